"""The eviction candidates of a `RadixTrie`: unused leaves, the least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from raydix.cache_core.trie.trie_node import TrieNode


class TrieQueue:
    """A row and a heap.

    Most leaves are queued the moment they were used, so they stand in a row in that order. A node that becomes a leaf
    because what was below it is gone may be older than some of the row: such nodes go to a lazy heap, whose entries
    are checked when they come up. So the front of one or the other is the victim, O(log n) at most.

    An entry is dead once its node was used again, has children or is gone, and none comes to life again: a node is
    bare of children only after what was used later than itself has been evicted, and by then its entry has come up.
    For the same reason it does not matter for the order whether a use is stamped on the ancestors, too.
    """

    def __init__(self) -> None:
        self._row: OrderedDict[TrieNode, None] = OrderedDict()  # ascending stamps, unused leaves only
        self._heap: list[tuple[int, int, TrieNode]] = []
        self._num_pushed = 0  # of two entries with one stamp, the older goes first

    def push_newest(self, leaf: TrieNode) -> None:
        """Queue an unused leaf that was used just now, wherever it stood before. O(1)."""
        self._row[leaf] = None
        self._row.move_to_end(leaf)

    def push(self, leaf: TrieNode) -> None:
        """Queue an unused leaf that has just become one, by its stamp. O(log n)."""
        self._num_pushed += 1
        heappush(self._heap, (leaf.last_access_time, self._num_pushed, leaf))

    def discard(self, node: TrieNode) -> None:
        """Forget a node that is in use or no leaf now. O(1)."""
        self._row.pop(node, None)

    def pop(self) -> TrieNode | None:
        """Take the least recently used unused leaf; None if there is none."""
        while self._heap and not _is_live(self._heap[0]):
            heappop(self._heap)
        first = next(iter(self._row), None)
        if self._heap and (first is None or self._heap[0][0] < first.last_access_time):
            return heappop(self._heap)[2]
        if first is not None:
            del self._row[first]
        return first

    def check(self, nodes: list[TrieNode]) -> None:
        """Raise AssertionError unless the unused leaves of these are what `pop` would yield, each once. O(n)."""
        leaves = {node for node in nodes if not node.children and not node.users}
        live = [entry[2] for entry in self._heap if _is_live(entry)]
        assert len(live) == len(set(live)) and self._row.keys().isdisjoint(live), "a leaf is queued twice"
        assert self._row.keys() | set(live) == leaves, f"queued wrongly or not at all: {self._row.keys() ^ leaves}"
        stamps = [leaf.last_access_time for leaf in self._row]
        assert stamps == sorted(stamps), f"the row is out of order: {stamps}"


def _is_live(entry: tuple[int, int, TrieNode]) -> bool:
    stamp, _, node = entry
    return node.last_access_time == stamp and node.root is not None and not node.children and not node.users
