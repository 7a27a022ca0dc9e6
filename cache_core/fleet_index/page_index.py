"""`PageIndex`: which caches hold a prefix, from their events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.fleet_index.page_hashes import Hashes
from raydix.cache_core.kernels import COMPILED, NOTE, PENDING, PROMISED, REMOVE_END, STORE_END, STORED, PageTable

_ALL = -1
_CELLS_A_PAGE = 8  # cells of the table to free of dead entries for each page that comes
_NO_PAGES = np.empty(0, np.int64)


class Applied(Enum):
    """The outcome of a batch."""

    DONE = "done"
    OLD = "old"  # everything in it was applied before; nothing has changed
    NEEDS_SNAPSHOT = "needs snapshot"  # events before it are missing, or it is another epoch's; nothing has changed


class _Column:
    """A cache's place in its events."""

    __slots__ = ("epoch", "holder", "promises", "seq")

    def __init__(self, holder: int) -> None:
        self.holder = holder  # the id of its pages in the table
        self.epoch: str | None = None  # None: no snapshot yet
        self.seq = 0  # the last event applied
        self.promises: dict[int, int] = {}  # how often each page is promised


class PageIndex:
    """The pages that caches hold, by hash. Each cache is a column, named by a number.

    A page is stored or pending, as the cache's events say, or promised by the owner of this index, after a request was
    sent there; or more than one of the three. A pending page belongs to a granted lease and will be published. All
    caches of an index must have the same page size and stride: a page stands for the tokens up to the end of a stride.

    A column may have *ends*, which name pages of any place: a match may end there, and nowhere else. Other columns have
    none, and a match may end at every page.

    The index is a hint. Synchronous; not thread-safe. Every call is atomic.

    Rules, which `check_invariants` verifies:

    1. A column's number is in use or free, and each column in use has an id in the table that no other has.
    2. A page is marked as promised in a column exactly if its count of promises is above 0.
    3. The rules of `PageTable`.
    """

    def __init__(self) -> None:
        self._table = PageTable()
        self._columns: list[_Column | None] = []
        self._free: list[int] = []

    # ---------------------------------------------------------------- columns

    def add_column(self, has_ends: bool = False) -> int:
        """Return the number of a new column, without pages. Numbers of dropped columns are given again.

        Args:
            has_ends: the column has ends. A snapshot replaces this, and the first event of an end makes it True.
        """
        column = self._free.pop() if self._free else len(self._columns)
        entry = _Column(self._table.new_id(column, has_ends))
        if column == len(self._columns):
            self._columns.append(entry)
        else:
            self._columns[column] = entry
        return column

    def drop_column(self, column: int) -> None:
        """Forget a cache and its pages. O(1), whatever it holds: the memory is freed by later calls."""
        self._table.end_id(self._column(column).holder)
        self._columns[column] = None
        self._free.append(column)

    def position(self, column: int) -> tuple[str | None, int]:
        """Return a cache's epoch, None before its first snapshot, and the number of the last event applied."""
        entry = self._column(column)
        return entry.epoch, entry.seq

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self._columns) - len(self._free)

    @property
    def has_ends(self) -> bool:
        """Whether any column has ends: then lookups need `pages`."""
        return bool(self._table.has_ends)

    def _column(self, column: int) -> _Column:
        entry = self._columns[column] if 0 <= column < len(self._columns) else None
        if entry is None:
            raise ValueError(f"column must be the number of a column that was added and not dropped, not {column}")
        return entry

    # ---------------------------------------------------------------- events

    def apply(
        self,
        column: int,
        epoch: str,
        seq: int,
        kinds: bytes,
        counts: NDArray[np.int32],
        hashes: Hashes,
    ) -> Applied:
        """Apply a batch of a cache's events, which have the numbers in (seq - len(kinds), seq].

        Events of the batch that were applied before are skipped. A column without a snapshot takes the events of any
        epoch, from its first event on.

        Args:
            column: the cache.
            epoch: the life of the cache that the numbers belong to.
            seq: the number of the last event.
            kinds: one byte an event: 0 pages stored, 1 removed, with their ends, 2 all pages gone, 3 pending, 4 not
                pending, 5 none, 6 ends stored, 7 ends removed.
            counts: the number of pages of each event; 0 of ends stored: the pages of the event before them.
            hashes: the pages of all events, event after event.

        Returns:
            `Applied.NEEDS_SNAPSHOT` if events are missing: the column stays as it is until `apply_snapshot`.

        Raises:
            ValueError: there is no such column, or the arguments do not fit together. Nothing has changed.
        """
        entry = self._column(column)
        first = entry.seq - (seq - len(kinds))  # the first event of the batch to apply
        if epoch != (entry.epoch or epoch) or first < 0:
            return Applied.NEEDS_SNAPSHOT
        if first >= len(kinds):
            return Applied.OLD if len(kinds) or seq <= entry.seq else Applied.DONE
        holder = self._table.apply(entry.holder, kinds, _numbers(counts, np.int32), _keys(hashes), first)
        if holder != entry.holder:
            entry.holder = holder
            self._mark_promises(entry)
        entry.epoch, entry.seq = epoch, seq
        self._table.purge(_CELLS_A_PAGE * len(hashes) + 1)
        return Applied.DONE

    def apply_snapshot(
        self,
        column: int,
        epoch: str,
        seq: int,
        stored: Hashes,
        pending: Hashes = _NO_PAGES,
        ends: Hashes | None = None,
    ) -> bool:
        """Replace a cache's pages by a snapshot's. Promises stay if the epoch does.

        Args:
            column: the cache.
            epoch: the life of the cache that the snapshot belongs to.
            seq: the number of the last event that it includes.
            stored: the hashes of the stored pages.
            pending: the hashes of the pending ones.
            ends: the hashes of the pages at which a match may end; None: the column has no ends.

        Returns:
            Whether it was taken. False: later events of this epoch have been applied, and nothing has changed.

        Raises:
            ValueError: there is no such column, or `seq` is negative. Nothing has changed.
        """
        entry = self._column(column)
        if seq < 0:
            raise ValueError(f"seq must be the number of an event, or 0, not {seq}")
        if epoch == entry.epoch and seq < entry.seq:
            return False
        stored, pending = _keys(stored), _keys(pending)
        end_keys = None if ends is None else _keys(ends)
        self._table.end_id(entry.holder)
        entry.holder = self._table.new_id(column, ends is not None)
        if epoch != entry.epoch:
            entry.promises.clear()
        entry.epoch, entry.seq = epoch, seq
        self._table.add(entry.holder, STORED, stored)
        self._table.add(entry.holder, PENDING, pending)
        if end_keys is not None:
            self._table.add_ends(entry.holder, end_keys)
        self._mark_promises(entry)
        self._table.purge(_CELLS_A_PAGE * (len(stored) + len(pending) + (0 if end_keys is None else len(end_keys))) + 1)
        return True

    # ---------------------------------------------------------------- promises

    def promise(self, column: int, hashes: Hashes) -> None:
        """Count pages as promised in a column until `withdraw`: a request that will publish them goes there."""
        entry = self._column(column)
        self._table.promise(entry.holder, entry.promises, _keys(hashes))

    def withdraw(self, column: int, hashes: Hashes) -> None:
        """End one promise of each page in `hashes`. No effect on pages that are not promised."""
        entry = self._column(column)
        self._table.withdraw(entry.holder, entry.promises, _keys(hashes))

    def _mark_promises(self, entry: _Column) -> None:
        if entry.promises:
            self._table.add(entry.holder, PROMISED, _keys(np.fromiter(entry.promises, np.int64)))

    # ---------------------------------------------------------------- lookups

    def prefix_runs(self, hashes: Hashes, pages: Hashes = _NO_PAGES, stride: int = 1) -> list[tuple[int, int, int]]:
        """Return (column, stored, expected) of each cache that holds the first page, in any order.

        Args:
            hashes: the pages of a prompt, as `page_hashes` returns them: those that end strides.
            pages: all pages of the prompt; needed for columns with ends, which have nothing stored without them.
            stride: pages of a stride. The result counts so many pages for each of `hashes`.

        Returns:
            `stored` is the number of leading pages that are stored there, `expected` of leading pages that are
            stored, pending or promised. `stored` may be 0. For a column with ends `stored` is its deepest end in
            the prompt, at most one stride above its stored pages, and so is `expected`, unless pages beyond the
            stored ones are pending or promised.
        """
        return self._table.runs(_keys(hashes), _ALL, 0, [], _pages(pages), index(stride))

    def longest_runs(
        self,
        hashes: Hashes,
        count: int,
        offset: int = 0,
        also: Sequence[int] = (),
        pages: Hashes = _NO_PAGES,
        stride: int = 1,
    ) -> list[tuple[int, int, int]]:
        """Return at most `count` of `prefix_runs`: the runs with most expected pages, in descending order.

        Args:
            hashes: the pages of a prompt.
            count: the number of columns wanted.
            offset: which of several columns with equal runs are returned; a random number spreads them. At least 0.
            also: further columns; their runs follow, if they are not returned already.
            pages, stride: as in `prefix_runs`.

        Raises:
            ValueError: `count` or `offset` is negative, or there is no such column.
        """
        if count < 0 or offset < 0:
            raise ValueError(f"count and offset must be at least 0, not {count} and {offset}")
        holders = [self._column(column).holder for column in also]
        return self._table.runs(_keys(hashes), count, offset, holders, _pages(pages), index(stride))

    def holders(self, page: int) -> dict[int, set[str]]:
        """Return the columns that hold a page, each with how: "stored", "pending", "promised"."""
        names = {STORED: "stored", PENDING: "pending", PROMISED: "promised"}
        return {
            column: {name for mark, name in names.items() if marks & mark}
            for column, marks in self._table.holders(index(page))
        }

    def pages(self, column: int) -> tuple[set[int], set[int], set[int]]:
        """Return the stored, the pending and the promised pages of a column. O(index).

        An end is among the stored ones, under its own key: the hash of its page, and `kernels.END`, combined by xor.
        """
        holder = self._column(column).holder
        stored, pending, promised = (set(self._table.pages(holder, mark)) for mark in (STORED, PENDING, PROMISED))
        return stored, pending, promised

    # ---------------------------------------------------------------- sizes, checks

    def num_pages(self, column: int | None = None) -> int:
        """Return the number of pages of a column; None: of all of them, each page counted once for each column."""
        return self._table.num_entries if column is None else self._table.num_held(self._column(column).holder)

    @property
    def num_bytes(self) -> int:
        """The memory of the pages, in bytes, without promises."""
        return self._table.num_bytes

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this class or of its table is broken. O(index)."""
        used = {number: entry for number, entry in enumerate(self._columns) if entry is not None}
        assert sorted([*used, *self._free]) == list(range(len(self._columns))), "rule 1"
        holders = [entry.holder for entry in used.values()]
        assert len(set(holders)) == len(holders), "rule 1"
        for number, entry in used.items():
            assert self.pages(number)[2] == set(entry.promises), f"rule 2 in column {number}"
            assert all(count > 0 for count in entry.promises.values()), f"rule 2 in column {number}"
        self._table.check_invariants()


def _keys(hashes: Hashes) -> Any:
    return _numbers(hashes, np.int64)


def _pages(pages: Hashes) -> Any:
    return _NO_KEYS if pages is _NO_PAGES else _keys(pages)


def _numbers(numbers: Any, dtype: type[np.generic]) -> Any:
    """Return numbers as the table takes them.

    Raises:
        ValueError: they are not integers of this width in one dimension.
    """
    if type(numbers) is not np.ndarray or numbers.dtype != dtype or numbers.ndim != 1:
        raise ValueError(f"the numbers must be a 1-D array of {dtype.__name__}, not {_described(numbers)}")
    return np.ascontiguousarray(numbers) if COMPILED else numbers.tolist()


def _described(numbers: Any) -> str:
    if isinstance(numbers, np.ndarray):
        return f"one of {numbers.dtype} and shape {numbers.shape}"
    return f"{'an iterable: ' if isinstance(numbers, Iterable) else ''}{type(numbers).__name__}"


assert (NOTE, STORE_END, REMOVE_END) == (5, 6, 7), "the kinds of events in `PageIndex.apply` are the table's"
_NO_KEYS = _keys(_NO_PAGES)
