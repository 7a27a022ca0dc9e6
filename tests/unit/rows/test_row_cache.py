"""`RowCache`, verb by verb: the lease of each row after every step, and its findable prefix.

The default cache has three rows of 6 slots, in pages of 2. `count(cache)` is free, private and cached rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.invariant_fixtures import checked_after

from raydix.cache_core import LeaseRangeError, OutOfSlotsError, RadixKey, RowCache, UnknownLeaseError
from raydix.cache_core.leases.results import Published
from raydix.cache_core.rows.row_cache import RowLease

ROW = 6


@pytest.fixture
def make() -> Iterator[Callable[..., RowCache]]:
    def make_cache(num_rows: int = 3, page_size: int = 2, **options: Any) -> RowCache:
        return RowCache(num_rows * ROW, ROW, page_size, **options)

    yield from checked_after(make_cache)


@pytest.fixture
def cache(make: Callable[..., RowCache]) -> RowCache:
    return make()


def key(*ids: int, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def count(cache: RowCache) -> tuple[int, int, int]:
    cache.check_invariants()
    sizes = cache.free_slots, cache.private_slots, cache.total_size()
    assert sum(sizes) == cache.num_slots
    assert cache.protected_size() == 0
    free, private, cached = (slots // ROW for slots in sizes)
    return free, private, cached


def take(cache: RowCache, lease_id: str, *ids: int, ns: str | None = None, **options: Any) -> RowLease:
    lease = cache.acquire(lease_id, "s", key(*ids, ns=ns), **options)
    assert isinstance(lease, RowLease)
    return lease


def insert(cache: RowCache, lease_id: str, num_tokens: int, *suffix: int, ns: str | None = None) -> Published:
    return cache.insert(lease_id, "s", num_tokens, key(*suffix, ns=ns))


def publish(cache: RowCache, *ids: int, ns: str | None = None) -> int:
    """Have these tokens in a released row; returns it."""
    row = take(cache, "publisher", *ids, ns=ns).row
    insert(cache, "publisher", len(ids), ns=ns)
    cache.release("publisher", "s")
    return row


def held(cache: RowCache, lease_id: str, *ids: int) -> int:
    """Have these tokens in a leased row; returns it."""
    row = take(cache, lease_id, *ids).row
    insert(cache, lease_id, len(ids))
    return row


def found(cache: RowCache, *ids: int, ns: str | None = None) -> list[int]:
    return cache.match(key(*ids, ns=ns)).indices.tolist()


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("num_slots", "max_seq_len", "page_size"), [(0, 6, 2), (17, 6, 2), (18, 6, 4), (18, 0, 1), (6, 12, 2), (6, 6, 0)]
)
def test_a_pool_is_whole_rows_and_a_row_whole_pages(num_slots: int, max_seq_len: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="must be a multiple of"):
        RowCache(num_slots, max_seq_len, page_size)


def test_a_lease_is_one_whole_row_named_by_its_first_slot(cache: RowCache) -> None:
    first, second = take(cache, "a", 1, 2, 3, new_tokens=1), take(cache, "b", 4)

    assert (first.starts.tolist(), first.prefix_len, first.num_slots) == ([0], 0, 4)
    assert (second.starts.tolist(), second.num_slots) == ([6], 1)
    assert count(cache) == (1, 2, 0)


def test_a_released_row_is_cached_if_something_was_published_in_it_else_free(cache: RowCache) -> None:
    held(cache, "a", 1, 2)
    take(cache, "b", 3, 4)

    cache.release("a", "s")
    assert count(cache) == (1, 1, 1)
    cache.release("b", "s")

    assert count(cache) == (2, 0, 1)
    assert (cache.evictable_size(), cache.protected_size()) == (ROW, 0)


# ---------------------------------------------------------------- match


def test_a_probe_finds_whole_pages_in_one_row_and_holds_nothing(cache: RowCache) -> None:
    publish(cache, 9, 9)
    publish(cache, 1, 2, 3, 4, 5)

    result = cache.match(key(1, 2, 3, 4, 5))

    assert (result.prefix_len, result.full_prefix_len, result.indices.tolist()) == (4, 4, [6, 7, 8, 9])
    assert found(cache, 1, 2, 3) == [6, 7]
    assert found(cache, 2) == []
    assert cache.counters.probes == 3
    assert count(cache) == (1, 0, 2)


def test_a_probe_is_no_use(cache: RowCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4)

    cache.match(key(1, 2))
    cache.evict(1)

    assert (found(cache, 1, 2), found(cache, 3, 4)) == ([], [6, 7])


def test_namespaces_never_meet(cache: RowCache) -> None:
    publish(cache, 1, 2, ns="lora")

    assert found(cache, 1, 2) == found(cache, 1, 2, ns="") == []
    assert found(cache, 1, 2, ns="lora") == [0, 1]


# ---------------------------------------------------------------- in place


def test_a_row_that_nobody_owns_is_reused_in_place(cache: RowCache) -> None:
    row = publish(cache, 1, 2, 3, 4)

    lease = take(cache, "a", 1, 2, 3, 4, 5)

    assert (lease.row, lease.prefix_len, lease.published_len) == (row, 4, 4)
    assert count(cache) == (2, 1, 0)


def test_of_many_rows_with_a_prefix_those_recorded_last_are_looked_at(
    make: Callable[..., RowCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raydix.cache_core.rows.row_cache._MAX_LOOKED_AT", 2)
    cache = make(num_rows=4)
    assert [held(cache, name, 1, 2, 3, digit) for name, digit in (("a", 4), ("b", 5), ("c", 6))] == [0, 1, 2]
    cache.release("a", "s")

    lease = take(cache, "d", 1, 2, 3, 7)  # row 0 could be reused, but two are recorded later

    assert (lease.row, lease.prefix_len) == (3, 2)
    assert count(cache) == (0, 3, 1)
    cache.release("c", "s")
    assert take(cache, "e", 1, 2, 3, 8).row == 2


def test_what_went_on_otherwise_in_a_reused_row_is_forgotten(cache: RowCache) -> None:
    publish(cache, 1, 2, 3, 4)

    assert take(cache, "a", 1, 2, 8, 8).prefix_len == 2

    assert found(cache, 1, 2, 3, 4) == [0, 1]
    cache.release("a", "s")
    assert found(cache, 1, 2, 8, 8) == [0, 1]
    assert count(cache) == (2, 0, 1)


def test_a_row_matched_in_part_is_reused_only_up_to_the_page(cache: RowCache) -> None:
    row = publish(cache, 1, 2, 3, 4)

    lease = take(cache, "a", 1, 2, 3, 9)

    assert (lease.row, lease.prefix_len) == (row, 2)


def test_of_several_released_rows_the_one_that_holds_least_beyond_the_prefix_is_reused(cache: RowCache) -> None:
    take(cache, "a", 1, 2, 3, 4)
    take(cache, "b", 1, 2)
    take(cache, "c", 1, 2, 5, 6)
    for lease_id, num_tokens in (("a", 4), ("b", 2), ("c", 4)):
        insert(cache, lease_id, num_tokens)
        cache.release(lease_id, "s")

    assert take(cache, "d", 1, 2, 7).row == 1
    assert take(cache, "e", 1, 2, 7).row == 2  # of two alike the one recorded last

    assert found(cache, 1, 2, 3, 4) == [0, 1, 2, 3]


def test_a_row_with_a_shorter_prefix_is_not_reused_for_a_longer_one(cache: RowCache) -> None:
    held(cache, "a", 1, 2, 3, 4)
    take(cache, "b", 1, 2, 9, 9)
    cache.release("b", "s")

    lease = take(cache, "c", 1, 2, 3, 4)

    assert (lease.row, lease.prefix_len) == (2, 4)
    assert found(cache, 1, 2, 9) != []


@pytest.mark.parametrize(("limit", "prefix_len"), [(0, 0), (1, 0), (3, 2), (4, 4), (99, 4)])
def test_max_prefix_len_leaves_something_to_compute(cache: RowCache, limit: int, prefix_len: int) -> None:
    publish(cache, 1, 2, 3, 4)

    assert take(cache, "a", 1, 2, 3, 4, max_prefix_len=limit).prefix_len == prefix_len


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_the_prefix_of_a_leased_row_is_copied_into_an_empty_one(
    make: Callable[..., RowCache], dtype: torch.dtype
) -> None:
    k, v = (torch.randint(0, 99, (3, ROW, 2, dim), dtype=torch.uint8).view(torch.int8).to(dtype) for dim in (3, 2))
    cache = make(kv_cache=(k, v))
    held(cache, "a", 1, 2, 3, 4)
    before = k.clone(), v.clone()

    lease = take(cache, "b", 1, 2, 3, 4, 5)

    assert (lease.row, lease.prefix_len) == (1, 4)
    for now, then in zip((k, v), before, strict=True):
        now, then = now.view(torch.uint8), then.view(torch.uint8)
        assert now[1, :4].equal(then[0, :4])
        assert now[1, 4:].equal(then[1, 4:]), "more than the prefix was copied"
        assert now[0].equal(then[0])
        assert now[2].equal(then[2])


def test_a_copy_can_be_found_when_its_source_is_gone(cache: RowCache) -> None:
    held(cache, "a", 1, 2, 3, 4)
    take(cache, "b", 1, 2, 9)

    cache.release("a", "s")
    cache.evict(1)

    assert found(cache, 1, 2, 3, 4) == [6, 7]


def test_a_copy_goes_into_the_row_used_longest_ago_if_none_is_empty(cache: RowCache) -> None:
    publish(cache, 7, 7)
    held(cache, "b", 1, 2)
    publish(cache, 8, 8)
    assert count(cache) == (0, 1, 2)

    lease = take(cache, "c", 1, 2)

    assert (lease.row, lease.prefix_len) == (0, 2)
    assert (found(cache, 7, 7), found(cache, 8, 8)) == ([], [12, 13])
    assert cache.counters.tokens_evicted == ROW


def test_a_hit_makes_a_row_the_most_recently_used(cache: RowCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4)
    take(cache, "a", 1, 2)
    cache.release("a", "s")

    assert cache.evict(1) == ROW

    assert (found(cache, 1, 2), found(cache, 3, 4)) == ([0, 1], [])


def test_being_copied_makes_a_row_the_most_recently_used(cache: RowCache) -> None:
    held(cache, "a", 1, 2)
    publish(cache, 3, 4)
    take(cache, "b", 1, 2)
    cache.release("a", "s")

    assert cache.evict(1) == ROW

    assert count(cache) == (1, 1, 1)
    assert found(cache, 3, 4) == []


def test_without_tensors_nothing_is_copied_and_all_else_is_the_same(cache: RowCache) -> None:
    held(cache, "a", 1, 2)

    assert (take(cache, "b", 1, 2).row, found(cache, 1, 2)) == (1, [6, 7])


# ---------------------------------------------------------------- no room, too long


def test_a_miss_takes_an_empty_row_before_a_cached_one(cache: RowCache) -> None:
    publish(cache, 1, 2)

    assert [take(cache, lease_id, 9).row for lease_id in "abc"] == [1, 2, 0]
    assert count(cache) == (0, 3, 0)


def test_where_every_row_is_leased_there_is_no_room_and_nothing_changes(cache: RowCache) -> None:
    for number, lease_id in enumerate("abc"):
        held(cache, lease_id, number, number)

    for refused in (lambda: take(cache, "d", 0, 0), lambda: take(cache, "e", 9), lambda: cache.lock("f", "s", key(1))):
        with pytest.raises(OutOfSlotsError) as caught:
            refused()
        error = caught.value
        assert (error.needed, error.free, error.evictable, error.capacity) == (6, 0, 0, 18)
        assert error.can_ever_fit

    assert count(cache) == (0, 3, 0)
    assert len(cache.leases) == cache.counters.acquires == 3
    cache.release("b", "s")
    assert take(cache, "g", 9).row == 1


def test_what_does_not_fit_into_a_row_is_refused_before_anything_changes(cache: RowCache) -> None:
    publish(cache, 1, 2)

    for too_long in (
        lambda: take(cache, "a", *range(7)),
        lambda: take(cache, "a", 1, 2, new_tokens=5),
        lambda: take(cache, "a", 1, new_tokens=-1),
        lambda: cache.check_len(7, key(1)),
    ):
        with pytest.raises(LeaseRangeError):
            too_long()

    cache.check_len(6, key(1))
    assert count(cache) == (2, 0, 1)
    assert cache.counters.acquires == 1
    assert take(cache, "a", 1, 2, new_tokens=4).num_slots == 6


def test_the_same_lease_id_again_is_the_same_lease(cache: RowCache) -> None:
    lease = take(cache, "a", 1, 2)

    assert take(cache, "a", 9, 9, 9) is lease
    assert cache.lock("a", "s", key(1)) is lease
    with pytest.raises(UnknownLeaseError):
        cache.acquire("a", "another", key(1, 2))
    assert count(cache) == (2, 1, 0)


# ---------------------------------------------------------------- lock, extend


def test_a_lock_takes_the_row_of_the_prefix_and_covers_it_alone(cache: RowCache) -> None:
    row = publish(cache, 1, 2, 3, 4)

    lease = cache.lock("a", "s", key(1, 2, 9, 9))

    assert (lease.starts.tolist(), lease.prefix_len, lease.num_slots) == ([row * ROW], 2, 2)
    assert count(cache) == (2, 1, 0)


def test_a_lock_takes_a_row_even_if_nothing_is_cached(cache: RowCache) -> None:
    lease = cache.lock("a", "s", key(*range(99)))

    assert (lease.prefix_len, lease.num_slots, len(cache.extend("a", "s", 6))) == (0, 0, 0)
    assert lease.num_slots == 6
    assert count(cache) == (2, 1, 0)


def test_a_lease_grows_up_to_the_end_of_its_row(cache: RowCache) -> None:
    lease = take(cache, "a", 1, 2)

    assert len(cache.extend("a", "s", 4)) == 0
    assert lease.num_slots == 6
    for wrong in (1, -1):
        with pytest.raises(LeaseRangeError):
            cache.extend("a", "s", wrong)
    with pytest.raises(UnknownLeaseError):
        cache.extend("a", "another", 1)
    assert lease.num_slots == 6


# ---------------------------------------------------------------- insert


def test_an_insert_publishes_whole_pages_in_the_leases_row(cache: RowCache) -> None:
    lease = take(cache, "a", 1, 2, 3)

    done = insert(cache, "a", 3)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates, done.retired) == (0, 2, 0, False)
    assert len(done.repointed) == 0
    assert lease.published_len == 2
    assert found(cache, 1, 2, 3) == [0, 1]
    assert cache.counters.tokens_inserted == 2
    assert count(cache) == (2, 1, 0)


def test_generated_tokens_are_published_behind_the_prompt(cache: RowCache) -> None:
    take(cache, "a", 1, 2, 3, new_tokens=1)
    insert(cache, "a", 3)

    done = insert(cache, "a", 4, 4)

    assert (done.prefix_len, done.num_inserted) == (2, 2)
    assert found(cache, 1, 2, 3, 4) == [0, 1, 2, 3]


def test_what_was_published_is_not_published_again(cache: RowCache) -> None:
    take(cache, "a", 1, 2, 3, 4)
    insert(cache, "a", 4)

    assert insert(cache, "a", 4).num_inserted == insert(cache, "a", 2).num_inserted == 0

    assert found(cache, 1, 2, 3, 4) == [0, 1, 2, 3]


def test_two_rows_may_hold_the_same_and_an_insert_tells_what_could_be_found_before(cache: RowCache) -> None:
    take(cache, "a", 1, 2, 3, 4)
    take(cache, "b", 1, 2, 3, 4)
    insert(cache, "a", 4)

    done = insert(cache, "b", 4)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (4, 4, 0)
    assert count(cache) == (1, 2, 0)


def test_a_mistaken_insert_raises_and_publishes_nothing(cache: RowCache) -> None:
    lease = take(cache, "a", 1, 2, new_tokens=2)

    for num_tokens, suffix in ((5, [3, 4, 5]), (2, [1, 3]), (4, [4]), (1, [3, 4])):
        with pytest.raises(LeaseRangeError):
            insert(cache, "a", num_tokens, *suffix)
    with pytest.raises(LeaseRangeError, match="namespaces"):
        insert(cache, "a", 3, 3, ns="other")
    with pytest.raises(LeaseRangeError, match="states"):
        cache.insert("a", "s", 2, key(), publish_state=True)
    with pytest.raises(UnknownLeaseError):
        cache.insert("a", "another", 2, key())

    assert (found(cache, 1, 2), lease.published_len, len(lease.key)) == ([], 0, 2)


def test_a_lease_may_read_what_it_covers_and_write_what_it_has_not_published(cache: RowCache) -> None:
    take(cache, "before", 9)
    lease = take(cache, "a", 1, 2, 3, new_tokens=1)
    insert(cache, "a", 3)

    def every(test: Any) -> list[int]:
        return [slot for slot in range(-1, 19) if test(lease, np.array([slot]))]

    assert every(cache.covers) == [6, 7, 8, 9]
    assert every(cache.holds_privately) == [8, 9]
    assert cache.holds_privately(lease, np.array([9, 8, 8]))
    assert not cache.holds_privately(lease, np.array([9, 7]))
    assert not cache.covers(lease, np.array([6, 10]))
    assert cache.covers(lease, np.empty(0, np.int64))


# ---------------------------------------------------------------- release, evict, reset


def test_a_lease_ends_once_and_only_for_its_own_session(cache: RowCache) -> None:
    take(cache, "a", 1, 2)

    with pytest.raises(UnknownLeaseError):
        cache.release("a", "another")
    assert cache.release("a", "s")
    assert not cache.release("a", "s")
    assert count(cache) == (3, 0, 0)


def test_the_end_of_a_session_ends_its_leases_alone(cache: RowCache) -> None:
    held(cache, "a", 1, 2)
    take(cache, "b", 3)
    cache.acquire("c", "another", key(4))

    assert cache.end_session("s") == 2

    assert count(cache) == (1, 1, 1)


def test_evict_empties_whole_released_rows_the_least_recently_used_first(cache: RowCache) -> None:
    publish(cache, 1, 2)
    held(cache, "a", 3, 4)
    publish(cache, 5, 6)

    assert cache.evict(0) == 0
    assert cache.evict(1) == ROW
    assert (found(cache, 1, 2), found(cache, 3, 4), found(cache, 5, 6)) == ([], [6, 7], [12, 13])
    assert cache.evict(ROW + 1) == ROW
    assert cache.evict(1) == 0

    assert count(cache) == (2, 1, 0)
    assert cache.counters.tokens_evicted == 2 * ROW


def test_a_reset_forgets_everything_and_leaves_leases_their_rows(cache: RowCache) -> None:
    publish(cache, 1, 2)
    lease = take(cache, "a", 3, 4, new_tokens=2)
    insert(cache, "a", 2)

    cache.reset()

    assert (found(cache, 1, 2), found(cache, 3, 4)) == ([], [])
    assert count(cache) == (2, 1, 0)
    done = insert(cache, "a", 4, 5, 6)
    assert (done.num_inserted, done.retired) == (0, True)
    assert found(cache, 3, 4) == []
    assert not cache.holds_privately(lease, np.array([6]))
    cache.release("a", "s")
    assert count(cache) == (3, 0, 0)


def test_after_a_reset_the_same_tokens_are_published_anew(cache: RowCache) -> None:
    publish(cache, 1, 2)
    cache.reset()

    publish(cache, 1, 2)

    assert found(cache, 1, 2) == [0, 1]


def test_a_window_or_state_is_nothing_to_this_cache(cache: RowCache) -> None:
    lease = take(cache, "a", 1, 2)

    cache.release_window("a", "s", 2)
    with pytest.raises(LeaseRangeError):
        cache.release_window("a", "s", 3)

    assert (cache.swa_sizes(), cache.state_sizes(), cache.swa_slots(torch.tensor([0]))) == (None, None, None)
    assert len(cache.swa_starts(lease)) == 0
    assert list(cache.resident_pages()) == []


# ---------------------------------------------------------------- pressure, checks


def test_pressure_is_told_when_fewer_slots_than_the_floor_are_free(make: Callable[..., RowCache]) -> None:
    told: list[str] = []
    cache = make(pressure_floor=ROW + 1, on_pressure=lambda: told.append("now"))

    take(cache, "a", 1, 2)
    assert told == []
    take(cache, "b", 1, 2)
    assert told == ["now"]

    insert(cache, "a", 2)
    cache.release("a", "s")  # it can be evicted now
    assert told == ["now", "now"]
    cache.release("b", "s")
    assert told == ["now", "now"]


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (lambda cache: cache._allocator.free(0), "rule 3"),
        (lambda cache: cache._allocator.occupy(2), "rule 3"),
        (lambda cache: cache._records.forget(0), "rule 4"),
        (lambda cache: cache._records.insert(key(9, 9), 0, 1), "rule 4"),
        (lambda cache: cache._empty.add(1), "rule 5"),
        (lambda cache: cache._allocator._versions.__setitem__(1, 7), "rule 5"),
        (lambda cache: setattr(cache.leases.get("a", "s"), "row", 2), r"\[0\]"),
        (lambda cache: setattr(cache.leases.get("a", "s"), "published_len", 3), "rule 1"),
        (lambda cache: setattr(cache.leases.get("a", "s"), "num_slots", 1), "rule 1"),
        (lambda cache: setattr(cache.leases.get("a", "s"), "num_slots", 7), "rule 2"),
    ],
)
def test_a_broken_rule_is_seen(broken: Callable[[RowCache], object], rule: str) -> None:
    cache = RowCache(3 * ROW, ROW, 2)
    held(cache, "a", 1, 2)
    publish(cache, 3, 4)
    assert count(cache) == (1, 1, 1)

    broken(cache)

    with pytest.raises(AssertionError, match=rule):
        cache.check_invariants()
