"""`EvictionQueue`: the candidates of one eviction order, the one to go next first."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from raydix.cache_core.tree_node import TreeNode

Rank = Any  # of one type within a queue, and ordered: the lowest goes first
_MIN_COMPACTED = 64  # entries; below that, compacting is not worth it


class EvictionQueue:
    """A lazy heap of nodes: an entry is checked when it is popped, not when its node changes.

    Whoever makes a node a candidate, or lowers the rank of one, pushes it. Nothing need be done when a node is no
    candidate any more, or its rank rises: it is passed over, or put back with its new rank, when its entry comes up. So
    order is exact, and of equal ranks the older node goes first. Of a node's entries the last counts; a queue never
    outgrows twice its nodes. O(log n) per push and pop, whatever else is locked.

    Args:
        rank: what orders the nodes.
        may_go: whether a node is a candidate now.
    """

    def __init__(self, rank: Callable[[TreeNode], Rank], may_go: Callable[[TreeNode], bool]) -> None:
        self._rank = rank
        self._may_go = may_go
        self._heap: list[tuple[Rank, int, TreeNode]] = []
        self._ranks: dict[int, Rank] = {}  # of each node's last entry, by node id
        self._compact_at = _MIN_COMPACTED

    def push(self, node: TreeNode) -> None:
        """Queue a candidate; one that stands in the queue moves only to the front."""
        rank = self._rank(node)
        queued = self._ranks.get(node.id)
        if queued is None or rank < queued:
            self._ranks[node.id] = rank
            heappush(self._heap, (rank, node.id, node))
            if len(self._heap) > self._compact_at:
                self._compact()

    def pop(self) -> TreeNode | None:
        """Take out the candidate of the lowest rank; None if there is none."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, node_id, node = heappop(heap)
            if ranks.get(node_id) != rank:
                continue  # a later entry counts
            del ranks[node_id]
            if not self._may_go(node):
                continue  # it is pushed again when it is a candidate
            now = self._rank(node)
            if now == rank:
                return node
            ranks[node_id] = now
            heappush(heap, (now, node_id, node))
        return None

    def _compact(self) -> None:
        """Drop what would be passed over. O(n), at most once each time the heap has doubled."""
        counting = [entry for entry in self._heap if self._ranks.get(entry[1]) == entry[0]]
        self._heap = [entry for entry in counting if self._may_go(entry[2])]
        self._ranks = {node_id: rank for rank, node_id, _ in self._heap}
        heapify(self._heap)
        self._compact_at = max(_MIN_COMPACTED, 2 * len(self._heap))

    def clear(self) -> None:
        """Forget every candidate."""
        self._heap.clear()
        self._ranks.clear()

    def __contains__(self, node: TreeNode) -> bool:
        return node.id in self._ranks
