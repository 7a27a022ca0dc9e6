"""`PageMemory`: the pages that were evicted recently, by a hash of 64 bits, in two Bloom filters in turn.

The hash of a page stands for all tokens up to its end: each page's ids times odd numbers are summed and mixed, and the
results are summed from the root on. Two prefixes have the same hash by chance only; that costs a place in a queue.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
import numpy as np

_ALL_BITS = cython.declare(cython.ulonglong, 2**64 - 1)
_PLACE = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)
_MIX = cython.declare(cython.ulonglong, 0xBF58476D1CE4E5B9)
_HIGH_HALF = cython.declare(cython.ulonglong, 0xD6E8FEB86659FD93)  # odd; spreads the upper half of wide ids
_FACTOR = 0xD1342543DE82EF95


@cython.cfunc
def _mixed(value: cython.ulonglong) -> cython.ulonglong:
    """Return 64 bits that depend on all bits of a value."""
    value ^= value >> 31
    value = (value * _MIX) & _ALL_BITS
    value ^= value >> 29
    value = (value * _PLACE) & _ALL_BITS
    return value ^ (value >> 32)


@cython.cfunc
def _bits(code: cython.ulonglong) -> cython.ulonglong:
    """Return the four bits of a page in its word of a filter. Its place among the words depends on other bits."""
    one: cython.ulonglong = 1
    return (one << (code & 63)) | (one << (code >> 6 & 63)) | (one << (code >> 12 & 63)) | (one << (code >> 18 & 63))


@cython.cclass
class PageMemory:
    """A memory of pages that forgets the oldest: two Bloom filters, one behind the other.

    Pages go to the recent filter. Once that holds `capacity` pages, it becomes the older one, and a new one begins. So
    the last `capacity` pages are remembered, and up to as many before them. At most 1 % of other pages count as
    remembered by chance.

    Args:
        page_size: the elements of a page of keys.
        capacity: the pages of one filter.
        bits_per_page: of a filter, at least.

    Attributes:
        num_recent: the pages in the recent filter; 0 if no page is remembered.
    """

    num_recent: int = cython.declare(cython.Py_ssize_t, visibility="readonly")
    _page_size: cython.Py_ssize_t
    _capacity: cython.Py_ssize_t
    _mask: cython.ulonglong
    _recent: cython.ulonglong[::1]
    _older: cython.ulonglong[::1]
    _factors: cython.ulonglong[::1]  # place in a page -> odd number that its id is multiplied by
    _sums: cython.ulonglong[::1]  # sums up to the end of each page of a run, while they are needed

    def __init__(
        self, page_size: cython.Py_ssize_t, capacity: cython.Py_ssize_t, bits_per_page: cython.Py_ssize_t = 16
    ) -> None:
        if page_size < 1 or capacity < 1 or bits_per_page < 1:
            raise ValueError(
                "page_size, capacity and bits_per_page must be at least 1, "
                f"not {page_size}, {capacity} and {bits_per_page}"
            )
        self._page_size = page_size
        self._capacity = capacity
        words: cython.Py_ssize_t = 1
        while 64 * words < bits_per_page * capacity:
            words *= 2
        self._mask = words - 1
        self._factors = self._sums = array("Q")
        self.clear()

    def clear(self) -> None:
        """Forget every page."""
        self._recent = array("Q", bytes(8 * (self._mask + 1)))
        self._older = array("Q", bytes(8 * (self._mask + 1)))
        self.num_recent = 0

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
            self._add(self._sums[place])

    def num_remembered(
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
        """Return how many pages of a run are remembered, up to the first one that is not.

        Args:
            data: packed ids; the run is the bytes from `start` to `stop`. The other arguments are those of `sum_of`.
        """
        page: cython.Py_ssize_t = self._page_size * unit
        found: cython.Py_ssize_t = 0
        step: cython.Py_ssize_t = 1  # pages that are hashed together: of most runs, the first one is not remembered
        count: cython.Py_ssize_t
        place: cython.Py_ssize_t
        end: cython.Py_ssize_t
        if page < 1 or not 0 <= start <= stop <= len(data) or (stop - start) % page:
            raise ValueError(f"a run is whole pages within the ids, not the bytes from {start} to {stop}")
        while start < stop:
            end = min(start + step * page, stop)
            count = self._sum_up(data, width, unit, first + found, seed, total, start, end)
            for place in range(count):
                if not self._has(self._sums[place]):
                    return found
                found += 1
            total = self._sums[count - 1]
            start = end
            step = min(4 * step, 1024)
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
    @cython.boundscheck(False)
    @cython.wraparound(False)
    @cython.initializedcheck(False)
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

    # ---------------------------------------------------------------- filters

    @cython.cfunc
    def _has(self, total: cython.ulonglong) -> cython.bint:
        code: cython.ulonglong = _mixed(total)
        bits: cython.ulonglong = _bits(code)
        word: cython.Py_ssize_t = code >> 24 & self._mask
        return self._recent[word] & bits == bits or self._older[word] & bits == bits

    @cython.cfunc
    def _add(self, total: cython.ulonglong) -> Any:
        """Put a page into the recent filter, unless it is there."""
        code: cython.ulonglong = _mixed(total)
        bits: cython.ulonglong = _bits(code)
        word: cython.Py_ssize_t = code >> 24 & self._mask
        if self._recent[word] & bits == bits:
            return
        if self.num_recent >= self._capacity:
            self._older = self._recent
            self._recent = array("Q", bytes(8 * (self._mask + 1)))
            self.num_recent = 0
        self._recent[word] |= bits
        self.num_recent += 1


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
