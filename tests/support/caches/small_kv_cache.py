"""Helpers for tests of a small `KVCache`: keys, sizes, and counts of its slots.

The default cache has 8 slots in pages of 2: [2 3] [4 5] [6 7] [8 9]. `count(cache)` is (free, private, tree).
"""

from typing import Any

from raydix.cache_core import KVCache, RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord

NO_IDS = RadixKey([])


def key(*ids: Any, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def count(cache: KVCache) -> tuple[int, int, int]:
    """Free, private and tree slots, after checking that all else holds too."""
    cache.check_invariants()
    tree = cache.tree.total_size()
    assert cache.free_slots + cache.private_slots + tree == cache.num_slots
    return cache.free_slots, cache.private_slots, tree


def shape(lease: LeaseRecord) -> tuple[int, list[int], int, int]:
    """Prefix, page starts, published pages, slots covered."""
    return lease.prefix_len, lease.starts.tolist(), lease.num_published_pages, lease.num_slots


def publish(cache: KVCache, *ids: int, ns: str | None = None) -> list[int]:
    """Put tokens into the tree and hold nothing; returns the slots they are found at."""
    cache.acquire("publisher", "publisher", key(*ids, ns=ns))
    cache.insert("publisher", "publisher", len(ids), RadixKey([], ns))
    cache.release("publisher", "publisher")
    return found(cache, *ids, ns=ns)


def found(cache: KVCache, *ids: int, ns: str | None = None) -> list[int]:
    return cache.tree.peek_prefix(key(*ids, ns=ns)).indices.tolist()
