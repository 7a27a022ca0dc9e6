"""Hashes of whole prefixes, many requests at a time, in numpy: good for counting pages, not for trusting them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.radix_key import RadixKey

Hashes = NDArray[np.uint64]

_HIGH_HALF = np.uint64(0xD6E8FEB86659FD93)  # odd; spreads the upper half of wide ids over the word
_PLACE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class PrefixHasher:
    """Gives each page of a key a hash of all tokens up to its end, 64 bits.

    A page is a sum of its ids times random odd numbers, mixed with its place; a prefix is the sum of its pages. So
    equal prefixes have equal hashes, and two others meet by chance only. About 3 ns a token.

    Args:
        page_size: tokens.
        seed: of the random numbers; hashes of different ones have nothing in common.
    """

    def __init__(self, page_size: int, seed: int = 0) -> None:
        self._page_size = page_size
        self._factors: dict[int, Hashes] = {}  # by ids a page
        self._seed = seed

    def hash_pages(self, keys: Sequence[RadixKey], num_pages: Sequence[int], seeds: Sequence[int]) -> Hashes:
        """The hashes of the first `num_pages[i]` pages of each key, below its namespace's seed, one after the other."""
        counts = np.array(num_pages, np.int64)
        seed = np.repeat(np.array(seeds, np.uint64), counts)
        starts = np.cumsum(counts) - counts
        place = np.arange(len(seed), dtype=np.uint64) - np.repeat(starts, counts).astype(np.uint64)
        sums = np.cumsum(_mixed(self._contents(keys, num_pages) + place * _PLACE + seed), dtype=np.uint64)
        before = np.zeros(len(keys), np.uint64)
        before[starts > 0] = sums[starts[starts > 0] - 1]
        return _mixed(sums - np.repeat(before, counts) + seed)

    def _contents(self, keys: Sequence[RadixKey], num_pages: Sequence[int]) -> Hashes:
        """A sum of each page's ids, wherever the page stands. Keys of one kind are joined first."""
        if len({(key.width, key.arity) for key in keys}) > 1:
            return np.concatenate([self._contents([key], [num]) for key, num in zip(keys, num_pages, strict=True)])
        page = self._page_size * keys[0].unit
        joined = b"".join([key.data[: num * page] for key, num in zip(keys, num_pages, strict=True)])
        ids: NDArray[Any] = np.frombuffer(joined, f"<u{keys[0].width}")
        per_page = page // keys[0].width
        words = ids.astype(np.uint64).reshape(-1, per_page)
        if keys[0].width == 8:
            words += (words >> np.uint64(32)) * _HIGH_HALF  # narrow ids stay what they are
        sums: Hashes = words @ self._factors_of(per_page)
        return sums

    def _factors_of(self, per_page: int) -> Hashes:
        if per_page not in self._factors:
            random = np.random.default_rng(self._seed)
            self._factors[per_page] = random.integers(0, 2**64, per_page, np.uint64) | np.uint64(1)
        return self._factors[per_page]


def _mixed(values: Hashes) -> Hashes:
    values = values ^ (values >> np.uint64(31))
    values *= _MIX
    values ^= values >> np.uint64(29)
    values *= _PLACE
    values ^= values >> np.uint64(32)
    return values
