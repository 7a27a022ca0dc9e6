"""`SWATokenToKVPoolAllocator`: the allocator of slots with a full half and a sliding-window half."""

from __future__ import annotations

from operator import index

import numpy as np
import torch

from raydix.cache_core.errors import OutOfSlotsError, SlotError
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator, slot_row
from raydix.cache_core.tree.packed_slots import Starts


class SWATokenToKVPoolAllocator(TokenToKVPoolAllocator):
    """An allocator of pages that each have a full half and a window half, a page of the smaller window pool.

    A slot's id is that of its full half; `swa_slots` maps it to its window slot, or 0 if that was freed. A window half
    can be freed earlier than its full half, and is freed with it at the latest.
    """

    swa: TokenToKVPoolAllocator

    def __init__(self, num_slots: int, num_swa_slots: int, page_size: int = 1) -> None:
        super().__init__(num_slots, page_size)
        self.swa = TokenToKVPoolAllocator(num_swa_slots, page_size)
        self.num_swa_slots = self.swa.num_slots
        self._swa_start = np.zeros(self.num_pages + 1, np.int64)  # by page number of the full half

    def swa_available_size(self) -> int:
        """Return the number of free window slots. O(1)."""
        return self.swa.available_size()

    def can_alloc(self, num_tokens: int) -> bool:
        """Return whether `alloc(num_tokens)` would succeed now."""
        return super().can_alloc(num_tokens) and self.swa.can_alloc(num_tokens)

    def alloc_pages(self, num_pages: int, num_windows: int | None = None) -> Starts:
        """Allocate pages with both halves; return the first slot of each.

        Args:
            num_windows: only so many pages, the last ones, get window halves; None: all do.

        Raises:
            OutOfSlotsError: too few pages are free in one of the pools; nothing was allocated.
            SlotError: `num_pages` is negative.
        """
        num_pages = index(num_pages)
        num_windows = num_pages if num_windows is None else num_windows
        needed = num_windows * self.page_size
        if needed > self.swa.available_size():
            raise OutOfSlotsError(needed, self.swa.available_size(), 0, self.num_swa_slots, "window slots")
        starts = super().alloc_pages(num_pages)
        self._swa_start[self.page_numbers(starts[num_pages - num_windows :])] = self.swa.alloc_pages(num_windows)
        return starts

    def free_pages(self, starts: Starts) -> None:
        """Free pages, given by their first slots, and their window halves.

        Raises:
            SlotError: a page is out of range, free already or given twice, or a slot is not the first of a page;
                nothing changed.
        """
        super().free_pages(starts)
        pages = self.page_numbers(starts)
        halves = self._swa_start[pages]
        self._swa_start[pages] = 0
        self.swa.free_pages(halves[halves > 0])

    def free_swa(self, indices: torch.Tensor) -> None:
        """Free the window halves of all pages that have a slot in `indices`. The full halves stay allocated.

        Raises:
            SlotError: a slot is out of range, a page has no window half, slots of one page are not neighbours, or
                `indices` is not a 1-D tensor of integers; nothing changed.
        """
        self.free_swa_pages(self.starts_of(slot_row(indices)))

    def free_swa_pages(self, starts: Starts) -> None:
        """Free the window halves of pages, given by their first slots. Raises SlotError as `free_swa`."""
        pages = self.page_numbers(starts)
        if len(pages) and (pages.item(pages.argmin()) < 1 or pages.item(pages.argmax()) > self.num_pages):
            raise SlotError(f"freed window halves must be in [{self.page_size}, {self.num_slots + self.page_size})")
        halves = self._swa_start.take(pages)
        if np.count_nonzero(halves) < len(halves):
            raise SlotError("freed window halves must be allocated: some are free already")
        self.swa.free_pages(halves)
        self._swa_start[pages] = 0

    def transfer_swa(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Move the window halves of the pages with slots in `src` to the pages with slots in `dst`, in order.

        Only the mapping changes; no KV is copied. Slot i of `src` and of `dst` must have the same offset in its page.

        Raises:
            SlotError: a page of `src` has no window half; a page of `dst` has one or is free; slots of one page are not
                neighbours; the offsets differ; or an argument is not a 1-D tensor of integers. Nothing changed.
        """
        source, target, page = slot_row(src), slot_row(dst), self.page_size
        sources, targets = self.page_numbers(self.starts_of(source)), self.page_numbers(self.starts_of(target))
        alike = len(source) == len(target) and len(sources) == len(targets)
        if not alike or (page > 1 and ((source - target) % page).any()):
            raise SlotError("src and dst must have equally many slots and pages, and equal offsets in the pages")
        if not len(sources):
            return
        pages = np.sort(np.concatenate((sources, targets)))
        if pages[0] < 1 or pages[-1] > self.num_pages or (pages[1:] == pages[:-1]).any():
            raise SlotError("src and dst must name each page once, and only pages of the pool")
        halves = self._swa_start[sources]
        if not halves.all() or self._swa_start[targets].any() or self.are_free(targets).any():
            raise SlotError("pages of src must have window halves; pages of dst must be allocated and have none")
        self._swa_start[targets] = halves
        self._swa_start[sources] = 0

    def take_all(self) -> None:
        """Take all pages and all window halves, before the first allocation. No page has a window half then."""
        super().take_all()
        self.swa.take_all()

    def give_swa(self, starts: Starts, swa_starts: Starts) -> None:
        """Give taken pages window halves that are taken, and that no page has."""
        self._swa_start[self.page_numbers(starts)] = swa_starts

    def swa_starts(self, starts: Starts) -> Starts:
        """Return the first window slot of each page, 0 if its window half was freed."""
        halves: Starts = self._swa_start[starts // self.page_size]
        return halves

    def swa_slots(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the window slot of each slot, int64, 0 for padding and for freed window halves.

        Raises:
            SlotError: a slot is out of range, or `indices` is not a 1-D tensor of integers.
        """
        slots = slot_row(indices)
        past = self.num_slots + self.page_size
        if slots.size and slots.view(np.uint64).max() >= past:  # as unsigned, a negative slot is too large
            raise SlotError(f"slots must be in [0, {past})")
        halves = self.swa_starts(slots)
        return torch.from_numpy(np.where(halves > 0, halves + slots % self.page_size, 0))

    def check_invariants(self) -> None:
        """Raise AssertionError unless every window half is either free or belongs to one used page. O(n)."""
        super().check_invariants()
        self.swa.check_invariants()
        halves = self._swa_start[self._swa_start > 0]
        assert len(np.unique(halves)) == len(halves), "two pages share a window half"
        num_others = len(self.swa.kept_starts()) * self.page_size + self.swa.available_size()
        assert len(halves) * self.page_size + num_others == self.num_swa_slots, "a window half was lost"
        assert not self.are_free(np.flatnonzero(self._swa_start)).any(), "a free page has a window half"
