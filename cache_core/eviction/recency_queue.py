"""`RecencyQueue`: eviction candidates of any kind, the least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, merge
from itertools import count
from operator import itemgetter
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RecencyQueue(Generic[Item]):
    """Items in the order of their last use, in an ordered dict and a lazy heap.

    Most items are pushed right after a use: they are appended to the dict, in O(1). An item that is pushed later goes
    to the heap, in O(log n). An item has at most one valid entry. If it is used while it is in the queue, its entry is
    out of date until the item is pushed again or `pop` meets the entry and moves it, so the order is exact.

    Args:
        last_use: returns the tick of an item's last use, which must never decrease.
    """

    def __init__(self, last_use: Callable[[Item], int]) -> None:
        self._last_use = last_use
        self._recent: OrderedDict[Item, int] = OrderedDict()  # ticks ascend
        self._newest = 0  # tick of the last item that was appended to `_recent`
        self._heap: list[tuple[int, int, Item]] = []  # tick, number of the entry, item
        self._late: dict[Item, int] = {}  # items in the heap, and the number of their valid entry
        self._numbers = count()

    def push(self, item: Item) -> None:
        """Queue an item. An item that is queued already moves to the end if it is the most recently used one."""
        tick, recent = self._last_use(item), self._recent
        if tick >= self._newest:
            if item in self._late:
                self._discard_late(item)
            elif item in recent:
                del recent[item]
            recent[item] = self._newest = tick
        elif item not in recent and item not in self._late:
            number = self._late[item] = next(self._numbers)
            heappush(self._heap, (tick, number, item))

    def pop(self, is_candidate: Callable[[Item], bool] | None = None) -> Item | None:
        """Take out and return the least recently used candidate, None if there is none.

        Items that are not candidates leave the queue, too: push them again once they are.
        """
        while self._recent or self._heap:
            item, tick = self._take_first()
            if item is None or (is_candidate is not None and not is_candidate(item)):
                continue
            if self._last_use(item) == tick:
                return item
            self.push(item)
        return None

    def in_order(self) -> Iterator[Item]:
        """Yield the items, the least recently used first. The queue must not change meanwhile.

        An item that was used while it is in the queue may come where it was before. O(1) a step, and O(n log n) for the
        late items at the beginning.
        """
        late = sorted(entry[:2] for entry in self._heap if self._late.get(entry[2]) == entry[1])
        items = {number: item for item, number in self._late.items()}
        recent = ((tick, item) for item, tick in self._recent.items())
        ticks = merge(recent, ((tick, items[number]) for tick, number in late), key=itemgetter(0))
        return (item for _, item in ticks)

    def _take_first(self) -> tuple[Item | None, int]:
        """Remove the first entry; return its item, or None if the entry is invalid, and its tick."""
        recent, heap = self._recent, self._heap
        if not heap or (recent and recent[next(iter(recent))] <= heap[0][0]):
            return recent.popitem(last=False)
        tick, number, item = heappop(heap)
        if self._late.get(item) != number:
            return None, tick
        del self._late[item]
        return item, tick

    def discard(self, item: Item) -> None:
        """Remove an item if it is in the queue. O(1) amortized."""
        if item in self._recent:
            del self._recent[item]
        elif item in self._late:
            self._discard_late(item)

    def _discard_late(self, item: Item) -> None:
        """Make the heap entry of an item invalid; drop all invalid entries once they are the majority."""
        del self._late[item]
        if len(self._heap) > 2 * len(self._late):
            self._heap = [entry for entry in self._heap if self._late.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def clear(self) -> None:
        """Remove every item."""
        self._recent.clear()
        self._heap.clear()
        self._late.clear()
        self._newest = 0

    @property
    def num_entries(self) -> int:
        """Entries in the dict and in the heap, invalid ones included."""
        return len(self._recent) + len(self._heap)

    def __contains__(self, item: Item) -> bool:
        return item in self._recent or item in self._late

    def __len__(self) -> int:
        return len(self._recent) + len(self._late)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each item has one valid entry and the dict is in order. O(n)."""
        valid = [entry[2] for entry in self._heap if self._late.get(entry[2]) == entry[1]]
        assert len(valid) == len(self._late), f"{len(self._late)} items, but {len(valid)} valid entries in the heap"
        assert self._recent.keys().isdisjoint(self._late), "an item is queued twice"
        ticks = list(self._recent.values())
        assert ticks == sorted(ticks), f"the dict is out of order: {ticks}"
