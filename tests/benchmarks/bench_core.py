"""Measure a request's cost in the core, against a floor for any cache: one compare, one copy.

    python -m benchmarks.bench_core [--workloads chat,short] [--rounds 5] [--scale 1] [--nodes 100000] [--json FILE]

in the tests' folder prints one table: microseconds a request in calls of the cache, and their ratio to the floor, which
runs in the same rounds; the match alone; and the extra cost of a list of ints over an array, as a ratio to packing it
once by `struct.pack`. Two tables follow: the cost of a request by the number of nodes, and the memory of a token and a
node. RAYDIX_TRACE names a trace in the Mooncake format for the workload that replays one. `raydix` must be installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from benchmarks.core_runs import (
    EVICT,
    INSERT,
    LOCK,
    MATCH,
    PHASES,
    UNLOCK,
    measure_in_tree,
    measure_memory,
    run_in_turns,
)
from benchmarks.core_workloads import WORKLOADS, known_workloads

KINDS = tuple(product((1, 16), ("numpy", "list")))  # tokens per page, and the form of the tokens
SIZES = (1_000, 10_000, 100_000)  # nodes
HEADING = (
    f"{'workload':<11}{'page':>5} {'form':<6}{'us/request':>11}{'x floor':>9}"
    f"{'match':>8}{'p50':>7}{'p99':>7}{'p99/50':>7}{'insert':>8}{'locks':>7}{'evict':>7}{'packings':>10}{'hits':>12}"
)


@dataclass
class Row:
    """One workload, page size and form: microseconds a request, except where noted."""

    workload: str
    page_size: int
    form: str
    total: float
    per_floor: float  # ratio
    match: float
    match_p50: float
    match_p99: float
    floor_p50: float  # of the floor's part in a match
    floor_p99: float
    insert: float
    locks: float  # lock and unlock
    evict: float
    packings: float | None  # ratio of the extra cost of lists over arrays to packing them
    hit_tokens: int


def rows_of(name: str, scale: float, num_rounds: int) -> Iterator[Row]:
    """Return the rows of a workload."""
    rounds = run_in_turns(WORKLOADS[name](scale), KINDS, num_rounds)
    floor, packing = rounds["floor"], rounds["packing"]
    for page_size, form in KINDS:
        run, of_arrays = rounds[page_size, form], rounds[page_size, "numpy"]
        yield Row(
            name,
            page_size,
            form,
            total=run.mean(),
            per_floor=float(np.median(run.means() / floor.means())),
            match=run.mean(MATCH),
            match_p50=run.percentile(50, MATCH),
            match_p99=run.percentile(99, MATCH),
            floor_p50=floor.percentile(50, MATCH),
            floor_p99=floor.percentile(99, MATCH),
            insert=run.mean(INSERT),
            locks=run.mean(LOCK, UNLOCK),
            evict=run.mean(EVICT),
            packings=float(np.median((run.means() - of_arrays.means()) / packing.means())) if form == "list" else None,
            hit_tokens=sum(run.hits),
        )


def line(row: Row) -> str:
    """Return a row of the table."""
    packings = "" if row.packings is None else f"{row.packings:.2f}"
    return (
        f"{row.workload:<11}{row.page_size:>5} {row.form:<6}{row.total:>11.1f}{row.per_floor:>9.2f}"
        f"{row.match:>8.1f}{row.match_p50:>7.1f}{row.match_p99:>7.1f}{row.match_p99 / row.match_p50:>7.1f}"
        f"{row.insert:>8.1f}{row.locks:>7.1f}{row.evict:>7.1f}{packings:>10}{row.hit_tokens:>12,}"
    )


def print_sizes(largest: int) -> dict[int, float]:
    """Print the cost of a request in trees up to this number of nodes."""
    sizes = sorted({size for size in SIZES if size < largest} | {largest})
    measured = {size: measure_in_tree(size) for size in sizes}
    cells = (f"{size:,}: {cost:.1f} us ({cost / measured[sizes[0]]:.2f}x)" for size, cost in measured.items())
    print("\na request of 64 tokens, half of them found, evicting as many, by nodes of the tree: " + ", ".join(cells))
    return measured


def print_memory(scale: float) -> list[dict[str, Any]]:
    """Print the memory of the tree itself, without the pool's tensors."""
    measured = []
    for name, page_size in product(("chat", "short"), (1, 16)):
        held, num_tokens, num_nodes = measure_memory(WORKLOADS[name](scale), page_size)
        per_token, per_node = held / num_tokens, held / num_nodes
        measured.append({"workload": name, "page_size": page_size, "per_token": per_token, "per_node": per_node})
        print(f"memory, {name}, pages of {page_size}: {per_token:.1f} bytes a token, {per_node:,.0f} a node")
    return measured


def main() -> None:
    """Print the tables for the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(known_workloads()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of each workload")
    parser.add_argument("--nodes", type=int, default=SIZES[-1], help="of the largest tree")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(HEADING)
    rows: list[Row] = []
    for name in args.workloads.split(","):
        for row in rows_of(name, args.scale, args.rounds):
            rows.append(row)
            print(line(row), flush=True)
    by_nodes = print_sizes(args.nodes)
    memory = print_memory(min(1.0, args.scale))
    if args.json:
        figures = {"phases": PHASES, "rows": [asdict(row) for row in rows], "us_by_nodes": by_nodes, "memory": memory}
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
