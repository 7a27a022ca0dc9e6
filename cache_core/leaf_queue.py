"""The queue of eviction candidates: unlocked leaves, the least recently used first."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from raydix.cache_core.tree_node import TreeNode

_FIRST = -1  # the stamp of nodes that go before all others
_MIN_COMPACTED = 64  # entries; below that, compacting is not worth it


class LeafQueue:
    """A lazy heap: an entry is checked when it is popped, not when its node changes.

    A live node has one entry at most (`node.queued`), so the heap never outgrows the tree. A touch only makes a node
    younger, so an entry whose stamp is old is put back with the new one and order is exact. O(log n) per pop.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._compact_at = _MIN_COMPACTED

    def push(self, leaf: TreeNode) -> None:
        """Queue an unlocked leaf. One that stands in the queue stays where it is, unless its namespace was retired:
        then it goes to the front, and its old entry is passed over when it comes up."""
        if not leaf.queued or not leaf.space.live:
            leaf.queued = True
            heappush(self._heap, (_stamp(leaf), leaf.id, leaf))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> TreeNode | None:
        """Take the least recently used unlocked leaf; None if there is none."""
        heap = self._heap
        while heap:
            stamp, _, node = heappop(heap)
            node.queued = False
            if node.slots is None or node.children or node.lock_ref:
                continue  # it will be queued again when it is an unlocked leaf
            if _stamp(node) == stamp:
                return node
            self.push(node)
        return None

    def pop_retired(self) -> TreeNode | None:
        """Take an unlocked leaf of a retired namespace; None if there is none."""
        while self._heap and self._heap[0][0] == _FIRST:
            node = self.pop()
            if node is None or not node.space.live:
                return node
            self.push(node)
        return None

    def _compact(self) -> None:
        """Drop the entries of nodes that left the tree. O(n), at most once each time the heap has doubled."""
        self._heap = [entry for entry in self._heap if entry[2].slots is not None]
        heapify(self._heap)
        self._compact_at = max(_MIN_COMPACTED, 2 * len(self._heap))

    def clear(self) -> None:
        """Forget every candidate."""
        for _, _, node in self._heap:
            node.queued = False
        self._heap.clear()

    def __len__(self) -> int:
        return len(self._heap)


def _stamp(node: TreeNode) -> int:
    return node.last_access_time if node.space.live else _FIRST
