"""A queue of eviction candidates of any kind, the least recently used first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar


class Queueable(Protocol):
    """What can stand in a `RecencyQueue`."""

    last_used: int
    queued: bool  # written by the queue only


Item = TypeVar("Item", bound=Queueable)


class RecencyQueue(Generic[Item]):
    """A line and a lazy heap: an entry is checked when it is popped, not when its item changes.

    What is pushed in the order of its use, as new items are, stands in line; the heap takes what comes out of order.
    An item has one entry at most (`item.queued`). A use only makes an item younger, so an entry whose stamp is old is
    put back with the new one and order is exact. What was discarded leaves when it is popped, or all together once it
    is half of the queue. O(1) per item from the line, O(log n) from the heap.
    """

    def __init__(self) -> None:
        self._line: deque[tuple[int, int, Item]] = deque()  # stamp, a number that no other entry has, item
        self._heap: list[tuple[int, int, Item]] = []
        self._number = count()
        self._num_discarded = 0

    def push(self, item: Item) -> None:
        """Queue an item; one that stands in the queue stays where it is."""
        if item.queued:
            return
        item.queued = True
        entry = (item.last_used, next(self._number), item)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heappush(self._heap, entry)

    def pop(self, is_candidate: Callable[[Item], bool]) -> Item | None:
        """Take out the least recently used candidate; None if there is none.

        What is no candidate leaves the queue, too: push it again once it is one.
        """
        while self._line or self._heap:
            stamp, _, item = self._take_first()
            if not item.queued:
                self._num_discarded -= 1
                continue
            item.queued = False
            if not is_candidate(item):
                continue
            if item.last_used == stamp:
                return item
            self.push(item)
        return None

    def _take_first(self) -> tuple[int, int, Item]:
        if self._line and not (self._heap and self._heap[0] < self._line[0]):
            return self._line.popleft()
        return heappop(self._heap)

    def discard(self, item: Item) -> None:
        """Forget an item for good: it must not be pushed again."""
        if not item.queued:
            return
        item.queued = False
        self._num_discarded += 1
        if self._num_discarded * 2 > self.num_entries:
            self._line = deque(entry for entry in self._line if entry[2].queued)
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapify(self._heap)
            self._num_discarded = 0

    @property
    def num_entries(self) -> int:
        """Items in the queue, and those discarded that still stand in it."""
        return len(self._line) + len(self._heap)

    def __len__(self) -> int:
        """How many items stand in the queue."""
        return self.num_entries - self._num_discarded
