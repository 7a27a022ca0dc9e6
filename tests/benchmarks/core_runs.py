"""One workload through a `RadixCache` of one kind, and through the floor for any cache."""

from __future__ import annotations

import gc
import struct
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable
from itertools import islice
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from benchmarks.core_workloads import Tokens, Workload
from numpy.typing import NDArray

from raydix.cache_core import RadixCache, RadixKey, SWATokenToKVPoolAllocator, TokenToKVPoolAllocator

PHASES = ("match", "lock", "evict", "insert", "unlock")
MATCH, LOCK, EVICT, INSERT, UNLOCK = range(len(PHASES))
WARM_UP = 32  # requests
Times = NDArray[np.int64]  # [requests, phases] in ns


class CoreRun:
    """A cache, with a sliding window or without, its pool, and its callers' tokens: numpy arrays or lists of ints.

    For each slot, there are `window_share` slots for window KV.

    Only calls of the cache are timed, keys included. A caller locks its hit, evicts if the pool is short of slots,
    inserts from the node at the end of its match, and frees duplicate slots.
    """

    def __init__(
        self, workload: Workload, page_size: int, form: str, window: int | None = None, window_share: int = 1
    ) -> None:
        num_slots = workload.capacity(page_size)
        self.pool: Any = TokenToKVPoolAllocator(num_slots, page_size)
        if window is not None:
            num_windows = num_slots // window_share // page_size * page_size
            self.pool = SWATokenToKVPoolAllocator(num_slots, num_windows, page_size)
        self.cache = RadixCache(page_size, token_to_kv_pool_allocator=self.pool, sliding_window_size=window)
        self.hits: list[int] = []
        self._workload = workload
        self._page_size = page_size
        self._as_lists = form == "list"
        self._has_window = window is not None

    def run(self, most: int | None = None) -> Times:
        """Run every request once, or the first ones."""
        times = []
        for prompt, sequence in islice(zip(self._workload.prompts, self._workload.sequences, strict=True), most):
            times.append(self._request(self._given(prompt), self._given(sequence)))
        return np.array(times)

    def _given(self, tokens: Tokens) -> Any:
        return tokens.tolist() if self._as_lists else tokens.copy()

    def _request(self, prompt: Any, sequence: Any) -> list[int]:
        cache, pool = self.cache, self.pool
        t0 = perf_counter_ns()
        found = cache.match_prefix(RadixKey(prompt))
        t1 = perf_counter_ns()
        receipt = cache.inc_lock_ref(found.last_node)
        t2 = perf_counter_ns()
        needed = -(-(len(sequence) - found.prefix_len) // self._page_size) * self._page_size
        missing = max(0, needed - pool.available_size())
        missing_windows = max(0, needed - pool.swa_available_size()) if self._has_window else 0
        t3 = perf_counter_ns()
        if missing or missing_windows:
            cache.evict(missing, missing_windows)
        t4 = perf_counter_ns()
        slots = torch.cat((found.indices, pool.alloc(len(sequence) - found.prefix_len)))
        t5 = perf_counter_ns()
        done = cache.insert(RadixKey(sequence), slots, from_node=found.last_node)
        t6 = perf_counter_ns()
        aligned = len(sequence) // self._page_size * self._page_size
        pool.free(slots[aligned:])
        if done.duplicate_indices.numel():
            pool.free(done.duplicate_indices)
        t7 = perf_counter_ns()
        cache.dec_lock_ref(found.last_node, receipt)
        t8 = perf_counter_ns()
        self.hits.append(found.prefix_len)
        return [t1 - t0, t2 - t1, t4 - t3, t6 - t5, t8 - t7]

    def check(self) -> None:
        """Raise AssertionError if a slot is lost or, in a cache without eviction, a hit is not the longest possible."""
        self.cache.check_invariants()
        assert self.cache.total_size() + self.pool.available_size() == self.pool.num_slots, (
            "free and cached slots must be all slots"
        )
        longest = self._workload.hits(self._page_size)
        if self._workload.num_slots is None and not self._has_window:  # otherwise some of it was evicted
            assert self.hits == longest, "a hit must be the longest possible"
        assert all(hit <= limit for hit, limit in zip(self.hits, longest, strict=True)), (
            "a hit must not exceed the shared prefix"
        )


def run_floor(workload: Workload) -> Times:
    """Do the work that no cache can avoid: compare the tokens of a hit and copy its slots; keep the new tokens and
    slots."""
    kept, times = [], []
    slots = np.arange(max(map(len, workload.sequences)))
    for sequence, hit in zip(workload.sequences, workload.hits(1), strict=True):
        tokens, earlier = sequence.copy(), sequence[:hit].copy()
        t0 = perf_counter_ns()
        (tokens[:hit] == earlier).all()
        slots[:hit].copy()
        t1 = perf_counter_ns()
        new = tokens[hit:].copy(), slots[hit : len(tokens)].copy()
        t2 = perf_counter_ns()
        kept.append(new)
        times.append([t1 - t0, t2 - t1])
    return np.array(times)


def run_packing(workload: Workload) -> Times:
    """Pack lists of ids by `struct.pack`: the prompts and the sequences."""
    times = []
    for prompt, sequence in zip(workload.prompts, workload.sequences, strict=True):
        lists = prompt.tolist(), sequence.tolist()
        t0 = perf_counter_ns()
        for ids in lists:
            struct.pack(f"<{len(ids)}I", *ids)
        times.append([perf_counter_ns() - t0])
    return np.array(times)


class Rounds:
    """The times of one kind in each round. A figure is computed within each round, then the median over rounds is
    taken: disturbances of one round count little, and the cache's own occasional work counts in full."""

    def __init__(self) -> None:
        self.hits: list[int] = []  # of each request
        self._times: list[Times] = []

    def add(self, times: Times, hits: list[int]) -> None:
        self._times.append(times)
        self.hits = hits

    def means(self, *phases: int) -> NDArray[np.float64]:
        """Return microseconds a request in each round, over all phases or these."""
        return np.array([times[:, phases or slice(None)].sum(1).mean() / 1e3 for times in self._times])

    def mean(self, *phases: int) -> float:
        """Return the median of `means`."""
        return float(np.median(self.means(*phases)))

    def percentile(self, percent: float, phase: int) -> float:
        """Return a percentile of the requests of a round in one phase, in microseconds."""
        return float(np.median([np.percentile(times[:, phase], percent) for times in self._times])) / 1e3


def run_in_turns(workload: Workload, kinds: Iterable[tuple[Any, ...]], num_rounds: int) -> dict[Any, Rounds]:
    """Run each kind (the arguments of a `CoreRun`), the floor and the packing in turns, with the garbage collector
    on."""
    rounds: dict[Any, Rounds] = defaultdict(Rounds)
    for _ in range(num_rounds):
        rounds["floor"].add(run_floor(workload), [])
        rounds["packing"].add(run_packing(workload), [])
        for kind in kinds:
            gc.collect()
            CoreRun(workload, *kind).run(
                WARM_UP
            )  # of a cache of its own, so that the code is in the processor's caches
            run = CoreRun(workload, *kind)
            rounds[kind].add(run.run(), run.hits)
            run.check()
            del run
    return dict(rounds)


def measure_memory(workload: Workload, page_size: int) -> tuple[int, int, int]:
    """Return the bytes that a cache holds after a workload, and the numbers of its tokens and nodes."""
    pool = TokenToKVPoolAllocator(workload.capacity(page_size), page_size)
    cache = RadixCache(page_size)
    slots = pool.alloc(max(map(len, workload.sequences)))
    tracemalloc.start()
    for sequence in workload.sequences:
        cache.insert(RadixKey(sequence), slots[: len(sequence)])
    cache.match_prefix(RadixKey(workload.prompts[0][:1]))  # frees the buffer of the longest key
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held, cache.total_size(), len(cache.tree_starts())


def measure_in_tree(num_nodes: int, num_requests: int = 2_000) -> float:
    """Return the median in microseconds of a request of 64 tokens, half of them found, in a tree of this many nodes."""
    rng = np.random.default_rng(num_nodes)
    cache = RadixCache()
    slots = torch.arange(64)
    heads = rng.integers(0, 2**31 - 1, (num_nodes // 2, 64), np.int32)
    for head in heads:
        cache.insert(RadixKey(head), slots)
    times = []
    for at in rng.integers(0, len(heads), num_requests):
        prompt = np.concatenate((heads[at, :32], rng.integers(0, 2**31 - 1, 32, np.int32)))
        started = perf_counter_ns()
        found = cache.match_prefix(RadixKey(prompt))
        cache.inc_lock_ref(found.last_node)
        cache.insert(RadixKey(prompt), slots, from_node=found.last_node)
        cache.dec_lock_ref(found.last_node)
        cache.evict(32)
        times.append(perf_counter_ns() - started)
    return float(np.median(times)) / 1e3
