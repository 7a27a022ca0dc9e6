"""Eviction policies, claim by claim: the order of each, and its logarithmic cost."""

from __future__ import annotations

from typing import Any

import pytest
from support.faults.count_queue_operations import queue_operations

from raydix.cache_core import MambaRadixCache, RadixCache, RadixKey, TokenToKVPoolAllocator, TreeNode
from raydix.cache_core.eviction.policy import POLICIES, SLRU, EvictionPolicy, TwoQ, make_policy
from raydix.cache_core.eviction.tenants import Tenant, Tenants


def named(name: str) -> str | EvictionPolicy:
    """The policy of that name, for a cache without a pool."""
    return TwoQ(num_slots=16) if name == "2q" else name


def insert(cache: RadixCache, token: int, priority: int = 0) -> None:
    cache.insert(RadixKey([token]), priority=priority)


def use(cache: RadixCache, token: int, priority: int = 0) -> None:
    assert cache.match_prefix(RadixKey([token]), priority).prefix_len == 1


def order(cache: RadixCache) -> list[int]:
    """The tokens in the order in which they go."""
    tokens = set(range(1, 10))
    left = {token for token in tokens if cache.peek_prefix(RadixKey([token])).prefix_len}
    gone: list[int] = []
    while left:
        cache.evict(1)
        now = {token for token in left if cache.peek_prefix(RadixKey([token])).prefix_len}
        gone += sorted(left - now)
        left = now
    return gone


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("lru", [3, 4, 2, 1]),
        ("mru", [1, 2, 4, 3]),
        ("lfu", [3, 4, 1, 2]),
        ("fifo", [1, 2, 3, 4]),
        ("filo", [4, 3, 2, 1]),
        ("slru", [3, 4, 1, 2]),
        ("priority", [4, 2, 1, 3]),
        ("2q", [3, 4, 2, 1]),
    ],
)
def test_each_policy_has_its_order(policy: str, expected: list[int]) -> None:
    cache = RadixCache(eviction_policy=named(policy))
    for token, priority in ((1, 0), (2, 0), (3, 7), (4, -1)):
        insert(cache, token, priority)
    use(cache, 2)
    use(cache, 2)
    use(cache, 1)

    assert order(cache) == expected


def test_segmented_lru_lets_a_scan_pass() -> None:
    cache = RadixCache(eviction_policy="slru")
    insert(cache, 1)
    use(cache, 1)
    use(cache, 1)
    for token in range(2, 7):
        insert(cache, token)

    assert order(cache) == [2, 3, 4, 5, 6, 1]


def test_segmented_lru_takes_its_threshold() -> None:
    cache = RadixCache(eviction_policy=SLRU(hits=1))
    insert(cache, 1)
    use(cache, 1)
    insert(cache, 2)

    assert order(cache) == [2, 1]
    with pytest.raises(ValueError, match="hits"):
        SLRU(hits=0)


def test_a_priority_is_the_highest_of_the_requests() -> None:
    cache = RadixCache(eviction_policy="priority")
    insert(cache, 1, 5)
    insert(cache, 2)
    use(cache, 2, 9)
    use(cache, 1, -3)

    assert order(cache) == [1, 2]


def test_a_prefix_is_as_important_as_what_goes_on_from_it() -> None:
    cache = RadixCache(eviction_policy="priority")
    cache.insert(RadixKey([1, 2, 3]), priority=1)
    cache.insert(RadixKey([1, 2, 4]), priority=8)

    first = cache.evict(1)
    assert (first.full_evicted, cache.peek_prefix(RadixKey([1, 2, 3])).prefix_len) == (1, 2)
    assert cache.peek_prefix(RadixKey([1, 2, 4])).last_node.parent.priority == 8


def test_of_equal_ranks_the_node_made_first_goes_first() -> None:
    class Whatever(EvictionPolicy):
        """All the same."""

        name = "whatever"

        def rank(self, node: TreeNode) -> int:
            """The same for all."""
            return 0

    cache = RadixCache(eviction_policy=Whatever())
    for token in (4, 2, 9, 1):
        insert(cache, token)
    use(cache, 4)

    assert order(cache) == [4, 2, 9, 1]


def test_retired_leaves_go_before_all_others_under_every_policy() -> None:
    for name in POLICIES:
        cache = RadixCache(eviction_policy=named(name))
        insert(cache, 1, 100)
        cache.retire_all()
        insert(cache, 2, -100)

        cache.evict(1)

        assert cache.peek_prefix(RadixKey([2])).prefix_len == 1, name


@pytest.mark.parametrize("name", POLICIES)
def test_a_cache_with_states_takes_policies_too(name: str) -> None:
    cache = MambaRadixCache(eviction_policy=named(name))
    for token in (1, 2):
        cache.insert(RadixKey([token]), mamba_value=token)
    assert cache.match_prefix(RadixKey([1])).prefix_len == 1

    cache.evict(1)

    survivor = 1 if cache.peek_prefix(RadixKey([1])).prefix_len else 2
    assert survivor == (2 if name in ("fifo", "mru") else 1)
    cache.check_invariants()


def test_a_policy_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="random"):
        RadixCache(eviction_policy="random")
    assert make_policy("lru").name == "lru"


@pytest.mark.parametrize("name", POLICIES)
def test_the_steps_for_a_victim_do_not_grow_with_the_tree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for num_nodes in (1_000, 10_000):
        cache = RadixCache(eviction_policy=named(name))
        for token in range(num_nodes):
            cache.insert(RadixKey([token]))
            if token % 3 == 0:
                cache.match_prefix(RadixKey([token]))
        monkeypatch.setattr(cache.parts.tree, "nodes_below", lambda top: pytest.fail("an eviction walked the tree"))
        done = queue_operations(monkeypatch)
        cache.evict(100)
        counts.append(len(done))
        monkeypatch.undo()

    assert max(counts) <= 300


class Failing(EvictionPolicy):
    """A mistake of its author's, from some time on."""

    name, fails = "failing", False

    def rank(self, node: TreeNode) -> int:
        if self.fails:
            raise LookupError
        return node.own_access_time


class PoolOfSlots:
    """A pool that takes no pages."""

    def __init__(self, pool: TokenToKVPoolAllocator) -> None:
        self.free = pool.free


def radix_cache(pool: Any, policy: EvictionPolicy) -> RadixCache:
    return RadixCache(token_to_kv_pool_allocator=pool, eviction_policy=policy)


def told_cache(pool: Any, policy: EvictionPolicy) -> RadixCache:
    return RadixCache(1, None, pool, id, eviction_policy=policy)


def state_cache(pool: Any, policy: EvictionPolicy) -> MambaRadixCache:
    return MambaRadixCache(1, pool, eviction_policy=policy)


def divided_cache(pool: Any, policy: EvictionPolicy) -> RadixCache:
    cache = radix_cache(pool, policy)
    cache.divide(Tenants([Tenant("mine", "a", floor=2)]))
    return cache


@pytest.mark.parametrize("slots_alone", [False, True])
@pytest.mark.parametrize("make", [radix_cache, told_cache, state_cache, divided_cache])
@pytest.mark.parametrize("retired", [False, True])
def test_what_went_before_a_rank_failed_is_not_lost(make: Any, slots_alone: bool, retired: bool) -> None:
    pool, policy = TokenToKVPoolAllocator(64), Failing()
    cache = make(PoolOfSlots(pool) if slots_alone else pool, policy)
    if retired:
        cache.insert(RadixKey([40]), pool.alloc(1))
        cache.retire_all()
    cache.insert(RadixKey([50, 51]), pool.alloc(2))
    first = pool.alloc(4)
    cache.insert(RadixKey([1, 2]), first[:2])
    cache.insert(RadixKey([1, 2, 3, 4]), first)
    policy.fails = True

    with pytest.raises(LookupError):
        cache.evict(9)  # the parent of the last leaf is to be ranked

    assert (pool.available_size(), cache.total_size()) == (62, 2)
