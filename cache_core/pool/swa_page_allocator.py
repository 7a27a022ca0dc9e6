"""`SWATokenToKVPoolAllocator`: slots with a full half and a sliding-window half."""

from __future__ import annotations

from operator import index

import numpy as np
import torch

from raydix.cache_core.errors import OutOfSlotsError, SlotError
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator, slot_row
from raydix.cache_core.tree.packed_slots import Starts


class SWATokenToKVPoolAllocator(TokenToKVPoolAllocator):
    """Hands out slots of the full pool, each page with a page of the smaller sliding-window pool behind it.

    A slot's id is that of its full half; `swa_slots` maps it to the window half, 0 where that was freed. The window
    half can be freed alone, and lives no longer than the full one.
    """

    swa: TokenToKVPoolAllocator

    def __init__(self, num_slots: int, num_swa_slots: int, page_size: int = 1) -> None:
        super().__init__(num_slots, page_size)
        self.swa = TokenToKVPoolAllocator(num_swa_slots, page_size)
        self.num_swa_slots = self.swa.num_slots
        self._swa_start = np.zeros(self.num_pages + 1, np.int64)  # by page number of the full half

    def swa_available_size(self) -> int:
        """Free slots of the window pool. O(1)."""
        return self.swa.available_size()

    def can_alloc(self, num_tokens: int) -> bool:
        """Whether `alloc(num_tokens)` would succeed now."""
        return super().can_alloc(num_tokens) and self.swa.can_alloc(num_tokens)

    def alloc_pages(self, num_pages: int) -> Starts:
        """Pages with both halves.

        Raises:
            OutOfSlotsError: too few are free in one of the pools; nothing was taken.
        """
        num_pages = index(num_pages)
        needed = num_pages * self.page_size
        if needed > self.swa.available_size():
            raise OutOfSlotsError(needed, self.swa.available_size(), 0, self.num_swa_slots, "window slots")
        starts = super().alloc_pages(num_pages)
        self._swa_start[self.page_numbers(starts)] = self.swa.alloc_pages(num_pages)
        return starts

    def free_pages(self, starts: Starts) -> None:
        """Take back pages with whatever window half they still have.

        Raises:
            SlotError: a page is out of range, not handed out, or named twice; nothing changed.
        """
        super().free_pages(starts)
        pages = self.page_numbers(starts)
        halves = self._swa_start[pages]
        self._swa_start[pages] = 0
        self.swa.free_pages(halves[halves > 0])

    def free_swa(self, indices: torch.Tensor) -> None:
        """Take back the window halves of the pages that `indices` touch; the full halves stay where they are.

        Raises:
            SlotError: a page has no window half, or is named in two places, or they are no row of integers; nothing
                changed.
        """
        self.free_swa_pages(self.starts_of(slot_row(indices)))

    def free_swa_pages(self, starts: Starts) -> None:
        """`free_swa` in pages."""
        pages = self.page_numbers(starts)
        if len(pages) and (pages.item(pages.argmin()) < 1 or pages.item(pages.argmax()) > self.num_pages):
            raise SlotError(f"window halves outside [{self.page_size}, {self.num_slots + self.page_size}) were freed")
        halves = self._swa_start.take(pages)
        if np.count_nonzero(halves) < len(halves):
            raise SlotError("window halves were freed that are free already")
        self.swa.free_pages(halves)
        self._swa_start[pages] = 0

    def transfer_swa(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Move the window halves of the pages that `src` touches behind those that `dst` does, in order. No KV moves.

        Raises:
            SlotError: a source has no window half, a target has one or is not handed out, a page is named in two
                places, the slots of one row do not lie in their pages as those of the other, or either is no row of
                integers; nothing changed.
        """
        source, target, page = slot_row(src), slot_row(dst), self.page_size
        sources, targets = self.page_numbers(self.starts_of(source)), self.page_numbers(self.starts_of(target))
        alike = len(source) == len(target) and len(sources) == len(targets)
        if not alike or (page > 1 and ((source - target) % page).any()):
            raise SlotError("window halves move between rows of slots that lie alike in as many pages")
        if not len(sources):
            return
        pages = np.sort(np.concatenate((sources, targets)))
        if pages[0] < 1 or pages[-1] > self.num_pages or (pages[1:] == pages[:-1]).any():
            raise SlotError("window halves move between pages of the pool, each of which is named in one place")
        halves = self._swa_start[sources]
        if not halves.all() or self._swa_start[targets].any() or self.are_free(targets).any():
            raise SlotError("window halves move from pages that have them to pages that are handed out without them")
        self._swa_start[targets] = halves
        self._swa_start[sources] = 0

    def swa_starts(self, starts: Starts) -> Starts:
        """The first window slot of each page, 0 where it is gone."""
        halves: Starts = self._swa_start[starts // self.page_size]
        return halves

    def swa_slots(self, indices: torch.Tensor) -> torch.Tensor:
        """The window slot of each slot, int64, 0 where it is gone and for padding.

        Raises:
            SlotError: a slot is out of range, or they are no row of integers.
        """
        slots = slot_row(indices)
        past = self.num_slots + self.page_size
        if slots.size and slots.view(np.uint64).max() >= past:  # of negative ones, too
            raise SlotError(f"slots outside [0, {past}) have no window slots")
        halves = self.swa_starts(slots)
        return torch.from_numpy(np.where(halves > 0, halves + slots % self.page_size, 0))

    def check_invariants(self) -> None:
        """Raise AssertionError unless every window half is free or behind exactly one used page. O(n)."""
        super().check_invariants()
        self.swa.check_invariants()
        halves = self._swa_start[self._swa_start > 0]
        assert len(np.unique(halves)) == len(halves), "two pages share a window half"
        assert len(halves) * self.page_size + self.swa.available_size() == self.num_swa_slots, "a window half was lost"
        assert not self.are_free(np.flatnonzero(self._swa_start)).any(), "a free page has a window half"
