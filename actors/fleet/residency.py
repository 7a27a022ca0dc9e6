"""Which caches hold a page: the index that routers ask, and one of Python's integers as bit sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

_FEW = 8  # bits; more are found by numpy


class ResidencyIndex(Protocol):
    """Pages of caches, as far as a router knows: stored ones, and promised ones, which are about to be stored.

    A page is an integer that stands for the whole prefix up to it. Caches have numbers from 0.
    """

    def store(self, cache: int, pages: Sequence[int]) -> None:
        """Note that a cache has stored pages."""

    def remove(self, cache: int, pages: Sequence[int]) -> None:
        """Note that a cache has removed pages; unknown ones have no effect."""

    def promise(self, cache: int, pages: Sequence[int]) -> None:
        """Note that a request with these pages goes to a cache. Each call has one `withdraw` later."""

    def withdraw(self, cache: int, pages: Sequence[int]) -> None:
        """End a promise of these pages. A page stays promised as long as another promise has it."""

    def runs(self, pages: Sequence[int]) -> dict[int, int]:
        """Return the number of leading pages that each cache has stored or is promised; those of no page are left out.

        The caller owns the dictionary.
        """


class BitsetIndex:
    """A `ResidencyIndex` of dictionaries: page -> the bit set of its caches, a Python integer."""

    def __init__(self, num_caches: int) -> None:
        """Make an empty index.

        Args:
            num_caches: the caches have the numbers 0 to `num_caches` - 1.
        """
        self._bits = [1 << cache for cache in range(num_caches)]
        self._stored: dict[int, int] = {}
        self._promised: dict[int, int] = {}
        self._more: dict[tuple[int, int], int] = {}  # (cache, page) -> further promises

    def __len__(self) -> int:
        """Return the number of stored pages; one that several caches hold counts once."""
        return len(self._stored)

    def store(self, cache: int, pages: Sequence[int]) -> None:
        """Note that a cache has stored pages."""
        bit, stored = self._bits[cache], self._stored
        for page in pages:
            held = stored.get(page)
            stored[page] = bit if held is None else held | bit

    def remove(self, cache: int, pages: Sequence[int]) -> None:
        """Note that a cache has removed pages; unknown ones have no effect."""
        bit, stored = self._bits[cache], self._stored
        for page in pages:
            if stored.get(page) == bit:
                del stored[page]
            else:
                _clear(stored, page, bit)

    def promise(self, cache: int, pages: Sequence[int]) -> None:
        """Note that a request with these pages goes to a cache. Each call has one `withdraw` later."""
        bit, promised = self._bits[cache], self._promised
        for page in pages:
            held = promised.get(page, 0)
            if held & bit:
                self._more[cache, page] = self._more.get((cache, page), 0) + 1
            else:
                promised[page] = held | bit

    def withdraw(self, cache: int, pages: Sequence[int]) -> None:
        """End a promise of these pages. A page stays promised as long as another promise has it."""
        bit, promised, more = self._bits[cache], self._promised, self._more
        for page in pages:
            count = more.get((cache, page)) if more else None
            if count is not None:
                if count == 1:
                    del more[cache, page]
                else:
                    more[cache, page] = count - 1
            elif promised.get(page) == bit:
                del promised[page]
            else:
                _clear(promised, page, bit)

    def runs(self, pages: Sequence[int]) -> dict[int, int]:
        """Return the number of leading pages that each cache has stored or is promised; those of no page are left out.

        The caller owns the dictionary.
        """
        runs: dict[int, int] = {}
        holders = -1  # all caches
        for place, page in enumerate(pages):
            still = holders & (self._stored.get(page, 0) | self._promised.get(page, 0))
            if place and still != holders:
                runs.update(dict.fromkeys(_caches_of(holders & ~still), place))
            holders = still
            if not holders:
                return runs
        if pages:
            runs.update(dict.fromkeys(_caches_of(holders), len(pages)))
        return runs


def _clear(caches_of: dict[int, int], page: int, bit: int) -> None:
    """Take a cache from a page's bit set; without caches, the page goes."""
    held = caches_of.get(page, 0)
    if held == bit:
        del caches_of[page]
    elif held & bit:
        caches_of[page] = held ^ bit


def _caches_of(bits: int) -> list[int]:
    """Return the numbers of the bits that are set."""
    if bits.bit_count() <= _FEW:
        found = []
        while bits:
            lowest = bits & -bits
            found.append(lowest.bit_length() - 1)
            bits ^= lowest
        return found
    octets = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    caches: list[int] = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
    return caches
