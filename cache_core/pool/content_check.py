"""`ContentCheck`: what debugging watches of a pool's tensors. Free slots hold poison, published ones a known content.

freed        every byte becomes 0xFF: NaN in each float dtype, and nothing that could pass for KV
published    a checksum of the page is kept, for each tensor
found        the checksums are compared: nobody may have written since
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
    """Poison and checksums of one pool of slots, in CPU memory that others may write at any time.

    Costs a pass over the bytes of the pages named, and a number per page and tensor.

    Args:
        tensors: each `[rows, ...]`, a row for each slot id, whole pages of them, contiguous; rows that are pages may
            lie apart. By what errors call them.
        page_size: slots that are freed and published together.
        unit: what errors call a slot.
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
        """These pages are free: overwrite them, and forget what was published there."""
        if not self._pages:
            return
        pages = starts // self.page_size
        self._is_known[pages] = False
        for words in self._pages:
            words.view(np.uint8)[pages] = _POISON

    def is_poisoned(self, starts: Starts) -> NDArray[np.bool_]:
        """Which of these pages hold poison alone."""
        pages = starts // self.page_size
        whole = [(words.view(np.uint8)[pages] == _POISON).all(axis=1) for words in self._pages]
        return np.logical_and.reduce(whole) if whole else np.ones(len(pages), np.bool_)

    def publish(self, starts: Starts) -> None:
        """These pages must not change any more. Those that are published already keep their checksums."""
        if not self._pages:
            return
        pages = starts // self.page_size
        pages = pages[~self._is_known[pages]]
        self._sums[pages] = self._checksums(pages)
        self._is_known[pages] = True

    def verify(self, starts: Starts) -> None:
        """Raise ContentError unless these pages, published all, are as they were then."""
        if not self._pages:
            return
        pages = starts // self.page_size
        assert self._is_known[pages].all(), f"nobody published all of the {self._unit}s at {starts}"
        differs = self._checksums(pages) != self._sums[pages]
        if differs.any():
            at, tensor = np.argwhere(differs)[0].tolist()
            page, first = int(pages[at]), int(pages[at]) * self.page_size
            stop = first + self.page_size - 1
            where = f"{self._unit} {first}" if self.page_size == 1 else f"{self._unit}s {first} to {stop}"
            raise ContentError(
                f"somebody wrote to a published page without a lease: page {page} ({where}), {self._names[tensor]}"
            )

    def _checksums(self, pages: Starts) -> NDArray[np.uint64]:
        """Of each page, in each tensor: the weighted sum of its words, which any single changed word changes."""
        sums = [words[pages].astype(np.uint64) @ self._weights[: words.shape[1]] for words in self._pages]
        return np.stack(sums, axis=1)


def _words(tensor: torch.Tensor, page_size: int) -> NDArray[np.unsignedinteger]:
    """The memory of a tensor, a row for each page, in the widest words that divide one."""
    assert page_size == 1 or tensor.is_contiguous(), "pages of a tensor lie side by side"
    rows = tensor.unsqueeze(-1).view(len(tensor), -1).view(torch.uint8).numpy()
    pages = rows if page_size == 1 else rows.reshape(len(rows) // page_size, -1)
    words: NDArray[np.unsignedinteger] = pages.view(f"u{gcd(pages.shape[1], _WORD_BYTES)}")
    return words
