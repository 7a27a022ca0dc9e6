"""Proof that random traffic finds faults: each rule of a cache of rows is broken once, and it must be seen."""

from __future__ import annotations

from typing import Any

import pytest
from support.checked.row_cache import NUM_LAYERS
from support.faults.faults import Catalogue, Fault, Patch, around
from support.traffic.rows import RowTrafficFailed, run_row_traffic

from raydix.cache_core import OutOfSlotsError, PrefixCacheManager, RadixKey, RowCache, SlotAllocator
from raydix.cache_core.leases.lease_table import LeaseRecord, LeaseTable, Quarantine
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.rows.row_cache import RowLease
from raydix.cache_core.rows.slot_allocator import SlotMask

RUNS = [(0, 2), (1, 1), (2, 4)]  # seed, page size

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


# ---------------------------------------------------------------- which row


@fault
def a_leased_row_is_reused_in_place(patch: Patch) -> None:
    def take(original: Any, cache: RowCache, prefix: RadixKey) -> int:
        holders = cache._records.peek_slots(prefix)[1]
        return holders[0] if holders else original(cache, prefix)

    around(patch, RowCache, "_take", take)


@fault
def a_released_row_is_copied_instead_of_reused(patch: Patch) -> None:
    def take(original: Any, cache: RowCache, prefix: RadixKey) -> int:
        if not cache._empty.count or not len(prefix):
            return original(cache, prefix)
        row = cache._take_empty()
        cache._records.copy_kv(prefix, row, cache._kv_cache, NUM_LAYERS)
        cache._publish(row, prefix)
        return row

    around(patch, RowCache, "_take", take)


@fault
def the_row_that_holds_most_is_reused(patch: Patch) -> None:
    around(patch, PrefixCacheManager, "recorded_len", lambda original, records, row: -original(records, row))


@fault
def an_empty_row_is_not_preferred_to_a_cached_one(patch: Patch) -> None:
    def take_empty(original: Any, cache: RowCache) -> int:
        cache.evict(cache.max_seq_len)
        return original(cache)

    around(patch, RowCache, "_take_empty", take_empty)


@fault
def nothing_is_evicted_for_a_lease(patch: Patch) -> None:
    def take_empty(original: Any, cache: RowCache) -> int:
        if not cache._empty.count:
            raise OutOfSlotsError(cache.max_seq_len, 0, 0, cache.num_slots)
        return original(cache)

    around(patch, RowCache, "_take_empty", take_empty)


@fault
def half_of_the_prefix_alone_is_reused(patch: Patch) -> None:
    around(patch, RowCache, "_take", lambda original, cache, prefix: original(cache, prefix[: len(prefix) // 2]))


# ---------------------------------------------------------------- what is in it


@fault
def a_reused_row_keeps_what_went_on_otherwise(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "invalidate", lambda records, row, valid_len: None)


@fault
def a_reused_row_loses_its_prefix(patch: Patch) -> None:
    around(patch, PrefixCacheManager, "invalidate", lambda original, records, row, valid_len: original(records, row, 0))
    patch.setattr(
        RowCache,
        "_publish",
        lambda cache, row, key: cache._records.insert(key[:-1], row, cache._allocator.version(row)),
    )


@fault
def nothing_is_copied(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "copy_kv", lambda records, tokens, row, kv, layers: len(tokens))


@fault
def the_last_layer_is_not_copied(patch: Patch) -> None:
    def copy_kv(original: Any, records: Any, tokens: Any, row: int, kv: Any, layers: int) -> Any:
        return original(records, tokens, row, kv, layers - 1)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def keys_alone_are_copied(patch: Patch) -> None:
    def copy_kv(original: Any, records: Any, tokens: Any, row: int, kv: Any, layers: int) -> Any:
        return original(records, tokens, row, (kv[0], kv[1].clone()), layers)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def the_last_token_is_not_copied(patch: Patch) -> None:
    def copy_kv(original: Any, records: Any, tokens: Any, row: int, kv: Any, layers: int) -> Any:
        return original(records, tokens[: len(tokens) - 1], row, kv, layers)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def a_copy_cannot_be_found(patch: Patch) -> None:
    def take(original: Any, cache: RowCache, prefix: RadixKey) -> int:
        row = original(cache, prefix)
        if len(cache._records.peek_slots(prefix)[1]) > 1:
            cache._records.forget(row)
        return row

    around(patch, RowCache, "_take", take)


@fault
def a_hit_is_no_use(patch: Patch) -> None:
    def take(original: Any, cache: RowCache, prefix: RadixKey) -> int:
        before = {row: record.last_used for row, record in cache._records._rows.items()}
        row = original(cache, prefix)
        if row in before and row in cache._records._rows:
            cache._records._rows[row].last_used = before[row]
        return row

    around(patch, RowCache, "_take", take)


# ---------------------------------------------------------------- matches


@fault
def a_match_is_not_floored_to_pages(patch: Patch) -> None:
    patch.setattr(RowCache, "_whole_pages", lambda cache, num_tokens: num_tokens)


@fault
def max_prefix_len_is_ignored(patch: Patch) -> None:
    def open_lease(original: Any, cache: RowCache, lease_id: str, session: str, key: Any, num: Any, *limit: Any) -> Any:
        return original(cache, lease_id, session, key, num, None, limit[-1])

    around(patch, RowCache, "_open_lease", open_lease)


@fault
def namespaces_meet(patch: Patch) -> None:
    def peek(original: Any, records: Any, key: RadixKey) -> Any:
        return original(records, RadixKey.from_packed(key.data, key.width, None))

    around(patch, PrefixCacheManager, "peek", peek)


@fault
def a_probe_is_a_use(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "peek", PrefixCacheManager.find)


# ---------------------------------------------------------------- publishing


@fault
def what_is_published_may_still_be_written(patch: Patch) -> None:
    patch.setattr(RowCache, "holds_privately", RowCache.covers)


@fault
def the_rest_of_the_row_may_be_written(patch: Patch) -> None:
    def lie_in(cache: RowCache, lease: LeaseRecord, slots: Any, first: int) -> bool:
        positions = slots - lease.starts[0]
        return bool(((positions >= first) & (positions < cache.max_seq_len)).all())

    patch.setattr(RowCache, "_lie_in", lie_in)


@fault
def the_row_before_may_be_written(patch: Patch) -> None:
    def lie_in(cache: RowCache, lease: LeaseRecord, slots: Any, first: int) -> bool:
        positions = slots - lease.starts[0]
        return bool((positions < lease.num_slots).all() and not (first and (abs(positions) < first).any()))

    patch.setattr(RowCache, "_lie_in", lie_in)


@fault
def an_insert_publishes_nothing(patch: Patch) -> None:
    patch.setattr(RowCache, "_publish", lambda cache, row, key: None)


@fault
def an_insert_publishes_all_that_is_known(patch: Patch) -> None:
    def insert(original: Any, cache: RowCache, lease_id: str, session: str, num_tokens: int, suffix: Any) -> Any:
        lease = cache.leases.get(lease_id, session)
        known = min(len(lease.key), lease.num_slots)
        if num_tokens < known and not len(suffix):
            return original(cache, lease_id, session, known, suffix)
        return original(cache, lease_id, session, num_tokens, suffix)

    around(patch, RowCache, "insert", insert)


@fault
def an_insert_tells_of_its_own_row_alone(patch: Patch) -> None:
    def insert(original: Any, cache: RowCache, lease_id: str, session: str, num_tokens: int, suffix: Any) -> Any:
        before = cache.leases.get(lease_id, session).published_len
        done = original(cache, lease_id, session, num_tokens, suffix)
        done.prefix_len = before
        return done

    around(patch, RowCache, "insert", insert)


@fault
def an_insert_takes_other_tokens_than_the_leases(patch: Patch) -> None:
    def known_key(original: Any, lease: LeaseRecord, num_tokens: int, suffix: RadixKey) -> RadixKey:
        start, known = num_tokens - len(suffix), len(lease.key)
        if 0 <= start <= known and num_tokens <= lease.num_slots:
            return lease.key if num_tokens <= known else lease.key + suffix[known - start :]
        return original(lease, num_tokens, suffix)

    around(patch, LeaseRecord, "known_key", known_key)


@fault
def an_insert_forgets_the_tokens_it_was_told(patch: Patch) -> None:
    def insert(original: Any, cache: RowCache, lease_id: str, session: str, num_tokens: int, suffix: Any) -> Any:
        lease = cache.leases.get(lease_id, session)
        key = lease.key
        done = original(cache, lease_id, session, num_tokens, suffix)
        lease.key = key
        return done

    around(patch, RowCache, "insert", insert)


# ---------------------------------------------------------------- sizes of leases


@fault
def a_lease_may_be_longer_than_a_row(patch: Patch) -> None:
    patch.setattr(RowCache, "_check_fits", lambda cache, num_tokens: None)


@fault
def a_full_row_is_refused(patch: Patch) -> None:
    around(patch, RowCache, "_check_fits", lambda original, cache, num_tokens: original(cache, num_tokens + 1))


@fault
def extend_forgets_how_much_is_covered(patch: Patch) -> None:
    def extend(original: Any, cache: RowCache, lease_id: str, session: str, num_tokens: int) -> Any:
        lease = cache.leases.get(lease_id, session)
        covered = lease.num_slots
        added = original(cache, lease_id, session, num_tokens)
        lease.num_slots = max(covered, num_tokens)
        return added

    around(patch, RowCache, "extend", extend)


@fault
def a_lock_covers_the_whole_key(patch: Patch) -> None:
    def lock(original: Any, cache: RowCache, lease_id: str, session: str, key: RadixKey) -> Any:
        lease = original(cache, lease_id, session, key)
        lease.num_slots = min(len(key), cache.max_seq_len)
        return lease

    around(patch, RowCache, "lock", lock)


@fault
def a_repeated_acquire_takes_another_row(patch: Patch) -> None:
    def acquire(original: Any, cache: RowCache, lease_id: str, session: str, *args: Any) -> Any:
        if lease_id in cache.leases._leases:
            return original(cache, lease_id + "again", session, *args)
        return original(cache, lease_id, session, *args)

    around(patch, RowCache, "acquire", acquire)


# ---------------------------------------------------------------- release, evict, reset


@fault
def a_released_row_stays_taken(patch: Patch) -> None:
    patch.setattr(RowCache, "_free_private", lambda cache, lease: None)


@fault
def a_release_forgets_what_was_published(patch: Patch) -> None:
    def free(original: Any, cache: RowCache, lease: RowLease) -> None:
        cache._records.forget(lease.row)
        original(cache, lease)

    around(patch, RowCache, "_free_private", free)


@fault
def a_released_row_counts_as_free(patch: Patch) -> None:
    def free(cache: RowCache, lease: RowLease) -> None:
        cache._allocator.free(lease.row)
        cache._empty.add(lease.row)

    patch.setattr(RowCache, "_free_private", free)


@fault
def a_released_row_counts_as_cached_though_nothing_is_in_it(patch: Patch) -> None:
    patch.setattr(RowCache, "_free_private", lambda cache, lease: cache._allocator.free(lease.row))


@fault
def a_session_ends_all_but_its_last_lease(patch: Patch) -> None:
    around(patch, LeaseTable, "of_session", lambda original, table, session: original(table, session)[:-1])


@fault
def eviction_takes_the_row_used_last(patch: Patch) -> None:
    def evict(original: Any, cache: RowCache, num_slots: int, *cause: str) -> int:
        rows = cache._records._rows
        for row in rows.values():
            row.last_used = -row.last_used
        try:
            return original(cache, num_slots)
        finally:
            for row in rows.values():
                row.last_used = -row.last_used

    around(patch, RowCache, "evict", evict)


@fault
def eviction_goes_on_when_enough_is_free(patch: Patch) -> None:
    around(patch, RowCache, "evict", lambda original, cache, num_slots: original(cache, num_slots + 1))


@fault
def eviction_is_not_counted(patch: Patch) -> None:
    def evict(original: Any, cache: RowCache, num_slots: int, *cause: str) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowCache, "_empty_free", lambda cache, rows: None)
            return original(cache, num_slots)

    around(patch, RowCache, "evict", evict)


@fault
def a_row_that_is_empty_already_is_counted_again(patch: Patch) -> None:
    def add(original: Any, mask: SlotMask, slot: int) -> None:
        mask.count += slot in mask
        original(mask, slot)

    around(patch, SlotMask, "add", add)


@fault
def eviction_takes_leased_rows(patch: Patch) -> None:
    def evict(original: Any, cache: RowCache, num_slots: int, *cause: str) -> int:
        for row in [*cache._records._rows]:
            if num_slots and not SlotAllocator.is_free(cache._allocator, row):
                cache._records.forget(row)
        return original(cache, num_slots)

    around(patch, RowCache, "evict", evict)


@fault
def a_reset_leaves_everything_findable(patch: Patch) -> None:
    patch.setattr(RowCache, "_retire_all", lambda cache: None)


@fault
def a_reset_leaves_cached_rows_counted(patch: Patch) -> None:
    patch.setattr(RowCache, "_retire_all", lambda cache: cache._records.reset())


@fault
def leases_from_before_a_reset_publish(patch: Patch) -> None:
    def reset(original: Any, cache: RowCache) -> None:
        original(cache)
        for lease in cache.leases:
            lease.retired = False

    around(patch, RowCache, "reset", reset)


@late_fault
def what_is_in_quarantine_is_not_retired(patch: Patch) -> None:
    def unlike_leases(original: Any, cache: RowCache, *arguments: Any) -> Any:
        withheld, cache.quarantine = cache.quarantine, Quarantine()
        done = original(cache, *arguments)
        cache.quarantine = withheld
        return done

    around(patch, RowCache, "reset", unlike_leases)
    around(patch, RowCache, "retire", unlike_leases)


@fault
def sessions_are_not_told_apart(patch: Patch) -> None:
    def find(table: LeaseTable, lease_id: str, session: str) -> Any:
        return table._leases.get(lease_id)

    patch.setattr(LeaseTable, "find", find)


@fault
def a_release_can_be_repeated(patch: Patch) -> None:
    around(patch, LeasedCache, "release", lambda original, *args: original(*args) or True)


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_random_traffic_sees(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises(RowTrafficFailed):
        for seed, page_size in RUNS:
            run_row_traffic(seed, page_size, 1500)


def test_without_a_fault_the_same_runs_pass() -> None:
    for seed, page_size in RUNS:
        run_row_traffic(seed, page_size, 1500)
