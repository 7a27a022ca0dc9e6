"""`PageMemory`: the pages that were evicted last, by a hash of 64 bits, and `HashMemory`, the table of such hashes.

The hash of a page stands for all tokens up to its end: each page's ids times odd numbers are summed and mixed, and the
results are summed from the root on. Two prefixes have the same hash by chance only; that costs a place in a queue.
"""

from __future__ import annotations

from array import array
from operator import index
from typing import Any

import cython
import numpy as np

_ALL_BITS = cython.declare(cython.ulonglong, 2**64 - 1)
_PLACE = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)
_MIX = cython.declare(cython.ulonglong, 0xBF58476D1CE4E5B9)
_HIGH_HALF = cython.declare(cython.ulonglong, 0xD6E8FEB86659FD93)  # odd; spreads the upper half of wide ids
_FACTOR = 0xD1342543DE82EF95
_BUCKET = cython.declare(cython.Py_ssize_t, 16)  # cells; loops have the number itself, so that C compilers unroll them
_FILLED = 12  # used cells of a bucket, in a full memory, on average
_MARK = cython.declare(cython.ulonglong, 2**32 - 1)
_MAX_HASHES = 2**31


@cython.cfunc
def _mixed(value: cython.ulonglong) -> cython.ulonglong:
    """Return 64 bits that depend on all bits of a value."""
    value ^= value >> 31
    value = (value * _MIX) & _ALL_BITS
    value ^= value >> 29
    value = (value * _PLACE) & _ALL_BITS
    return value ^ (value >> 32)


@cython.final
@cython.cclass
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.initializedcheck(False)
@cython.nonecheck(False)
class HashMemory:
    """The `capacity` hashes that were noted last: each hash once. One more, and the oldest one is forgotten.

    It is a hash table of buckets of 16 cells. A hash may lie in two buckets, and goes to the emptier one (Azar, Broder,
    Karlin and Upfal, Balanced allocations, SIAM Journal on Computing 29, 1999); it stays in its cell. A cell has 12
    bytes: 32 bits of the hash, and the cells of the hashes that were noted before and after it. At most about three
    quarters of the cells are used. So a hash that is not noted counts as noted in one of 100 million cases. If both
    buckets are full, the hash is not noted, which happened to none of 36 million. Each operation is O(1).

    Attributes:
        num_hashes: the noted hashes.
        num_bytes: of the table: at most 16 for each of its `capacity`, if that is 200 or more.
    """

    num_hashes: int = cython.declare(cython.Py_ssize_t, visibility="readonly")
    _capacity: cython.Py_ssize_t
    _num_buckets: cython.ulonglong
    _end: cython.Py_ssize_t  # the cell behind the last one has no mark; it links the oldest hash and the newest
    _marks: cython.uint[::1]  # cell -> bits of its hash; 0: the cell is free
    _links: cython.uint[::1]  # twice the cell -> the cell of the hash noted before; the next number -> noted after

    def __init__(self, capacity: cython.Py_ssize_t) -> None:
        if not 1 <= capacity <= _MAX_HASHES:
            raise ValueError(f"capacity must be from 1 to {_MAX_HASHES:,}, not {capacity}")
        self._capacity = capacity
        self._num_buckets = max(2, (capacity - 1) // _FILLED, capacity // (_FILLED + 1) + 1)
        self._end = _BUCKET * self._num_buckets
        self.clear()

    @property
    def num_bytes(self) -> int:
        return 4 * (len(self._marks) + len(self._links))

    def clear(self) -> None:
        """Forget all hashes. O(1): the system provides the zeros of the new table as they are used."""
        self._marks = memoryview(np.zeros(self._end, np.uint32))
        self._links = memoryview(np.zeros(2 * self._end + 2, np.uint32))
        self._links[2 * self._end] = self._links[2 * self._end + 1] = self._end
        self.num_hashes = 0

    def count(self, hashes: cython.const_slonglong[::1], salt: Any, known: cython.uchar[::1]) -> None:
        """Note hashes, the last one first. A hash that is noted already becomes the newest one.

        Args:
            hashes: signed, of 64 bits.
            salt: a whole number, modulo 2**64. A hash under another salt is another hash.
            known: gets 1 for each hash that was noted before the call; as many zeros as there are hashes.
        """
        i: cython.Py_ssize_t
        offset: cython.ulonglong = index(salt) % 2**64
        if len(known) != len(hashes):
            raise ValueError(f"known must have {len(hashes)} places, not {len(known)}")
        offset = (offset * _PLACE) & _ALL_BITS
        for i in range(len(hashes)):
            known[i] = self._cell_of(_mixed((hashes[i] + offset) & _ALL_BITS)) >= 0
        for i in range(len(hashes) - 1, -1, -1):
            self._note(_mixed((hashes[i] + offset) & _ALL_BITS))

    @cython.cfunc
    @cython.exceptval(check=False)
    def _first_bucket(self, code: cython.ulonglong) -> cython.Py_ssize_t:
        """Return the first cell of a hash's first bucket."""
        return _BUCKET * ((code >> 32) * self._num_buckets >> 32)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _second_bucket(self, code: cython.ulonglong) -> cython.Py_ssize_t:
        """Return the first cell of a hash's second bucket, which is another one."""
        step: cython.ulonglong = 1 + (((code * _MIX) & _MARK) * (self._num_buckets - 1) >> 32)
        first: cython.Py_ssize_t = self._first_bucket(code) + _BUCKET * step
        return first if first < self._end else first - self._end

    @cython.cfunc
    @cython.exceptval(check=False)
    def _cell_in(self, bucket: cython.Py_ssize_t, mark: cython.uint) -> cython.Py_ssize_t:
        """Return the cell of a bucket that has a mark, -1 if none has it."""
        i: cython.Py_ssize_t
        for i in range(16):
            if self._marks[bucket + i] == mark:
                return bucket + i
        return -1

    @cython.cfunc
    @cython.exceptval(check=False)
    def _cell_of(self, code: cython.ulonglong) -> cython.Py_ssize_t:
        """Return the cell of a hash, -1 if it is not noted."""
        mark: cython.uint = code & _MARK or 1
        bucket: cython.Py_ssize_t = self._first_bucket(code)
        if self._num_cells(bucket, mark):
            return self._cell_in(bucket, mark)
        bucket = self._second_bucket(code)
        return self._cell_in(bucket, mark) if self._num_cells(bucket, mark) else -1

    @cython.cfunc
    @cython.exceptval(check=False)
    def _num_cells(self, bucket: cython.Py_ssize_t, mark: cython.uint) -> cython.uint:
        """Return the number of cells of a bucket that have a mark. Compiled, it compares several cells in a step."""
        found: cython.uint = 0
        i: cython.Py_ssize_t
        for i in range(16):
            found += self._marks[bucket + i] == mark
        return found

    @cython.cfunc
    @cython.exceptval(check=False)
    def _note(self, code: cython.ulonglong) -> cython.bint:
        """Make a hash the newest one, and forget the oldest one if there are too many; return whether it is noted."""
        cell: cython.Py_ssize_t = self._cell_of(code)
        if cell >= 0:
            self._unlink(cell)
        else:
            if self.num_hashes >= self._capacity:
                self._remove(self._links[2 * self._end + 1])
            bucket: cython.Py_ssize_t = self._first_bucket(code)
            second: cython.Py_ssize_t = self._second_bucket(code)
            if self._num_cells(second, 0) > self._num_cells(bucket, 0):
                bucket = second
            cell = self._cell_in(bucket, 0)
            if cell < 0:
                return False
            self._marks[cell] = code & _MARK or 1
            self.num_hashes += 1
        newest: cython.Py_ssize_t = self._links[2 * self._end]
        self._links[2 * cell] = newest
        self._links[2 * cell + 1] = self._end
        self._links[2 * newest + 1] = cell
        self._links[2 * self._end] = cell
        return True

    @cython.cfunc
    @cython.exceptval(check=False)
    def _forget(self, code: cython.ulonglong) -> cython.bint:
        """Forget a hash; return whether it was noted."""
        cell: cython.Py_ssize_t = self._cell_of(code)
        if cell < 0:
            return False
        self._remove(cell)
        return True

    @cython.cfunc
    @cython.exceptval(check=False)
    def _remove(self, cell: cython.Py_ssize_t) -> cython.bint:
        """Empty a cell."""
        self._unlink(cell)
        self._marks[cell] = 0
        self.num_hashes -= 1
        return True

    @cython.cfunc
    @cython.exceptval(check=False)
    def _unlink(self, cell: cython.Py_ssize_t) -> cython.bint:
        """Take a cell out of the order."""
        before: cython.Py_ssize_t = self._links[2 * cell]
        after: cython.Py_ssize_t = self._links[2 * cell + 1]
        self._links[2 * before + 1] = after
        self._links[2 * after] = before
        return True


@cython.final
@cython.cclass
@cython.boundscheck(False)
@cython.wraparound(False)
@cython.initializedcheck(False)
@cython.nonecheck(False)
class PageMemory:
    """The last `capacity` pages that were remembered and not forgotten since, in a `HashMemory`.

    Args:
        page_size: the elements of a page of keys.
        capacity: pages.

    Attributes:
        num_pages: the remembered pages.
        num_bytes: of the memory: at most 16 for each of its `capacity`, if that is 200 or more.
    """

    _page_size: cython.Py_ssize_t
    _hashes: HashMemory
    _factors: cython.ulonglong[::1]  # place in a page -> odd number that its id is multiplied by
    _sums: cython.ulonglong[::1]  # sums up to the end of each page of a run, while they are needed

    def __init__(self, page_size: cython.Py_ssize_t, capacity: cython.Py_ssize_t) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self._page_size = page_size
        self._hashes = HashMemory(capacity)
        self._factors = self._sums = array("Q")

    @property
    def num_pages(self) -> int:
        return self._hashes.num_hashes

    @property
    def num_bytes(self) -> int:
        return self._hashes.num_bytes

    def clear(self) -> None:
        """Forget every page."""
        self._hashes.clear()

    def sum_of(
        self,
        data: bytes,
        width: cython.Py_ssize_t,
        unit: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        seed: Any,
        total: Any,
    ) -> int:
        """Return the sum up to the end of a run of whole pages.

        Args:
            data: the packed ids of the run.
            width: bytes of an id.
            unit: bytes of an element.
            first: pages before the run.
            seed: of the namespace and its generation.
            total: the sum up to the run.
        """
        count: cython.Py_ssize_t = self._sum_up(data, width, unit, first, seed, total, 0, len(data))
        return self._sums[count - 1] if count else total

    def remember(
        self,
        data: bytes,
        width: cython.Py_ssize_t,
        unit: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        seed: Any,
        total: Any,
    ) -> None:
        """Remember the pages of a run, its last page first: the arguments are those of `sum_of`."""
        place: cython.Py_ssize_t = self._sum_up(data, width, unit, first, seed, total, 0, len(data))
        while place > 0:
            place -= 1
            self._hashes._note(_mixed(self._sums[place]))

    def recall(
        self,
        data: bytes,
        width: cython.Py_ssize_t,
        unit: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        seed: Any,
        total: Any,
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
    ) -> int:
        """Forget the pages of a run that are remembered; return how many pages there are up to the last of them.

        Args:
            data: packed ids; the run is the bytes from `start` to `stop`. The other arguments are those of `sum_of`.
        """
        count: cython.Py_ssize_t = self._sum_up(data, width, unit, first, seed, total, start, stop)
        found: cython.Py_ssize_t = 0
        place: cython.Py_ssize_t
        for place in range(count):
            if self._hashes._forget(_mixed(self._sums[place])):
                found = place + 1
        return found

    # ---------------------------------------------------------------- hashes

    @cython.cfunc
    def _sum_up(
        self,
        data: bytes,
        width: cython.Py_ssize_t,
        unit: cython.Py_ssize_t,
        first: cython.Py_ssize_t,
        seed: Any,
        total: Any,
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
    ) -> cython.Py_ssize_t:
        """Note the sum up to the end of each page of a part of `data`; return the number of pages."""
        if width not in (4, 8) or unit < 1 or unit % width or not 0 <= start <= stop <= len(data):
            raise ValueError(f"an id has 4 or 8 bytes, and a run lies within the ids, not {width}, {start} and {stop}")
        page: cython.Py_ssize_t = self._page_size * unit
        if (stop - start) % page or first < 0:
            raise ValueError(f"a run is whole pages, not {stop - start} bytes")
        count: cython.Py_ssize_t = (stop - start) // page
        per_page: cython.Py_ssize_t = page // width
        if len(self._factors) < per_page:
            self._factors = _powers(per_page)
        if len(self._sums) < count:
            self._sums = array("Q", bytes(8 * count))
        if cython.compiled:
            self._fill(data, width, per_page, count, first, seed, total, start)
        else:
            factors = np.frombuffer(self._factors, np.uint64)[:per_page]
            sums = _summed(data[start:stop], width, factors, first, seed, total)
            self._sums[:count] = array("Q", sums.tobytes())
        return count

    @cython.cfunc
    def _fill(
        self,
        data: bytes,
        width: cython.Py_ssize_t,
        per_page: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        first: cython.ulonglong,
        seed: cython.ulonglong,
        total: cython.ulonglong,
        start: cython.Py_ssize_t,
    ) -> Any:
        begin: cython.p_char = cython.cast(cython.p_char, data) + start
        narrow: cython.p_uint = cython.cast(cython.p_uint, begin)
        wide: cython.p_ulonglong = cython.cast(cython.p_ulonglong, begin)
        content: cython.ulonglong
        value: cython.ulonglong
        place: cython.Py_ssize_t
        i: cython.Py_ssize_t
        for place in range(count):
            content = (first + place) * _PLACE + seed
            if width == 4:
                for i in range(per_page):
                    content += narrow[i] * self._factors[i]
                narrow += per_page
            else:
                for i in range(per_page):
                    value = wide[i]
                    content += (value + (value >> 32) * _HIGH_HALF) * self._factors[i]
                wide += per_page
            total += _mixed(content)
            self._sums[place] = total


def _powers(count: cython.Py_ssize_t) -> Any:
    """Return the first powers of an odd number, modulo 2**64."""
    powers = array("Q")
    power: object = 1
    for _ in range(count):
        power = power * _FACTOR % 2**64
        powers.append(power)
    return powers


def _summed(data: bytes, width: int, factors: Any, first: int, seed: int, total: int) -> Any:
    """Return the sums of pages, as `_fill` computes them, by numpy."""
    ids = np.frombuffer(data, f"<u{width}").astype(np.uint64).reshape(-1, len(factors))
    if width == 8:
        ids += (ids >> np.uint64(32)) * np.uint64(_HIGH_HALF)
    places = np.arange(first, first + len(ids), dtype=np.uint64)
    contents = ids @ factors + places * np.uint64(_PLACE) + np.uint64(seed)
    contents ^= contents >> np.uint64(31)
    contents *= np.uint64(_MIX)
    contents ^= contents >> np.uint64(29)
    contents *= np.uint64(_PLACE)
    contents ^= contents >> np.uint64(32)
    return np.cumsum(contents, dtype=np.uint64) + np.uint64(total)
