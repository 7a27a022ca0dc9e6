"""`PageTable`: the pages of many caches by hash, with the caches that hold each. Compiled for the loops over pages.

A page is held under an id, one for each life of a column: after a drop the column gets another id, so that a drop
takes no walk over the pages. An entry is an id and its marks. Entries of ids without a column are dead: lookups skip
them, and a rebuild of their part of the table removes them.

An id may have *ends*: pages at which a match may end, and at no others. An end has a cell of its own, under the page's
hash mixed with a constant, and is marked as stored there. A lookup counts a column with ends up to its deepest end.

The table has 256 parts, so that a rebuild takes a short time. A part is a hash table with linear probing (Knuth, The
Art of Computer Programming 3, section 6.4, algorithms L and R): 8 bytes a cell for the hash, and 4 for the entry of the
only holder, or for the place of a row with the entries of all of them.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython

STORED, PENDING, PROMISED = 1, 2, 4  # marks of an entry
# The kinds of changes. A note changes nothing.
STORE, REMOVE, CLEAR, PEND, UNPEND, NOTE, STORE_END, REMOVE_END = range(8)
END = 0x5851F42D4C957F2D  # A page's hash and this number, combined by exclusive or, are the key of the page's end.
MAX_IDS = 2**28

_STORE = cython.declare(cython.int, STORE)
_REMOVE = cython.declare(cython.int, REMOVE)
_CLEAR = cython.declare(cython.int, CLEAR)
_PEND = cython.declare(cython.int, PEND)
_UNPEND = cython.declare(cython.int, UNPEND)
_NOTE = cython.declare(cython.int, NOTE)
_STORE_END = cython.declare(cython.int, STORE_END)
_REMOVE_END = cython.declare(cython.int, REMOVE_END)
_END = cython.declare(cython.longlong, END)
_NUM_PARTS = cython.declare(cython.Py_ssize_t, 256)
_FACTOR = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_ALL_BITS = cython.declare(cython.ulonglong, 2**64 - 1)
_MARKS = cython.declare(cython.int, 7)
_MIN_CELLS = cython.declare(cython.Py_ssize_t, 8)
_NUM_SIZES = cython.declare(cython.Py_ssize_t, 30)


@cython.cfunc
def _mixed(key: cython.longlong) -> cython.ulonglong:
    """Return 64 bits that depend on all bits of a hash (Fibonacci hashing): callers may number their pages."""
    return (cython.cast(cython.ulonglong, key) * _FACTOR) & _ALL_BITS


@cython.cclass
class _Ids:
    """The ids, the column, the entries and the ends of each, and the lengths of a lookup's runs."""

    columns: cython.sint[::1]  # id -> column; -1: the id has no column, so its entries are dead
    counts: cython.slonglong[::1]  # id -> number of entries
    num_ends: cython.slonglong[::1]  # id -> number of entries that are ends; -1: the id has pages alone
    stored: cython.sint[::1]  # id -> leading pages that are stored, in a lookup; else 0
    expected: cython.sint[::1]  # the same for pages with any mark
    ends: cython.sint[::1]  # the deepest end found in a lookup, in pages; else 0
    found: cython.sint[::1]  # the ids of a lookup
    num_ids: cython.Py_ssize_t  # given so far; below it are all ids
    free: list[Any]  # ids without a column and without entries
    num_entries: cython.Py_ssize_t  # dead ones included
    num_dead: cython.Py_ssize_t
    num_with_ends: cython.Py_ssize_t  # ids with a column and with ends, or none yet

    def __init__(self) -> None:
        self.num_ids = self.num_entries = self.num_dead = self.num_with_ends = 0
        self.free = []
        self._resize(16)

    @cython.cfunc
    def _resize(self, size: cython.Py_ssize_t) -> Any:
        columns: cython.sint[::1] = array("i", bytes(4 * size))
        counts: cython.slonglong[::1] = array("q", bytes(8 * size))
        num_ends: cython.slonglong[::1] = array("q", bytes(8 * size))
        i: cython.Py_ssize_t
        for i in range(self.num_ids):
            columns[i] = self.columns[i]
            counts[i] = self.counts[i]
            num_ends[i] = self.num_ends[i]
        self.columns = columns
        self.counts = counts
        self.num_ends = num_ends
        self.stored = array("i", bytes(4 * size))
        self.expected = array("i", bytes(4 * size))
        self.ends = array("i", bytes(4 * size))
        self.found = array("i", bytes(4 * size))

    @cython.cfunc
    def _new(self, column: cython.int, has_ends: cython.bint) -> cython.Py_ssize_t:
        """Return an id for a column, with ends or without."""
        new: cython.Py_ssize_t
        if self.free:
            new = self.free.pop()
        else:
            if self.num_ids >= MAX_IDS:
                raise OverflowError(f"a table has at most {MAX_IDS} lives of columns with pages")
            if self.num_ids == len(self.columns):
                self._resize(2 * self.num_ids)
            new = self.num_ids
            self.num_ids += 1
        self.columns[new] = column
        self.num_ends[new] = 0 if has_ends else -1
        self.num_with_ends += has_ends
        return new

    @cython.cfunc
    def _end(self, old: cython.Py_ssize_t) -> Any:
        """Take an id from its column: its entries are dead from now on."""
        self.columns[old] = -1
        self.num_with_ends -= self.num_ends[old] >= 0
        self.num_dead += self.counts[old]
        if self.counts[old] == 0:
            self.free.append(old)

    @cython.cfunc
    def _purged(self, old: cython.Py_ssize_t) -> Any:
        """Note that a dead entry was removed."""
        self.counts[old] -= 1
        self.num_entries -= 1
        self.num_dead -= 1
        if self.counts[old] == 0:
            self.free.append(old)


@cython.cclass
class _Part:
    """One part of the table.

    A cell's holder is 0 in an empty cell; an entry (id * 8 + marks) if it is positive; else -1 - the place of a row. A
    row has its size class k, the number of its entries, and room for 2**k of them. Free rows of a class are a list.
    """

    ids: _Ids
    keys: cython.slonglong[::1]
    holders: cython.sint[::1]
    mask: cython.Py_ssize_t  # cells - 1
    num_pages: cython.Py_ssize_t
    rows: cython.sint[::1]
    rows_end: cython.Py_ssize_t  # the first number of `rows` that was never used
    free: cython.sint[::1]  # size class -> the first free row + 1; 0: none

    def __init__(self, ids: _Ids) -> None:
        self.ids = ids
        self._clear(_MIN_CELLS)

    @cython.cfunc
    def _clear(self, num_cells: cython.Py_ssize_t) -> Any:
        self.keys = array("q", bytes(8 * num_cells))
        self.holders = array("i", bytes(4 * num_cells))
        self.mask = num_cells - 1
        self.num_pages = 0
        self.rows = array("i")
        self.rows_end = 0
        self.free = array("i", bytes(4 * _NUM_SIZES))

    # ---------------------------------------------------------------- cells

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _cell(self, key: cython.longlong) -> cython.Py_ssize_t:
        """Return the cell of a page, or the empty cell where it belongs."""
        at: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, _mixed(key) >> 16) & self.mask
        while self.holders[at] != 0 and self.keys[at] != key:
            at = (at + 1) & self.mask
        return at

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _delete(self, at: cython.Py_ssize_t) -> Any:
        """Empty a cell, and close the gap in the runs of cells that go over it."""
        mask: cython.Py_ssize_t = self.mask
        gap: cython.Py_ssize_t = at
        home: cython.Py_ssize_t
        self.num_pages -= 1
        while True:
            self.holders[gap] = 0
            while True:
                at = (at + 1) & mask
                if self.holders[at] == 0:
                    return
                home = cython.cast(cython.Py_ssize_t, _mixed(self.keys[at]) >> 16) & mask
                if ((at - home) & mask) >= ((at - gap) & mask):
                    break
            self.keys[gap] = self.keys[at]
            self.holders[gap] = self.holders[at]
            gap = at

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _add(self, key: cython.longlong, holder: cython.int, mark: cython.int) -> Any:
        """Mark a page as held under an id."""
        at: cython.Py_ssize_t = self._cell(key)
        held: cython.int = self.holders[at]
        row: cython.Py_ssize_t
        if held == 0:
            if 3 * (self.num_pages + 1) > 2 * (self.mask + 1):
                self._rebuild()
                at = self._cell(key)
            self.keys[at] = key
            self.holders[at] = holder * 8 + mark
            self.num_pages += 1
        elif held > 0:
            if held >> 3 == holder:
                self.holders[at] = held | mark
                return
            row = self._new_row(1)
            self.rows[row + 1] = 2
            self.rows[row + 2] = held
            self.rows[row + 3] = holder * 8 + mark
            self.holders[at] = -1 - cython.cast(cython.int, row)
        elif not self._add_to_row(at, holder, mark):
            return
        self.ids.counts[holder] += 1
        self.ids.num_entries += 1

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _discard(self, key: cython.longlong, holder: cython.int, mark: cython.int) -> Any:
        """Remove the mark of a page under an id; without marks, remove its entry."""
        at: cython.Py_ssize_t = self._cell(key)
        held: cython.int = self.holders[at]
        if held == 0:
            return
        if held < 0:
            if not self._discard_from_row(at, holder, mark):
                return
        else:
            if held >> 3 != holder:
                return
            held &= ~mark
            if held & _MARKS:
                self.holders[at] = held
                return
            self._delete(at)
        self.ids.counts[holder] -= 1
        self.ids.num_entries -= 1

    # ---------------------------------------------------------------- rows

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _new_row(self, size: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Return the place of a row of a size class, without entries."""
        row: cython.Py_ssize_t = self.free[size] - 1
        i: cython.Py_ssize_t
        if row >= 0:
            self.free[size] = self.rows[row + 1]
        else:
            row = self.rows_end
            self.rows_end += 2 + (1 << size)
            if self.rows_end > len(self.rows):
                if self.rows_end + self.rows_end // 4 >= 2**31 - 1:
                    raise OverflowError("a part of the table has too many holders")
                rows: cython.sint[::1] = array("i", bytes(4 * (self.rows_end + self.rows_end // 4)))
                for i in range(row):
                    rows[i] = self.rows[i]
                self.rows = rows
        self.rows[row] = cython.cast(cython.int, size)
        self.rows[row + 1] = 0
        return row

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _free_row(self, row: cython.Py_ssize_t) -> Any:
        size: cython.Py_ssize_t = self.rows[row]
        self.rows[row + 1] = self.free[size]
        self.free[size] = cython.cast(cython.int, row) + 1

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _place_in_row(self, row: cython.Py_ssize_t, holder: cython.int) -> cython.Py_ssize_t:
        """Return the place of an id's entry in a row; -1 if it has none."""
        i: cython.Py_ssize_t
        for i in range(row + 2, row + 2 + self.rows[row + 1]):
            if self.rows[i] >> 3 == holder:
                return i
        return -1

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _add_to_row(self, at: cython.Py_ssize_t, holder: cython.int, mark: cython.int) -> cython.bint:
        """Mark a page with a row as held; return whether it is a new entry."""
        row: cython.Py_ssize_t = -1 - cython.cast(cython.Py_ssize_t, self.holders[at])
        place: cython.Py_ssize_t = self._place_in_row(row, holder)
        count: cython.Py_ssize_t = self.rows[row + 1]
        larger: cython.Py_ssize_t
        i: cython.Py_ssize_t
        if place >= 0:
            self.rows[place] = self.rows[place] | mark
            return False
        if count == cython.cast(cython.Py_ssize_t, 1) << self.rows[row]:
            larger = self._new_row(self.rows[row] + 1)
            for i in range(2, 2 + count):
                self.rows[larger + i] = self.rows[row + i]
            self._free_row(row)
            self.holders[at] = -1 - cython.cast(cython.int, larger)
            row = larger
        self.rows[row + 2 + count] = holder * 8 + mark
        self.rows[row + 1] = cython.cast(cython.int, count) + 1
        return True

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _discard_from_row(self, at: cython.Py_ssize_t, holder: cython.int, mark: cython.int) -> cython.bint:
        """Remove the mark of a page with a row; return whether an entry was removed with it."""
        row: cython.Py_ssize_t = -1 - cython.cast(cython.Py_ssize_t, self.holders[at])
        place: cython.Py_ssize_t = self._place_in_row(row, holder)
        count: cython.int = self.rows[row + 1]
        left: cython.int
        if place < 0:
            return False
        left = self.rows[place] & ~mark
        if left & _MARKS:
            self.rows[place] = left
            return False
        self.rows[place] = self.rows[row + 1 + count]
        self.rows[row + 1] = count - 1
        if count == 2:
            self.holders[at] = self.rows[row + 2]
            self._free_row(row)
        return True

    # ---------------------------------------------------------------- rebuilds

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _rebuild(self) -> Any:
        """Remove dead entries, and choose the number of cells: half of them are empty at least."""
        keys: cython.slonglong[::1] = self.keys
        holders: cython.sint[::1] = self.holders
        rows: cython.sint[::1] = self.rows
        num_cells: cython.Py_ssize_t = _MIN_CELLS
        num_pages: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t
        row: cython.Py_ssize_t
        i: cython.Py_ssize_t
        held: cython.int
        for at in range(len(holders)):
            held = holders[at]
            if held > 0:
                num_pages += self.ids.columns[held >> 3] >= 0
            elif held < 0:
                row = -1 - cython.cast(cython.Py_ssize_t, held)
                for i in range(row + 2, row + 2 + rows[row + 1]):
                    if self.ids.columns[rows[i] >> 3] >= 0:
                        num_pages += 1
                        break
        while num_cells < 2 * (num_pages + 1):
            num_cells *= 2
        self._clear(num_cells)
        for at in range(len(holders)):
            held = holders[at]
            if held > 0:
                self._move(keys[at], held)
            elif held < 0:
                row = -1 - cython.cast(cython.Py_ssize_t, held)
                for i in range(row + 2, row + 2 + rows[row + 1]):
                    self._move(keys[at], rows[i])

    @cython.cfunc
    def _move(self, key: cython.longlong, entry: cython.int) -> Any:
        """Add an entry of the table before a rebuild, unless it is dead."""
        ids: _Ids = self.ids
        holder: cython.int = entry >> 3
        if ids.columns[holder] < 0:
            ids._purged(holder)
            return
        ids.counts[holder] -= 1
        ids.num_entries -= 1
        self._add(key, holder, entry & _MARKS)


# ---------------------------------------------------------------- the table


@cython.cclass
class PageTable:
    """The pages that columns hold: stored, pending, promised, in any combination. A column has a number from 0.

    Hashes are int64: in an array when this module is compiled, in a list when it is interpreted.
    """

    _ids: _Ids
    _parts: list[Any]
    _next_purge: cython.Py_ssize_t

    def __init__(self) -> None:
        self._ids = _Ids()
        self._parts = [_Part(self._ids) for _ in range(_NUM_PARTS)]
        self._next_purge = 0

    @property
    def num_entries(self) -> int:
        """Return the number of pairs of a page and a column that holds it."""
        return self._ids.num_entries - self._ids.num_dead

    @property
    def num_dead(self) -> int:
        """Return the number of entries that wait for their removal."""
        return self._ids.num_dead

    @property
    def num_pages(self) -> int:
        """Return the number of pages; pages with dead entries alone are included."""
        return sum([cython.cast(_Part, part).num_pages for part in self._parts])

    @property
    def num_bytes(self) -> int:
        """Return the memory of the table, in bytes."""
        size: cython.Py_ssize_t = 36 * len(self._ids.columns)
        part: _Part
        for part in self._parts:
            size += 12 * (part.mask + 1) + 4 * len(part.rows) + 4 * _NUM_SIZES + 512
        return size

    @property
    def has_ends(self) -> bool:
        """Whether any column has ends, or none yet."""
        return self._ids.num_with_ends > 0

    def new_id(self, column: cython.int, has_ends: cython.bint = False, /) -> int:
        """Return an id for a column that has none. With ends, a match may end there alone."""
        if column < 0:
            raise ValueError(f"a column has a number from 0, not {column}")
        return self._ids._new(column, has_ends)

    def end_id(self, holder: cython.int, /) -> None:
        """Drop all pages of an id. O(1)."""
        self._check(holder)
        self._ids._end(holder)

    def num_held(self, holder: cython.int, /) -> int:
        """Return the number of pages of an id, without its ends."""
        self._check(holder)
        count: cython.Py_ssize_t = self._ids.counts[holder] - max(0, self._ids.num_ends[holder])
        return count

    def add_ends(self, holder: cython.int, hashes: cython.const_slonglong[::1], /) -> None:
        """Store the ends at pages. The id must have been made with ends."""
        self._check(holder)
        if self._ids.num_ends[holder] < 0:
            raise ValueError(f"{holder} is the id of a column without ends")
        self._change(holder, _STORE_END, hashes, 0, len(hashes))

    @cython.cfunc
    def _check(self, holder: cython.int) -> Any:
        if holder < 0 or holder >= self._ids.num_ids or self._ids.columns[holder] < 0:
            raise ValueError(f"{holder} is the id of no column")

    def add(self, holder: cython.int, mark: cython.int, hashes: cython.const_slonglong[::1], /) -> None:
        """Mark pages as held under an id."""
        self._check(holder)
        i: cython.Py_ssize_t
        for i in range(len(hashes)):
            self._part(hashes[i])._add(hashes[i], holder, mark)

    def discard(self, holder: cython.int, mark: cython.int, hashes: cython.const_slonglong[::1], /) -> None:
        """Remove a mark of pages; a page without marks is not held. No effect on pages without the mark."""
        self._check(holder)
        i: cython.Py_ssize_t
        for i in range(len(hashes)):
            self._part(hashes[i])._discard(hashes[i], holder, mark)

    def promise(self, holder: cython.int, counts: dict[int, int], hashes: cython.const_slonglong[::1], /) -> None:
        """Mark pages as promised under an id, and add 1 to the count of each."""
        self._check(holder)
        i: cython.Py_ssize_t
        for i in range(len(hashes)):
            key: Any = hashes[i]  # boxed once
            counts[key] = counts.get(key, 0) + 1
            self._part(hashes[i])._add(hashes[i], holder, 4)

    def withdraw(self, holder: cython.int, counts: dict[int, int], hashes: cython.const_slonglong[::1], /) -> None:
        """Take 1 from the count of each page that has one; at 0, remove count and mark."""
        self._check(holder)
        i: cython.Py_ssize_t
        count: cython.Py_ssize_t
        for i in range(len(hashes)):
            key: Any = hashes[i]  # boxed once
            count = counts.get(key, 0)
            if count > 1:
                counts[key] = count - 1
            elif count == 1:
                del counts[key]
                self._part(hashes[i])._discard(hashes[i], holder, 4)

    def apply(
        self,
        holder: cython.int,
        kinds: bytes,
        counts: cython.const_sint[::1],
        hashes: cython.const_slonglong[::1],
        first: cython.Py_ssize_t,
        /,
    ) -> int:
        """Apply changes to the pages of an id, in order; return the id afterwards, as a clear gives the column another.

        Args:
            kinds: one byte a change. The first change of ends gives the id ends.
            counts: the number of pages of each change; 0 at `STORE_END`: the pages of the change before it.
            hashes: the pages of all changes, change after change.
            first: the first change to apply; the earlier ones are skipped with their pages.

        Raises:
            ValueError: the counts do not add up to the hashes, or a kind is none. Nothing has changed.
        """
        self._check(holder)
        total: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t = 0
        before: cython.Py_ssize_t = 0
        i: cython.Py_ssize_t
        stop: cython.Py_ssize_t
        kind: cython.int
        has_ends: cython.bint
        if not 0 <= first <= len(kinds) == len(counts):
            raise ValueError(f"{len(kinds)} changes need as many counts, not {len(counts)}, and a first one of them")
        for i in range(len(kinds)):
            kind = kinds[i]
            if counts[i] < 0 or kind > REMOVE_END:
                raise ValueError(
                    f"change {i} must be of kind 0 to {REMOVE_END} with 0 pages or more, not {kind}, {counts[i]}"
                )
            total += counts[i]
        if total != len(hashes):
            raise ValueError(f"the changes have {total} pages, but {len(hashes)} hashes came with them")
        for i in range(len(kinds)):
            kind = kinds[i]
            stop = at + counts[i]
            if i >= first:
                if kind == _CLEAR:
                    column = self._ids.columns[holder]
                    has_ends = self._ids.num_ends[holder] >= 0
                    self._ids._end(holder)
                    holder = self._ids._new(column, has_ends)
                if kind > _NOTE and self._ids.num_ends[holder] < 0:
                    self._ids.num_ends[holder] = 0
                    self._ids.num_with_ends += 1
                if kind == _STORE_END and counts[i] == 0:
                    self._change(holder, kind, hashes, before, stop)
                self._change(holder, kind, hashes, at, stop)
            before = at
            at = stop
        return holder

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _change(
        self,
        holder: cython.int,
        kind: cython.int,
        hashes: cython.const_slonglong[::1],
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
    ) -> Any:
        """Apply a change to the pages of hashes [start, stop)."""
        ids: _Ids = self._ids
        count: cython.longlong = ids.counts[holder]
        i: cython.Py_ssize_t
        if kind == _STORE_END:
            for i in range(start, stop):
                self._part(hashes[i] ^ _END)._add(hashes[i] ^ _END, holder, 1)
        elif kind == _REMOVE_END or (kind == _REMOVE and ids.num_ends[holder] > 0):  # An end goes with its page.
            for i in range(start, stop):
                self._part(hashes[i] ^ _END)._discard(hashes[i] ^ _END, holder, 1)
        if ids.num_ends[holder] >= 0:
            ids.num_ends[holder] += ids.counts[holder] - count
        if kind == _STORE:
            for i in range(start, stop):
                self._part(hashes[i])._add(hashes[i], holder, 1)
        elif kind == _REMOVE:
            for i in range(start, stop):
                self._part(hashes[i])._discard(hashes[i], holder, 1)
        elif kind == _PEND:
            for i in range(start, stop):
                self._part(hashes[i])._add(hashes[i], holder, 2)
        elif kind == _UNPEND:
            for i in range(start, stop):
                self._part(hashes[i])._discard(hashes[i], holder, 2)

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _part(self, key: cython.longlong) -> _Part:
        return cython.cast(_Part, self._parts[cython.cast(cython.Py_ssize_t, _mixed(key) >> 56)])

    def purge(self, num_cells: cython.Py_ssize_t, /) -> None:
        """Rebuild parts of about so many cells, one at least, while dead entries are more than a third."""
        part: _Part
        while 3 * self._ids.num_dead > self._ids.num_entries + 4096 and num_cells > 0:
            part = self._parts[self._next_purge]
            num_cells -= part.mask + 1
            part._rebuild()
            self._next_purge = (self._next_purge + 1) % _NUM_PARTS

    # ---------------------------------------------------------------- lookups

    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def runs(
        self,
        hashes: cython.const_slonglong[::1],
        limit: cython.Py_ssize_t,
        offset: cython.ulonglong,
        also: list[int],
        pages: cython.const_slonglong[::1],
        stride: cython.Py_ssize_t,
        /,
    ) -> list[tuple[int, int, int]]:
        """Return, for each column that holds the first page: (column, leading pages stored, leading pages held).

        With a `limit` of 0 or more, only so many are returned: the columns that hold most, the longest first. Among
        equals, `offset` chooses. O(limit) for each column. The columns of the ids `also` follow, if they hold the
        first page and are not returned already.

        A column with ends is also found by an end within the first stride. Its stored pages end with its deepest end.
        So do its held pages, unless they go beyond the stored ones.

        Args:
            hashes: of the pages that end strides.
            pages: of all pages of the prompt, for the ends; empty: no end is found.
            stride: pages of a stride. All lengths in the result are multiplied by it, or are ends, counted in pages.
        """
        ids: _Ids = self._ids
        part: _Part
        held: cython.int
        holder: cython.int
        row: cython.Py_ssize_t
        i: cython.Py_ssize_t
        j: cython.Py_ssize_t
        num_found: cython.Py_ssize_t = 0
        num_longer: cython.Py_ssize_t
        result: list[Any]
        for holder in also:
            self._check(holder)
        if stride < 1:
            raise ValueError(f"a stride is at least one page, not {stride}")
        for i in range(len(hashes)):
            part = self._part(hashes[i])
            held = part.holders[part._cell(hashes[i])]
            num_longer = 0
            if held > 0:
                num_longer = _lengthen(ids, held, i, 0)
            elif held < 0:
                row = -1 - cython.cast(cython.Py_ssize_t, held)
                for j in range(row + 2, row + 2 + part.rows[row + 1]):
                    num_longer += _lengthen(ids, part.rows[j], i, num_longer)
            if i == 0:
                num_found = num_longer
            if num_longer == 0:
                break
        if ids.num_with_ends > 0:
            num_found = self._find_ends(num_found, pages, stride)
            for j in range(num_found):
                holder = ids.found[j]
                held = ids.ends[holder]
                ids.ends[holder] = 0
                if ids.num_ends[holder] >= 0 and ids.expected[holder] <= ids.stored[holder]:
                    ids.stored[holder] = ids.expected[holder] = held
                    continue
                ids.expected[holder] *= cython.cast(cython.int, stride)
                if ids.num_ends[holder] >= 0:
                    ids.stored[holder] = held
                    ids.expected[holder] = max(held, ids.expected[holder])
                else:
                    ids.stored[holder] *= cython.cast(cython.int, stride)
        elif stride > 1:
            for j in range(num_found):
                ids.stored[ids.found[j]] *= cython.cast(cython.int, stride)
                ids.expected[ids.found[j]] *= cython.cast(cython.int, stride)
        if limit < 0:
            return [_run(ids, ids.found[j]) for j in range(num_found)]
        result = [_run(ids, _longest(ids, num_found, offset)) for i in range(min(limit, num_found))]
        for holder in also:
            if ids.expected[holder] > 0:  # a run ends as it is returned
                result.append(_run(ids, holder))
        for j in range(num_found):
            ids.stored[ids.found[j]] = 0
            ids.expected[ids.found[j]] = 0
        return result

    @cython.cfunc
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
    def _find_ends(
        self, num_found: cython.Py_ssize_t, pages: cython.const_slonglong[::1], stride: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """Look for the deepest end of each column with ends, page by page; return the number of ids found now.

        An end lies at most one stride above the stored run, as that would go on otherwise. In the first stride the
        columns without a stored stride are looked for, so it is looked through to its beginning.
        """
        ids: _Ids = self._ids
        part: _Part
        held: cython.int
        holder: cython.int
        row: cython.Py_ssize_t
        i: cython.Py_ssize_t
        j: cython.Py_ssize_t
        num_left: cython.Py_ssize_t = 0  # columns with a stored stride and without an end yet
        longest: cython.Py_ssize_t = 0
        for j in range(num_found):
            holder = ids.found[j]
            if ids.num_ends[holder] >= 0 and ids.stored[holder] > 0:
                num_left += 1
                longest = max(longest, ids.stored[holder])
        i = min((longest + 1) * stride, cython.cast(cython.Py_ssize_t, len(pages)))
        while i > 0:
            if num_left == 0 and i > stride:
                i = stride
            part = self._part(pages[i - 1] ^ _END)
            held = part.holders[part._cell(pages[i - 1] ^ _END)]
            if held > 0:
                num_found += _note_end(ids, held, i, num_found)
                num_left -= ids.stored[held >> 3] > 0 and ids.ends[held >> 3] == i
            elif held < 0:
                row = -1 - cython.cast(cython.Py_ssize_t, held)
                for j in range(row + 2, row + 2 + part.rows[row + 1]):
                    num_found += _note_end(ids, part.rows[j], i, num_found)
                    num_left -= ids.stored[part.rows[j] >> 3] > 0 and ids.ends[part.rows[j] >> 3] == i
            i -= 1
        return num_found

    def holders(self, key: cython.longlong, /) -> list[tuple[int, int]]:
        """Return the columns that hold a page, each with its marks."""
        return [(self._ids.columns[entry >> 3], entry & _MARKS) for entry in self._live(self._part(key), key)]

    @cython.cfunc
    def _live(self, part: _Part, key: cython.longlong) -> list[Any]:
        return [entry for entry in _entries(part, part._cell(key)) if self._ids.columns[entry >> 3] >= 0]

    def pages(self, holder: cython.int, mark: cython.int, /) -> list[int]:
        """Return the hashes of an id's pages with any bit of `mark`. O(table)."""
        self._check(holder)
        part: _Part
        at: cython.Py_ssize_t
        found: list[Any] = []
        for part in self._parts:
            for at in range(part.mask + 1):
                found += [part.keys[at] for entry in _entries(part, at) if entry >> 3 == holder and entry & mark]
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule is broken. O(table).

        1. A page stands in the part of its hash, where a probe finds it, once.
        2. An entry has marks and an id that was given; a row has two entries at least, and no id twice.
        3. The counts of pages, entries and ends are right; an id that is free has no column and no entries.
        4. Rows, used and free, fill their array up to its end, and none is used twice.
        5. Between lookups, the lengths of runs are 0.
        """
        ids: _Ids = self._ids
        counts: list[int] = [0] * ids.num_ids
        part: _Part
        at: cython.Py_ssize_t
        key: cython.longlong
        for number, part in enumerate(self._parts):
            num_pages = 0
            num_ints = 0
            for at in range(part.mask + 1):
                entries = _entries(part, at)
                if not entries:
                    continue
                key = part.keys[at]
                num_pages += 1
                assert _mixed(key) >> 56 == number and part._cell(key) == at, f"rule 1 at {key}"
                held = [entry >> 3 for entry in entries]
                assert all(entry & _MARKS for entry in entries), f"rule 2 at {key}"
                assert len(set(held)) == len(held) and max(held) < ids.num_ids, f"rule 2 at {key}"
                if part.holders[at] < 0:
                    assert len(entries) > 1, f"rule 2 at {key}"
                    num_ints += 2 + (1 << part.rows[-1 - part.holders[at]])
                for holder in held:
                    counts[holder] += 1
            assert num_pages == part.num_pages, f"rule 3 in part {number}"
            for size in range(_NUM_SIZES):
                row = part.free[size] - 1
                while row >= 0:
                    assert part.rows[row] == size, f"rule 4 in part {number}"
                    num_ints += 2 + (1 << size)
                    row = part.rows[row + 1] - 1
            assert num_ints == part.rows_end <= len(part.rows), f"rule 4 in part {number}"
        assert counts == [ids.counts[i] for i in range(ids.num_ids)], "rule 3"
        assert sum(counts) == ids.num_entries, "rule 3"
        dead = [i for i in range(ids.num_ids) if ids.columns[i] < 0]
        assert sum([counts[i] for i in dead]) == ids.num_dead, "rule 3"
        assert sorted(ids.free) == [i for i in dead if not counts[i]], "rule 3"
        with_ends = [i for i in range(ids.num_ids) if ids.columns[i] >= 0 and ids.num_ends[i] >= 0]
        assert len(with_ends) == ids.num_with_ends, "rule 3"
        assert all(ids.num_ends[i] <= counts[i] for i in with_ends), "rule 3"
        assert not any(ids.stored[i] or ids.expected[i] or ids.ends[i] for i in range(ids.num_ids)), "rule 5"


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.initializedcheck(False)
def _lengthen(ids: _Ids, entry: cython.int, at: cython.Py_ssize_t, num_found: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Count a page of a lookup for the id of an entry; return 1 if its run goes on with page `at`, else 0."""
    holder: cython.int = entry >> 3
    if ids.columns[holder] < 0:
        return 0
    if at == 0:
        ids.found[num_found] = holder
    elif ids.expected[holder] != at:
        return 0
    ids.expected[holder] = cython.cast(cython.int, at) + 1
    if entry & 1 and ids.stored[holder] == at:
        ids.stored[holder] = cython.cast(cython.int, at) + 1
    return 1


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.initializedcheck(False)
def _note_end(ids: _Ids, entry: cython.int, at: cython.Py_ssize_t, num_found: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Note an end for the id of an entry, unless a deeper one is known; return 1 if the id is found by it, else 0."""
    holder: cython.int = entry >> 3
    if ids.columns[holder] < 0 or ids.ends[holder] > 0:
        return 0
    ids.ends[holder] = cython.cast(cython.int, at)
    if ids.expected[holder] > 0:
        return 0
    ids.found[num_found] = holder
    return 1


@cython.cfunc
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.initializedcheck(False)
def _longest(ids: _Ids, num_found: cython.Py_ssize_t, offset: cython.ulonglong) -> cython.int:
    """Return the id with the longest run of a lookup; among equals, the first from place `offset` on."""
    start: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, offset % cython.cast(cython.ulonglong, num_found))
    i: cython.Py_ssize_t
    at: cython.Py_ssize_t
    best: cython.int = ids.found[start]
    for i in range(start + 1, start + num_found):
        at = i - num_found if i >= num_found else i
        if ids.expected[ids.found[at]] > ids.expected[best]:
            best = ids.found[at]
    return best


@cython.cfunc
def _run(ids: _Ids, holder: cython.int) -> tuple[int, int, int]:
    """Return the column of an id and its runs, which end with this."""
    run = ids.columns[holder], ids.stored[holder], ids.expected[holder]
    ids.stored[holder] = 0
    ids.expected[holder] = 0
    return run


@cython.cfunc
def _entries(part: _Part, at: cython.Py_ssize_t) -> list[Any]:
    """Return the entries of a cell."""
    held: cython.int = part.holders[at]
    row: cython.Py_ssize_t
    if held >= 0:
        return [held] if held else []
    row = -1 - cython.cast(cython.Py_ssize_t, held)
    return [part.rows[i] for i in range(row + 2, row + 2 + part.rows[row + 1])]
