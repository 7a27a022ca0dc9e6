"""Proof that random traffic finds faults: each rule of a disk tier's records is broken once, and found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.traffic.disk import DiskShape, DiskTraffic
from support.traffic.radix import TrafficFailed

from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.tiers.disk_spaces import DiskSpaces
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.row_runs import RowRuns
from raydix.cache_core.tiers.tree_builder import TreeBuilder

SHAPES = [DiskShape(2, num_pages=12), DiskShape(2, window=3), DiskShape(1, num_states=12)]
SEEDS = range(10)
NUM_OPERATIONS = 400

FAULTS = Catalogue()
fault = FAULTS.register


@fault
def a_record_with_a_row_is_used_again_before_the_row_is_deleted(patch: Patch) -> None:
    around(patch, RecordKeeper, "keep", lambda keep, self, starts: starts)


@fault
def a_record_is_free_when_the_deletion_of_its_row_begins(patch: Patch) -> None:
    rows_deleted = RecordKeeper.rows_deleted

    def take_leaving(original: Any, self: RecordKeeper) -> Any:
        numbers = original(self)
        rows_deleted(self, numbers)
        return numbers

    around(patch, RecordKeeper, "take_leaving", take_leaving)
    around(patch, RecordKeeper, "rows_deleted", lambda original, self, numbers: None)
    around(patch, RecordKeeper, "rows_not_deleted", lambda original, self, numbers: None)


@fault
def rows_that_could_not_be_deleted_are_forgotten(patch: Patch) -> None:
    around(patch, RecordKeeper, "rows_not_deleted", lambda original, self, numbers: None)


@fault
def rows_are_not_noted(patch: Patch) -> None:
    around(patch, RecordKeeper, "add_rows", lambda original, self, numbers: None)


@fault
def slots_are_handed_out_before_all_rows_are_read(patch: Patch) -> None:
    def add_dormant(original: Any, self: RecordKeeper, numbers: Any) -> Any:
        named = original(self, numbers[: len(numbers) // 2])
        self.end_reading()
        return np.ones(len(numbers), np.bool_) if len(named) else original(self, numbers)

    around(patch, RecordKeeper, "add_dormant", add_dormant)


@fault
def a_claimed_record_has_no_row(patch: Patch) -> None:
    def claim(original: Any, self: RecordKeeper, numbers: Any) -> Any:
        is_claimed = original(self, numbers)
        self.rows_refused(numbers)
        return is_claimed

    around(patch, RecordKeeper, "claim", claim)


@fault
def the_digest_of_a_page_is_not_checked(patch: Patch) -> None:
    around(
        patch, RowRuns, "_is_right", lambda original, self, row: (row.parent or b"") in self._tips or row.kind != "full"
    )


@fault
def a_run_goes_on_behind_a_branch(patch: Patch) -> None:
    def end_level(original: Any, self: RowRuns) -> Any:
        runs = original(self)
        tips = {digest: self._tips[digest] for digest in self._tips}
        for tip in tips.values():
            if tip.above is not None and tip.above.pages and len(tip.pages) == 1:
                tip.above.pages.append(tip.pages[0])
        return runs

    around(patch, RowRuns, "_end_level", end_level)


@fault
def hashes_are_those_of_other_pages(patch: Patch) -> None:
    def keep_hashes(original: Any, self: TreeBuilder, run: Any, node: Any) -> None:
        original(self, run, node)
        if node.hash_values is not None:
            node.hash_values = node.hash_values[::-1]

    around(patch, TreeBuilder, "_keep_hashes", keep_hashes)


@fault
def spaces_of_other_models_are_built(patch: Patch) -> None:
    def bind(original: Any, self: DiskSpaces, namespace: Any, models: Any) -> Any:
        spaces = [space for space in self if space.namespace == namespace]
        return original(self, namespace, spaces[-1].models if spaces else models)

    around(patch, DiskSpaces, "bind", bind)


@fault
def only_the_current_space_is_retired(patch: Patch) -> None:
    def retire(original: Any, self: DiskSpaces, is_meant: Any) -> Any:
        spared = [space for space in self if self.current(space.namespace) is not space]
        numbers = original(self, is_meant)
        for space in spared:
            if space.number in numbers:
                self.add(space.number, space.namespace, space.models)
        return numbers

    around(patch, DiskSpaces, "retire", retire)


@fault
def records_of_deleted_spaces_stay_dormant(patch: Patch) -> None:
    around(patch, DiskSpaces, "deleted", lambda original, self, numbers: None)


@fault
def the_rows_that_no_run_has_stay(patch: Patch) -> None:
    def give(original: Any, self: DiskSpaces, space: Any, runs: Any, left_out: Any, *, is_last: bool) -> None:
        original(self, space, runs, (), is_last=is_last)
        space.pop_all()

    around(patch, DiskSpaces, "give", give)


@fault
def records_leave_while_their_space_is_built(patch: Patch) -> None:
    def drop_dormant(original: Any, self: DiskSpaces, num_pages: int) -> Any:
        for space in self:
            if space.builder is not None:
                self._drop(space.pop_records(num_pages))
        return original(self, num_pages)

    around(patch, DiskSpaces, "drop_dormant", drop_dormant)


@fault
def a_write_without_room_evicts(patch: Patch) -> None:
    def check_pages(original: Any, self: Any, num_pages: int, *more: Any) -> None:
        if num_pages * self._page_size > self._allocator.available_size():
            self.evict(num_pages * self._page_size)
        original(self, num_pages, *more)

    around(patch, LeaseAllocator, "check_pages", check_pages)


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_a_planted_fault_is_found(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises((TrafficFailed, AssertionError)):
        for seed in SEEDS:
            for shape in SHAPES:
                DiskTraffic(seed, shape).run(NUM_OPERATIONS)
