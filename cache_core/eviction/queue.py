"""`EvictionQueue`: the candidates of one eviction order, the one to go next first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raydix.cache_core import kernels
from raydix.cache_core.eviction.sorted_runs import SortedRuns
from raydix.cache_core.kernels import plain_kernels
from raydix.cache_core.tree.tree_node import TreeNode

Rank = Any  # of one type within a queue, and ordered: the lowest goes first
Entry = tuple[Rank, int, TreeNode]  # with the node's id: of equal ranks the older node goes first


if TYPE_CHECKING:

    class _AnyRanking(plain_kernels.Ranking):
        def pop(self) -> TreeNode | None: ...
        def first_ranked(self) -> Entry | None: ...

else:
    _AnyRanking = object  # it is mixed into both kinds of ranking


class _Queue(_AnyRanking):
    """The nodes that may go now, in order; nothing in it is ever out of date.

    Its owner may have others stand in it, and lay them aside when they come up.

    What comes in the order of its rank, as new nodes and nodes just used do under LRU, stands in a ranking, where
    pushing, moving to the end and taking out are O(1). Compiled, what comes a few places late stands there, too, as
    where leases end in another order than they began. What comes later, as a parent whose last child has gone, is
    sorted in beside it, O(log n) and a short move. No operation does the work of another: there is no single slow one.

    Args:
        rank: what orders the nodes. Whoever changes it of one that stands here tells by `touch`.
    """

    def __init__(self, rank: Callable[[TreeNode], Rank]) -> None:
        super().__init__(rank)
        self._late = SortedRuns()  # of entries
        self._late_ranks: dict[TreeNode, Rank] = {}

    def first(self) -> Entry | None:
        """The candidate of the lowest rank, and before it what orders it among all nodes; None if there is none."""
        late: Entry | None = self._late.first()
        head = self.first_ranked()
        if head is None or (late is not None and late[:2] < head[:2]):
            return late
        return head

    def clear(self) -> None:
        """Forget every candidate."""
        self.clear_ranked()
        self._late.clear()
        self._late_ranks.clear()
        self.num_late = 0

    def __contains__(self, node: TreeNode) -> bool:
        return self.is_ranked(node) or node in self._late_ranks

    def __len__(self) -> int:
        return self.num_ranked + len(self._late_ranks)

    # ---------------------------------------------------------------- what comes late

    def _push_late(self, node: TreeNode, rank: Rank) -> None:
        assert node not in self._late_ranks, f"{node} stands in a queue"
        self._late_ranks[node] = rank
        self._late.add((rank, node.id, node))
        self.num_late += 1

    def _discard_late(self, node: TreeNode) -> None:
        if node in self._late_ranks:
            self._late.remove((self._late_ranks.pop(node), node.id, node))
            self.num_late -= 1

    def _touch_late(self, node: TreeNode) -> None:
        if node in self._late_ranks and self._late_ranks[node] != self.rank(node):
            self._discard_late(node)
            self.push(node)

    def _pop_late(self) -> TreeNode | None:
        """`pop` while there are late ones."""
        first = self.first()
        assert first is not None, "there is at least one"
        self.discard(first[2])
        return first[2]

    def check(self, candidates: set[TreeNode]) -> None:
        """Raise AssertionError unless these are exactly the candidates, in their order. O(n log n)."""
        ranked = self.ranked()
        queued = {node for _, _, node in ranked} | set(self._late_ranks)
        assert len(self) == len(candidates) and queued == candidates, (
            f"queued wrongly or not at all: {candidates ^ queued}"
        )
        assert [entry[:2] for entry in ranked] == sorted(entry[:2] for entry in ranked), "the ranking is out of order"
        late = [(rank, node.id) for node, rank in self._late_ranks.items()]
        assert [entry[:2] for entry in self._late] == sorted(late), "the late ones are out of order"
        assert self.num_late == len(late), f"{self.num_late=}, but there are {len(late)}"
        known = {node: rank for rank, _, node in ranked} | self._late_ranks
        for node in candidates:
            assert self.rank(node) == known[node], f"{node} has another rank now: {self.rank(node)}"


class EvictionQueue(_Queue, kernels.Ranking):
    """A queue for nodes that stand in no other of this class."""


class SideQueue(_Queue, plain_kernels.Ranking):
    """A queue for nodes that may stand in others, too: slower."""

    def use(self, nodes: list[tuple[TreeNode, Rank]]) -> None:
        """Nodes whose ranks are these now, higher than all others, in their order: what stands here goes to the end."""
        ranks, late = self._ranks, self._late_ranks
        for node, rank in nodes:
            if node in ranks:
                ranks[node] = rank
                ranks.move_to_end(node)
            elif node in late:
                self._discard_late(node)
                ranks[node] = rank
