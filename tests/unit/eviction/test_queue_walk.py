"""Walks over the candidates for eviction: in the order of eviction, without a change."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.caches.small_kv_cache import key, publish
from support.traffic.eviction_order import NUM_PAGES, PAGE, make

from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.eviction.queue_walk import VictimWalk
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.tree.tree_node import TreeNode


def walked(walk: VictimWalk) -> list[TreeNode]:
    found = []
    while (leaf := walk.take()) is not None:
        found.append(leaf)
    return found


def filled(policy: str, seed: int, **options: Any) -> KVCache:
    """Return a cache of single pages below the root, so that no eviction makes a candidate; some end late."""
    rng = Random(seed)
    allocator = TokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE)
    cache = KVCache(RadixCache(PAGE, None, allocator, eviction_policy=policy), allocator, **options)
    names = options.get("names", (None, "a", "b"))
    for number in range(4 * NUM_PAGES):
        prompt = RadixKey([rng.randrange(40), 0], rng.choice(names))
        lease_id = f"l{number}"
        cache.acquire(lease_id, "s", prompt, priority=rng.randrange(3))
        cache.insert(lease_id, "s", PAGE, prompt)
        if rng.random() < 0.8:
            cache.release(lease_id, "s")
        if rng.random() < 0.1:
            cache.end_session("s")
    cache.end_session("s")
    return cache


@pytest.mark.parametrize("search_limit", [0, 256])
@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "2q"])
def test_a_walk_names_the_leaves_in_the_order_of_their_eviction(policy: str, search_limit: int) -> None:
    cache = filled(policy, 3)
    gone: list[int] = []
    cache.radix.on_node_evict = gone.append
    queues = cache.radix.parts.two_queues
    for queue in (
        (queues.probation, queues.protected) if queues is not None else [cache.radix.parts.full.tenants.rest.queue]
    ):
        queue.search_limit = search_limit

    order = [leaf.id for leaf in walked(cache.radix.walk())]
    cache.check_invariants()
    cache.evict(cache.num_slots)

    assert order == gone and len(order) > 10


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_of_two_queues_follows_the_share_of_each(seed: int) -> None:
    cache = filled("2q", seed)
    for number in range(12):  # These come back while they are remembered.
        publish(cache, number, 0)
    gone: list[int] = []
    cache.radix.on_node_evict = gone.append

    leaves = walked(cache.radix.walk())
    cache.evict(cache.num_slots)

    assert [leaf.id for leaf in leaves] == gone
    assert {leaf.is_protected for leaf in leaves} == {True, False}


def test_a_walk_of_tenants_keeps_their_floors() -> None:
    tenants = Tenants([Tenant("kept", "a", floor=6), Tenant("capped", "b", cap=20)])
    cache = filled("lru", 1, tenants=tenants)
    gone: list[int] = []
    cache.radix.on_node_evict = gone.append

    order = [leaf.id for leaf in walked(cache.radix.walk())]
    cache.evict(cache.num_slots)

    assert order == gone and cache.total_size() == 6


def test_the_node_of_a_step_may_leave_the_queue() -> None:
    cache = filled("lru", 2)
    expected = [leaf.id for leaf in walked(cache.radix.walk())]
    walk, found = cache.radix.walk(), []
    while (leaf := walk.take()) is not None:
        found.append(leaf.id)
        cache.tree.inc_lock_ref(leaf)

    assert found == expected and not walk.is_stale


def test_a_walk_is_stale_if_its_next_node_has_left_the_queue() -> None:
    cache = make(NUM_PAGES, "lru", "radix")
    for number in range(3):
        publish(cache, number, 0)
    walk = cache.radix.walk()
    assert walk.take() is not None

    assert cache.tree.match_pages(key(1, 0)).prefix_len == 2
    cache.acquire("l", "s", key(1, 0))

    assert walk.take() is None and walk.is_stale
