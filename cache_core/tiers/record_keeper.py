"""`RecordKeeper`: which records of a disk tier have rows in its index, and keeps those that may not be used yet.

    unread ──> dormant ──> the cache's, with a row ──> leaving ──> free ──> the cache's, without a row
      │           └──────────────────^────────────────────^                          │
      └──> free                      └───────────────────────────────────────────────┘

At the start all records are unread. A record that a row names is dormant until its page is in the tree. When all rows
have been read, the unread records are free. If the cache frees a record with a row, the record is leaving until the
deletion of the row is committed. So no row names a record that is used for another page, and
`free + private + tree + quarantined + unread + dormant + leaving == num_slots`.

It also knows the space of each row, so that a space without rows is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.errors import SlotError
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import PageKeeper, TokenToKVPoolAllocator
from raydix.cache_core.tree.packed_slots import Starts

Numbers = NDArray[np.int64]

# A plain record is free, or the cache's without a row. Unread, dormant and leaving ones are kept.
_PLAIN, _WITH_ROW, _UNREAD, _DORMANT, _LEAVING = range(5)


class _Pool(Protocol):
    """Allocates the records of a kind."""

    keeper: PageKeeper | None

    def take_all(self) -> None:
        """Take all records, before the first allocation."""

    def available_size(self) -> int:
        """Return the number of free slots."""


class RecordKeeper:
    """The records of one kind, numbered from 1. All are unread at first: the pool hands out none.

    Args:
        pool: allocates the records. It must be new.
        num_records: of the pool.
        slots_of_record: slots from one record to the next.
        free: frees slots to the pool, the first ones of records.

    Attributes:
        on_rows: called with the spaces of rows that begin, and 1; or of rows that end, and -1.
    """

    def __init__(self, pool: _Pool, num_records: int, slots_of_record: int, free: Callable[[Starts], object]) -> None:
        self._pool = pool
        self._step = slots_of_record
        self._free = free
        self._states = np.full(num_records + 1, _UNREAD, np.uint8)  # state of each record; record 0 is for padding
        self._states[0] = _PLAIN
        self._counts = [0, 0, num_records, 0, 0]  # records of each state, without plain ones and those with rows
        self._spaces = np.zeros(num_records + 1, np.int64)  # space of the row of each record that has one
        self._to_delete: list[Numbers] = []
        self.on_rows: Callable[[Numbers, int], object] = lambda spaces, sign: None
        pool.take_all()
        pool.keeper = self

    @classmethod
    def of_pages(cls, allocator: TokenToKVPoolAllocator) -> RecordKeeper:
        """Keep the records of pages; or of window halves, for the allocator of window slots."""
        return cls(allocator, allocator.num_pages, allocator.page_size, allocator.free_pages)

    @classmethod
    def of_states(cls, pool: MambaPool) -> RecordKeeper:
        """Keep the records of states."""

        def free(slots: Starts) -> None:
            for slot in reversed(slots.tolist()):  # The one freed last is used first.
                pool.free_track_slot(slot)

        return cls(pool, pool.num_slots, 1, free)

    @property
    def num_records(self) -> int:
        """All records."""
        return len(self._states) - 1

    @property
    def num_free(self) -> int:
        """The records that the pool can hand out."""
        return self._pool.available_size() // self._step

    @property
    def num_unread(self) -> int:
        """The records of which it is not known yet whether a row names them."""
        return self._counts[_UNREAD]

    @property
    def num_dormant(self) -> int:
        """The records with rows of which the pages are not in the tree."""
        return self._counts[_DORMANT]

    @property
    def num_leaving(self) -> int:
        """The records of which the rows are being deleted."""
        return self._counts[_LEAVING]

    # ---------------------------------------------------------------- the start

    def add_dormant(self, numbers: Numbers, spaces: Numbers | int = 0) -> NDArray[np.bool_]:
        """Note records that rows of spaces name; return for each whether it is one that no row has named before."""
        is_moved = self._move(numbers, _UNREAD, _DORMANT)
        self._begin_rows(numbers[is_moved], np.broadcast_to(spaces, len(numbers))[is_moved])
        return is_moved

    def end_reading(self) -> None:
        """Free the records that no row names."""
        numbers = np.flatnonzero(self._states == _UNREAD)
        self._move(numbers, _UNREAD, _PLAIN)
        self._free(numbers * self._step)

    def are_dormant(self, numbers: Numbers) -> bool:
        """Return whether all records are dormant."""
        is_inside = (numbers > 0) & (numbers <= self.num_records)
        return bool(is_inside.all() and (self._states[numbers] == _DORMANT).all())

    def claim(self, numbers: Numbers) -> NDArray[np.bool_]:
        """Give dormant records to the cache; return for each whether it was dormant."""
        return self._move(numbers, _DORMANT, _WITH_ROW)

    def drop(self, numbers: Numbers) -> None:
        """Let dormant records leave; others are left alone."""
        self._leave(numbers[self._move(numbers, _DORMANT, _LEAVING)])

    def free_dormant(self, numbers: Numbers) -> None:
        """Free dormant records of a space when its deletion is committed; others are left alone."""
        self._free(numbers[self._move(numbers, _DORMANT, _PLAIN)] * self._step)

    # ---------------------------------------------------------------- rows

    def add_rows(self, numbers: Numbers, spaces: Numbers | int = 0) -> None:
        """Note that rows of spaces are to be committed for records of the cache's.

        Call it before the writer has the rows.
        """
        assert self._move(numbers, _PLAIN, _WITH_ROW).all(), "a record has a row already, or is not the cache's"
        self._begin_rows(numbers, np.broadcast_to(spaces, len(numbers)))

    def rows_refused(self, numbers: Numbers) -> None:
        """Note that the index did not take rows. Records that are leaving stay so until their deletion is committed."""
        self._end_rows(numbers[self._move(numbers, _WITH_ROW, _PLAIN)])

    def take_leaving(self) -> Numbers:
        """Return the records of which the writer must delete the rows, behind its earlier commits; each once."""
        numbers = np.concatenate(self._to_delete) if self._to_delete else np.empty(0, np.int64)
        self._to_delete.clear()
        return numbers

    def rows_deleted(self, numbers: Numbers) -> None:
        """Free records of `take_leaving` when the deletion of their rows is committed."""
        assert self._move(numbers, _LEAVING, _PLAIN).all(), "a record is not leaving"
        self._end_rows(numbers)
        self._free(numbers * self._step)

    def rows_not_deleted(self, numbers: Numbers) -> None:
        """Let `take_leaving` return records again: the commit has failed."""
        self._leave(numbers)

    # ---------------------------------------------------------------- the pool's keeper

    def keep(self, starts: Starts) -> Starts:
        """Let freed records with rows leave; return the others."""
        numbers = starts // self._step
        if not ((numbers > 0) & (numbers <= self.num_records)).all():
            return starts  # The pool refuses them.
        states = self._states[numbers]
        if (states >= _UNREAD).any():
            raise SlotError("freed records must be the cache's: some are unread, dormant or leaving")
        has_row = states == _WITH_ROW
        if not has_row.any():
            return starts
        leaving = numbers[has_row]
        if len(_firsts(leaving)) < len(leaving):
            raise SlotError("a record must be freed once: one is given twice in a call")
        self._move(leaving, _WITH_ROW, _LEAVING)
        self._leave(leaving)
        others: Starts = starts[~has_row]
        return others

    def kept_starts(self) -> Starts:
        """Return the first slots of unread, dormant and leaving records. O(n)."""
        starts: Starts = np.flatnonzero(self._states >= _UNREAD) * self._step
        return starts

    def check_invariants(self) -> None:
        """Raise AssertionError if the counts are not those of the records, or a leaving one is lost. O(n)."""
        counts = np.bincount(self._states, minlength=len(self._counts)).tolist()
        assert counts[_UNREAD:] == self._counts[_UNREAD:], f"{counts=}, but {self._counts=}"
        if self._to_delete:
            waiting = np.concatenate(self._to_delete)
            assert (self._states[waiting] == _LEAVING).all(), "the row of a record that is not leaving is to be deleted"
            assert len(_firsts(waiting)) == len(waiting), "a row is to be deleted twice"

    def _begin_rows(self, numbers: Numbers, spaces: Numbers) -> None:
        self._spaces[numbers] = spaces
        self.on_rows(spaces, 1)

    def _end_rows(self, numbers: Numbers) -> None:
        if len(numbers):
            self.on_rows(self._spaces[numbers], -1)

    def _leave(self, numbers: Numbers) -> None:
        if len(numbers):
            self._to_delete.append(numbers)

    def _move(self, numbers: Numbers, source: int, target: int) -> NDArray[np.bool_]:
        """Change the state of the records that are in `source`, and return which ones are.

        Of a number that is given twice, the first counts.
        """
        is_moved = (numbers > 0) & (numbers <= self.num_records)
        is_moved[is_moved] = self._states[numbers[is_moved]] == source
        places = np.flatnonzero(is_moved)
        firsts = _firsts(numbers[places])
        is_moved[:] = False
        is_moved[places[firsts]] = True
        self._states[numbers[is_moved]] = target
        self._counts[source] -= len(firsts)
        self._counts[target] += len(firsts)
        return is_moved


def _firsts(numbers: Numbers) -> NDArray[np.int64]:
    """Return the place of the first of each equal numbers. `np.unique` would import modules at its first call: 8 ms."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    is_first = np.ones(len(numbers), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    firsts: NDArray[np.int64] = order[is_first]
    return firsts
