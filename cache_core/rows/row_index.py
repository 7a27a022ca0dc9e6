"""`RowIndex`: what is recorded of each row, and the tree that finds it. No versions are compared here.

Rules, checked by `check` beside those of the tree and of eviction:

1. A slot has one record at most, under its own number, never of length 0.
2. The tree holds `max_tokens` at most.
"""

from __future__ import annotations

from raydix.cache_core.rows.row_eviction import LeafEviction, RowEviction
from raydix.cache_core.rows.row_tree import WIDTH, Row, RowNode, RowTree
from raydix.cache_core.rows.slot_allocator import SlotAllocator
from raydix.cache_core.tree.radix_key import RadixKey


class RowIndex:
    """Rows, tree, recency and eviction together: each method leaves them whole."""

    def __init__(self, max_tokens: int, allocator: SlotAllocator | None) -> None:
        self.max_tokens = max_tokens
        self.clock = 0  # ticks at each use
        self.rows: dict[int, Row] = {}  # by slot
        self.tree = RowTree()
        self.leaves = LeafEviction(self.tree)
        self.released = RowEviction(allocator)

    def touch(self, node: RowNode, end: int) -> RowNode:
        """Make tokens [0, end), which end in `node`, the most recently used; returns the node that ends there."""
        if 0 < end < node.end:
            node = self.tree.split(node, end)
        self.clock += 1
        for above in node.path_up():
            above.last_used = self.clock
        return node

    def write(self, key: RadixKey, slot: int, slot_ver: int) -> int:
        """Record that a slot holds the tokens of `key`, as many as there is room for; returns how many."""
        row = self.rows.get(slot)
        if row is not None and row.version != slot_ver:
            self.shorten(row, 0)
        self.drop_overwritten(slot, key)
        node = self._grow(self.touch(*self.tree.walk(key)), key)
        if node.parent is not None:
            self._record(slot, slot_ver, node)
        return node.end

    def _grow(self, node: RowNode, key: RadixKey) -> RowNode:
        """Add what `key` has beyond `node`, as much as there is room for; returns the node that ends it."""
        missing = len(key) - node.end
        self.evict(self.tree.num_tokens + missing - self.max_tokens, used_before=self.clock)
        length = min(missing, self.max_tokens - self.tree.num_tokens)
        if not length:
            return node
        return self.tree.add_leaf(node, key.data[node.end * WIDTH : (node.end + length) * WIDTH], self.clock)

    def _record(self, slot: int, slot_ver: int, node: RowNode) -> None:
        """Note that `slot` holds everything up to `node`, as the last one recorded on its path."""
        row = self.rows.get(slot)
        if row is None:
            row = self.rows[slot] = Row(slot, slot_ver, node, self.clock)
            self.released.add(row)
        elif row.tail.end < node.end:
            row.tail = node
        row.recorded_at = row.last_used = self.clock
        for above in row.tail.path_up():
            above.rows.pop(slot, None)
            above.rows[slot] = None
        self.leaves.offer(node)

    def drop_overwritten(self, slot: int, key: RadixKey) -> None:
        """Shorten the record of a slot to what it shares with the tokens now written there, if these differ from it."""
        row = self.rows.get(slot)
        if row is None:
            return
        node, end = self.tree.walk(key)
        while node.parent is not None and slot not in node.rows:
            node = node.parent
        if min(end, node.end) < len(key):
            self.shorten(row, min(end, node.end))

    def shorten(self, row: Row, length: int) -> None:
        """Take a row out of all nodes beyond `length`; nodes that nobody needs go."""
        node = row.tail
        while node.end > length:
            parent = node.parent
            assert parent is not None, f"{row} ends above the top"
            if parent.end < length:
                parent = self.tree.split(node, length)
            del node.rows[row.slot]
            self.leaves.prune(node)
            node = parent
        self._move_tail(row, node)

    def _move_tail(self, row: Row, node: RowNode) -> None:
        """Let a row that was taken out of the nodes below end here; none is left of it at a top."""
        row.tail = node
        if node.parent is not None:
            self.released.requeue(row)  # the pins of its path may lie beyond it now
        else:
            del self.rows[row.slot]
            self.released.discard(row)

    def evict(self, num_tokens: int, used_before: int) -> int:
        """Give up that many tokens of unpinned leaves last used before that tick, LRU first; returns how many went."""
        freed, removed = self.leaves.evict(num_tokens, used_before)
        for leaf in removed:
            assert leaf.parent is not None
            for slot in leaf.rows:
                self._move_tail(self.rows[slot], leaf.parent)
        return freed

    def check(self) -> None:
        """Raise AssertionError if a rule of this module, of the tree or of eviction is broken. O(n)."""
        rows = self.rows.values()
        self.tree.check(rows)
        self.leaves.check()
        self.released.check(rows)
        for slot, row in self.rows.items():
            assert row.slot == slot and row.tail.parent is not None, f"rule 1: {row} under {slot}"
        assert self.tree.num_tokens <= self.max_tokens, f"rule 2: {self.tree.num_tokens=}, {self.max_tokens=}"
