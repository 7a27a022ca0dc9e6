"""What may leave a `RowTree`, and what goes next: leaves for want of nodes, whole rows for want of slots.

Rules, checked by the `check` of each:

1. A node's `lock_ref` counts its own pins and the `lock_ref`s of its children; `num_pins` counts all pins.
2. Every leaf without locks stands in the queue of leaves.
3. Every row stands in the queue of rows, or is parked because its slot was taken, or has a pin on its path.
4. `_recorded` names the slots that have a row, for an allocator to be asked about.
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter

from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.rows.row_tree import Row, RowNode, RowTree
from raydix.cache_core.rows.slot_allocator import SlotAllocator, SlotMask


class LeafEviction:
    """Pins, and the leaves without any."""

    def __init__(self, tree: RowTree) -> None:
        self.num_pins = 0  # taken and not given back
        self._tree = tree
        self._queue: RecencyQueue[RowNode] = RecencyQueue(attrgetter("last_used"))

    def offer(self, node: RowNode) -> None:
        """Queue a node if it is a leaf that may go."""
        if node.rows and _may_go(node):
            self._queue.push(node)

    def prune(self, node: RowNode) -> None:
        """Remove a node that holds no row and is not locked."""
        if not node.rows and not node.lock_ref:
            self._queue.discard(node)
            self.offer(self._tree.remove_leaf(node))

    def pin(self, node: RowNode) -> None:
        """Keep a node and those above it. O(depth in runs)."""
        self.num_pins += 1
        node.own_pins += 1
        for above in node.path_up():
            above.lock_ref += 1

    def unpin(self, node: RowNode) -> None:
        """Undo one pin of this very node. What holds no row goes. O(depth in runs)."""
        assert node.own_pins > 0, f"unpin of {node}"
        self.num_pins -= 1
        node.own_pins -= 1
        path = list(node.path_up())
        for above in path:
            above.lock_ref -= 1
        for above in path:
            self.prune(above)
        self.offer(node)

    def evict(self, num_tokens: int, used_before: int) -> tuple[int, list[RowNode]]:
        """Take unlocked leaves last used before that tick, LRU first, of the last one only the tail that is needed.

        Returns how many tokens went and the nodes that went whole, whose rows end at their parents now.
        """
        freed, removed = 0, list[RowNode]()
        while freed < num_tokens and (leaf := self._queue.pop(_may_go)) is not None:
            if leaf.last_used >= used_before:
                self._queue.push(leaf)
                break
            length = min(len(leaf), num_tokens - freed)
            freed += length
            if length < len(leaf):
                self._tree.trim(leaf, length)
                self._queue.push(leaf)
            else:
                removed.append(leaf)
                self.offer(self._tree.remove_leaf(leaf))
        return freed, removed

    def check(self) -> None:
        """Raise AssertionError if rule 1 or 2 is broken. O(n)."""
        num_pins = 0
        for _, node in self._tree.nodes():
            below = sum(child.lock_ref for child in node.children.values())
            assert node.own_pins >= 0 and node.lock_ref == node.own_pins + below, f"rule 1 at {node}"
            assert node in self._queue or not _may_go(node), f"rule 2 at {node}"
            num_pins += node.own_pins
        assert num_pins == self.num_pins, f"rule 1: {num_pins=}, but {self.num_pins=}"


class RowEviction:
    """Rows whose slot nobody has taken, the one used longest ago first. Without an allocator: all rows.

    The allocator tells nobody when a slot is taken or freed. So a row whose slot turns out to be taken is parked, and
    put back into the queue once the bits of parked and free slots meet.
    """

    def __init__(self, allocator: SlotAllocator | None) -> None:
        num_slots = allocator.max_slots if allocator is not None else 0
        self._allocator = allocator
        self._queue: RecencyQueue[Row] = RecencyQueue(attrgetter("last_used"))
        self._recorded = SlotMask(num_slots)
        self._parked = SlotMask(num_slots)

    def add(self, row: Row) -> None:
        """A new row."""
        if self._allocator is not None:
            self._recorded.add(row.slot)
        self._queue.push(row)

    def discard(self, row: Row) -> None:
        """A row of which nothing is left."""
        self._queue.discard(row)
        if self._allocator is not None:
            self._recorded.discard(row.slot)
            self._parked.discard(row.slot)

    def requeue(self, row: Row) -> None:
        """A row that may have lost a pin of its path."""
        if self._allocator is None or row.slot not in self._parked:
            self._queue.push(row)

    def pop(self, rows: dict[int, Row]) -> Row | None:
        """Take the least recently used released row without pins, of all `rows`; None if there is none."""
        if self._allocator is not None:
            for slot in self._parked.common(self._allocator.free_mask):
                self._parked.discard(slot)
                self._queue.push(rows[slot])
        return self._queue.pop(self._may_go)

    def _may_go(self, row: Row) -> bool:
        if self._allocator is not None and not self._allocator.is_free(row.slot):
            self._parked.add(row.slot)
            return False
        return not _has_pin(row)

    def lowest_empty_slot(self) -> int:
        """The lowest free slot without a row; -1 if there is none."""
        return -1 if self._allocator is None else self._allocator.free_mask.lowest_outside(self._recorded)

    def check(self, rows: Collection[Row]) -> None:
        """Raise AssertionError if rule 3 or 4 is broken. O(n)."""
        self._recorded.check_invariants()
        self._parked.check_invariants()
        parked = set(self._parked.common(self._parked))
        for row in rows:
            assert row in self._queue or row.slot in parked or _has_pin(row), f"rule 3 at {row}"
        slots = {row.slot for row in rows}
        assert len(self._queue) == sum(row in self._queue for row in rows), (
            f"rule 3: {len(self._queue)} rows are queued"
        )
        assert parked <= slots, f"rule 3: {parked=} of {slots}"
        if self._allocator is not None:
            recorded = set(self._recorded.common(self._recorded))
            assert recorded == slots, f"rule 4: {recorded=}, but the rows are {slots}"


def _may_go(node: RowNode) -> bool:
    return not node.children and not node.lock_ref


def _has_pin(row: Row) -> bool:
    return any(node.own_pins for node in row.tail.path_up())
