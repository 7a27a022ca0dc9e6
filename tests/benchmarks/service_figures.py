"""The service's figures: whole requests against calls that do nothing, and latencies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks import bench_service
from benchmarks.figures import Figure
from benchmarks.local_ray import ray_started

MIN_PER_NOOP = {64: 4.0, 256: 5.0}  # ratio of whole requests to no-op calls, by coroutines
GATES = {64: 4.0}
LONGER: dict[str, Any] = {  # than the quick run
    "concurrencies": (1, 64, 256),
    "processes": (1, 4),
    "rounds": 5,
    "tokens": 1_000_000,
}
SHORTER: dict[str, Any] = {
    "concurrencies": (64, 256),
    "processes": (1, 4),
    "each": 800,
    "samples": 100,
    "nodes": 50_000,
    "tokens": 100_000,
}


def figures(quick: bool) -> list[Figure]:
    """Return the figures of `bench_service`, in a shorter run."""
    scale = replace(bench_service.QUICK, **(SHORTER if quick else LONGER))
    with ray_started():
        return from_measured(bench_service.figures(scale))


def from_measured(measured: dict[str, Any]) -> list[Figure]:
    """Return the same figures with their goals."""
    found = []
    for row in measured["throughput"]:
        count, rate, ratio = row["coroutines"], row["cycles"], row["cycles_per_noop"]
        what = f"whole requests of {count} coroutine{'s' * (count > 1)}"
        found.append(_rate(what, rate, ratio, "no-op calls", MIN_PER_NOOP.get(count), GATES.get(count)))
    for row in measured["processes"]:
        count = row["processes"]
        what = f"whole requests of {count} client process{'es' * (count > 1)}"
        goal = 0.9 if count == 4 else None
        found.append(_rate(what, row["cycles"], row["per_one"], "one process", goal))
    for row in measured["latency"]:
        what = f"p50 of an acquire among {row['others']} others" if row["others"] else "p50 of a lone acquire"
        goal = None if row["others"] else 1.3
        found.append(_time(what, row["acquire"]["p50_ms"], row["p50_per_noop"], "a no-op call", goal))
    published = measured["next_page"]
    short, long = published["lengths"]
    what = f"p50 of one more page, published behind {long:,} tokens"
    found.append(_time(what, published["long"]["p50_ms"], published["ratio"], f"behind {short:,}", 1.3))
    pressure = measured["pressure"]
    what = "p99 of an acquire with eviction running"
    found.append(_time(what, pressure["pressed_p99_ms"], pressure["ratio"], "without", 2.0))
    for name, held in measured["stalls"].items():
        size = f"{held['nodes']:,} nodes" if "nodes" in held else f"{held['tokens']:,} tokens"
        found.append(_time(f"loop held at once, p99, {name} of {size}", held["p99_ms"], None, "", 2.0))
    return found


def _rate(
    what: str, value: float, ratio: float, to: str, at_least: float | None = None, gate: float | None = None
) -> Figure:
    return Figure("service", what, value, "1/s", ratio, to, at_least=at_least, gate=gate)


def _time(what: str, value: float, ratio: float | None, to: str, at_most: float | None) -> Figure:
    return Figure("service", what, value, "ms", ratio, to, at_most=at_most)
