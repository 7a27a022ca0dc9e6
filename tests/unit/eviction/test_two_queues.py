"""Policy "2q", claim by claim: which pages are protected, evicted, remembered and forgotten."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from support.reference.two_queues import protected_pages, two_queues_of

from raydix.cache_core import (
    MambaPool,
    MambaRadixCache,
    RadixCache,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.eviction.policy import TwoQ
from raydix.cache_core.eviction.tenants import Tenant, Tenants

PAGE = 4
NUM_PAGES = 16


class Cached:
    """A cache of 16 pages of 4 tokens, and its pool. A page has one id, 4 times."""

    def __init__(self) -> None:
        self.pool = TokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE)
        self.cache = RadixCache(PAGE, None, self.pool, eviction_policy="2q")

    def insert(self, *pages: int, namespace: str | None = None) -> None:
        """Insert a prefix, after an eviction of as many pages as are missing."""
        key = key_of(*pages, namespace=namespace)
        found = self.cache.match_prefix(key)
        self.cache.inc_lock_ref(found.last_node)
        missing = len(key) - found.prefix_len
        if (shortfall := missing - self.pool.available_size()) > 0:
            self.cache.evict(shortfall)
        slots = self.pool.alloc(missing)
        self.cache.insert(key, torch.cat([found.indices, slots]), prev_prefix_len=found.prefix_len)
        self.cache.dec_lock_ref(found.last_node)
        self.cache.check_invariants()

    def has(self, *pages: int, namespace: str | None = None) -> int:
        """Return how many leading pages are cached."""
        return self.cache.peek_prefix(key_of(*pages, namespace=namespace)).prefix_len // PAGE


def key_of(*pages: int, namespace: str | None = None) -> RadixKey:
    return RadixKey([page for page in pages for _ in range(PAGE)], namespace)


def num_remembered(cached: Cached) -> int:
    return two_queues_of(cached.cache).memory.num_pages


def test_a_hit_protects_nothing() -> None:
    cached = Cached()
    cached.insert(1)
    for _ in range(3):
        cached.cache.match_prefix(key_of(1))

    assert protected_pages(cached.cache) == 0
    cached.insert(2)
    cached.cache.match_prefix(key_of(1))
    cached.cache.evict(1)
    assert (cached.has(1), cached.has(2)) == (1, 0), "probation is in the order of last use"


def test_a_page_that_comes_back_is_protected_with_all_above_it() -> None:
    cached = Cached()
    cached.insert(1, 2)
    cached.insert(1, 2, 3)
    cached.cache.evict(1)
    assert cached.has(1, 2, 3) == 2
    assert protected_pages(cached.cache) == 0

    cached.insert(1, 2, 3)

    assert protected_pages(cached.cache) == 3


def test_a_leaf_is_cut_behind_its_last_remembered_page() -> None:
    cached = Cached()
    cached.insert(1, 2)
    cached.cache.evict(1)
    assert cached.has(1) == 0

    cached.insert(1, 2, 3, 4)

    assert protected_pages(cached.cache) == 2
    assert [len(node) for node in cached.cache.parts.tree.nodes()] == [2 * PAGE, 2 * PAGE]


def test_a_remembered_page_behind_one_that_is_not_is_protected_with_it() -> None:
    cached = Cached()
    cached.insert(1)
    cached.cache.evict(1)
    cached.insert(1)
    cached.insert(1, 2)
    cached.cache.evict(1)
    cached.cache.evict(1)
    assert (cached.has(1), num_remembered(cached)) == (0, 1), "page 2 left probation, then page 1 the protected queue"

    cached.insert(1, 2, 3, 4)

    assert (protected_pages(cached.cache), num_remembered(cached)) == (2, 0)
    assert [len(node) for node in cached.cache.parts.tree.nodes()] == [2 * PAGE, 2 * PAGE]


def test_a_page_that_comes_back_is_forgotten() -> None:
    cached = Cached()
    cached.insert(1)
    cached.cache.evict(1)
    cached.insert(1)
    assert (protected_pages(cached.cache), num_remembered(cached)) == (1, 0)

    cached.cache.evict(1)
    assert cached.has(1) == 0, "evicted from the protected queue"
    cached.insert(1)

    assert protected_pages(cached.cache) == 0, "on probation"
    cached.cache.evict(1)
    cached.insert(1)
    assert protected_pages(cached.cache) == 1


def test_the_last_pages_are_remembered_four_times_as_many_as_the_pool_holds() -> None:
    cached = Cached()
    for page in range(100):
        cached.insert(page)
        cached.cache.evict(1)
    assert num_remembered(cached) == 4 * NUM_PAGES

    cached.insert(100 - 4 * NUM_PAGES - 1)
    assert protected_pages(cached.cache) == 0
    cached.insert(100 - 4 * NUM_PAGES)
    assert protected_pages(cached.cache) == 1


def test_pages_that_have_come_back_take_no_place_of_others() -> None:
    cached = Cached()
    cached.insert(1000)
    cached.cache.evict(1)
    for page in range(4 * NUM_PAGES):  # each leaves probation, comes back, and leaves the protected queue
        for _ in range(2):
            cached.insert(page)
            cached.cache.evict(1)

    cached.insert(1000)

    assert protected_pages(cached.cache) == 1


def test_the_protected_pages_keep_half_of_the_pool_in_a_scan() -> None:
    cached = Cached()
    for page in range(1, 8):
        cached.insert(page)
    cached.cache.evict(NUM_PAGES * PAGE)
    for page in range(1, 8):
        cached.insert(page)
    assert protected_pages(cached.cache) == 7

    for page in range(100, 200):
        cached.insert(page)

    assert [cached.has(page) for page in range(1, 8)] == [1] * 7


def test_with_half_of_the_pool_protected_the_coldest_of_them_goes() -> None:
    cached = Cached()
    for page in range(1, 9):
        cached.insert(page)
    cached.cache.evict(NUM_PAGES * PAGE)
    for page in range(1, 9):
        cached.insert(page)
    cached.insert(50)
    cached.cache.match_prefix(key_of(1))

    cached.cache.evict(1)

    assert (cached.has(2), cached.has(1), cached.has(50)) == (0, 1, 1)


def test_an_empty_queue_leaves_the_choice_to_the_other_one() -> None:
    cached = Cached()
    cached.insert(1)
    cached.cache.evict(PAGE)
    cached.insert(1)
    assert protected_pages(cached.cache) == 1

    assert cached.cache.evict(1).full_evicted == PAGE


@pytest.mark.parametrize("forget", ["retire", "retire_all", "reset"])
def test_pages_of_old_weights_do_not_come_back(forget: str) -> None:
    cached = Cached()
    cached.insert(1)
    cached.insert(9)
    cached.cache.evict(1)
    if forget == "retire":
        cached.cache.retire(lambda extra_key: extra_key is None)
    else:
        getattr(cached.cache, forget)()

    cached.insert(1)

    assert protected_pages(cached.cache) == 0


def test_retired_nodes_are_not_remembered() -> None:
    cached = Cached()
    cached.insert(1)
    cached.cache.retire(lambda extra_key: True)
    cached.cache.evict(PAGE)

    assert num_remembered(cached) == 0


def test_a_page_comes_back_in_its_own_namespace_only() -> None:
    cached = Cached()
    cached.insert(1, namespace="a")
    cached.cache.evict(PAGE)

    for namespace in (None, "b", "None"):
        cached.insert(1, namespace=namespace)
    assert protected_pages(cached.cache, (None, "b", "None")) == 0
    cached.insert(1, namespace="a")
    assert protected_pages(cached.cache, ("a",)) == 1


def test_pages_are_remembered_beyond_a_wide_id() -> None:
    cached = Cached()
    cached.insert(1, 2)
    cached.cache.evict(2 * PAGE)
    cached.insert(2**40)  # every id of the namespace takes 8 bytes now

    cached.insert(1, 2)

    assert protected_pages(cached.cache) == 2


def test_the_sum_of_a_node_is_that_of_its_tokens_however_it_was_cut() -> None:
    cached, other = Cached(), Cached()
    pages = (5, 6, 7, 8, 9)
    cached.insert(*pages)
    for end in (3, 1, 4):
        cached.cache.match_prefix(key_of(*pages[:end]))
    other.insert(*pages)

    whole, parts = (two_queues_of(each.cache).sum_of(leaf_of(each, *pages)) for each in (other, cached))

    assert whole == parts != 0


def leaf_of(cached: Cached, *pages: int) -> Any:
    return cached.cache.peek_prefix(key_of(*pages)).last_node


def test_a_window_takes_nothing_from_the_queues() -> None:
    pool = SWATokenToKVPoolAllocator(NUM_PAGES * PAGE, NUM_PAGES * PAGE, PAGE)
    cache = RadixCache(PAGE, 2 * PAGE, pool, eviction_policy="2q")
    key = key_of(1, 2, 3, 4, 5, 6)
    cache.insert(key, pool.alloc(len(key)))
    cache.evict(NUM_PAGES * PAGE)
    longer = key_of(1, 2, 3, 4, 5, 6, 7, 8)

    cache.insert(longer, pool.alloc(len(longer)), swa_evicted_seqlen=2 * PAGE)

    cache.check_invariants()
    assert protected_pages(cache) == 6
    lives = [(node.end // PAGE, node.swa_tombstone) for node in cache.parts.tree.nodes()]
    assert (2, True) in lives
    assert (6, False) in lives
    cache.evict(0, NUM_PAGES * PAGE)  # of the window alone
    cache.check_invariants()


def test_states_take_nothing_from_the_queues() -> None:
    pool, states = TokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE), MambaPool(8)
    cache = MambaRadixCache(PAGE, pool, states, eviction_policy="2q")
    for _ in range(2):
        for pages in ((1, 2), (1, 2, 3)):
            slot = states.alloc_track_slot()
            done = cache.insert(key_of(*pages), pool.alloc(len(pages) * PAGE), mamba_value=slot)
            pool.free(done.duplicate_indices)
            if done.mamba_exist:
                states.free_track_slot(slot)
            cache.check_invariants()
        before = protected_pages(cache)
        cache.evict(NUM_PAGES * PAGE)
        cache.check_invariants()

    assert before == 3
    assert (pool.available_size(), len(cache.state_slots())) == (NUM_PAGES * PAGE, 0)


def test_random_requests_with_windows_and_states_lose_nothing() -> None:
    random, num_slots = Random(3), 24 * PAGE
    pool, states = SWATokenToKVPoolAllocator(num_slots, num_slots // 2, PAGE), MambaPool(8)
    cache = MambaRadixCache(PAGE, pool, states, sliding_window_size=PAGE + 1, eviction_policy="2q")
    most_protected = 0
    for _ in range(400):
        key = key_of(*(random.randrange(2) for _ in range(random.randint(1, 7))))
        found = cache.match_prefix(key)
        receipt = cache.inc_lock_ref(found.last_node)
        missing = len(key) - found.prefix_len
        cache.evict(
            max(0, missing - pool.available_size()),
            max(0, missing - pool.swa_available_size()),
            max(0, 1 - states.available_size()),
        )
        slot = states.alloc_track_slot()
        slots = torch.cat([found.indices, pool.alloc(missing)])
        done = cache.insert(key, slots, from_node=found.last_node, mamba_value=slot)
        pool.free(done.duplicate_indices)
        if done.mamba_exist:
            states.free_track_slot(slot)
        cache.dec_lock_ref(found.last_node, receipt)
        cache.check_invariants()
        assert cache.total_size() + pool.available_size() == num_slots
        assert len(cache.state_slots()) + states.available_size() == 8
        most_protected = max(most_protected, protected_pages(cache))

    assert most_protected > 6


def test_tenants_are_refused() -> None:
    cache = RadixCache(token_to_kv_pool_allocator=TokenToKVPoolAllocator(8), eviction_policy="2q")

    with pytest.raises(ValueError, match="policy '2q' takes no tenants"):
        cache.divide(Tenants([Tenant("mine", "a", floor=2)]))


def test_the_size_of_the_pool_must_be_known() -> None:
    with pytest.raises(ValueError, match="needs a pool with num_slots"):
        RadixCache(eviction_policy="2q")
    with pytest.raises(ValueError, match="num_slots must be at least 1, not 0"):
        TwoQ(0)
    assert RadixCache(eviction_policy=TwoQ(64)).parts.full.policy.name == "2q"
