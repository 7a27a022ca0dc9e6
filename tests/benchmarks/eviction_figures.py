"""Eviction's figures: the cost of a victim in a large tree, against a small one."""

from __future__ import annotations

from benchmarks.bench_eviction import KINDS, MAX_RATIO, NUM_CALLS, measure_sizes, ratio_of
from benchmarks.figures import Figure


def figures(quick: bool) -> list[Figure]:
    """Return the figures of every kind of victim."""
    smallest, largest = 1_000, 10_000 if quick else 100_000
    found = []
    for kind in KINDS:
        measured = measure_sizes(kind, (smallest, largest), num_calls=5 if quick else NUM_CALLS)
        found.append(
            Figure(
                "eviction",
                f"{kind}, a victim of {largest:,} nodes",
                measured[-1].us_per_victim,
                "us",
                ratio_of(measured),
                f"of {smallest:,}",
                at_most=MAX_RATIO,
                gate=MAX_RATIO,
            )
        )
    return found
