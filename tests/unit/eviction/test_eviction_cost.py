"""The number of nodes that one `evict` ranks, counted by a policy instead of a clock."""

from __future__ import annotations

import pytest

from raydix.cache_core import RadixCache, RadixKey, TreeNode
from raydix.cache_core.eviction.policy import LRU
from raydix.cache_core.eviction.queue import EvictionQueue
from raydix.cache_core.eviction.tenants import Tenant, Tenants

NUM_LEAVES = 2_000
NUM_VICTIMS = 16
MOST_ASKED = 8 * NUM_VICTIMS  # for each victim: it, its parent, and a few others


class CountingLRU(LRU):
    """Least recently used first, as by default."""

    asked = 0

    def rank(self, node: TreeNode) -> int:
        self.asked += 1
        return super().rank(node)


def grown() -> tuple[RadixCache, CountingLRU]:
    policy = CountingLRU()
    cache = RadixCache(eviction_policy=policy)
    for leaf in range(NUM_LEAVES):
        cache.insert(RadixKey([leaf]))
    policy.asked = 0
    return cache, policy


def test_a_call_looks_at_a_few_leaves_for_each_victim() -> None:
    cache, policy = grown()

    assert cache.evict(NUM_VICTIMS).full_evicted == NUM_VICTIMS

    assert policy.asked <= MOST_ASKED


def test_a_call_looks_at_a_few_leaves_even_where_all_were_used_since_the_last() -> None:
    cache, policy = grown()
    for leaf in range(NUM_LEAVES):
        cache.match_prefix(RadixKey([leaf]))
    policy.asked = 0

    assert cache.evict(NUM_VICTIMS).full_evicted == NUM_VICTIMS

    assert policy.asked <= MOST_ASKED


def test_with_tenants_a_call_looks_at_one_leaf_of_each_beside_for_each_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, names, looks = CountingLRU(), "abcd", 0
    cache = RadixCache(eviction_policy=policy)
    cache.divide(Tenants(Tenant(name, name, floor=NUM_LEAVES // 8) for name in names))
    for leaf in range(NUM_LEAVES):
        cache.insert(RadixKey([leaf], names[leaf % 4]))
    first = EvictionQueue.first

    def counted(queue: EvictionQueue) -> object:
        nonlocal looks
        looks += 1
        return first(queue)

    monkeypatch.setattr(EvictionQueue, "first", counted)
    policy.asked = 0

    assert cache.evict(NUM_VICTIMS).full_evicted == NUM_VICTIMS

    assert policy.asked <= MOST_ASKED
    assert looks == NUM_VICTIMS * len(names)
