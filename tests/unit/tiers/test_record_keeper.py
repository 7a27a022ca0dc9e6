"""A keeper takes over freed records with rows, and frees each when nothing on the disk names it any more."""

from __future__ import annotations

import numpy as np
import pytest

from raydix.cache_core import (
    KVCache,
    MambaPool,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    SlotError,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.tiers.record_keeper import RecordKeeper

PAGE = 4


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def opened(num_pages: int = 6) -> tuple[TokenToKVPoolAllocator, RecordKeeper]:
    """A pool of which all rows have been read: there are none."""
    pool = TokenToKVPoolAllocator(num_pages * PAGE, PAGE)
    keeper = RecordKeeper.of_pages(pool)
    keeper.end_reading()
    return pool, keeper


def test_nothing_is_free_before_all_rows_are_read() -> None:
    pool = TokenToKVPoolAllocator(6 * PAGE, PAGE)
    keeper = RecordKeeper.of_pages(pool)
    assert (keeper.num_unread, keeper.num_records, pool.available_size()) == (6, 6, 0)
    with pytest.raises(OutOfSlotsError):
        pool.alloc_pages(1)

    assert keeper.add_dormant(numbers(2, 5, 2, 7, 0, -1)).tolist() == [True, True, False, False, False, False]
    assert keeper.add_dormant(numbers(5)).tolist() == [False]
    keeper.end_reading()

    assert (keeper.num_unread, keeper.num_dormant, pool.available_size()) == (0, 2, 4 * PAGE)
    assert (pool.alloc_pages(4) // PAGE).tolist() == [1, 3, 4, 6]
    assert (keeper.kept_starts() // PAGE).tolist() == [2, 5]
    keeper.check_invariants()
    pool.check_invariants()


def test_a_dormant_record_is_claimed_or_dropped_once() -> None:
    pool = TokenToKVPoolAllocator(6 * PAGE, PAGE)
    keeper = RecordKeeper.of_pages(pool)
    keeper.add_dormant(numbers(1, 2, 3, 4))
    keeper.end_reading()

    assert (
        keeper.are_dormant(numbers(1, 2))
        and not keeper.are_dormant(numbers(1, 5))
        and not keeper.are_dormant(numbers(9))
    )
    assert keeper.claim(numbers(1, 1, 5)).tolist() == [True, False, False]
    keeper.drop(numbers(1, 2))
    keeper.free_dormant(numbers(1, 2, 3))
    assert (keeper.num_dormant, keeper.num_leaving, pool.available_size()) == (1, 1, 3 * PAGE)
    assert keeper.take_leaving().tolist() == [2]

    pool.free_pages(numbers(1) * PAGE)  # the cache frees the claimed record: it has a row
    assert keeper.take_leaving().tolist() == [1]


def test_a_record_with_a_row_leaves_and_one_without_is_free() -> None:
    pool, keeper = opened()
    starts = pool.alloc_pages(4)
    keeper.add_rows(starts[:2] // PAGE)

    pool.free_pages(starts)

    assert (keeper.num_leaving, pool.available_size()) == (2, 4 * PAGE)
    assert keeper.take_leaving().tolist() == [1, 2]
    assert not len(keeper.take_leaving()), "the writer has them"
    keeper.rows_not_deleted(numbers(2))
    assert keeper.take_leaving().tolist() == [2]
    keeper.rows_deleted(numbers(1, 2))
    assert (keeper.num_leaving, pool.available_size()) == (0, 6 * PAGE)
    pool.check_invariants()
    keeper.check_invariants()


def test_refused_rows_are_none() -> None:
    pool, keeper = opened()
    starts = pool.alloc_pages(2)
    keeper.add_rows(starts // PAGE)
    keeper.rows_refused(starts // PAGE)

    pool.free_pages(starts)
    assert (keeper.num_leaving, pool.available_size()) == (0, 6 * PAGE)


def test_a_record_is_not_freed_twice() -> None:
    pool, keeper = opened()
    starts = pool.alloc_pages(3)
    keeper.add_rows(starts // PAGE)
    with pytest.raises(SlotError, match="one is given twice"):
        pool.free_pages(np.concatenate((starts, starts)))
    pool.free_pages(starts[:1])

    with pytest.raises(SlotError, match="freed records must be the cache's: some are unread, dormant or leaving"):
        pool.free_pages(starts)
    with pytest.raises(SlotError, match="freed slots must be in"):
        pool.free_pages(numbers(99 * PAGE))
    with pytest.raises(AssertionError, match="a record has a row already"):
        keeper.add_rows(starts // PAGE)
    with pytest.raises(AssertionError, match="a record is not leaving"):
        keeper.rows_deleted(starts // PAGE)


def test_window_halves_and_states_have_keepers_of_their_own() -> None:
    pool = SWATokenToKVPoolAllocator(6 * PAGE, 4 * PAGE, PAGE)
    pages, halves = RecordKeeper.of_pages(pool), RecordKeeper.of_pages(pool.swa)
    pages.add_dormant(numbers(1, 2))
    halves.add_dormant(numbers(4))
    pages.end_reading()
    halves.end_reading()
    assert (pool.available_size(), pool.swa_available_size()) == (4 * PAGE, 3 * PAGE)

    pages.claim(numbers(1, 2))
    halves.claim(numbers(4))
    pool.give_swa(numbers(2) * PAGE, numbers(4) * PAGE)
    assert pool.swa_starts(numbers(1, 2) * PAGE).tolist() == [0, 4 * PAGE]
    pool.check_invariants()
    pool.free_swa_pages(numbers(2) * PAGE)
    assert (halves.num_leaving, pages.num_leaving, pool.swa_available_size()) == (1, 0, 3 * PAGE)
    pool.free_pages(numbers(1, 2) * PAGE)
    assert (pages.num_leaving, pool.available_size()) == (2, 4 * PAGE)
    pool.check_invariants()

    states = MambaPool(3)
    keeper = RecordKeeper.of_states(states)
    keeper.add_dormant(numbers(2))
    keeper.end_reading()
    assert states.free_slots() == [3, 1]
    keeper.claim(numbers(2))
    states.free_track_slot(2)
    assert (states.available_size(), states.kept_slots()) == (2, [2])
    keeper.rows_deleted(keeper.take_leaving())
    assert states.alloc_track_slot() == 2
    states.check_invariants()


def test_a_lease_gets_no_slots_by_an_eviction() -> None:
    pool, keeper = opened(4)
    cache = KVCache(RadixCache(PAGE, None, pool), pool)
    lease = cache.open_target(RadixKey(list(range(3 * PAGE))), 0)
    keeper.add_rows(lease.starts // PAGE)
    cache.publish_copy(lease, lease.key, 10**6)
    cache.end_quietly(lease)
    assert (cache.free_slots, cache.evictable_size()) == (PAGE, 3 * PAGE)

    with pytest.raises(OutOfSlotsError) as refused:
        cache.open_target(RadixKey([9] * 2 * PAGE), 0)
    assert (refused.value.free, refused.value.evictable) == (PAGE, 0)
    assert cache.evictable_size() == 3 * PAGE, "nothing was evicted in vain"

    cache.evict(2 * PAGE)
    assert cache.free_slots == PAGE and keeper.num_leaving >= 2
    cache.check_invariants()
    keeper.rows_deleted(keeper.take_leaving())
    cache.open_target(RadixKey([9] * 2 * PAGE), 0)
    cache.check_invariants()
