"""Measure a request's cost in trees of a thousand nodes and of a million, and the memory of tokens and nodes.

    python -m benchmarks.bench_scale [--quick] [--requests 1000000]

in the tests' folder. The last line serves requests in a steady state, and measures the growth of the process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tracemalloc
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
import torch
from benchmarks.bench_eviction import no_collection
from benchmarks.figures import HEADING, Figure, median_ratio, times_in_turns
from numpy.typing import NDArray

from raydix.actors import LocalPrefixCache
from raydix.cache_core import RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.leases.lease_table import EndedLeases
from raydix.schemas import CacheConfig, LeaseConfig, PoolConfig

PAGE = 16
HALF = 32  # tokens of a template, of its continuation, and of a request's addition
FANOUT = 8  # continuations of each template
MAX_GROWTH = 2.0  # of a request's cost, from the smallest tree to the largest
ROUNDS = 5  # in which the trees take turns
MAX_TOKEN_BYTES = 12.0
WARM_UP = 20_000  # requests
MAX_GROWN_MIB = 4.0  # in a steady state: the allocator takes a mebibyte at a time
MAX_LEFT_BYTES = 8.0  # left by a request
MAX_FORGETTING = 3.0  # of removing one id, from few remembered ids to many
Tokens = NDArray[np.int32]


class Costs(NamedTuple):
    """Medians in microseconds."""

    match: float
    insert: float


class SizedTree:
    """A tree of this many nodes, for requests of equal shape: 96 tokens, of which 64 are found in two nodes, the second
    an unlocked leaf. Another 32 are added below it, and another leaf of that length is evicted.

    Requests ask for the last inserted paths, once each; eviction removes the first ones. Before the two meet, the tree
    is made again, which a small one needs soon.
    """

    def __init__(self, num_nodes: int, page_size: int) -> None:
        self._rng = np.random.default_rng(num_nodes)
        self._page_size = page_size
        self._slots = torch.arange(page_size, page_size + 3 * HALF)
        self._templates = _ids(self._rng, num_nodes // (FANOUT + 1), HALF)
        self._follows = _ids(self._rng, len(self._templates) * FANOUT, HALF)
        self._to_ask: list[int] = []

    def _plant(self) -> None:
        self._cache = RadixCache(self._page_size)
        for at in range(len(self._follows)):
            self._cache.insert(RadixKey(self._known(at)), self._slots[: 2 * HALF])
        last = np.arange(len(self._follows) // FANOUT * (FANOUT - 1), len(self._follows))
        self._to_ask = self._rng.permutation(last).tolist()

    def _known(self, at: int) -> Tokens:
        return np.concatenate((self._templates[at % len(self._templates)], self._follows[at]))

    def serve(self, num_requests: int) -> Costs:
        """Return the medians of this many requests, after the same number to warm up."""
        times = []
        for _ in range(2 * num_requests):
            if not self._to_ask:
                self._plant()
            whole = np.concatenate((self._known(self._to_ask.pop()), _ids(self._rng, 1, HALF)[0]))
            started = perf_counter_ns()
            found = self._cache.match_prefix(RadixKey(whole))
            matched = perf_counter_ns()
            self._cache.insert(RadixKey(whole), self._slots, from_node=found.last_node)
            times.append((matched - started, perf_counter_ns() - matched))
            assert found.prefix_len == 2 * HALF, found
            self._cache.evict(HALF)
        match, insert = np.median(times[num_requests:], 0) / 1e3
        return Costs(float(match), float(insert))


def _ids(rng: np.random.Generator, *shape: int) -> Tokens:
    return rng.integers(0, 2**31 - 1, shape, np.int32)


def size_figures(largest: int, num_requests: int) -> list[Figure]:
    """Return figures of match and insert, from a thousand nodes to `largest`, in pages of the size that a cache's actor
    has."""
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= largest]
    found = []
    with no_collection():
        for page_size in (1, PAGE):
            trees = [SizedTree(size, page_size) for size in sizes]
            rounds = [[tree.serve(num_requests // ROUNDS) for tree in trees] for _ in range(ROUNDS)]
            costs = np.array(rounds)  # by round, tree and phase
            values, ratios = np.median(costs, 0), np.median(costs / costs[:, :1], 0)
            for phase, name in enumerate(Costs._fields):
                for at, size in enumerate(sizes[1:], 1):
                    what = f"{name}, pages of {page_size}, in {size:,} nodes"
                    value, ratio = float(values[at, phase]), float(ratios[at, phase])
                    found.append(Figure("scale", what, value, "us", ratio, "1,000 nodes", at_most=MAX_GROWTH))
            del trees
    return found


# ---------------------------------------------------------------- memory


class Held(NamedTuple):
    """The memory of a cache and its allocator, without the pool's tensors."""

    num_bytes: int
    num_tokens: int
    num_nodes: int


def of_conversations(num_tokens: int, page_size: int) -> Held:
    """Make conversations of eight turns of about 260 tokens under common system prompts, until this many tokens are
    cached."""
    rng = np.random.default_rng(7)
    systems = _ids(rng, 8, 1_000)
    gc.collect()
    tracemalloc.start()
    pool = TokenToKVPoolAllocator((num_tokens + 4_096) // page_size * page_size, page_size)
    cache = RadixCache(page_size, token_to_kv_pool_allocator=pool)
    number = 0
    while cache.total_size() < num_tokens:
        history = systems[number % len(systems)]
        for _ in range(8):
            history = np.concatenate((history, _ids(rng, int(rng.integers(160, 360)))))
            _publish(cache, pool, history)
        number += 1
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Held(held, cache.total_size(), len(cache.tree_starts()))


def _publish(cache: RadixCache, pool: TokenToKVPoolAllocator, tokens: Tokens) -> None:
    """Do as a request does, without the lock."""
    found = cache.match_prefix(RadixKey(tokens))
    slots = torch.cat((found.indices, pool.alloc(len(tokens) - found.prefix_len)))
    cache.insert(RadixKey(tokens), slots, from_node=found.last_node)
    pool.free(slots[len(tokens) // pool.page_size * pool.page_size :])


def memory_figures(num_tokens: int) -> list[Figure]:
    """Return the bytes of a token and of a node."""
    found = []
    for page_size in (PAGE, 1):
        held = of_conversations(num_tokens if page_size > 1 else num_tokens // 4, page_size)
        where = f"pages of {page_size}, {held.num_tokens / 1e6:.1f}M tokens in {held.num_nodes:,} nodes"
        per_token, per_node = held.num_bytes / held.num_tokens, held.num_bytes / held.num_nodes
        goal = MAX_TOKEN_BYTES if page_size > 1 else None
        found.append(Figure("scale", f"memory, {where}", per_token, "B/token", at_most=goal, gate=goal))
        found.append(Figure("scale", "  of that a node", per_node, "B/node"))
    return found


# ---------------------------------------------------------------- steady state


def resident_bytes() -> int:
    """Return the resident memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Growth(NamedTuple):
    """The growth of a process over this many requests."""

    resident_bytes: int
    traced_bytes: int
    num_traced: int  # requests; 0: tracing was off


async def steady_state(num_requests: int, num_traced: int, num_before: int = WARM_UP) -> Growth:
    """Serve this many requests under eviction, then some under tracemalloc, which slows them down.

    Before either part, `num_before` requests fill all bounded structures, such as the record of evictions. Before the
    traced part, they also replace all live objects by traced ones.
    """
    leases = LeaseConfig(remembered_leases=1_024)
    pool = PoolConfig(num_slots=2**14, device="cpu")
    rng = np.random.default_rng(3)
    templates = _ids(rng, 64, 128)

    async def serve(cache: LocalPrefixCache, count: int) -> None:
        for at in rng.integers(0, len(templates), count):
            prompt = np.concatenate((templates[at], _ids(rng, 64)))
            lease = await cache.acquire(prompt)
            await lease.insert(prompt, release=True)
        gc.collect()

    async with LocalPrefixCache(CacheConfig(page_size=PAGE, pool=pool, leases=leases)) as cache:
        await serve(cache, num_before)
        resident = resident_bytes()
        await serve(cache, num_requests)
        resident, traced = resident_bytes() - resident, 0
        if num_traced:
            tracemalloc.start()
            await serve(cache, num_before)
            traced = tracemalloc.get_traced_memory()[0]
            await serve(cache, num_traced)
            traced = tracemalloc.get_traced_memory()[0] - traced
            tracemalloc.stop()
        stats = await cache.stats()
    assert stats.tokens_evicted >= 2 * HALF * num_requests - pool.num_slots, "the pool must fill up"
    return Growth(resident, traced, num_traced)


def steady_figures(num_requests: int, num_traced: int) -> list[Figure]:
    """Return the growth in a steady state."""
    growth = asyncio.run(steady_state(num_requests, num_traced))
    what = f"resident memory grown by {num_requests:,} requests"
    found = [Figure("scale", what, growth.resident_bytes / 2**20, "MiB", at_most=MAX_GROWN_MIB)]
    if num_traced:
        what, value = f"left behind by each of {num_traced:,} requests", growth.traced_bytes / num_traced
        found.append(Figure("scale", what, value, "B", at_most=MAX_LEFT_BYTES, gate=8 * MAX_LEFT_BYTES))
    return found


def forgetting_figures() -> list[Figure]:
    """Return the cost of ending one more lease, which forgets the oldest one, by the number remembered."""
    count = 50_000
    remembering = {f"{capacity:,}": EndedLeases(capacity) for capacity in (1_024, 65_536)}
    numbers = iter(range(10**9))

    def end(ended: EndedLeases) -> None:
        for number in islice(numbers, count):
            ended.add("session", f"lease-{number}")

    for ended in remembering.values():
        end(ended)
        end(ended)  # from here on, each one makes the cache forget another
    with no_collection():
        times = times_in_turns({name: partial(end, ended) for name, ended in remembering.items()}, ROUNDS)
    few, many = times
    what, value = f"one more of {many} ended leases remembered", median(times[many]) / count * 1e6
    ratio = median_ratio(times, few, many)
    return [Figure("scale", what, value, "us", ratio, f"of {few}", at_most=MAX_FORGETTING, gate=3 * MAX_FORGETTING)]


def figures(quick: bool, num_requests: int | None = None) -> list[Figure]:
    """Return all figures."""
    largest, num_measured, num_tokens = (100_000, 500, 500_000) if quick else (1_000_000, 5_000, 10_000_000)
    steady = (5_000, 0) if quick else (50_000, 10_000)
    return (
        size_figures(largest, num_measured)
        + memory_figures(num_tokens)
        + steady_figures(num_requests or steady[0], steady[1])
        + forgetting_figures()
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--requests", type=int, help="of the steady state")
    args = parser.parse_args()
    print(HEADING)
    for figure in figures(args.quick, args.requests):
        print(figure.line())


if __name__ == "__main__":
    main()
