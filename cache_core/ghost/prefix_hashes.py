"""`PrefixHasher`: hashes of whole prefixes, many requests at a time, in numpy; to count pages, not to identify them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.tree.radix_key import RadixKey

Hashes = NDArray[np.uint64]

_CHUNK = 8_192  # tokens of several keys that are hashed together

_HIGH_HALF = np.uint64(0xD6E8FEB86659FD93)  # odd; spreads the upper half of wide ids over the word
_PLACE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class PrefixHasher:
    """Computes for each page of a key a 64-bit hash of all tokens up to its end.

    The hash of a page is the sum of its ids times random odd numbers, mixed with its position; the hash of a prefix is
    the sum of its pages. Equal prefixes have equal hashes; other prefixes collide by chance only. About 3 ns per token.

    Args:
        page_size: tokens.
        seed: of the random numbers; hashes of different seeds are independent.
    """

    def __init__(self, page_size: int, seed: int = 0) -> None:
        self._page_size = page_size
        self._factors: dict[int, Hashes] = {}  # ids a page -> factors
        self._places = np.empty(0, np.uint64)
        self._seed = seed

    def hash_pages(self, keys: Sequence[RadixKey], num_pages: Sequence[int], seeds: Sequence[int]) -> Hashes:
        """Return the hashes of the first `num_pages[i]` pages of each key, with its namespace's seed, concatenated."""
        counts = np.array(num_pages, np.int64)
        starts = np.cumsum(counts) - counts
        seed = np.repeat(np.array(seeds, np.uint64), counts)
        pages = np.concatenate(self._all_contents(keys, num_pages))
        pages += np.concatenate([self._places_of(num) for num in num_pages])
        pages += seed
        sums = np.cumsum(_mixed(pages), dtype=np.uint64)
        before = np.zeros(len(keys), np.uint64)
        before[starts > 0] = sums[starts[starts > 0] - 1]
        sums -= np.repeat(before, counts)
        sums += seed
        return _mixed(sums)

    def _all_contents(self, keys: Sequence[RadixKey], num_pages: Sequence[int]) -> list[Hashes]:
        """Return `_contents` of all keys, of a few keys of one width at a time, to fit the processor's cache."""
        parts = []
        first = num_tokens = 0
        for place, num in enumerate(num_pages):
            num_tokens += num * self._page_size
            if num_tokens >= _CHUNK or place + 1 == len(keys) or _kind(keys[place]) != _kind(keys[place + 1]):
                parts.append(self._contents(keys[first : place + 1], num_pages[first : place + 1]))
                first, num_tokens = place + 1, 0
        return parts

    def _contents(self, keys: Sequence[RadixKey], num_pages: Sequence[int]) -> Hashes:
        """Return the weighted sum of each page's ids; it does not depend on the page's position."""
        width, page = keys[0].width, self._page_size * keys[0].unit
        if len(keys) == 1:
            joined = keys[0].data
        else:
            joined = b"".join([key.data[: num * page] for key, num in zip(keys, num_pages, strict=True)])
        per_page = page // width
        ids: NDArray[Any] = np.frombuffer(joined, f"<u{width}", sum(num_pages) * per_page)
        words = ids.astype(np.uint64).reshape(-1, per_page)
        if width == 8:
            words += (words >> np.uint64(32)) * _HIGH_HALF  # narrow ids are unchanged
        sums: Hashes = words @ self._factors_of(per_page)
        return sums

    def _places_of(self, num_pages: int) -> Hashes:
        """Return a number for each position in a prefix."""
        if num_pages > len(self._places):
            self._places = np.arange(2 * num_pages, dtype=np.uint64) * _PLACE
        return self._places[:num_pages]

    def _factors_of(self, per_page: int) -> Hashes:
        if per_page not in self._factors:
            random = np.random.default_rng(self._seed)
            self._factors[per_page] = random.integers(0, 2**64, per_page, np.uint64) | np.uint64(1)
        return self._factors[per_page]


def _kind(key: RadixKey) -> tuple[int, int]:
    return key.width, key.arity


def _mixed(values: Hashes) -> Hashes:
    """Mix `values` in place so that every bit depends on every bit, and return them."""
    values ^= values >> np.uint64(31)
    values *= _MIX
    values ^= values >> np.uint64(29)
    values *= _PLACE
    values ^= values >> np.uint64(32)
    return values
