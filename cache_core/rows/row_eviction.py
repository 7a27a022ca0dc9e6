"""`RowEviction`: the eviction order of whole rows.

Rules, checked by `check`:

1. Every row is in the queue, or is parked because its slot is taken, or has a pin on its path.
2. The mask of recorded slots has exactly the slots with a row. It is compared with the allocator's free slots.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.rows.row_tree import Row
from raydix.cache_core.rows.slot_allocator import SlotAllocator, SlotMask


class RowEviction:
    """The rows with slots that are free in the allocator, least recently used first. Without an allocator: all rows.

    The allocator does not notify the queue when a slot is taken or freed. So `pop` parks a row if its slot is taken,
    and queues it again once the slot is free.
    """

    def __init__(self, allocator: SlotAllocator | None) -> None:
        num_slots = allocator.max_slots if allocator is not None else 0
        self._allocator = allocator
        self._queue: RecencyQueue[Row] = RecencyQueue(attrgetter("last_used"))
        self._recorded = SlotMask(num_slots)
        self._parked = SlotMask(num_slots)

    def add(self, row: Row) -> None:
        """Queue a new row."""
        if self._allocator is not None:
            self._recorded.add(row.slot)
        self._queue.push(row)

    def discard(self, row: Row) -> None:
        """Remove a row, because its record is dropped."""
        self._queue.discard(row)
        if self._allocator is not None:
            self._recorded.discard(row.slot)
            self._parked.discard(row.slot)

    def requeue(self, row: Row) -> None:
        """Queue a row again, because its path may have fewer pins."""
        if self._allocator is None or row.slot not in self._parked:
            self._queue.push(row)

    def pop(self, rows: dict[int, Row]) -> Row | None:
        """Remove and return the least recently used row that is released and has no pin; None if there is none.

        Args:
            rows: all rows, by slot.
        """
        if self._allocator is not None:
            for slot in self._parked.common(self._allocator.free_mask):
                self._parked.discard(slot)
                self._queue.push(rows[slot])
        return self._queue.pop(self._may_go)

    def _may_go(self, row: Row) -> bool:
        if self._allocator is not None and not self._allocator.is_free(row.slot):
            self._parked.add(row.slot)
            return False
        return not row.is_pinned

    def lowest_empty_slot(self) -> int:
        """Return the lowest free slot without a row; -1 if there is none."""
        return -1 if self._allocator is None else self._allocator.free_mask.lowest_outside(self._recorded)

    def check(self, rows: Collection[Row]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        self._queue.check_invariants()
        self._recorded.check_invariants()
        self._parked.check_invariants()
        parked = set(self._parked.common(self._parked))
        for row in rows:
            assert row in self._queue or row.slot in parked or row.is_pinned, f"rule 1 at {row}"
        slots = {row.slot for row in rows}
        num_queued = sum(row in self._queue for row in rows)
        assert len(self._queue) == num_queued, f"rule 1: {len(self._queue)} rows are queued, but {num_queued} records"
        assert parked <= slots, f"rule 1: {parked=} of {slots}"
        if self._allocator is not None:
            recorded = set(self._recorded.common(self._recorded))
            assert recorded == slots, f"rule 2: {recorded=}, but the rows are {slots}"
