"""`TokenToKVPoolAllocator`: hands out the slots of a pool in whole pages."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import OutOfSlotsError, SlotError
from raydix.cache_core.kernels import take_back
from raydix.cache_core.tree.packed_slots import Starts


class TokenToKVPoolAllocator:
    """Slots in whole pages, from a stack of free ones: last freed, first reused.

    The methods for window slots are those of a pool without a sliding window; `SWATokenToKVPoolAllocator` has others.

    Slot ids run from `page_size` to `num_slots + page_size - 1`: page 0 is reserved for padding. Allocating and
    freeing cost O(pages) in numpy.

    Attributes:
        num_pages: of the pool.
        swa: the allocator of the window slots; None without a sliding window.

    Raises:
        ValueError: `num_slots` is not a positive multiple of `page_size`.
    """

    swa: TokenToKVPoolAllocator | None = None

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        num_slots, page_size = index(num_slots), index(page_size)
        if page_size < 1 or num_slots < page_size or num_slots % page_size:
            raise ValueError(f"num_slots ({num_slots}) must be a positive multiple of page_size ({page_size})")
        self.num_slots = num_slots
        self.page_size = page_size
        self.on_free: Callable[[Starts], None] | None = None  # told of pages that have become free
        self.num_pages = num_slots // page_size
        self._stack: Starts = np.arange(self.num_pages, 0, -1, dtype=np.int64) * page_size
        self._num_free = self.num_pages
        self._marks = np.full(self.num_pages + 1, -1, np.int32)  # by page number: 0 if handed out, else negative
        self._lane = np.arange(page_size, dtype=np.int64)

    def available_size(self) -> int:
        """Free slots. O(1)."""
        return self._num_free * self.page_size

    def can_alloc(self, num_tokens: int) -> bool:
        """Whether `alloc(num_tokens)` would succeed now."""
        return 0 <= index(num_tokens) <= self.available_size()

    def alloc(self, num_tokens: int) -> torch.Tensor:
        """Slots for `num_tokens` tokens, int64, the caller's until it frees them. The last page may be used in part.

        Raises:
            OutOfSlotsError: too few are free; nothing was taken.
            SlotError: `num_tokens` is negative.
        """
        num_tokens = index(num_tokens)
        if num_tokens < 0:
            raise SlotError(f"cannot allocate {num_tokens} slots")
        starts = self.alloc_pages(-(-num_tokens // self.page_size))
        if self.page_size == 1:
            return torch.from_numpy(starts)
        return torch.from_numpy((starts[:, None] + self._lane).reshape(-1)[:num_tokens])

    def alloc_pages(self, num_pages: int) -> Starts:
        """`alloc` in pages: the first slot of each."""
        num_pages = index(num_pages)
        if num_pages < 0:
            raise SlotError(f"cannot allocate {num_pages} pages")
        left = self._num_free - num_pages
        if left < 0:
            raise OutOfSlotsError(num_pages * self.page_size, self.available_size(), 0, self.num_slots)
        starts = self._stack[left : self._num_free][::-1].copy()
        self._marks[self.page_numbers(starts)] = 0
        self._num_free = left
        return starts

    def free(self, indices: torch.Tensor) -> None:
        """Take back the pages that `indices` touch, whole: name all slots in use of a page in one call.

        Raises:
            SlotError: a slot is out of range or not handed out, or a page is named in two places, or they are no row of
                integers; nothing changed.
        """
        self.free_pages(self.starts_of(slot_row(indices)))

    def starts_of(self, slots: Starts) -> Starts:
        """Return the first slots of the pages that slots touch; neighbours of one page name it once."""
        if self.page_size > 1 and slots.size:
            pages = slots // self.page_size
            is_first = np.empty(slots.size, np.bool_)
            is_first[0] = True
            np.not_equal(pages[1:], pages[:-1], is_first[1:])
            slots = pages[is_first] * self.page_size
        return slots

    def free_pages(self, starts: Starts) -> None:
        """`free` in pages, each named once by its first slot.

        Raises:
            SlotError: a page is out of range, not handed out, or named twice, or by another slot; nothing changed.
        """
        num_pages = len(starts)
        if not num_pages:
            return
        fault = take_back(starts, self._marks, self._stack, self._num_free, self.page_size)
        if fault is not None:
            self._refuse(fault)
        self._num_free += num_pages
        if self.on_free is not None:
            self.on_free(starts)

    def _refuse(self, fault: str) -> NoReturn:
        page = self.page_size
        within = f", or no first slots of pages of {page}," if page > 1 else ""
        raise SlotError(
            {
                "outside": f"slots outside [{page}, {self.num_slots + page}){within} were freed",
                "free": "slots were freed that are free already",
                "twice": "a page is freed twice in one call",
            }[fault]
        )

    def page_numbers(self, starts: Starts) -> Starts:
        """Return the numbers of the pages that begin at these slots, from 1."""
        return starts if self.page_size == 1 else starts // self.page_size

    def swa_starts(self, starts: Starts) -> Starts:
        """Return the first window slot of each page, 0 where the page has none."""
        return np.zeros_like(starts)

    def swa_slots(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the window slot of each slot, int64, 0 where it has none; None without a sliding window."""
        return None

    def free_swa_pages(self, starts: Starts) -> None:
        """Free the window slots of pages. No effect without a sliding window."""

    def are_free(self, pages: Starts) -> NDArray[np.bool_]:
        """Return which of the pages with these numbers are free."""
        return self._marks[pages] < 0

    def free_starts(self) -> Starts:
        """The free pages, for checks of conservation. O(n)."""
        return self._stack[: self._num_free].copy()

    def check_invariants(self) -> None:
        """Raise AssertionError unless each page is free or used, once. O(n)."""
        assert not (self._stack[: self._num_free] % self.page_size).any(), "a free page is named by a slot within it"
        pages = self._stack[: self._num_free] // self.page_size
        assert len(np.unique(pages)) == self._num_free, "a page stands on the free stack twice"
        assert (self._marks[pages] < 0).all(), "a free page is marked as used"
        num_used = np.count_nonzero(self._marks == 0)
        assert num_used + self._num_free == self.num_pages, "a page is neither free nor used"


def slot_row(indices: torch.Tensor) -> Starts:
    """Return slots that a caller named as a 1-D array, int64.

    Raises:
        SlotError: they are not a 1-D tensor of integers.
    """
    try:
        slots = torch.as_tensor(indices).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):  # from torch, for an argument that is no tensor of numbers
        if isinstance(indices, torch.Tensor):  # a device that failed, say
            raise
        raise SlotError(f"slots must be a 1-D row of integers, not {type(indices).__name__}") from None
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and slots.size):
        raise SlotError(f"slots must be a 1-D row of integers, not {slots.dtype} of shape {slots.shape}")
    return slots.astype(np.int64, copy=False)
