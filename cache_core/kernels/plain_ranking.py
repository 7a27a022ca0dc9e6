"""Nodes in the order of their ranks, in plain Python: the equivalent of `c/_ranking.c`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


class Ranking:
    """Nodes in ascending order of rank, then of id; the base of `EvictionQueue`.

    Nodes must be pushed in rank order. A node that ranks below the last one is a late node: `_push_late` gives it to
    the subclass, which also defines `_discard_late`, `_touch_late` and `_pop_late`. If ranks are integers, the compiled
    class first tries the last `reach` positions. It links the nodes, so a node can be in one compiled ranking at most.

    Attributes:
        reach: the number of positions that a push tries, from the end; 0 in plain Python.
    """

    reach = 0

    def __init__(self, rank: Callable[[Any], Any]) -> None:
        self.rank = rank
        self.num_late = 0  # the subclass counts them
        self._ranks: OrderedDict[Any, Any] = OrderedDict()  # ranks by node, ascending

    def push(self, node: Any) -> None:
        """Add a node, which must be in no ranking."""
        assert node not in self._ranks, f"{node} stands in a queue"
        self._put(node, self.rank(node))

    def discard(self, node: Any) -> None:
        """Remove a node if it is in the ranking or a late node."""
        if node in self._ranks:
            del self._ranks[node]
        elif self.num_late:
            self._discard_late(node)

    def touch(self, node: Any) -> None:
        """Move a node to the place of its current rank, if it is in the ranking or a late node."""
        if node not in self._ranks:
            if self.num_late:
                self._touch_late(node)
        elif (rank := self.rank(node)) != self._ranks[node]:
            del self._ranks[node]
            self._put(node, rank)

    def pop(self) -> Any:
        """Remove and return the node with the lowest rank; None if there is none."""
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
        """Return rank, id and node of the first node, late ones excluded; None if there is none."""
        if not self._ranks:
            return None
        node, rank = next(iter(self._ranks.items()))
        return rank, node.id, node

    def ranked(self) -> list[tuple[Any, int, Any]]:
        """Return rank, id and node of each node in order, late ones excluded."""
        return [(rank, node.id, node) for node, rank in self._ranks.items()]

    def is_ranked(self, node: Any) -> bool:
        """Return whether a node is in the ranking, not a late node."""
        return node in self._ranks

    def clear_ranked(self) -> None:
        """Remove all nodes but the late ones."""
        self._ranks.clear()

    @property
    def num_ranked(self) -> int:
        """The number of nodes, late ones excluded."""
        return len(self._ranks)

    def _push_late(self, node: Any, rank: Any) -> None:
        raise NotImplementedError

    def _discard_late(self, node: Any) -> None:
        raise NotImplementedError

    def _touch_late(self, node: Any) -> None:
        raise NotImplementedError

    def _pop_late(self) -> Any:
        raise NotImplementedError
