"""`RowIndex`: the record of each row, and the tree that finds it. The caller compares versions.

Rules, checked by `check` besides the rules of the tree and of eviction:

1. A slot has at most one record, under its own number, never of length 0.
2. The tree holds at most `max_tokens` tokens.
"""

from __future__ import annotations

from raydix.cache_core.rows.row_eviction import RowEviction
from raydix.cache_core.rows.row_tree import Row, RowTree, path_up
from raydix.cache_core.rows.slot_allocator import SlotAllocator
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode


class RowIndex:
    """The rows, their tree, and their eviction order. Each method leaves them consistent."""

    def __init__(self, max_tokens: int, allocator: SlotAllocator | None) -> None:
        self.max_tokens = max_tokens
        self.clock = 0  # ticks at each use
        self.rows: dict[int, Row] = {}  # slot -> row
        self.tree = RowTree()
        self.released = RowEviction(allocator)

    def touch(self, node: TreeNode, end: int) -> TreeNode:
        """Make the first `end` tokens of a path the most recently used prefix; return the node that ends there.

        The prefix must end in `node`, which is split if it is longer.
        """
        node = self.tree.split(node, end)
        self.clock += 1
        node.own_access_time = self.clock
        self.tree.offer(node)
        return node

    def write(self, key: RadixKey, slot: int, slot_ver: int) -> int:
        """Record that a slot holds the tokens of `key`, as many as the capacity allows; return how many."""
        row = self.rows.get(slot)
        if row is not None and row.version != slot_ver:
            self.shorten(row, 0)
        self.drop_overwritten(slot, key)
        path, end = self.tree.walk(key)
        if path:
            node = self._grow(self.touch(path[-1], end), key)
        else:
            self.clock += 1
            node = self._grow(None, key)
        if node is None:
            return 0
        self._record(slot, slot_ver, node)
        return node.end

    def _grow(self, node: TreeNode | None, key: RadixKey) -> TreeNode | None:
        """Add the tokens of `key` beyond `node`, as many as the capacity allows; return the last node."""
        start = 0 if node is None else node.end
        missing = len(key) - start
        self.evict(self.tree.num_tokens + missing - self.max_tokens, used_before=self.clock)
        assert node is None or node in self.tree.rows, f"{node} was evicted for its own path"
        length = min(missing, self.max_tokens - self.tree.num_tokens)
        return self.tree.add_leaf(node, key, start + length, self.clock) if length else node

    def _record(self, slot: int, slot_ver: int, node: TreeNode) -> None:
        """Record that `slot` holds all tokens up to the end of `node`, as the last row on its path."""
        row = self.rows.get(slot)
        if row is None:
            row = self.rows[slot] = Row(slot, slot_ver, node, self.clock)
            self.released.add(row)
        elif row.tail.end < node.end:
            row.tail = node
        row.recorded_at = row.last_used = self.clock
        for above in path_up(row.tail):
            slots = self.tree.rows[above]
            slots.pop(slot, None)
            slots[slot] = None
        self.tree.offer(node)

    def drop_overwritten(self, slot: int, key: RadixKey) -> None:
        """Shorten the record of a slot to the tokens that it shares with `key`, unless it holds all of `key`."""
        row = self.rows.get(slot)
        if row is None:
            return
        path, end = self.tree.walk(key)
        held = next((node.end for node in reversed(path) if slot in self.tree.rows[node]), 0)
        if min(end, held) < len(key):
            self.shorten(row, min(end, held))

    def shorten(self, row: Row, length: int) -> None:
        """Remove a row from all nodes beyond `length`, and the nodes that are no longer needed."""
        node = row.tail
        while node.end > length:
            if node.end - len(node) < length:
                self.tree.split(node, length)
            parent = node.parent
            assert parent is not None
            del self.tree.rows[node][row.slot]
            self.tree.prune(node)
            node = parent
        self._move_tail(row, node)

    def _move_tail(self, row: Row, node: TreeNode) -> None:
        """End a row at `node`, after it was removed from the nodes below. Forget it if no token is left."""
        row.tail = node
        if node.end:
            self.released.requeue(row)  # the pins of its path may have been beyond `node`
        else:
            del self.rows[row.slot]
            self.released.discard(row)

    def evict(self, num_tokens: int, used_before: int) -> int:
        """Evict unpinned leaves that were last used before a tick, least recently used first.

        Stops after `num_tokens` tokens. Returns how many were evicted.
        """
        removed = self.tree.evict(num_tokens, used_before)
        for leaf, slots in removed:
            assert leaf.parent is not None
            for slot in slots:
                self._move_tail(self.rows[slot], leaf.parent)
        return sum(len(leaf) for leaf, _ in removed)

    def check(self) -> None:
        """Raise AssertionError if a rule of this module, of the tree or of eviction is broken. O(n)."""
        rows = self.rows.values()
        self.tree.check(rows)
        self.released.check(rows)
        for slot, row in self.rows.items():
            assert row.slot == slot and row.tail.end, f"rule 1: {row} under {slot}"
        assert self.tree.num_tokens <= self.max_tokens, f"rule 2: {self.tree.num_tokens=}, {self.max_tokens=}"
