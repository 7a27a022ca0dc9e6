"""Rankings of nodes in plain Python: the twin of `_ranking.c`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class Ranking:
    """Nodes in the order of their ranks, and of their ids where those are equal: what `EvictionQueue` is made of.

    Compiled, a node stands in one ranking at most: its neighbours are named in it. What is put and goes before the last
    node does not stand in it, but, compiled, where its place is among the last few, and ranks are integers. Its heir
    keeps the others, by `_push_late`, `_discard_late`, `_touch_late` and `_pop_late`.

    Attributes:
        reach: so many from the end are looked at for the place of a node.
    """

    reach = 0

    def __init__(self, rank: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.num_late = 0  # for its heir to count
        self._ranks: OrderedDict[Any, Any] = OrderedDict()  # ranks by node, ascending

    def push(self, node: Any) -> None:
        """A node, which stands in no ranking, has its place here."""
        assert node not in self._ranks, f"{node} stands in a queue"
        self._put(node, self.rank(node))

    def discard(self, node: Any) -> None:
        """A node has no place here (now), if it had one."""
        if node in self._ranks:
            del self._ranks[node]
        elif self.num_late:
            self._discard_late(node)

    def touch(self, node: Any) -> None:
        """The rank of a node may have changed, if it has a place here."""
        if node not in self._ranks:
            if self.num_late:
                self._touch_late(node)
        elif (rank := self.rank(node)) != self._ranks[node]:
            del self._ranks[node]
            self._put(node, rank)

    def pop(self) -> Any:
        """Take out the node that goes first; None if there is none."""
        if self.num_late:
            return self._pop_late()
        return self._ranks.popitem(last=False)[0] if self._ranks else None

    def _put(self, node: Any, rank: Any) -> None:
        if self._ranks:
            last = next(reversed(self._ranks))
            if not (rank > self._ranks[last] or (rank == self._ranks[last] and node.id >= last.id)):
                self._push_late(node, rank)
                return
        self._ranks[node] = rank

    def first_ranked(self) -> tuple[Any, int, Any] | None:
        """Rank, id and node of the first that stands in it; None if there is none."""
        if not self._ranks:
            return None
        node, rank = next(iter(self._ranks.items()))
        return rank, node.id, node

    def ranked(self) -> list[tuple[Any, int, Any]]:
        """Rank, id and node of all that stand in it, in order."""
        return [(rank, node.id, node) for node, rank in self._ranks.items()]

    def is_ranked(self, node: Any) -> bool:
        """Whether a node stands in it."""
        return node in self._ranks

    def clear_ranked(self) -> None:
        """Have none stand in it."""
        self._ranks.clear()

    @property
    def num_ranked(self) -> int:
        """How many stand in it."""
        return len(self._ranks)

    def _push_late(self, node: Any, rank: Any) -> None:
        raise NotImplementedError

    def _discard_late(self, node: Any) -> None:
        raise NotImplementedError

    def _touch_late(self, node: Any) -> None:
        raise NotImplementedError

    def _pop_late(self) -> Any:
        raise NotImplementedError
