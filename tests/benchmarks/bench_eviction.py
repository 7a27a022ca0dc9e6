"""Measure the cost of evicting one node, in trees of a thousand nodes and of a million.

    python tests/benchmarks/bench_eviction.py [largest number of nodes]

prints microseconds per victim: the median of several calls that evict 512 victims each, as the background task does; in
brackets the ratio to the smallest tree; and the longest of those calls. `raydix` must be installed.

A node holds one token, and except in the row "as served" there is no pool: the time is that of finding and unlinking
victims. It is CPU time of this thread, so that other load counts little. There is one large tree at a time, and no
garbage collection while it is made and measured, as that would walk all its nodes.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from raydix.cache_core import (
    MambaRadixCache,
    PrefixCacheManager,
    RadixCache,
    RadixKey,
    RadixTrie,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.eviction.history import EvictionHistory

SIZES = (1_000, 10_000, 100_000, 1_000_000)  # nodes
SLICE = 512  # victims of one call: tokens, window tokens, states, blocks or rows
NUM_CALLS = 15  # measured for one size
MAX_SECONDS = 6.0  # after this, no further call
MAX_CALL_S = 1.0  # if a call takes longer, larger trees are skipped
MAX_RATIO = 3.0  # the promised ratio to the smallest tree
MAX_STALL = 30.0  # a call that takes longer, in medians of the smallest tree, is reported
FANOUT = 8  # leaves of a bush
CHAIN = 8  # nodes of a path with inner nodes as victims

Evict = Callable[[int], int]  # takes the number of victims to evict; returns the number evicted


class Measured(NamedTuple):
    """One kind of victim in trees of one size."""

    num_nodes: int
    us_per_victim: float  # median of the calls
    longest_ms: float  # of the calls
    victims: tuple[int, ...]  # of each call


# ---------------------------------------------------------------- trees: each function makes one and returns its
# `evict`


def full_leaves(num_nodes: int, used_since: bool = False) -> Evict:
    """Leaves of a `RadixCache`, and parents that become leaves; each is matched once more after all are inserted."""
    cache = RadixCache()
    for path in _bushes(num_nodes):
        cache.insert(RadixKey(path))
    for path in _bushes(num_nodes if used_since else 0):
        cache.match_prefix(RadixKey(path))
    return lambda count: cache.evict(count).full_evicted


def served_leaves(num_nodes: int) -> Evict:
    """The same in a `RadixCache` with the parts of a served one: a pool takes the slots, and evictions are recorded."""
    pool = TokenToKVPoolAllocator(num_nodes + FANOUT)
    cache = RadixCache(token_to_kv_pool_allocator=pool)
    cache.keep_history(EvictionHistory())
    for path in _bushes(num_nodes):
        pool.free(cache.insert(RadixKey(path), pool.alloc(len(path))).duplicate_indices)
    return lambda count: cache.evict(count).full_evicted


def window_leaves(num_nodes: int, used_since: bool = False) -> Evict:
    """Leaves of a `RadixCache` with a window, evicted for their window KV: they are removed whole."""
    cache = RadixCache(sliding_window_size=1)
    for number in range(num_nodes):
        cache.insert(RadixKey([number]))
    for number in range(num_nodes if used_since else 0):
        cache.match_prefix(RadixKey([number]))
    return lambda count: cache.evict(0, count).swa_evicted


def window_tombstones(num_nodes: int) -> Evict:
    """Inner nodes of a `RadixCache` with a window: they become tombstones."""
    cache = RadixCache(sliding_window_size=1)
    for path in _chains(num_nodes):
        cache.insert(RadixKey(path))
    return lambda count: cache.evict(0, count).swa_evicted


def mamba_leaves(num_nodes: int) -> Evict:
    """Leaves of a `MambaRadixCache`, with their states."""
    cache = MambaRadixCache()
    for number, path in enumerate(_bushes(num_nodes), 1):
        cache.insert(RadixKey(path), mamba_value=number)
    return lambda count: cache.evict(count).full_evicted


def mamba_states(num_nodes: int) -> Evict:
    """States of inner nodes of a `MambaRadixCache`; the KV stays."""
    cache, _ = _with_states(num_nodes)
    return lambda count: cache.evict(0, count).mamba_evicted


def mamba_states_half_locked(num_nodes: int) -> Evict:
    """The same, with a lock on the least recently used half."""
    cache, nodes = _with_states(num_nodes)
    for node in nodes[: min(num_nodes // 2, num_nodes - SLICE)]:
        cache.inc_lock_ref(node)
    return lambda count: cache.evict(0, count).mamba_evicted


def trie_blocks(num_nodes: int) -> Evict:
    """Blocks of a `RadixTrie`, one per node."""
    trie = RadixTrie()
    for path in _bushes(num_nodes):
        trie.insert(path, path)
    return lambda count: len(trie.evict_blocks(count))


def row_nodes(num_nodes: int, used_since: bool = False) -> Evict:
    """Nodes of a `PrefixCacheManager`; each is found once more after all are inserted."""
    manager = _with_rows(num_nodes)
    for path in _bushes(num_nodes if used_since else 0):
        manager.find(RadixKey(path))
    return lambda count: manager.evict(count)


def rows(num_nodes: int) -> Evict:
    """Rows of a `PrefixCacheManager`, one call each."""
    manager = _with_rows(num_nodes)
    return lambda count: sum(manager.evict_lru_slot() is not None for _ in range(count))


KINDS: dict[str, Callable[[int], Evict]] = {
    "RadixCache, leaves": full_leaves,
    "RadixCache, leaves used since": partial(full_leaves, used_since=True),
    "RadixCache, leaves, as served": served_leaves,
    "RadixCache, window leaves": window_leaves,
    "RadixCache, window leaves used since": partial(window_leaves, used_since=True),
    "RadixCache, window tombstones": window_tombstones,
    "MambaRadixCache, leaves": mamba_leaves,
    "MambaRadixCache, states": mamba_states,
    "MambaRadixCache, states, half locked": mamba_states_half_locked,
    "RadixTrie, blocks": trie_blocks,
    "PrefixCacheManager, nodes": row_nodes,
    "PrefixCacheManager, nodes used since": partial(row_nodes, used_since=True),
    "PrefixCacheManager, rows": rows,
}


def _bushes(num_nodes: int) -> Iterator[list[int]]:
    """Return paths of two tokens, eight of which share the first: this many nodes, most of them leaves."""
    for bush in range(num_nodes // (FANOUT + 1)):
        for child in range(FANOUT):
            yield [bush, child]
    for lone in range(num_nodes % (FANOUT + 1)):
        yield [num_nodes + lone]


def _chains(num_nodes: int) -> Iterator[list[int]]:
    """Return paths of this many nodes, inner ones first: all of one token, then all of two, and so on."""
    for depth in range(1, CHAIN + 1):
        for chain in range(num_nodes // CHAIN):
            yield [chain, *range(1, depth)]


def _with_states(num_nodes: int) -> tuple[MambaRadixCache, list[Any]]:
    """Return a cache with a state on every node, and its nodes in the order of their use."""
    cache = MambaRadixCache()
    nodes = [
        cache.insert(RadixKey(path), mamba_value=number).last_node for number, path in enumerate(_chains(num_nodes), 1)
    ]
    return cache, nodes


def _with_rows(num_nodes: int) -> PrefixCacheManager:
    manager = PrefixCacheManager(max_capacity=num_nodes)
    for slot, path in enumerate(_bushes(num_nodes)):
        manager.insert(RadixKey(path), slot, 1)
    return manager


# ---------------------------------------------------------------- measuring


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from walking the trees."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    gc.collect()


def measure(kind: str, num_nodes: int, num_calls: int = NUM_CALLS) -> Measured:
    """Measure calls that evict a slice each, in trees that lose a quarter of their nodes at most, or one slice.

    All trees are made before the first call, and one uncounted call precedes the others, so that code is cached for
    small and large trees alike.
    """
    calls: list[float] = []
    victims: list[int] = []
    calls_a_tree = max(1, num_nodes // (4 * SLICE))
    with no_collection():
        trees = [KINDS[kind](num_nodes) for _ in range(-(-(num_calls + 1) // calls_a_tree))]
        in_turn = itertools.chain.from_iterable(itertools.repeat(evict, calls_a_tree) for evict in trees)
        for evict in itertools.islice(in_turn, num_calls + 1):
            started = time.thread_time()
            victims.append(evict(SLICE))
            calls.append(time.thread_time() - started)
            if len(calls) > 1 and sum(calls) > MAX_SECONDS:
                break
        del trees, in_turn, evict
    return Measured(num_nodes, 1e6 * median(calls[1:]) / SLICE, 1e3 * max(calls[1:]), tuple(victims))


def measure_sizes(kind: str, sizes: Sequence[int], num_calls: int = NUM_CALLS) -> list[Measured]:
    """Measure the sizes in order, until a call takes too long for a larger tree."""
    measured: list[Measured] = []
    for num_nodes in sizes:
        if not measured or measured[-1].us_per_victim * SLICE < 1e6 * MAX_CALL_S:
            measured.append(measure(kind, num_nodes, num_calls))
    return measured


def ratio_of(measured: Sequence[Measured]) -> float:
    """Return the cost of a victim in the largest tree, as a ratio to the smallest."""
    return measured[-1].us_per_victim / measured[0].us_per_victim


def verdict_on(measured: Sequence[Measured]) -> str:
    """Return whether the promise holds that a victim costs about the same in every tree."""
    if ratio_of(measured) > MAX_RATIO:
        return f"grows: {ratio_of(measured):.1f} times > {MAX_RATIO:g}"
    if 1e3 * measured[-1].longest_ms > MAX_STALL * SLICE * measured[0].us_per_victim:
        return f"holds, but one call takes {measured[-1].longest_ms:,.0f} ms"
    return "holds"


def heading(sizes: Sequence[int]) -> str:
    """Return the first line of the table."""
    nodes = "".join(f"{f'{num_nodes:,} nodes':>19}" for num_nodes in sizes)
    return f"{'us per victim':<37}{nodes}{'longest call':>15}   verdict"


def line(kind: str, measured: Sequence[Measured], num_sizes: int) -> str:
    """Return the line of one kind."""
    first = measured[0].us_per_victim
    cells = [f"{each.us_per_victim:.2f} ({each.us_per_victim / first:.2f})" for each in measured]
    cells += ["-"] * (num_sizes - len(cells))
    longest = f"{measured[-1].longest_ms:,.1f} ms"
    return f"{kind:<37}{''.join(f'{cell:>19}' for cell in cells)}{longest:>15}   {verdict_on(measured)}"


def main() -> None:
    """Print the whole table, up to the number of nodes on the command line."""
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else SIZES[-1]
    sizes = sorted({size for size in SIZES if size < largest} | {largest})
    print(heading(sizes))
    for kind in KINDS:
        print(line(kind, measure_sizes(kind, sizes), len(sizes)), flush=True)


if __name__ == "__main__":
    main()
