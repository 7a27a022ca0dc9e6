"""The second state slot of a lease: a copy of its state at the end of a page, which `insert` publishes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.caches.invariant_fixtures import checked_after
from support.caches.small_kv_cache import NO_IDS, key

from raydix.cache_core import (
    KVCache,
    LeaseRangeError,
    MambaPool,
    MambaRadixCache,
    RadixCache,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.leases.lease_table import LeaseRecord


@pytest.fixture
def make() -> Iterator[Callable[..., KVCache]]:
    """16 slots in pages of two, and a few states of one number."""

    def make_cache(num_states: int = 6, bigram: bool = False) -> KVCache:
        states, allocator = MambaPool(num_states, [[(1,)]], dtype=torch.int64), TokenToKVPoolAllocator(16, 2)
        return KVCache(MambaRadixCache(2, allocator, states), allocator, states=states, bigram=bigram)

    yield from checked_after(make_cache)


def write(cache: KVCache, slot: int | None, number: int) -> None:
    assert cache.pools.states is not None and slot is not None
    cache.pools.states.layers[0][0][slot] = number


def state_after(cache: KVCache, *ids: int) -> int | None:
    """The number in the state that a request of these tokens continues from; None: it continues from none."""
    lease = cache.acquire("reader", "reader", key(*ids))
    assert cache.pools.states is not None
    number = int(cache.pools.states.layers[0][0][lease.state_slot])
    cache.release("reader", "reader")
    return number if lease.prefix_len else None


def decode(cache: KVCache, *ids: int, new_tokens: int = 4) -> LeaseRecord:
    """A lease of a prompt that has decoded up to the tokens, with the state at each page end in its second slot."""
    lease = cache.acquire("l", "s", key(*ids[:1]), new_tokens + len(ids) - 1, boundary_state=True)
    for place in range(1, len(ids) + 1):
        write(cache, lease.state_slot, ids[place - 1])
        if place % 2 == 0:
            write(cache, lease.boundary_slot, ids[place - 1])
    return lease


def test_an_answer_that_ends_within_a_page_leaves_the_state_of_its_last_page(
    make: Callable[..., KVCache],
) -> None:
    cache = make()
    lease = decode(cache, 1, 2, 3, 4, 5)
    slot = lease.boundary_slot

    cache.insert("l", "s", 5, key(2, 3, 4, 5), boundary_len=4)
    cache.release("l", "s")

    assert state_after(cache, 1, 2, 3, 4, 5, 6) == 4
    assert cache.tree.state_slots() == [slot]  # the slot itself, without a copy
    assert cache.state_sizes() is not None
    assert cache.state_sizes().free == 5  # type: ignore[union-attr]


def test_without_a_boundary_nothing_is_published(make: Callable[..., KVCache]) -> None:
    cache = make()
    lease = decode(cache, 1)

    cache.insert("l", "s", 1, NO_IDS)

    assert lease.boundary_slot is not None
    cache.release("l", "s")
    assert cache.tree.state_slots() == []


def test_a_node_keeps_the_state_that_it_has(make: Callable[..., KVCache]) -> None:
    cache = make()
    lease = decode(cache, 1, 2, 3)
    write(cache, lease.state_slot, 7)
    cache.insert("l", "s", 2, key(2), publish_state=True)
    (kept,) = cache.tree.state_slots()

    cache.insert("l", "s", 3, key(3), boundary_len=2)

    assert lease.boundary_slot is None
    assert cache.tree.state_slots() == [kept]
    cache.release("l", "s")
    assert state_after(cache, 1, 2, 9) == 7


@pytest.mark.parametrize("boundary_len", [0, 1, 2, 3, 5, 6])
def test_any_length_but_that_of_the_last_whole_page_is_refused(make: Callable[..., KVCache], boundary_len: int) -> None:
    cache = make()
    lease = decode(cache, 1, 2, 3, 4, 5)

    with pytest.raises(LeaseRangeError, match="boundary_len must be the end of the last whole page, 4, not"):
        cache.insert("l", "s", 5, key(2, 3, 4, 5), boundary_len=boundary_len)

    assert lease.num_published_pages == 0
    assert lease.boundary_slot is not None
    cache.release("l", "s")


def test_a_pair_of_tokens_is_one_unit_of_a_bigram_tree(make: Callable[..., KVCache]) -> None:
    cache = make(bigram=True)
    lease = cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6), boundary_state=True)
    write(cache, lease.boundary_slot, 5)
    with pytest.raises(LeaseRangeError):
        cache.insert("l", "s", 6, NO_IDS, boundary_len=4)

    cache.insert("l", "s", 6, NO_IDS, boundary_len=5)

    cache.release("l", "s")
    assert state_after(cache, 1, 2, 3, 4, 5, 7) == 5


def test_the_same_insert_again_has_no_effect(make: Callable[..., KVCache]) -> None:
    cache = make()
    decode(cache, 1, 2, 3)
    for _ in range(2):
        cache.insert("l", "s", 3, key(2, 3), boundary_len=2)
    with pytest.raises(LeaseRangeError, match="has published it"):
        cache.insert("l", "s", 5, key(4, 5), boundary_len=4)

    cache.release("l", "s")
    assert state_after(cache, 1, 2, 9) == 2


def test_a_second_slot_is_evicted_for_or_done_without(make: Callable[..., KVCache]) -> None:
    cache = make(num_states=3)
    decode(cache, 1, 2, 3)
    cache.insert("l", "s", 3, key(2, 3), boundary_len=2)
    cache.release("l", "s")

    first = cache.acquire("a", "s", key(5), boundary_state=True)
    second = cache.acquire("b", "s", key(6), 1, boundary_state=True)  # evicts the published state for its first slot

    assert first.boundary_slot is not None
    assert (second.state_slot is None, second.boundary_slot) == (False, None)
    assert cache.counters.boundary_states_refused == 1
    with pytest.raises(LeaseRangeError, match="the lease has no boundary state"):
        cache.insert("b", "s", 2, key(7), boundary_len=2)
    cache.end_session("s")


def test_a_lease_does_not_evict_the_state_that_it_continues_from(make: Callable[..., KVCache]) -> None:
    cache = make(num_states=2)
    lease = cache.acquire("l", "s", key(1, 2))
    write(cache, lease.state_slot, 9)
    cache.insert("l", "s", 2, NO_IDS, publish_state=True)
    cache.release("l", "s")

    lease = cache.acquire("l", "s", key(1, 2, 3), boundary_state=True)

    assert (lease.prefix_len, lease.boundary_slot) == (2, None)
    cache.release("l", "s")


def test_both_slots_of_a_vanished_session_are_withheld(make: Callable[..., KVCache]) -> None:
    cache = make()
    decode(cache, 1, 2, 3)

    cache.quarantine_session("s")

    sizes: Any = cache.state_sizes()
    assert (sizes.free, sizes.quarantined) == (4, 2)
    cache.free_withheld("s")
    assert cache.state_sizes().free == 6  # type: ignore[union-attr]


def test_a_retired_lease_publishes_no_boundary_state(make: Callable[..., KVCache]) -> None:
    cache = make()
    lease = decode(cache, 1, 2, 3)
    cache.reset()

    assert cache.insert("l", "s", 3, key(2, 3), boundary_len=2).retired

    assert lease.boundary_slot is not None
    cache.release("l", "s")
    assert cache.tree.state_slots() == []


def test_an_adopted_lease_keeps_its_second_slot(make: Callable[..., KVCache]) -> None:
    cache = make()
    slot = decode(cache, 1, 2, 3).boundary_slot
    cache.offer("l", "s", "offer", 1e9)

    lease = cache.adopt("l", "s", "t", "offer")

    assert lease.boundary_slot == slot
    assert cache.acquire("l", "t", key(1), 4, boundary_state=True) is lease  # a retry
    cache.release("l", "t")


def test_a_cache_without_states_takes_no_boundary() -> None:
    allocator = TokenToKVPoolAllocator(16, 2)
    cache = KVCache(RadixCache(2, token_to_kv_pool_allocator=allocator), allocator)
    lease = cache.acquire("l", "s", key(1, 2), boundary_state=True)
    assert (lease.boundary_slot, cache.counters.boundary_states_refused) == (None, 0)

    with pytest.raises(LeaseRangeError, match="no boundary state"):
        cache.insert("l", "s", 2, NO_IDS, boundary_len=2)
