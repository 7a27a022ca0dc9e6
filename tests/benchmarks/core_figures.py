"""The core's figures: microseconds a request, against the floor for any cache."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from time import perf_counter_ns

import torch
from benchmarks.bench_core import Row, rows_of
from benchmarks.core_runs import run_in_turns
from benchmarks.core_workloads import WORKLOADS, Workload, known_workloads
from benchmarks.figures import Figure

from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator

MAX_PER_FLOOR = {"chat": 3.5, "documents": 2.8, "short": 4.0, "traced": 3.5, "pressed": 5.5, "chains": 5.3}
GATES = {"chat": 4.5, "documents": 3.5, "short": 4.5, "traced": 5.0, "pressed": 6.0, "chains": 7.0}
MAX_PACKINGS = {"traced": 2.0}
MAX_TAIL = 6.0  # p99 of a match, as a ratio to its median
MAX_TWO_QUEUES = 1.1
WINDOW, MAX_WINDOWED, MAX_SHORT = (
    1_024,
    5.0,
    9.0,
)  # tokens; cost as a ratio to a request without it, with all its slots and with half


def figures(quick: bool) -> list[Figure]:
    """Return the figures of every workload that can be made here."""
    scale, num_rounds = (0.1, 2) if quick else (0.5, 5)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [
            figure for name in known_workloads() for figure in _of_workload(list(rows_of(name, scale, num_rounds)))
        ]
        return [*found, *_windowed(scale, num_rounds), _by_two_queues(scale, num_rounds)]
    finally:
        torch.set_num_threads(num_threads)


def _windowed(scale: float, num_rounds: int) -> Iterator[Figure]:
    """Return the extra cost of window KV over full KV, with slots for all of it, and for half."""
    plain, roomy, tight = (16, "numpy"), (16, "numpy", WINDOW), (16, "numpy", WINDOW, 2)
    rounds = run_in_turns(WORKLOADS["chat"](scale), (plain, roomy, tight), num_rounds)
    for kind, room, goal in ((roomy, "", MAX_WINDOWED), (tight, ", half its room", MAX_SHORT)):
        what = f"chat, window of {WINDOW:,}{room}, pages of 16, a request"
        cost = rounds[kind].mean()
        yield Figure("core", what, cost, "us", cost / rounds[plain].mean(), "without", at_most=goal)


def _by_two_queues(scale: float, num_rounds: int) -> Figure:
    """Return the time of an acquire and an insert by policy "2q", where most evict, as a ratio to that by "lru"."""
    workload = WORKLOADS["pressed"](scale)
    rounds = [[_acquire_and_insert(workload, policy) for policy in ("lru", "2q")] for _ in range(num_rounds)]
    cost, ratio = median(two for _, two in rounds), median(two / lru for lru, two in rounds)
    what = "pressed, policy 2q, pages of 16, acquire and insert"
    return Figure("core", what, cost, "us", ratio, "lru", at_most=MAX_TWO_QUEUES)


def _acquire_and_insert(workload: Workload, policy: str) -> float:
    """Return the mean in microseconds over a workload, by one policy."""
    allocator = TokenToKVPoolAllocator(workload.capacity(16), 16)
    cache = KVCache(RadixCache(16, None, allocator, eviction_policy=policy), allocator)
    keys = [RadixKey(sequence) for sequence in workload.sequences]
    elapsed = 0
    for number, key in enumerate(keys):
        lease_id = str(number)
        began = perf_counter_ns()
        cache.acquire(lease_id, "session", key)
        cache.insert(lease_id, "session", len(key), key[:0])
        elapsed += perf_counter_ns() - began
        cache.release(lease_id, "session")
    return elapsed / 1e3 / len(keys)


def _of_workload(rows: list[Row]) -> Iterator[Figure]:
    name = rows[0].workload
    for row in rows:
        if row.form == "numpy":
            what = f"{name}, pages of {row.page_size}, a request"
            goal, gate = MAX_PER_FLOOR[name], GATES[name]
            yield Figure("core", what, row.total, "us", row.per_floor, "floor", at_most=goal, gate=gate)
    lists = max((row for row in rows if row.packings is not None), key=lambda row: row.packings or 0)
    yield Figure(
        "core",
        f"{name}, the same from lists of ints",
        lists.total,
        "us",
        lists.packings,
        "struct.pack, more",
        at_most=MAX_PACKINGS.get(name, 1.5),
    )
    worst = max((row for row in rows if row.form == "numpy"), key=lambda row: row.match_p99 / row.match_p50)
    tail = worst.match_p99 / worst.match_p50
    yield Figure("core", f"{name}, p99 of a match", worst.match_p99, "us", tail, "its median", at_most=MAX_TAIL)
    tail = worst.floor_p99 / worst.floor_p50  # hits differ in length, so even a compare and a copy have a tail
    yield Figure("core", f"{name}, p99 of the floor's compare and copy", worst.floor_p99, "us", tail, "its median")
