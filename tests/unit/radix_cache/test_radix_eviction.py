"""`RadixCache`: the order and cost of eviction."""

from collections.abc import Callable

import pytest
import torch
from support.caches.small_radix import FreedSlots, edges, found, key, lock, row, sizes
from support.faults.count_queue_operations import queue_operations

from raydix.cache_core import (
    EvictResult,
    MambaPool,
    MambaRadixCache,
    RadixCache,
    RadixKey,
    SlotError,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)


def test_leaves_go_in_the_order_of_their_last_use(cache: RadixCache, pool: FreedSlots) -> None:
    for token in (1, 2, 3, 4):
        cache.insert(key(token), row(10 * token))
    cache.match_prefix(key(2))
    cache.insert(key(1), row(10))

    order = []
    while cache.evict(1).full_evicted:
        order += pool.take()

    assert order == [30, 40, 20, 10]


def test_one_call_evicts_in_the_same_order(cache: RadixCache, pool: FreedSlots) -> None:
    for token in (1, 2, 3, 4):
        cache.insert(key(token), row(10 * token))
    cache.match_prefix(key(2))

    assert cache.evict(4) == EvictResult(4, 0, 0)

    assert pool.take() == [10, 30, 40, 20]


def test_it_stops_once_the_target_is_met(cache: RadixCache, pool: FreedSlots) -> None:
    for token in (1, 2, 3, 4):
        cache.insert(key(token), row(10 * token))

    assert cache.evict(2).full_evicted == 2

    assert pool.take() == [10, 20]
    assert sizes(cache) == (2, 0)


@pytest.mark.parametrize("retired", [False, True])
def test_more_than_64_bits_can_count_is_all_there_is(cache: RadixCache, pool: FreedSlots, retired: bool) -> None:
    cache.insert(key(1, 2), row(10, 11))
    if retired:
        cache.retire_all()
    cache.insert(key(3), row(12))

    assert cache.evict(2**70).full_evicted == 3

    assert sorted(pool.take()) == [10, 11, 12]


def test_a_leaf_goes_whole_and_the_result_counts_what_really_went(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(4), row(13))

    assert cache.evict(1).full_evicted == 3

    assert pool.take() == [10, 11, 12]
    assert sizes(cache) == (1, 0)


@pytest.mark.parametrize("told", [True, False], ids=["with a callback", "slots alone"])
def test_of_a_long_leaf_the_tail_alone_goes_as_far_as_it_is_needed(told: bool) -> None:
    """An eighth of it goes at least, as each split copies the head. Less than 1,024 tokens do not stay alone."""
    pool, gone = FreedSlots(), list[int]()
    cache = RadixCache(4, None, pool, gone.append if told else None)
    ids, slots = torch.arange(8192), torch.arange(8192)
    cache.insert(RadixKey(ids), slots)
    cache.insert(key(-1 % 2**32, 2, 3, 4), row(9000, 9001, 9002, 9003))

    sizes_after = []
    for num_tokens in (3001, 1, 1, 2000, 1):
        before = cache.total_size()
        freed = cache.evict(num_tokens).full_evicted
        cache.check_invariants()
        assert freed == before - cache.total_size()
        sizes_after.append(cache.peek_prefix(RadixKey(ids)).prefix_len)
        assert pool.take() == slots[sizes_after[-1] : sizes_after[-1] + freed].tolist()

    assert sizes_after == [5188, 4540, 3972, 1972, 1724]
    assert cache.evict(700).full_evicted == 700
    assert cache.evict(1).full_evicted == 1024, "the rest goes whole"
    assert cache.evict(1).full_evicted == 4, "the rest of a victim goes before what was used later"
    assert len(gone) == len(set(gone)) == (8 if told else 0)


def test_a_long_leaf_goes_whole_where_no_more_than_that_is_there() -> None:
    cache = RadixCache(2048, None, FreedSlots())
    cache.insert(RadixKey(torch.arange(4096)), torch.arange(4096))

    assert cache.evict(2049).full_evicted == 4096
    cache.insert(RadixKey(torch.arange(4096)), torch.arange(4096))
    assert cache.evict(2048).full_evicted == 2048
    assert cache.evict(1).full_evicted == 2048


def test_a_retired_leaf_goes_whole() -> None:
    cache = RadixCache(4, None, FreedSlots())
    cache.insert(RadixKey(torch.arange(4096)), torch.arange(4096))
    cache.retire_all()

    assert cache.evict(1).full_evicted == 4096


@pytest.mark.parametrize("states", [False, True], ids=["window", "states"])
def test_a_leaf_with_a_window_or_states_goes_whole(states: bool) -> None:
    ids, slots = torch.arange(4096), torch.arange(4096)
    if states:
        hybrid = MambaRadixCache(4, FreedSlots(), MambaPool(4))
        hybrid.insert(RadixKey(ids), slots, mamba_value=row(hybrid.mamba_pool.alloc_track_slot()))
        assert hybrid.evict(1).full_evicted == 4096
        return
    allocator = SWATokenToKVPoolAllocator(8192, 8192, 4)
    windows = RadixCache(4, 4096, allocator)
    windows.insert(RadixKey(ids), allocator.alloc(4096))
    assert windows.evict(1).full_evicted == 4096


def test_a_parent_becomes_a_candidate_when_its_last_child_has_gone(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 3), row(10, 21))
    cache.insert(key(9), row(30))

    cache.evict(1)
    assert pool.take() == [11]
    cache.evict(1)
    assert pool.take() == [21]  # its parent is as young, and a candidate only now
    cache.evict(1)
    assert pool.take() == [10]
    cache.evict(1)
    assert pool.take() == [30]


def test_a_chain_goes_from_its_end_within_one_call(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    assert cache.evict(99).full_evicted == 3

    assert pool.take() == [12, 11, 10]
    assert edges(cache) == set()


@pytest.mark.parametrize("retired", [False, True])
@pytest.mark.parametrize("told", [None, lambda node_id: None])
@pytest.mark.parametrize("num_tokens", [0, -5, -(2**63), -(2**63) - 1, -(2**70)])
def test_nothing_is_evicted_for_nothing(
    make_cache: Callable[..., RadixCache], pool: FreedSlots, num_tokens: int, told: object, retired: bool
) -> None:
    cache = make_cache(on_node_evict=told)
    cache.insert(key(1), row(10))
    if retired:
        cache.retire_all()

    assert cache.evict(num_tokens) == EvictResult(0, 0, 0)
    assert pool.take() == []


def test_an_empty_cache_has_nothing_to_evict(cache: RadixCache) -> None:
    assert cache.evict(99) == EvictResult(0, 0, 0)


def test_a_full_eviction_leaves_a_cache_that_works(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.evict(99)

    cache.insert(key(1, 2), row(20, 21))

    assert found(cache, 1, 2) == [20, 21]
    assert pool.take() == [10, 11]


def test_each_evicted_node_is_told_of_by_its_id_after_it_left(make_cache: Callable[..., RadixCache]) -> None:
    told: list[tuple[int, set[str]]] = []
    cache = make_cache(on_node_evict=lambda node_id: told.append((node_id, edges(cache))))
    first = cache.insert(key(1), row(10)).last_node
    second = cache.insert(key(2), row(20)).last_node
    cache.insert(key(3), row(30))

    cache.evict(2)

    assert told == [(first.id, {"3"}), (second.id, {"3"})]
    assert first.evicted
    assert first.value is None


def test_a_pool_that_takes_pages_gets_whole_pages_back() -> None:
    allocator = TokenToKVPoolAllocator(num_slots=8, page_size=2)
    cache = RadixCache(2, token_to_kv_pool_allocator=allocator)
    slots = allocator.alloc(8)
    cache.insert(key(1, 2, 3, 4), slots[:4])
    cache.insert(key(1, 2, 5, 6), torch.cat((slots[:2], slots[[5, 4]])))  # one page the other way round

    cache.evict(99)
    allocator.free(slots[6:])

    assert allocator.available_size() == 8
    allocator.check_invariants()
    cache.check_invariants()


@pytest.mark.parametrize("num_leaves", [10, 100, 10_000])
def test_the_steps_for_a_victim_do_not_grow_with_the_tree(
    cache: RadixCache, monkeypatch: pytest.MonkeyPatch, num_leaves: int
) -> None:
    for token in range(num_leaves):
        cache.insert(key(token))
    done = queue_operations(monkeypatch)
    monkeypatch.setattr(cache.parts.tree, "nodes_below", lambda top: pytest.fail("an eviction walked the tree"))

    for _ in range(5):
        cache.evict(1)

    assert done == ["pop"] * 5
    monkeypatch.undo()


def test_uses_cost_the_next_eviction_nothing(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in range(100):
        cache.insert(key(token))
    for token in range(7):
        cache.match_prefix(key(token))
        cache.match_prefix(key(token))
    done = queue_operations(monkeypatch)

    cache.evict(1)

    assert done == ["pop"]
    assert found(cache, 7) == []


def test_the_queue_holds_the_unlocked_leaves_alone(cache: RadixCache) -> None:
    for token in range(10):
        cache.insert(key(token))
    for _ in range(100):
        node = lock(cache, 3)
        assert len(cache.parts.full._queue) == 9
        cache.dec_lock_ref(node)
        cache.insert(key(3))

    assert len(cache.parts.full._queue) == 10


# ---------------------------------------------------------------- pools that refuse


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("give_back", ["evict", "reset", "reclaim_retired"])
def test_what_a_pool_refuses_raises_once_it_has_left_the_tree(page_size: int, give_back: str) -> None:
    pool = TokenToKVPoolAllocator(16, page_size)
    evicted: list[int] = []
    cache = RadixCache(page_size, token_to_kv_pool_allocator=pool, on_node_evict=evicted.append)
    cache.insert(key(1, 2, 3, 4), pool.alloc(4))
    cache.insert(key(5, 6), row(1000, 1001))
    if give_back == "reclaim_retired":
        cache.retire_all()

    with pytest.raises(SlotError, match=r"the pool refused slots that were in the tree: .*1000"):
        cache.evict(100) if give_back == "evict" else getattr(cache, give_back)()

    assert (cache.total_size(), len(evicted)) == (0, 2)
    cache.check_invariants()
    cache.insert(key(7, 8), pool.alloc(2))
    assert cache.evict(2).full_evicted == 2


def test_what_a_pool_without_pages_refuses_raises_for_the_compiled_loop_as_well() -> None:
    class Refusing:
        def free(self, indices: torch.Tensor) -> None:
            raise KeyError(f"{len(indices)} slots too many")

    cache = RadixCache(1, token_to_kv_pool_allocator=Refusing())
    cache.insert(key(1, 2), row(5, 6))

    with pytest.raises(SlotError, match="that were in the tree: 5, 6: '2 slots too many'"):
        cache.evict(100)

    assert cache.total_size() == 0
    cache.check_invariants()


def test_a_pool_of_other_pages_is_refused() -> None:
    for of_pool, of_cache in ((16, 1), (1, 16)):
        with pytest.raises(ValueError, match="pages are of"):
            RadixCache(of_cache, token_to_kv_pool_allocator=TokenToKVPoolAllocator(64, of_pool))
