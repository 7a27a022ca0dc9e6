"""`EvictionQueue`: the unlocked leaves of a tree in the order of a policy's ranks, the lowest rank first.

Entries are removed eagerly: `pop` never meets a stale one, and no operation does the work of another. A compiled
ranking links a node into one queue at most: the components order window KV and states by a `RecencyQueue`.

A node pushed in the order of its rank, as new and just used nodes are under LRU, goes to the end: O(1). A node that
goes before all others, as most parents do after their last child was evicted, stands first: O(1). Other nodes pushed
later are sorted into `LateNodes`: O(log n) and a short move.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from raydix.cache_core import kernels
from raydix.cache_core.tree.tree_node import TreeNode

# The ranks of a queue are of one ordered type; the node of the lowest rank goes first.
Rank = Any
# The id in the middle is the node's: among equal ranks the older node goes first.
Entry = tuple[Rank, int, TreeNode]

_place_of = itemgetter(0, 1)  # rank and id of an entry

_LONGEST = 1024  # entries of a run of `LateNodes`; a longer one is split in two


class LateNodes:
    """Nodes in ascending order of rank and id, which may come and go in any order.

    The entries are a list of short sorted lists: `add` and `remove` cost two bisections and a short move each.

    Attributes:
        ranks: the rank that each node was added with.
    """

    def __init__(self) -> None:
        self.ranks: dict[TreeNode, Rank] = {}
        self._runs: list[list[Entry]] = []
        self._lasts: list[Entry] = []  # the last entry of each run

    def add(self, node: TreeNode, rank: Rank) -> None:
        """Add a node.

        Raises:
            AssertionError: the node is in the queue already.
        """
        assert node not in self.ranks, f"{node} stands in a queue"
        self.ranks[node] = rank
        entry = (rank, node.id, node)
        if not self._runs:
            self._runs, self._lasts = [[entry]], [entry]
            return
        at = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        run = self._runs[at]
        insort(run, entry)
        if len(run) > _LONGEST:
            half = len(run) // 2
            self._runs[at : at + 1] = [run[:half], run[half:]]
            self._lasts[at : at + 1] = [run[half - 1], run[-1]]
        else:
            self._lasts[at] = run[-1]

    def remove(self, node: TreeNode) -> None:
        """Take out a node that is here."""
        entry = (self.ranks.pop(node), node.id, node)
        at = bisect_left(self._lasts, entry)
        run = self._runs[at]
        del run[bisect_left(run, entry)]
        if run:
            self._lasts[at] = run[-1]
        else:
            del self._runs[at], self._lasts[at]

    def first(self) -> Entry | None:
        """Return the lowest entry; None if there is none."""
        return self._runs[0][0] if self._runs else None

    def after(self, place: tuple[Rank, int]) -> Entry | None:
        """Return the lowest entry behind a rank and an id; None if there is none. O(log n)."""
        at = bisect_right(self._lasts, place, key=_place_of)
        if at == len(self._runs):
            return None
        run = self._runs[at]
        return run[bisect_right(run, place, key=_place_of)]

    def clear(self) -> None:
        """Forget every node."""
        self.ranks.clear()
        self._runs, self._lasts = [], []

    def __contains__(self, node: TreeNode) -> bool:
        return node in self.ranks

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries in ascending order."""
        for run in self._runs:
            yield from run


class EvictionQueue(kernels.RankedQueue):
    """The candidates for eviction of a tree, in rank order. A node is in one queue of this class at most.

    `push`, `discard`, `touch` and `pop` are inherited from the ranking. It hands late nodes to the hooks below.
    Compiled, a node that is a few places late goes into the ranking too, as when leases end in another order than they
    began.

    Args:
        rank: the order of the nodes. After a change of a queued node's rank, the caller must `touch` it.
    """

    def __init__(self, rank: Callable[[TreeNode], Rank]) -> None:
        super().__init__(rank)
        self._late = LateNodes()

    def first(self) -> Entry | None:
        """Return the candidate of the lowest rank as (rank, id, node); None if there is none."""
        head, late = self.first_ranked(), self._late.first()
        return late if head is None or (late is not None and late[:2] < head[:2]) else head

    def late_after(self, place: tuple[Rank, int] | None) -> Entry | None:
        """Return the lowest late entry behind a rank and an id, or of all; None if there is none. O(log n)."""
        if not self.num_late:
            return None
        return self._late.first() if place is None else self._late.after(place)

    def clear(self) -> None:
        """Forget every candidate."""
        self.clear_ranked()
        self._late.clear()
        self.num_late = 0

    def __contains__(self, node: TreeNode) -> bool:
        return self.is_ranked(node) or node in self._late

    def __len__(self) -> int:
        return self.num_ranked + len(self._late)

    def _push_late(self, node: TreeNode, rank: Rank) -> None:
        self._late.add(node, rank)
        self.num_late += 1

    def _discard_late(self, node: TreeNode) -> None:
        if node in self._late:
            self._late.remove(node)
            self.num_late -= 1

    def _touch_late(self, node: TreeNode) -> None:
        if node in self._late and self._late.ranks[node] != self.rank(node):
            self._discard_late(node)
            self.push(node)

    def _pop_late(self) -> TreeNode | None:
        """Return the result of `pop` while there are late nodes."""
        first = self.first()
        assert first is not None, "there is at least one"
        self.discard(first[2])
        return first[2]

    def check(self, candidates: set[TreeNode]) -> None:
        """Raise AssertionError unless the queue holds exactly `candidates`, in their order. O(n log n)."""
        ranked, late = self.ranked(), list(self._late)
        for part in (ranked, late):
            assert [entry[:2] for entry in part] == sorted(entry[:2] for entry in part), f"out of order: {part}"
        ranks = {node: rank for rank, _, node in late}
        assert self._late.ranks == ranks, "the late nodes are not the nodes with a rank"
        assert self.num_late == len(late), f"{self.num_late=}, but there are {len(late)}"
        known = {node: rank for rank, _, node in (*ranked, *late)}
        assert known.keys() == candidates, f"queued wrongly or not at all: {candidates ^ known.keys()}"
        assert len(known) == len(self), "a node is queued twice"
        for node in candidates:
            assert self.rank(node) == known[node], f"{node} has another rank now: {self.rank(node)}"
