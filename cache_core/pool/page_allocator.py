"""`TokenToKVPoolAllocator`: the allocator of a pool's slots, in whole pages."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import NoReturn, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import OutOfSlotsError, SlotError
from raydix.cache_core.kernels import free_pages
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts


class PageKeeper(Protocol):
    """Takes over freed pages that may not be used again yet."""

    def keep(self, starts: Starts) -> Starts:
        """Take over some of the pages that are being freed; return the others, which are free from now on.

        Raises:
            SlotError: a page is kept already; nothing changed.
        """

    def kept_starts(self) -> Starts:
        """Return the first slots of the pages that are kept, for invariant checks. O(n)."""


class TokenToKVPoolAllocator:
    """An allocator of slots in whole pages. Free pages are kept on a stack: the page freed last is reused first.

    Slot ids run from `page_size` to `num_slots + page_size - 1`: page 0 is reserved for padding. Allocating and
    freeing cost O(pages) in numpy. The pool has no window slots; `SWATokenToKVPoolAllocator` adds them.

    Attributes:
        num_pages: pages of the pool.
        keeper: takes over some of the pages that are freed, which are neither free nor a caller's then; None: all are
            free.
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
        self.on_free: Callable[[Starts], None] | None = None  # called with the first slots of freed pages
        self.keeper: PageKeeper | None = None
        self.num_pages = num_slots // page_size
        self._stack: Starts = np.arange(self.num_pages, 0, -1, dtype=np.int64) * page_size
        self._num_free = self.num_pages
        self._marks = np.full(self.num_pages + 1, -1, np.int32)  # by page number: 0 if allocated, else negative
        self._lane = np.arange(page_size, dtype=np.int64)

    def available_size(self) -> int:
        """Return the number of free slots. O(1)."""
        return self._num_free * self.page_size

    def can_alloc(self, num_tokens: int) -> bool:
        """Return whether `alloc(num_tokens)` would succeed now."""
        return 0 <= index(num_tokens) <= self.available_size()

    def alloc(self, num_tokens: int) -> torch.Tensor:
        """Allocate pages for `num_tokens` tokens; return a slot per token, int64. The caller must `free` them.

        The rest of the last page is unused.

        Raises:
            OutOfSlotsError: too few slots are free; nothing was allocated.
            SlotError: `num_tokens` is negative.
        """
        num_tokens = index(num_tokens)
        if num_tokens < 0:
            raise SlotError(f"cannot allocate {num_tokens} slots: num_tokens must not be negative")
        starts = self.alloc_pages(-(-num_tokens // self.page_size))
        if self.page_size == 1:
            return torch.from_numpy(starts)
        return torch.from_numpy((starts[:, None] + self._lane).reshape(-1)[:num_tokens])

    def alloc_pages(self, num_pages: int) -> Starts:
        """Allocate pages; return the first slot of each.

        Raises:
            OutOfSlotsError: too few pages are free; nothing was allocated.
            SlotError: `num_pages` is negative.
        """
        num_pages = index(num_pages)
        if num_pages < 0:
            raise SlotError(f"cannot allocate {num_pages} pages: num_pages must not be negative")
        left = self._num_free - num_pages
        if left < 0:
            raise OutOfSlotsError(num_pages * self.page_size, self.available_size(), 0, self.num_slots)
        starts = self._stack[left : self._num_free][::-1].copy()
        self._marks[self.page_numbers(starts)] = 0
        self._num_free = left
        return starts

    def free(self, indices: torch.Tensor) -> None:
        """Free all pages that have a slot in `indices`. Slots of one page must be neighbours, in the same call.

        Raises:
            SlotError: a slot is out of range or free already, slots of one page are not neighbours, or `indices` is not
                a 1-D tensor of integers; nothing changed.
        """
        self.free_pages(self.starts_of(slot_row(indices)))

    def starts_of(self, slots: Starts) -> Starts:
        """Return the first slot of the page of each slot, once for neighbours of one page."""
        if self.page_size > 1 and slots.size:
            pages = slots // self.page_size
            is_first = np.empty(slots.size, np.bool_)
            is_first[0] = True
            np.not_equal(pages[1:], pages[:-1], is_first[1:])
            slots = pages[is_first] * self.page_size
        return slots

    def free_pages(self, starts: Starts) -> None:
        """Free pages, given by their first slots.

        Raises:
            SlotError: a page is out of range, free already or given twice, or a slot is not the first of a page;
                nothing changed.
        """
        if self.keeper is not None:
            starts = self.keeper.keep(starts)
        num_pages = len(starts)
        if not num_pages:
            return
        fault = free_pages(starts, self._marks, self._stack, self._num_free, self.page_size)
        if fault is not None:
            self._refuse(fault)
        self._num_free += num_pages
        if self.on_free is not None:
            self.on_free(starts)

    def _refuse(self, fault: str) -> NoReturn:
        page = self.page_size
        within = f" and first in a page of {page}" if page > 1 else ""
        raise SlotError(
            {
                "outside": f"freed slots must be in [{page}, {self.num_slots + page}){within}",
                "free": "freed slots must be allocated: some are free already",
                "twice": "a page must be freed once: one is given twice in a call",
            }[fault]
        )

    def page_numbers(self, starts: Starts) -> Starts:
        """Return the numbers of the pages that begin at these slots, from 1."""
        return starts if self.page_size == 1 else starts // self.page_size

    def swa_starts(self, starts: Starts) -> Starts:
        """Return the first window slot of each page, 0 if the page has none."""
        return np.zeros_like(starts)

    def swa_slots(self, indices: torch.Tensor) -> torch.Tensor | None:
        """Return the window slot of each slot, int64, 0 if it has none; None without a sliding window."""
        return None

    def free_swa_pages(self, starts: Starts) -> None:
        """Free the window slots of pages. No effect without a sliding window."""

    def are_free(self, pages: Starts) -> NDArray[np.bool_]:
        """Return for each page number whether the page is free."""
        return self._marks[pages] < 0

    def free_starts(self) -> Starts:
        """Return the first slots of the free pages, for invariant checks. O(n)."""
        return self._stack[: self._num_free].copy()

    def take_all(self) -> None:
        """Take all pages, before the first allocation: for a keeper that has them from the start."""
        self._marks[1:], self._num_free = 0, 0

    def kept_starts(self) -> Starts:
        """Return the first slots of the pages that the keeper has, for invariant checks. O(n)."""
        return NO_STARTS if self.keeper is None else self.keeper.kept_starts()

    def check_invariants(self) -> None:
        """Raise AssertionError unless each page is either free or used. O(n)."""
        assert not (self._stack[: self._num_free] % self.page_size).any(), "a free page's slot is not its first"
        pages = self._stack[: self._num_free] // self.page_size
        assert len(np.unique(pages)) == self._num_free, "a page is on the free stack twice"
        assert (self._marks[pages] < 0).all(), "a free page is marked as used"
        num_used = np.count_nonzero(self._marks == 0)
        assert num_used + self._num_free == self.num_pages, "a page is neither free nor used"


def slot_row(indices: torch.Tensor) -> Starts:
    """Return a caller's slots as a 1-D array, int64.

    Raises:
        SlotError: `indices` is not a 1-D tensor of integers.
    """
    try:
        slots = torch.as_tensor(indices).detach().cpu().numpy()
    except (TypeError, ValueError, RuntimeError):  # torch cannot make a tensor of the argument
        if isinstance(indices, torch.Tensor):  # such as a failed device
            raise
        raise SlotError(f"slots must be a 1-D tensor of integers, not {type(indices).__name__}") from None
    if slots.ndim != 1 or (slots.dtype.kind not in "iu" and slots.size):
        raise SlotError(f"slots must be a 1-D tensor of integers, not {slots.dtype} of shape {slots.shape}")
    return slots.astype(np.int64, copy=False)
