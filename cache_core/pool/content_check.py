"""`ContentCheck`: debugging checks of the content of a pool's tensors.

freed        every byte of the page is set to 0xFF, which is NaN in each float dtype
published    a checksum of the page is kept for each tensor
found        the checksums are compared: a published page must not change
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import ContentError
from raydix.cache_core.tree.packed_slots import Starts

_POISON = 0xFF
_WORD_BYTES = 8


class ContentCheck:
    """Poison and checksums for one pool of slots, in CPU memory that other processes may write at any time.

    A call reads or writes all bytes of its pages. A checksum takes 8 bytes per page and tensor.

    Args:
        tensors: the tensors by their names in errors, each `[slots, ...]`, indexed by slot id, in whole pages. They
            must be contiguous; with `page_size` 1 only each slot must be.
        page_size: slots that are freed and published together.
        unit: the name of a slot in errors.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], page_size: int = 1, unit: str = "slot") -> None:
        self.page_size = page_size
        self._unit = unit
        self._names = [name for name, tensor in tensors.items() if tensor.numel()]
        self._pages = [_words(tensors[name], page_size) for name in self._names]
        num_pages = max((len(pages) for pages in self._pages), default=0)
        widths = max((pages.shape[1] for pages in self._pages), default=0)
        self._weights = np.random.default_rng(0).integers(0, 2**63, widths, np.uint64) * 2 + 1  # odd: invertible
        self._sums = np.zeros((num_pages, len(self._pages)), np.uint64)
        self._is_known = np.zeros(num_pages, np.bool_)

    def poison(self, starts: Starts) -> None:
        """Overwrite freed pages with poison, and drop their checksums."""
        if not self._pages:
            return
        pages = starts // self.page_size
        self._is_known[pages] = False
        for words in self._pages:
            words.view(np.uint8)[pages] = _POISON

    def publish(self, starts: Starts) -> None:
        """Keep a checksum of each page, which must not change until it is freed. A known checksum stays as it is."""
        if not self._pages:
            return
        pages = starts // self.page_size
        pages = pages[~self._is_known[pages]]
        self._sums[pages] = self._checksums(pages)
        self._is_known[pages] = True

    def verify(self, starts: Starts) -> None:
        """Raise ContentError if one of these pages changed after it was published. All must be published."""
        if not self._pages:
            return
        pages = starts // self.page_size
        assert self._is_known[pages].all(), f"not all of the {self._unit}s at {starts} are published"
        differs = self._checksums(pages) != self._sums[pages]
        if differs.any():
            at, tensor = np.argwhere(differs)[0].tolist()
            page, first = int(pages[at]), int(pages[at]) * self.page_size
            stop = first + self.page_size - 1
            where = f"{self._unit} {first}" if self.page_size == 1 else f"{self._unit}s {first} to {stop}"
            raise ContentError(
                f"published page {page} ({where}), {self._names[tensor]}, was overwritten: clients may write only the "
                "private slots of their leases"
            )

    def _checksums(self, pages: Starts) -> NDArray[np.uint64]:
        """Return the weighted sum of each page's words, `[pages, tensors]`. Any change of one word changes its sum."""
        sums = [words[pages].astype(np.uint64) @ self._weights[: words.shape[1]] for words in self._pages]
        return np.stack(sums, axis=1)


def _words(tensor: torch.Tensor, page_size: int) -> NDArray[np.unsignedinteger]:
    """Return the memory of a tensor as `[pages, words of a page]`, in the widest words that divide a page."""
    assert page_size == 1 or tensor.is_contiguous(), "a tensor with pages of several slots must be contiguous"
    rows = tensor.unsqueeze(-1).view(len(tensor), -1).view(torch.uint8).numpy()
    pages = rows if page_size == 1 else rows.reshape(len(rows) // page_size, -1)
    words: NDArray[np.unsignedinteger] = pages.view(f"u{gcd(pages.shape[1], _WORD_BYTES)}")
    return words
