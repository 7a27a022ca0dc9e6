"""`EvictionQueue`: the candidates of one eviction order, the one to go next first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from raydix.cache_core.sorted_runs import SortedRuns
from raydix.cache_core.tree_node import TreeNode

Rank = Any  # of one type within a queue, and ordered: the lowest goes first
Key = tuple[Rank, int]  # rank and node id: of equal ranks the older node goes first


class EvictionQueue:
    """Exactly the nodes that may go now, in order; nothing in it is ever out of date.

    What comes in the order of its rank, as new nodes and nodes just used do under LRU, stands in a row, where pushing,
    moving to the end and taking out are O(1). What comes late, as a parent whose last child has gone, is sorted in
    beside it, O(log n) and a short move. No operation does the work of another: there is no single slow one.

    Args:
        rank: what orders the nodes. Whoever changes it tells by `touch`.
    """

    def __init__(self, rank: Callable[[TreeNode], Rank]) -> None:
        self._rank = rank
        self._row: OrderedDict[TreeNode, Rank] = OrderedDict()  # ascending
        self._row_end: Rank = None  # no rank of the row is higher,
        self._row_end_id = -1  # and of those that are as high, no id
        self._late = SortedRuns()  # of (rank, id, node)
        self._late_keys: dict[TreeNode, Key] = {}

    def push(self, node: TreeNode) -> None:
        """A node became a candidate."""
        assert node not in self._row and node not in self._late_keys, f"{node} stands in the queue"
        rank, number = self._rank(node), node.id
        if not self._row or rank > self._row_end or self._is_last(rank, number):
            self._row[node] = rank
            self._row_end, self._row_end_id = rank, number
        else:
            self._late_keys[node] = rank, number
            self._late.add((rank, number, node))

    def discard(self, node: TreeNode) -> None:
        """A node is no candidate (now), if it was one."""
        if self._row.pop(node, None) is None and (key := self._late_keys.pop(node, None)) is not None:
            self._late.remove((*key, node))

    def touch(self, node: TreeNode) -> None:
        """The rank of a node may have changed, if it is a candidate."""
        known = self._row.get(node)
        in_row = known is not None
        if not in_row:
            if node not in self._late_keys:
                return
            known = self._late_keys[node][0]
        rank, number = self._rank(node), node.id
        if rank == known:
            return
        if in_row and self._is_last(rank, number):
            self._row[node] = rank
            self._row.move_to_end(node)
            self._row_end, self._row_end_id = rank, number
        else:
            self.discard(node)
            self.push(node)

    def _is_last(self, rank: Rank, number: int) -> bool:
        """Whether nothing in the row, which is not empty, goes after it."""
        return bool(rank > self._row_end or (rank == self._row_end and number >= self._row_end_id))

    def first(self) -> tuple[Rank, int, TreeNode] | None:
        """The candidate of the lowest rank, and before it what orders it among all nodes; None if there is none."""
        late: tuple[Rank, int, TreeNode] | None = self._late.first()
        if self._row:
            node, rank = next(iter(self._row.items()))
            if late is None or (rank, node.id) < late[:2]:
                return rank, node.id, node
        return late

    def pop(self) -> TreeNode | None:
        """Take out the candidate of the lowest rank; None if there is none."""
        late = self._late.first() if self._late_keys else None
        if self._row:
            node = next(iter(self._row))
            if late is None or (self._row[node], node.id) < late[:2]:
                del self._row[node]
                return node
        if late is None:
            return None
        self._late.pop_first()
        late_node: TreeNode = late[2]
        del self._late_keys[late_node]
        return late_node

    def clear(self) -> None:
        """Forget every candidate."""
        self._row.clear()
        self._late.clear()
        self._late_keys.clear()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._row or node in self._late_keys

    def __len__(self) -> int:
        return len(self._row) + len(self._late_keys)

    def check(self, candidates: set[TreeNode]) -> None:
        """Raise AssertionError unless these are exactly the candidates, in their order. O(n log n)."""
        assert len(self) == len(candidates) and all(node in self for node in candidates), (
            f"queued wrongly or not at all: {candidates ^ {*self._row, *self._late_keys}}"
        )
        keys = [(rank, node.id) for node, rank in self._row.items()]
        assert keys == sorted(keys), "the row is out of order"
        assert [entry[:2] for entry in self._late] == sorted(self._late_keys.values()), "the late ones are out of order"
        for node in candidates:
            rank = self._rank(node)
            known = self._row[node] if node in self._row else self._late_keys[node][0]
            assert rank == known, f"{node} has another rank now: {rank}"
