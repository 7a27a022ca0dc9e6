"""Faults of moves between tiers, planted under the core alone and under a whole service; and faults of a disk tier."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
from support.faults.faults import Catalogue, Patch, around

from raydix.actors.sessions.model_bindings import ModelBindings
from raydix.actors.tiers.disk import disk_store
from raydix.actors.tiers.disk.disk_errors import DiskError
from raydix.actors.tiers.disk.disk_index import DiskIndex
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter, Write, _Steps
from raydix.actors.tiers.disk.disk_writes import DiskWrites
from raydix.actors.tiers.disk.space_bindings import SpaceBindings
from raydix.actors.tiers.disk.space_deletions import SpaceDeletions
from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.lease_table import TIERS
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.tiers.disk_spaces import DiskSpaces
from raydix.cache_core.tiers.loads import Loads
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.tier import Source, Tier
from raydix.cache_core.tiers.use_counter import UseCounter
from raydix.cache_core.tiers.writes import Writes

FAULTS_OF_MOVES = Catalogue()
fault = FAULTS_OF_MOVES.register


@fault
def pages_are_published_before_their_copy_has_ended(patch: Patch) -> None:
    for moves in (Loads, Writes):
        around(patch, moves, "complete", lambda complete, self, move, num, is_whole=None: complete(self, move, 10**6))


@fault
def slots_are_freed_under_the_copy(patch: Patch) -> None:
    def abandon(original: Any, self: LeasedCache, lease_id: str, session_id: str) -> bool:
        leases = self.leases.filling_for(session_id)
        found: bool = original(self, lease_id, session_id)
        for lease in leases:
            if lease.lease_id == lease_id:
                self._free_private(lease)
        return found

    around(patch, LeasedCache, "_abandon", abandon)


@fault
def the_lock_at_the_source_is_forgotten(patch: Patch) -> None:
    def lock_node(original: Any, self: KVCache, node: Any, path: Any) -> Any:
        lease = original(self, node, path)
        self.tree.dec_lock_ref(node, lease.receipt)
        return lease

    around(patch, KVCache, "lock_node", lock_node)


@fault
def the_lower_tier_is_not_retired(patch: Patch) -> None:
    def init(original: Any, self: Writes, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.upper.cache.below = None

    around(patch, Writes, "__init__", init)


@fault
def a_lease_is_handed_out_after_a_retirement_in_the_middle_of_its_load(patch: Patch) -> None:
    def complete(original: Any, self: Any, move: Any, num_pages: int, is_whole: bool | None = None) -> Any:
        move.source.retired = move.target.retired = False
        return original(self, move, num_pages, is_whole)

    for moves in (Loads, Writes):
        around(patch, moves, "complete", complete)


@fault
def a_loaded_token_is_counted_twice(patch: Patch) -> None:
    def hand_out(original: Any, self: KVCache, lease: Any, prefix_len: int) -> None:
        self.counters.tokens_reused += prefix_len - lease.prefix_len
        original(self, lease, prefix_len)

    around(patch, KVCache, "hand_out", hand_out)


@fault
def a_source_is_that_of_an_earlier_look_up(patch: Patch) -> None:
    kept: dict[Any, Source] = {}

    def lock(original: Any, self: Tier, key: Any, limit: int) -> Source:
        source: Source = original(self, key, limit)
        before = kept.setdefault((self, key.extra_key, key[: source.stop].data), source)
        return source._replace(starts=before.starts, windows=before.windows, state=before.state)

    around(patch, Tier, "lock", lock)


# ---------------------------------------------------------------- the disk

FAULTS_OF_DISK = Catalogue()
disk_fault, late_disk_fault = FAULTS_OF_DISK.register, FAULTS_OF_DISK.register_late


@disk_fault
def pages_are_released_before_they_are_copied(patch: Patch) -> None:
    def write(original: Any, self: DiskWriter, records: Any, gathered: Any, done: Any, source: Any = None) -> Any:
        write = original(self, records, lambda: None, done, source)
        asyncio.get_running_loop().call_soon(gathered)
        return write

    around(patch, DiskWriter, "write", write)


@late_disk_fault
def pages_are_summed_after_their_release(patch: Patch) -> None:
    def write_one(original: Any, self: _Steps, item: Any) -> None:
        if isinstance(item, Write):
            kept = item.buffer.copy()  # type: ignore[union-attr]
            item.rows.clear()
            self._gather(item)  # the sums of the pages as they are now
            item.buffer[:] = kept  # type: ignore[index]
        original(self, item)

    around(patch, _Steps, "write_one", write_one)


@disk_fault
def rows_are_committed_before_their_records_are_written(patch: Patch) -> None:
    def write(original: Any, self: _Steps, store: DiskStore, write: Write) -> Any:
        with suppress(DiskError):
            store.index.commit(write.rows)
        return original(self, store, write)

    around(patch, _Steps, "_write", write)


@disk_fault
def pages_can_be_matched_before_their_rows_are_committed(patch: Patch) -> None:
    def write(original: Any, self: DiskWriter, records: Any, gathered: Any, done: Any, source: Any = None) -> Any:
        def copied() -> None:
            gathered()
            done(Ended(result=[row for part in records.values() for row in part.rows]))

        return original(self, records, copied, lambda written: None, source)

    around(patch, DiskWriter, "write", write)


@late_disk_fault
def a_record_is_used_again_before_its_row_is_deleted(patch: Patch) -> None:
    def take_leaving(original: Any, self: RecordKeeper) -> Any:
        numbers = original(self)
        rows_deleted(self, numbers)
        return numbers

    rows_deleted = RecordKeeper.rows_deleted
    around(patch, RecordKeeper, "take_leaving", take_leaving)
    around(patch, RecordKeeper, "rows_deleted", lambda original, self, numbers: None)
    around(patch, RecordKeeper, "rows_not_deleted", lambda original, self, numbers: None)


@late_disk_fault
def all_rows_of_a_write_count_as_refused_if_some_are(patch: Patch) -> None:
    def end(original: Any, self: DiskWrites, batch: Any, written: Ended) -> None:
        if len(written.result) < sum(map(len, batch.numbers.values())):
            written = Ended(error=DiskError("some rows were refused"), result=[])
        original(self, batch, written)

    around(patch, DiskWrites, "_end", end)


@disk_fault
def a_retirement_does_not_reach_the_disk(patch: Patch) -> None:
    around(patch, DiskIndex, "delete_spaces", lambda original, self, numbers: None)


@late_disk_fault
def a_retirement_is_answered_before_it_is_committed(patch: Patch) -> None:
    around(patch, SpaceDeletions, "future", lambda original, self: None)


@late_disk_fault
def a_retirement_that_failed_is_forgotten(patch: Patch) -> None:
    around(patch, SpaceDeletions, "_end", lambda original, self, numbers, done: original(self, numbers, Ended()))


@disk_fault
def damaged_records_are_loaded(patch: Patch) -> None:
    def are_right(records: Any, *others: Any) -> Any:
        return np.ones(len(records), np.bool_)

    patch.setattr(disk_store, "are_right", are_right)


@disk_fault
def a_damaged_record_is_not_dropped(patch: Patch) -> None:
    around(patch, KVCache, "drop_page", lambda original, self, key, first: 0)


@late_disk_fault
def spaces_of_other_models_are_built(patch: Patch) -> None:
    def bind(original: Any, self: SpaceBindings, lora_id: str | None = None) -> None:
        self._to_look.extend(self._spaces._dormant.values())
        self._on_change()

    around(patch, SpaceBindings, "bind", bind)
    around(patch, SpaceBindings, "_has_models", lambda original, self, space: True)
    around(patch, SpaceBindings, "check_invariants", lambda original, self: None)


@late_disk_fault
def sessions_that_are_not_bound_publish(patch: Patch) -> None:
    around(patch, ModelBindings, "may_publish", lambda original, self, session_id, extra_key: True)


@late_disk_fault
def a_first_bind_retires_nothing(patch: Patch) -> None:
    around(patch, ModelBindings, "_retire_strangers", lambda original, self, lora_id: None)


@late_disk_fault
def of_equal_spaces_the_oldest_is_built(patch: Patch) -> None:
    def bind(original: Any, self: DiskSpaces, namespace: Any, models: Any) -> Any:
        spaces = self._of_namespace.get(namespace, ())
        self._of_namespace[namespace] = tuple(reversed(spaces))
        try:
            return original(self, namespace, models)
        finally:
            if spaces:
                self._of_namespace[namespace] = spaces

    around(patch, DiskSpaces, "bind", bind)


@late_disk_fault
def a_use_counts_twice_for_its_request(patch: Patch) -> None:
    def ended(original: Any, self: UseCounter, lease: Any) -> None:
        if lease.session_id != TIERS:
            self._count(lease, 0, lease.num_published_pages)
        original(self, lease)

    around(patch, UseCounter, "ended", ended)


@late_disk_fault
def two_tiers_load_one_page(patch: Patch) -> None:
    patch.setattr(Loads, "others", property(lambda self: (), lambda self, others: None), raising=False)


@late_disk_fault
def those_that_wait_for_a_load_of_the_disk_are_not_told_of_its_end(patch: Patch) -> None:
    def wait_for(original: Any, self: TierLoads, load: Any, resume: Any) -> None:
        if self.name != "disk":
            original(self, load, resume)

    around(patch, TierLoads, "wait_for", wait_for)


@late_disk_fault
def a_write_that_was_cancelled_is_forgotten(patch: Patch) -> None:
    def end(original: Any, self: DiskWrites, batch: Any, written: Ended) -> None:
        if not written.result:
            batch.due.clear()
        original(self, batch, written)

    around(patch, DiskWrites, "_end", end)


@late_disk_fault
def a_late_load_keeps_the_lease_of_its_request(patch: Patch) -> None:
    patch.setattr(Loads, "abandon", lambda self, move: None)
