"""`SecondUse`: remembers which pages were used before, in two Bloom filters that take turns."""

from __future__ import annotations

from math import ceil

import numpy as np
from numpy.typing import NDArray

BITS_PER_PAGE = 16
NUM_PROBES = 6
_REMEMBERED = 4  # times `num_pages`, on average
_WORD_BITS = 64

Hashes = NDArray[np.int64]
_Words = NDArray[np.uint64]

# Multipliers of splitmix64, which mixes the bits of a number.
_STEP, _FIRST, _SECOND = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class SecondUse:
    """A set of page hashes that forgets the oldest ones.

    The newer filter takes the used pages until it has a fixed number of them. Then the older one is emptied and becomes
    the newer one. So a page is remembered for the next `filter_pages` to `2 * filter_pages` used pages, which are
    different ones: 4 times `num_pages` on average. A full filter takes an unknown page for a known one in 0.1 % of
    calls; the two take 16 bits for each page that they remember at most.

    Args:
        num_pages: the pages of the tiers that it serves, 1 at least.

    Attributes:
        filter_pages: the pages that a filter takes.

    Raises:
        ValueError: `num_pages` is less than 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self.filter_pages = ceil(_REMEMBERED * num_pages * 2 / 3)
        num_words = ceil(self.filter_pages * BITS_PER_PAGE / _WORD_BITS)
        self._num_bits = np.uint64(num_words * _WORD_BITS)
        self._newer, self._older = np.zeros(num_words, np.uint64), np.zeros(num_words, np.uint64)
        self._num_taken = 0  # pages that the newer filter has

    @property
    def num_bytes(self) -> int:
        """The bytes of both filters."""
        return self._newer.nbytes + self._older.nbytes

    def count(self, hashes: Hashes, salt: int = 0) -> NDArray[np.bool_]:
        """Note a use of each page; return for each whether it was used before this call. O(pages).

        Args:
            hashes: the first 64 bits of the pages' digests, signed.
            salt: of the pages' weights: uses under another salt are not remembered. The number of a space is one.
        """
        words, masks = self._probes(hashes, salt)
        is_newer = _contains(self._newer, words, masks)
        is_known = is_newer | _contains(self._older, words, masks)
        fresh = np.flatnonzero(~is_newer)
        while len(fresh):
            taken, fresh = np.split(fresh, [self.filter_pages - self._num_taken])
            np.bitwise_or.at(self._newer, words[:, taken].ravel(), masks[:, taken].ravel())
            self._num_taken += len(taken)
            if self._num_taken >= self.filter_pages:
                self._newer, self._older, self._num_taken = self._older, self._newer, 0
                self._newer.fill(0)
        return is_known

    def clear(self) -> None:
        """Forget all pages."""
        self._newer.fill(0)
        self._older.fill(0)
        self._num_taken = 0

    def _probes(self, hashes: Hashes, salt: int) -> tuple[NDArray[np.int64], _Words]:
        """Return the words and the bits in them that stand for each page, `[NUM_PROBES, pages]` each."""
        salted = np.uint64(salt * int(_STEP) % 2**64)
        first = _mixed(np.asarray(hashes, np.int64).view(np.uint64) + salted)
        step = _mixed(first + _STEP) | np.uint64(1)
        bits = (first + np.arange(NUM_PROBES, dtype=np.uint64)[:, None] * step) % self._num_bits
        masks = np.uint64(1) << (bits % np.uint64(_WORD_BITS))
        return (bits // np.uint64(_WORD_BITS)).astype(np.int64), masks


def _contains(filter_words: _Words, words: NDArray[np.int64], masks: _Words) -> NDArray[np.bool_]:
    """Return for each page whether all its bits are set."""
    found: NDArray[np.bool_] = ((filter_words[words] & masks) != 0).all(axis=0)
    return found


def _mixed(numbers: _Words) -> _Words:
    """Return each number with its bits mixed: splitmix64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FIRST
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _SECOND
    return numbers ^ (numbers >> np.uint64(31))
