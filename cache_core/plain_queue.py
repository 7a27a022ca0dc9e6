"""Rows of nodes in plain Python: the twin of `_queue.c`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class Row:
    """Nodes in the order of their ranks, and of their ids where those are equal: what `EvictionQueue` is made of.

    Compiled, a node stands in one row at most: its neighbours are named in it. What is put and goes before the last
    node is not the row's: its heir keeps it, by the methods `_push_late`, `_discard_late`, `_touch_late`, `_pop_late`.
    """

    def __init__(self, rank: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.num_late = 0  # for its heir to count
        self._row: OrderedDict[Any, Any] = OrderedDict()  # ranks by node, ascending

    def push(self, node: Any) -> None:
        """A node, which stands in no row, has its place here."""
        assert node not in self._row, f"{node} stands in a queue"
        self._put(node, self.rank(node))

    def discard(self, node: Any) -> None:
        """A node has no place here (now), if it had one."""
        if node in self._row:
            del self._row[node]
        elif self.num_late:
            self._discard_late(node)

    def touch(self, node: Any) -> None:
        """The rank of a node may have changed, if it has a place here."""
        if node not in self._row:
            if self.num_late:
                self._touch_late(node)
        elif (rank := self.rank(node)) != self._row[node]:
            del self._row[node]
            self._put(node, rank)

    def pop(self) -> Any:
        """Take out the node that goes first; None if there is none."""
        if self.num_late:
            return self._pop_late()
        return self._row.popitem(last=False)[0] if self._row else None

    def _put(self, node: Any, rank: Any) -> None:
        if self._row:
            last = next(reversed(self._row))
            if not (rank > self._row[last] or (rank == self._row[last] and node.id >= last.id)):
                self._push_late(node, rank)
                return
        self._row[node] = rank

    def row_head(self) -> tuple[Any, int, Any] | None:
        """Rank, id and node of the first in the row; None if it is empty."""
        if not self._row:
            return None
        node, rank = next(iter(self._row.items()))
        return rank, node.id, node

    def row_entries(self) -> list[tuple[Any, int, Any]]:
        """Rank, id and node of all in the row."""
        return [(rank, node.id, node) for node, rank in self._row.items()]

    def row_holds(self, node: Any) -> bool:
        """Whether a node stands in the row."""
        return node in self._row

    def row_clear(self) -> None:
        """Empty the row."""
        self._row.clear()

    @property
    def row_length(self) -> int:
        """How many stand in the row."""
        return len(self._row)

    def _push_late(self, node: Any, rank: Any) -> None:
        raise NotImplementedError

    def _discard_late(self, node: Any) -> None:
        raise NotImplementedError

    def _touch_late(self, node: Any) -> None:
        raise NotImplementedError

    def _pop_late(self) -> Any:
        raise NotImplementedError
