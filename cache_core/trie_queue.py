"""The eviction candidates of a `RadixTrie`: unused leaves, the least recently used first."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from raydix.cache_core.trie_node import TrieNode


class TrieQueue:
    """A lazy heap: an entry is checked when it is popped, not when its node changes.

    A node has one entry at most, `[stamp, number, node]`, and a leaf that gets a child hands its entry on to it: a
    chain of thousands of nodes has one. A touch only makes a node younger, so an entry whose stamp is old is put
    back with the new one and order is exact. O(log n) per push, and per pop when spread over the pushes.
    """

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        self._num_pushed = 0  # of two entries with one stamp, the older goes first

    def push(self, leaf: TrieNode) -> None:
        """Queue an unused leaf; one that stands in the queue stays where it is."""
        if leaf.entry is None:
            self._num_pushed += 1
            leaf.entry = [leaf.last_access_time, self._num_pushed, leaf]
            heappush(self._heap, leaf.entry)

    def hand_on(self, parent: TrieNode, child: TrieNode) -> None:
        """Queue `child`, the new leaf below `parent`, in the place of `parent` if that has one. O(1) then."""
        if parent.entry is None:
            self.push(child)
            return
        child.entry, parent.entry = parent.entry, None
        child.entry[2] = child

    def pop(self) -> TrieNode | None:
        """Take the least recently used unused leaf; None if there is none."""
        while self._heap:
            stamp, _, node = heappop(self._heap)
            assert isinstance(node, TrieNode)
            node.entry = None
            if node.root is None or node.children or node.users:
                continue  # it will be queued again when it is an unused leaf
            if node.last_access_time == stamp:
                return node
            self.push(node)
        return None

    def check(self, nodes: list[TrieNode]) -> None:
        """Raise AssertionError unless these nodes' entries are theirs alone, no younger than they, and all there are.

        O(n).
        """
        entries = [(node, node.entry) for node in nodes if node.entry is not None]
        for node, entry in entries:
            assert entry[2] is node, f"{node} has the entry of {entry[2]}"
            assert entry[0] <= node.last_access_time, f"{node} would be evicted too late"
        assert {id(entry) for entry in self._heap} == {id(entry) for _, entry in entries}, "entries of no node"
        assert len(self._heap) == len(entries), "an entry stands in the queue twice"
