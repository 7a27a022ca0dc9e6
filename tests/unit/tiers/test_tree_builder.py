"""Rows of a space become the nodes that they were; rows that are not right are left out, with all below them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.row_runs import RowRun, RowRuns
from raydix.cache_core.tiers.tree_builder import TreeBuilder
from raydix.cache_core.tree.hashing import hash_page, namespace_seed

PAGE = 2
NUM_PAGES = 60


class Disk:
    """A cache of a disk, and the rows of one space."""

    def __init__(self, namespace: str | None = None, arity: int = 0) -> None:
        self.namespace, self.arity = namespace, arity
        self.rows: list[IndexRow] = []
        self.records: dict[bytes, int] = {}
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * PAGE, PAGE)
        self.keeper = RecordKeeper.of_pages(self.allocator)
        self.cache = KVCache(RadixCache(PAGE, None, self.allocator), self.allocator)
        self.builder = TreeBuilder(self.cache, {"full": self.keeper}, namespace, arity)

    def add(self, tokens: Sequence[Any]) -> None:
        """Add the rows of a prompt that are not there."""
        key, prior = RadixKey(list(tokens), self.namespace), namespace_seed(self.namespace)
        for place in range(len(key) // PAGE):
            page = key[place * PAGE : (place + 1) * PAGE]
            digest = hash_page(page.data, page.width, page.arity, prior)
            if digest not in self.records:
                self.records[digest] = len(self.records) + 1
                parent = prior if place else None
                row = IndexRow("full", self.records[digest], 1, place + 1, digest, bytes(16), parent, page.data)
                self.rows.append(row)
            prior = digest

    def read(self) -> tuple[list[RowRun], list[IndexRow]]:
        """The runs of all rows, and the rows that are left out."""
        self.rows.sort(key=lambda row: row.place)
        self.keeper.add_dormant(np.array([row.record for row in self.rows]))
        self.keeper.end_reading()
        runs = RowRuns(PAGE, self.namespace, self.arity)
        return runs.add(self.rows) + runs.end(), runs.left_out

    def build(self) -> list[RowRun]:
        runs, left_out = self.read()
        self.builder.add(runs)
        self.builder.leave_out(left_out)
        assert not self.builder.build(10**6)
        self.cache.check_invariants()
        self.keeper.check_invariants()
        return runs

    def cached(self, tokens: Sequence[Any]) -> list[int]:
        """The records of a prompt's cached prefix."""
        lease = self.cache.find_source(RadixKey(list(tokens), self.namespace), len(tokens))
        self.cache.end_quietly(lease)
        return (lease.starts // PAGE).tolist()


def test_pages_in_a_row_are_one_run_and_branches_begin_others() -> None:
    disk = Disk()
    disk.add([1] * 8)
    disk.add([1, 1, 1, 1, 2, 2, 3, 3])
    disk.add([5] * 4)

    runs = disk.build()

    assert sorted((run.pages[0].depth, len(run.pages)) for run in runs) == [(1, 2), (1, 2), (3, 2), (3, 2)]
    assert [len(node) for node in disk.cache.radix.parts.tree.nodes()] == [4, 4, 4, 4]
    assert disk.cached([1] * 8) == [1, 2, 3, 4]
    assert disk.cached([1, 1, 1, 1, 2, 2, 3, 3]) == [1, 2, 5, 6]
    assert disk.cached([5] * 5) == [7, 8]
    assert (disk.builder.num_built, disk.keeper.num_leaving, disk.keeper.num_dormant) == (8, 0, 0)


@pytest.mark.parametrize("namespace", [None, "a", "salt\ud800"])
@pytest.mark.parametrize("unit", ["narrow", "wide", "mixed", "pairs"])
def test_all_kinds_of_ids_are_found_again(namespace: str | None, unit: str) -> None:
    make: Any = {
        "narrow": lambda number: number,
        "wide": lambda number: number + 2**40,
        "mixed": lambda number: number + 2**40 * (number % 3 == 0),
        "pairs": lambda number: (number, number + 1),
    }[unit]
    disk, rng = Disk(namespace, arity=2 if unit == "pairs" else 0), Random(1)
    prompts = [[make(rng.choice((1, 2, 3, 4))) for _ in range(2 * rng.randint(1, 5))] for _ in range(10)]
    for prompt in prompts:
        disk.add(prompt)

    disk.build()

    for prompt in prompts:
        records, prior = disk.cached(prompt), namespace_seed(namespace)
        key = RadixKey(prompt, namespace)
        for place, record in enumerate(records):
            page = key[place * PAGE : (place + 1) * PAGE]
            prior = hash_page(page.data, page.width, page.arity, prior)
            assert disk.records[prior] == record
        assert len(records) == len(prompt) // PAGE


def test_the_hashes_of_the_rows_are_kept() -> None:
    disk = Disk("a")
    disk.add([1] * 8)
    disk.add([1] * 4 + [2] * 4)
    disk.build()

    digests = {record: digest.hex() for digest, record in disk.records.items()}
    for node in disk.cache.radix.parts.tree.nodes():
        assert node.value is not None
        assert node.hash_values == [digests[slot // PAGE] for slot in node.value.tolist()[::PAGE]]


def test_rows_that_are_not_right_are_left_out_with_all_below() -> None:
    disk = Disk()
    for first in range(6):
        disk.add([first] * 8)
    at = {(row.depth, row.tokens): place for place, row in enumerate(disk.rows)}

    def change(first: int, depth: int, **values: Any) -> None:
        place = at[depth, RadixKey([first] * PAGE).data]
        disk.rows[place] = disk.rows[place]._replace(**values)

    change(0, 2, tokens=RadixKey([7] * PAGE).data)
    change(1, 1, tokens=None)
    change(2, 3, tokens=b"abc" * 8)
    change(3, 2, parent=None)
    change(4, 4, parent=b"x" * 32)
    disk.build()

    assert [len(disk.cached([first] * 8)) for first in range(6)] == [1, 0, 2, 1, 3, 4]
    assert disk.builder.num_built == 11
    assert disk.keeper.num_leaving == 13, "their rows are to be deleted"
    assert not disk.keeper.num_dormant


def test_missing_levels_cut_what_is_below() -> None:
    disk = Disk()
    disk.add([1] * 12)
    disk.add([2] * 4)
    del disk.rows[2:4]
    runs = disk.build()

    assert [len(run.pages) for run in runs] == [2, 2]
    assert disk.keeper.num_leaving == 2


def test_of_two_rows_of_one_page_one_stays() -> None:
    disk = Disk()
    disk.add([1] * 4)
    disk.rows += [row._replace(record=row.record + 10) for row in disk.rows]
    disk.rows[0] = disk.rows[0]._replace(tokens=RadixKey([3, 3]).data)  # the first is damaged

    disk.build()
    assert disk.cached([1] * 4) == [11, 2]
    assert disk.keeper.num_leaving == 2


def test_a_tree_is_built_in_slices_from_the_root_down() -> None:
    disk = Disk()
    disk.add([1] * 4)
    for branch in (2, 3, 4):
        disk.add([1] * 4 + [branch] * 4)
    runs, _ = disk.read()
    disk.builder.add(runs)

    seen = []
    while disk.builder.build(2):
        seen.append(len(disk.cached([1] * 4 + [4] * 4)))
        disk.cache.check_invariants()
    assert seen == [2, 2, 2]
    assert len(disk.cached([1] * 4 + [4] * 4)) == 4


def test_a_node_that_was_split_or_evicted_meanwhile() -> None:
    disk = Disk()
    for branch in (2, 3):
        disk.add([1] * 8 + [branch] * 2)
    disk.add([5] * 8 + [6] * 2)
    disk.add([5] * 8 + [7] * 2)
    runs, _ = disk.read()
    disk.builder.add(runs)
    disk.builder.build(8)  # both beginnings
    disk.cached([1] * 8)
    disk.cached([1] * 4)  # splits the first
    disk.cache.evict(4 * PAGE)
    assert disk.cached([5] * 8) == []

    assert not disk.builder.build(10**6)
    disk.cache.check_invariants()
    assert [len(disk.cached([1] * 8 + [branch] * 2)) for branch in (2, 3)] == [5, 5]
    assert disk.cached([5] * 8 + [6] * 2) == [], "nothing hangs below an evicted node"
    assert disk.keeper.num_leaving == 6


def test_pages_that_were_written_meanwhile_are_not_replaced() -> None:
    disk = Disk()
    disk.add([1] * 8)
    runs, _ = disk.read()
    key = RadixKey([1] * 4)
    lease = disk.cache.open_target(key, 0)
    disk.keeper.add_rows(lease.starts // PAGE)
    disk.cache.publish_copy(lease, key, 4)
    disk.cache.end_quietly(lease)
    written = disk.cached([1] * 4)

    disk.builder.add(runs)
    disk.builder.build(10**6)
    assert disk.cached([1] * 8) == [*written, 3, 4]
    assert disk.keeper.take_leaving().tolist() == [1, 2]
    disk.cache.check_invariants()


def test_records_that_are_not_dormant_are_not_taken() -> None:
    disk = Disk()
    disk.add([1] * 4)
    disk.add([2] * 4)
    runs, _ = disk.read()
    disk.keeper.drop(np.array([2]))
    disk.builder.add(runs)
    disk.builder.build(10**6)

    assert disk.cached([1] * 4) == []
    assert disk.cached([2] * 4) == [3, 4]
    assert sorted(disk.keeper.take_leaving().tolist()) == [1, 2]


def test_a_builder_that_is_cancelled_leaves_the_others_dormant() -> None:
    disk = Disk()
    for first in (1, 2, 3):
        disk.add([first] * 4)
    runs, _ = disk.read()
    disk.builder.add(runs)
    disk.builder.build(1)
    disk.builder.cancel()
    disk.builder.add(runs)
    disk.builder.leave_out(disk.rows)

    assert not disk.builder.build(10**6)
    assert (disk.keeper.num_dormant, disk.keeper.num_leaving) == (4, 0)
    disk.keeper.free_dormant(np.array([row.record for row in disk.rows]))
    assert disk.keeper.num_dormant == 0
    assert disk.allocator.available_size() == (NUM_PAGES - 2) * PAGE
    disk.cache.check_invariants()
