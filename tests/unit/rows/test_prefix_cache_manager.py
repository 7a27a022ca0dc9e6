"""Slots and the slot cache: lookups, invalidation, order of eviction, and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.invariant_fixtures import checked_after

from raydix.cache_core import PrefixCacheManager, RadixKey, SlotAllocator
from raydix.cache_core.errors import CoreError, InvalidKeyError, LockError, SlotError, StaleNodeError
from raydix.cache_core.eviction.recency_queue import RecencyQueue

Make = Callable[..., PrefixCacheManager]
MISS = (0, -1, 0)


@pytest.fixture
def make() -> Iterator[Make]:
    yield from checked_after(PrefixCacheManager)


@pytest.fixture
def cache(make: Make) -> PrefixCacheManager:
    return make()


@pytest.fixture
def slots() -> Iterator[SlotAllocator]:
    allocator = SlotAllocator(4)
    yield allocator
    allocator.check_invariants()


# ---------------------------------------------------------------- SlotAllocator


def test_the_lowest_free_slot_comes_first_and_minus_one_when_none_is_left(slots: SlotAllocator) -> None:
    assert [slots.alloc() for _ in range(5)] == [0, 1, 2, 3, -1]

    slots.free(2)
    slots.free(1)

    assert slots.free_count == 2
    assert [slots.alloc() for _ in range(3)] == [1, 2, -1]


def test_the_version_rises_at_alloc_and_at_nothing_else(slots: SlotAllocator) -> None:
    slots.alloc()
    assert slots.version(0) == 1

    slots.free(0)
    slots.occupy(0)
    slots.free(0)
    assert slots.version(0) == 1

    slots.alloc()
    assert slots.version(0) == 2
    assert [slots.version(slot) for slot in (1, 2, 3)] == [0, 0, 0]


def test_a_given_slot_is_taken_with_or_without_a_new_version(slots: SlotAllocator) -> None:
    slots.occupy(2)
    slots.alloc_at(1)

    assert [slots.is_free(slot) for slot in range(4)] == [True, False, False, True]
    assert [slots.version(slot) for slot in range(4)] == [0, 1, 0, 0]


def test_a_slot_in_the_wrong_state_is_refused_and_nothing_changes(slots: SlotAllocator) -> None:
    slots.alloc()

    for act, slot in [(slots.occupy, 0), (slots.alloc_at, 0), (slots.free, 1)]:
        with pytest.raises(SlotError):
            act(slot)

    assert slots.free_count == 3
    assert [slots.is_free(slot) for slot in range(4)] == [False, True, True, True]
    assert slots.version(0) == 1


@pytest.mark.parametrize("slot", [-1, 4, 1000])
def test_a_slot_out_of_range_is_refused_and_none_is_minted(slots: SlotAllocator, slot: int) -> None:
    for act in (slots.free, slots.occupy, slots.alloc_at, slots.is_free, slots.version):
        with pytest.raises(ValueError, match="outside"):
            act(slot)

    assert slots.free_count == 4
    assert [slots.alloc() for _ in range(5)] == [0, 1, 2, 3, -1]


@pytest.mark.parametrize("max_slots", [0, -1])
def test_an_allocator_has_a_slot_at_least(max_slots: int) -> None:
    with pytest.raises(ValueError, match="max_slots"):
        SlotAllocator(max_slots)


def test_slots_beyond_one_word_of_the_mask_are_found() -> None:
    slots = SlotAllocator(3000)

    assert [slots.alloc() for _ in range(3001)] == [*range(3000), -1]

    slots.free(2999)
    slots.free(1024)
    assert [slots.alloc(), slots.alloc(), slots.alloc()] == [1024, 2999, -1]
    slots.check_invariants()


# ---------------------------------------------------------------- what is found


def test_an_empty_cache_finds_nothing(cache: PrefixCacheManager) -> None:
    assert cache.find((1, 2, 3)) == MISS
    assert cache.find(()) == MISS
    assert cache.pretty_format() == ""


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_every_prefix_of_a_row_is_found(cache: PrefixCacheManager, length: int) -> None:
    cache.insert((1, 2, 3, 4), slot=10, slot_ver=7)

    assert cache.find((1, 2, 3, 4)[:length]) == (length, 10, 7)
    assert cache.find((*(1, 2, 3, 4)[:length], 9, 9)) == (length, 10, 7)


def test_of_rows_that_share_a_prefix_the_last_recorded_is_found(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=10, slot_ver=1)
    cache.insert((1, 2, 4), slot=11, slot_ver=1)

    assert cache.find((1, 2, 9)) == (2, 11, 1)
    assert cache.find((1, 2, 3)) == (3, 10, 1)
    assert cache.peek_slots((1, 2, 9)) == (2, [11, 10])
    assert cache.peek_slots((1, 2, 9), limit=1) == (2, [11])


def test_when_the_last_recorded_row_goes_another_still_serves_the_prefix(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=10, slot_ver=1)
    cache.insert((1, 2, 4), slot=11, slot_ver=1)

    cache.forget(11)

    assert cache.find((1, 2, 4)) == (2, 10, 1)


def test_whatever_a_key_can_be_made_of_finds_the_same(cache: PrefixCacheManager) -> None:
    cache.insert([1, 2, 2**40], slot=0, slot_ver=1)

    for ids in ((1, 2, 2**40), np.array([1, 2, 2**40]), torch.tensor([1, 2, 2**40]), RadixKey([1, 2, 2**40])):
        assert cache.find(ids) == (3, 0, 1)
    assert cache.find((1, 2, 0)) == (2, 0, 1)  # the lower half of the wide id


def test_namespaces_do_not_see_each_other(cache: PrefixCacheManager) -> None:
    cache.insert(RadixKey([1, 2], "a"), slot=0, slot_ver=1)

    assert cache.find([1, 2]) == MISS
    assert cache.find(RadixKey([1, 2], "")) == MISS
    assert cache.find(RadixKey([1, 2], "a")) == (2, 0, 1)


@pytest.mark.parametrize("ids", [(-1,), (0.5,), [(1, 2), (2, 3)], "12"])
def test_what_is_no_row_of_plain_ids_is_refused(cache: PrefixCacheManager, ids: object) -> None:
    with pytest.raises(InvalidKeyError):
        cache.find(ids)
    with pytest.raises(InvalidKeyError):
        cache.insert(ids, 0, 1)


def test_a_peek_changes_nothing(make: Make) -> None:
    cache = make(max_capacity=4)
    cache.insert((1, 2), slot=0, slot_ver=1)
    cache.insert((3, 4), slot=1, slot_ver=1)
    before = cache.pretty_format()

    assert cache.peek((1,)) == (1, 0, 1)
    assert cache.pretty_format() == before

    cache.insert((5, 6), slot=2, slot_ver=1)  # in place of (1, 2), the oldest still
    assert cache.peek((1, 2)) == MISS


# ---------------------------------------------------------------- what a slot holds


def test_a_slot_given_out_anew_is_not_found_any_more(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)
    slot = slots.alloc()
    cache.insert((1, 2, 3), slot, slots.version(slot))

    slots.free(slot)
    assert cache.find((1, 2, 3)) == (3, slot, 1)  # released, and still there

    assert slots.alloc() == slot
    assert cache.find((1, 2, 3)) == MISS
    assert not cache.slot_is_findable(slot)


def test_a_stale_row_gives_way_to_the_longest_valid_shorter_prefix(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)
    for tokens in ((1, 2), (1, 2, 3, 4), (1, 2, 3)):
        slot = slots.alloc()
        cache.insert(tokens, slot, slots.version(slot))

    slots.free(1)
    slots.alloc()

    assert cache.find((1, 2, 3, 4)) == (3, 2, 1)
    slots.free(2)
    slots.alloc()
    assert cache.find((1, 2, 3, 4)) == (2, 0, 1)


def test_a_slot_taken_back_as_it_is_stays_valid(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)
    cache.insert((1, 2, 3), slots.alloc(), 1)
    slots.free(0)

    slots.occupy(0)

    assert cache.find((1, 2, 3)) == (3, 0, 1)


def test_an_insert_that_comes_too_late_records_nothing(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)
    slots.alloc()
    slots.free(0)
    slots.alloc()

    assert cache.insert((1, 2), 0, slot_ver=1) == 0
    assert cache.num_rows == 0
    assert cache.insert((1, 2), 0, slot_ver=2) == 2


def test_invalidation_drops_what_is_deeper_and_keeps_the_rest(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3, 4), slot=0, slot_ver=1)
    cache.insert((1, 2, 3, 4), slot=1, slot_ver=1)

    cache.invalidate(1, 2)

    assert cache.recorded_len(1) == 2
    assert cache.find((1, 2, 3, 4)) == (4, 0, 1)
    assert cache.find((1, 2)) == (2, 1, 1)
    cache.invalidate(0, 0)
    assert cache.find((1, 2, 3, 4)) == (2, 1, 1)
    assert cache.num_nodes == 2


def test_invalidation_beyond_what_is_recorded_changes_nothing(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)

    cache.invalidate(0, 3)
    cache.invalidate(7, 0)

    assert cache.find((1, 2, 3)) == (3, 0, 1)


def test_other_tokens_on_the_same_row_take_the_place_of_the_former(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3, 4), slot=0, slot_ver=1)

    cache.insert((1, 2, 8), slot=0, slot_ver=1)

    assert cache.find((1, 2, 3, 4)) == (2, 0, 1)
    assert cache.find((1, 2, 8)) == (3, 0, 1)


def test_another_version_takes_the_place_of_the_former(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3, 4), slot=0, slot_ver=1)

    cache.insert((1, 2), slot=0, slot_ver=2)

    assert cache.find((1, 2, 3, 4)) == (2, 0, 2)
    assert cache.num_nodes == 2


def test_a_shorter_insert_leaves_what_lies_beyond(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)

    assert cache.insert((1, 2), slot=0, slot_ver=1) == 2

    assert cache.find((1, 2, 3)) == (3, 0, 1)


def test_an_insert_of_nothing_records_nothing(cache: PrefixCacheManager) -> None:
    assert cache.insert((), slot=0, slot_ver=1) == 0
    assert cache.num_rows == 0


def test_slots_that_do_not_exist_are_refused(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)

    for slot in (-1, 4):
        with pytest.raises(SlotError):
            cache.insert((1,), slot, 0)
        with pytest.raises(SlotError):
            cache.invalidate(slot, 0)
        with pytest.raises(SlotError):
            cache.forget(slot)
    with pytest.raises(SlotError, match="negative"):
        make().insert((1,), -1, 0)
    with pytest.raises(SlotError, match="negative"):
        cache.invalidate(0, -1)


# ---------------------------------------------------------------- capacity and eviction


@pytest.mark.parametrize("max_capacity", [0, -1])
def test_a_cache_has_room_for_a_node_at_least(max_capacity: int) -> None:
    with pytest.raises(ValueError, match="max_capacity"):
        PrefixCacheManager(max_capacity)


def test_capacity_counts_each_token_of_a_path_once(make: Make) -> None:
    cache = make(max_capacity=5)

    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((1, 2, 4, 5), slot=1, slot_ver=1)
    assert cache.num_nodes == 5
    assert cache.find((1, 2, 3))[0] == 3

    cache.insert((1, 2, 3, 6), slot=0, slot_ver=1)
    assert cache.num_nodes == 5
    assert cache.find((1, 2, 4, 5)) == (3, 1, 1)  # its last token made room


def test_the_least_recently_used_goes_first(make: Make) -> None:
    cache = make(max_capacity=3)
    for slot, token in enumerate((1, 2, 3)):
        cache.insert((token,), slot, 1)
    cache.find((1,))

    cache.insert((4,), 3, 1)

    assert [cache.peek((token,))[0] for token in (1, 2, 3, 4)] == [1, 0, 1, 1]


def test_leaves_go_before_what_they_hang_from(make: Make) -> None:
    cache = make()
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((1, 2, 4), slot=1, slot_ver=1)

    gone = []
    while cache.num_nodes:
        assert cache.evict(1) == 1
        gone.append((cache.recorded_len(0), cache.recorded_len(1)))
        cache.check_invariants()

    assert gone == [(2, 3), (2, 2), (1, 1), (0, 0)]
    assert cache.evict(1) == 0


def test_eviction_counts_what_has_really_gone(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)

    assert [cache.evict(n) for n in (0, -1, 2, 1000, 1)] == [0, 0, 2, 1, 0]


def test_of_what_is_too_long_the_leading_tokens_are_recorded(make: Make) -> None:
    cache = make(max_capacity=4)
    cache.insert((9, 9), slot=1, slot_ver=1)

    assert cache.insert((1, 2, 3, 4, 5, 6), slot=0, slot_ver=1) == 4

    assert cache.find((1, 2, 3, 4, 5, 6)) == (4, 0, 1)
    assert cache.find((9, 9)) == MISS


def test_eviction_ends_when_all_is_pinned_and_so_does_insert(make: Make) -> None:
    cache = make(max_capacity=4)
    cache.insert((1, 2), slot=0, slot_ver=1)
    cache.insert((3, 4), slot=1, slot_ver=1)
    cache.pin((1, 2))
    cache.pin((3, 4))

    assert cache.evict(1) == 0
    assert cache.evict_lru_slot() is None
    assert cache.insert((5,), slot=2, slot_ver=1) == 0
    assert cache.insert((3, 4, 5), slot=3, slot_ver=1) == 2  # an existing record may be repeated
    assert cache.find((3, 4, 5)) == (2, 3, 1)


def test_insert_takes_no_reference(make: Make) -> None:
    cache = make(max_capacity=2)

    for turn in range(100):
        assert cache.insert((turn, turn + 1), slot=turn, slot_ver=1) == 2

    assert cache.num_pins == 0
    assert cache.num_rows == 1


# ---------------------------------------------------------------- pins


def test_a_pin_keeps_exactly_its_prefix(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3, 4), slot=0, slot_ver=1)
    cache.pin((1, 2))

    assert cache.evict(1000) == 2
    assert cache.find((1, 2, 3, 4)) == (2, 0, 1)


def test_pins_are_counted(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2), slot=0, slot_ver=1)
    cache.pin((1, 2))
    cache.pin((1, 2))

    cache.release((1, 2))
    assert cache.evict(2) == 0

    cache.release((1, 2))
    assert cache.find((1, 2)) == (2, 0, 1)  # at zero references it stays recorded
    assert cache.evict(2) == 2


@pytest.mark.parametrize("tokens", [(), (2,), (1, 2, 3, 4), (1, 9)])
def test_a_pin_of_what_is_not_there_is_refused(cache: PrefixCacheManager, tokens: tuple[int, ...]) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    before = cache.pretty_format()

    with pytest.raises(StaleNodeError):
        cache.pin(tokens)

    assert cache.pretty_format() == before


@pytest.mark.parametrize("tokens", [(), (1,), (2,), (1, 2, 3), (1, 2, 3, 4)])
def test_a_release_of_what_is_not_pinned_is_refused(cache: PrefixCacheManager, tokens: tuple[int, ...]) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.pin((1, 2))
    before = cache.pretty_format()

    with pytest.raises(LockError):
        cache.release(tokens)

    assert cache.pretty_format() == before


def test_a_pin_keeps_no_kv_that_was_overwritten_and_can_be_released_all_the_same(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.pin((1, 2, 3))

    cache.invalidate(0, 1)
    assert cache.find((1, 2, 3)) == (1, 0, 1)
    with pytest.raises(StaleNodeError):
        cache.pin((1, 2, 3))

    cache.release((1, 2, 3))
    assert cache.num_nodes == 1


def test_a_reset_forgets_pins_too(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2), slot=0, slot_ver=1)
    cache.pin((1, 2))

    cache.reset()

    assert (cache.num_nodes, cache.num_rows, cache.num_pins) == (0, 0, 0)
    with pytest.raises(LockError):
        cache.release((1, 2))


# ---------------------------------------------------------------- copies


def kv_of(slots: int, positions: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of different head sizes, each number once."""
    k = torch.arange(slots * positions * layers * 2 * 3.0).reshape(slots, positions, layers, 2, 3)
    v = -torch.arange(slots * positions * layers * 2 * 5.0).reshape(slots, positions, layers, 2, 5)
    return k, v


def test_exactly_the_rows_of_the_prefix_are_copied_in_each_layer(cache: PrefixCacheManager) -> None:
    k, v = kv_of(slots=3, positions=6, layers=4)
    k_before, v_before = k.clone(), v.clone()
    cache.insert((1, 2, 3, 4), slot=0, slot_ver=1)

    assert cache.copy_kv((1, 2, 3), 2, (k, v), n_layers=3) == 3

    for after, before in ((k, k_before), (v, v_before)):
        before[2, :3, :3] = before[0, :3, :3]
        assert torch.equal(after, before)


def test_numpy_arrays_are_copied_as_well(cache: PrefixCacheManager) -> None:
    k, v = (np.arange(2 * 3 * 1).reshape(2, 3, 1) for _ in range(2))
    cache.insert((1, 2), slot=1, slot_ver=1)

    cache.copy_kv((1, 2), 0, (k, v), n_layers=1)

    assert k[:, :, 0].tolist() == [[3, 4, 2], [3, 4, 5]]


def test_a_stale_prefix_is_not_copied(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)
    k, v = kv_of(slots=4, positions=4, layers=2)
    before = k.clone()
    cache.insert((1, 2, 3), slots.alloc(), 1)
    slots.alloc()
    cache.invalidate(0, 2)

    with pytest.raises(StaleNodeError):
        cache.copy_kv((1, 2, 3), 1, (k, v), 2)
    slots.free(0)
    slots.alloc()
    with pytest.raises(StaleNodeError):
        cache.copy_kv((1, 2), 1, (k, v), 2)

    assert torch.equal(k, before)


def test_a_copy_drops_what_it_overwrites_and_keeps_what_it_repeats(cache: PrefixCacheManager) -> None:
    kv = kv_of(slots=3, positions=6, layers=1)
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((1, 8, 9), slot=1, slot_ver=1)
    cache.insert((1, 2, 3, 4), slot=2, slot_ver=1)

    cache.copy_kv((1, 2, 3), 1, kv, 1)
    cache.copy_kv((1, 2, 3), 2, kv, 1)

    assert [cache.recorded_len(slot) for slot in (0, 1, 2)] == [3, 1, 4]


@pytest.mark.parametrize(
    ("target", "shape", "n_layers"),
    [(-1, (3, 6, 2), 2), (3, (3, 6, 2), 2), (1, (3, 2, 2), 2), (1, (3, 6, 2), 3), (1, (3, 6, 2), -1)],
)
def test_a_copy_that_does_not_fit_is_refused_whole(
    cache: PrefixCacheManager, target: int, shape: tuple[int, ...], n_layers: int
) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((9,), slot=1, slot_ver=1)
    k, v = torch.rand(3, 6, 3), torch.rand(shape)
    before, tree = k.clone(), cache.pretty_format()

    with pytest.raises(SlotError):
        cache.copy_kv((1, 2, 3), target, (k, v), n_layers)

    assert torch.equal(k, before)
    assert cache.pretty_format() == tree


# ---------------------------------------------------------------- what a service needs


def test_a_conversation_goes_on_in_its_row_and_another_takes_a_copy(make: Make, slots: SlotAllocator) -> None:
    cache = make(max_capacity=100, allocator=slots)
    kv = kv_of(slots=4, positions=8, layers=2)
    slot = slots.alloc()
    cache.insert((1, 2, 3, 4), slot, slots.version(slot))
    slots.free(slot)

    n, found, _ = cache.find((1, 2, 3, 9))  # a free row: reused in place
    slots.occupy(found)
    cache.invalidate(found, n)
    assert cache.find((1, 2, 3, 4)) == (3, 0, 1)

    n, found, _ = cache.find((1, 2, 7))  # someone's row: copied
    assert not slots.is_free(found)
    empty = slots.alloc()
    assert cache.copy_kv((1, 2, 7)[:n], empty, kv, 2) == 2
    cache.insert((1, 2, 7), empty, slots.version(empty))

    assert (empty, cache.find((1, 2, 7))) == (1, (3, 1, 1))


def test_the_released_row_used_longest_ago_is_given_up_first(make: Make, slots: SlotAllocator) -> None:
    cache = make(allocator=slots)
    for token in (1, 2, 3, 4):
        slot = slots.alloc()
        cache.insert((token, 9), slot, 1)
    assert cache.evict_lru_slot() is None  # all are taken

    for slot in (3, 1, 0):
        slots.free(slot)
    cache.find((1,))

    assert [cache.evict_lru_slot() for _ in range(4)] == [1, 3, 0, None]
    assert [cache.slot_is_findable(slot) for slot in range(4)] == [False, False, True, False]

    slots.free(2)
    assert cache.evict_lru_slot() == 2


def test_a_row_with_a_pin_is_not_given_up_until_it_is_released(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((4,), slot=1, slot_ver=1)
    cache.pin((1, 2))

    assert [cache.evict_lru_slot(), cache.evict_lru_slot()] == [1, None]

    cache.release((1, 2))
    assert cache.evict_lru_slot() == 0


def test_what_is_given_up_of_a_shared_prefix_stays_with_the_others(cache: PrefixCacheManager) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((1, 2, 4), slot=1, slot_ver=1)

    assert cache.evict_lru_slot() == 0

    assert cache.find((1, 2, 3)) == (2, 1, 1)
    assert cache.num_nodes == 3


def test_the_tokens_of_a_row_can_be_read_back(cache: PrefixCacheManager) -> None:
    cache.insert(RadixKey([1, 2, 3], "a"), slot=0, slot_ver=1)
    cache.insert(RadixKey([1, 2, 2**40], "a"), slot=1, slot_ver=1)

    assert cache.recorded_key(0) == RadixKey([1, 2, 3], "a")
    assert cache.recorded_key(1) == RadixKey([1, 2, 2**40], "a")
    assert cache.recorded_key(2) is None
    assert cache.recorded_len(2) == 0


def test_the_tree_can_be_read_at_a_glance(cache: PrefixCacheManager, capsys: pytest.CaptureFixture[str]) -> None:
    cache.insert((1, 2, 3), slot=0, slot_ver=1)
    cache.insert((1, 2, 4), slot=1, slot_ver=1)
    cache.insert(RadixKey(range(100, 120), "a"), slot=2, slot_ver=1)
    cache.pin((1, 2, 4))

    cache.pretty_print()

    assert capsys.readouterr().out.splitlines() == [
        "namespace None",
        "  [1 2] len=2 rows=[0 1] pinned x1 age=1",
        "    [3] len=1 rows=[0] age=2",
        "    [4] len=1 rows=[1] pinned x1 age=1",
        "namespace 'a'",
        "  [100 101 102 103 104 105 106 107 ...] len=20 rows=[2] age=0",
    ]


def test_the_errors_are_the_core_s_own() -> None:
    for error in (SlotError, StaleNodeError, LockError, InvalidKeyError):
        assert issubclass(error, CoreError)


# ---------------------------------------------------------------- cost


def test_a_chain_of_10000_nodes_works_everywhere(make: Make) -> None:
    cache = make(max_capacity=20_000)
    chain = tuple(range(10_000))
    cache.insert(chain, slot=0, slot_ver=1)
    for length in range(9_999, 0, -1):  # each find cuts one token off the first run
        cache.find(chain[:length])
    assert len(cache.pretty_format().splitlines()) == 10_001

    cache.pin(chain)
    cache.insert((*chain, 1), slot=1, slot_ver=1)
    assert cache.evict(20_000) == 1
    cache.release(chain)
    cache.invalidate(1, 5_000)
    assert cache.find(chain) == (10_000, 0, 1)
    cache.check_invariants()
    assert cache.evict_lru_slot() == 1
    assert cache.evict(20_000) == 10_000
    assert cache.num_rows == 0


def queue_steps(monkeypatch: pytest.MonkeyPatch, num_rows: int, evict: Callable[[PrefixCacheManager], object]) -> float:
    """Items popped from the queues for each of 200 evictions among so many rows, a third of which were used again."""
    cache = PrefixCacheManager(max_capacity=10**7)
    for slot in range(num_rows):
        cache.insert((slot, 1, 2), slot, 1)
    for slot in range(0, num_rows, 3):
        cache.find((slot, 1, 2))
    popped = 0
    take_first = RecencyQueue._take_first

    def counted(queue: RecencyQueue[Any]) -> Any:
        nonlocal popped
        popped += 1
        return take_first(queue)

    monkeypatch.setattr(RecencyQueue, "_take_first", counted)
    for _ in range(200):
        evict(cache)
    monkeypatch.undo()
    return popped / 200


@pytest.mark.parametrize("evict", [lambda cache: cache.evict(3), lambda cache: cache.evict_lru_slot()])
def test_a_victim_costs_no_more_steps_among_many(
    monkeypatch: pytest.MonkeyPatch, evict: Callable[[PrefixCacheManager], object]
) -> None:
    assert queue_steps(monkeypatch, 10_000, evict) <= 1.1 * queue_steps(monkeypatch, 300, evict) <= 3


def test_queues_do_not_outgrow_what_they_queue(make: Make) -> None:
    cache = make(max_capacity=10_000)

    for turn in range(5_000):
        cache.insert((turn, 1, 2), slot=turn % 10, slot_ver=turn)
        cache.find((turn, 1))

    assert cache.num_rows == 10
    assert cache._leaves.num_entries <= 50
    assert cache._released.num_entries <= 50
