"""`SecondUse`: remembers which pages were used before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core.kernels import HashMemory

_REMEMBERED = 4  # times `num_pages`

Hashes = NDArray[np.int64]


class SecondUse:
    """The hashes of the pages that were used last, 4 times `num_pages` of them, in at most 16 bytes each.

    A page is remembered until as many other pages were used after its last use. An unknown page is taken for a known
    one in one of 100 million cases.

    Args:
        num_pages: the pages of the tiers that it serves, 1 at least.

    Raises:
        ValueError: `num_pages` is less than 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, not {num_pages}")
        self._memory = HashMemory(_REMEMBERED * num_pages)

    def count(self, hashes: Hashes, salt: int = 0) -> NDArray[np.bool_]:
        """Note a use of each page; return for each whether it was used before this call. O(pages).

        Of the pages of a call, the first one is forgotten last: it is above the others.

        Args:
            hashes: the first 64 bits of the pages' digests, signed.
            salt: of the pages' weights, modulo 2**64: uses under another salt are not remembered.
        """
        known = np.zeros(len(hashes), np.uint8)
        self._memory.count(np.ascontiguousarray(hashes, np.int64).data, salt, known.data)
        return known.view(np.bool_)
