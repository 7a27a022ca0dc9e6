"""`RowTree`: the prefixes that rows hold, the pins of prefixes, and the eviction order of leaves.

A row is the KV of one sequence, in one slot. The tree is a `RadixTree` with pages of one token. A row is recorded at
each node of its path, down to its tail, so every prefix of it can be found.

Rules, checked by `check` besides `RadixTree`'s rules:

1. A row is recorded exactly at its tail and at all nodes above it. At each node, the row recorded last is last.
2. A node without rows is locked. A namespace without nodes is removed.
3. A node's `lock_ref` counts its own pins and the `lock_ref`s of its children; `num_pins` counts all pins.
4. Every leaf without locks is in the queue.
5. `num_tokens` counts the tokens of all nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.kernels import last_use, walk
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode


def path_up(node: TreeNode | None) -> Iterator[TreeNode]:
    """Yield a node and the nodes above it, except the namespace's."""
    while node is not None and node.end:
        yield node
        node = node.parent


def prefix_of(node: TreeNode) -> RadixKey:
    """Return the tokens from the root to the end of a node. O(their number)."""
    parts = [above.data for above in path_up(node)]
    return RadixKey.from_packed(b"".join(reversed(parts)), node.namespace.width, node.namespace.extra_key)[:]


class Row:
    """The record of a slot: its version, and the node at which its valid prefix ends."""

    __slots__ = ("last_used", "recorded_at", "slot", "tail", "version")

    def __init__(self, slot: int, version: int, tail: TreeNode, now: int) -> None:
        self.slot = slot
        self.version = version
        self.tail = tail
        self.recorded_at = now  # tick of the last insert
        self.last_used = now  # tick of the last insert, or of the last find that returned this row

    @property
    def is_pinned(self) -> bool:
        """Whether a node of its path has a pin."""
        node: TreeNode | None = self.tail  # a loop, as `path_up` would cost 0.5 us more per evicted row
        while node is not None and not node.own_locks:
            node = node.parent
        return node is not None

    def __repr__(self) -> str:
        return f"Row(slot={self.slot}, version={self.version}, len={self.tail.end})"


class RowTree:
    """A radix tree, and the rows of its nodes.

    Attributes:
        rows: for each node, the slots of the rows that hold all tokens from the root to its end, in the order in which
            they were recorded.
    """

    def __init__(self) -> None:
        self.rows: dict[TreeNode, dict[int, None]] = {}
        self.num_tokens = 0
        self.num_pins = 0  # pins without a release
        self._tree = RadixTree(1, holds_slots=False)
        self._queue: RecencyQueue[TreeNode] = RecencyQueue(last_use)

    @property
    def tops(self) -> Collection[TreeNode]:
        """The node of each namespace."""
        return self._tree.tops.values()

    def walk(self, key: RadixKey) -> tuple[list[TreeNode], int]:
        """Return the nodes that share tokens with `key`, and how many tokens they share with it in total.

        The last node may share only its first tokens. Costs a memcmp and a lookup per node.
        """
        top, key = self._tree.find_namespace(key)
        if top is None:
            return [], 0
        path, end, _ = walk(top, key, 1, key.num_tokens)
        return path, end

    def split(self, node: TreeNode, end: int) -> TreeNode:
        """Return the node that ends after `end` tokens from the root: `node`, or a new node above it."""
        if end == node.end:
            return node
        above = self._tree.split(node, end)
        self.rows[above] = dict(self.rows[node])
        return above

    def add_leaf(self, parent: TreeNode | None, key: RadixKey, stop: int, now: int) -> TreeNode:
        """Add the tokens of `key` from the end of `parent` to `stop`; without a parent, from the first token."""
        top, key = self._tree.ensure_namespace(key, now)
        leaf = self._tree.add_leaf(top if parent is None else parent, key, stop, b"", now, 0)
        self.rows[leaf] = {}
        self.num_tokens += len(leaf)
        return leaf

    def offer(self, node: TreeNode) -> None:
        """Queue a node if it may be evicted."""
        if self.rows[node] and _may_go(node):
            self._queue.push(node)

    def prune(self, node: TreeNode) -> None:
        """Remove a node that has no row and is not locked."""
        if not self.rows[node] and not node.lock_ref:
            self._queue.discard(node)
            self._remove_leaf(node)

    def _remove_leaf(self, leaf: TreeNode) -> None:
        parent = leaf.parent
        assert parent is not None
        self._tree.remove_leaf(leaf)
        del self.rows[leaf]
        self.num_tokens -= len(leaf)
        if parent.end:
            self.offer(parent)
        elif not parent.children:
            self._tree.remove_top(parent)

    def pin(self, node: TreeNode) -> None:
        """Pin a node and the nodes above it. O(depth in nodes)."""
        self.num_pins += 1
        node.own_locks += 1
        for above in path_up(node):
            above.lock_ref += 1

    def unpin(self, node: TreeNode) -> None:
        """Undo one pin of this node, and remove nodes without rows. O(depth in nodes)."""
        assert node.own_locks > 0, f"unpin of {node}"
        self.num_pins -= 1
        node.own_locks -= 1
        path = list(path_up(node))
        for above in path:
            above.lock_ref -= 1
        for above in path:
            self.prune(above)
        if node in self.rows:
            self.offer(node)

    def evict(self, num_tokens: int, used_before: int) -> list[tuple[TreeNode, dict[int, None]]]:
        """Remove unlocked leaves that were last used before a tick, least recently used first.

        Stops after `num_tokens` tokens: of the last leaf, only the last tokens are removed. Returns each removed leaf
        and its rows. The caller must end the rows at the leaf's parent.
        """
        removed: list[tuple[TreeNode, dict[int, None]]] = []
        while num_tokens > 0 and (leaf := self._queue.pop(_may_go)) is not None:
            if leaf.own_access_time >= used_before:
                self._queue.push(leaf)
                break
            if len(leaf) > num_tokens:
                self.split(leaf, leaf.end - num_tokens)
            num_tokens -= len(leaf)
            removed.append((leaf, self.rows[leaf]))
            self._remove_leaf(leaf)
        return removed

    def check(self, rows: Iterable[Row]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(nodes, and the rows at each)."""
        recorded: dict[TreeNode, list[int]] = {}
        for row in sorted(rows, key=lambda row: row.recorded_at):
            for above in path_up(row.tail):
                recorded.setdefault(above, []).append(row.slot)
        for top in self.tops:
            self._tree.check_structure(top)
        num_nodes = num_tokens = num_pins = 0
        for node in self._tree.nodes():
            assert list(self.rows[node]) == recorded.pop(node, []), f"rule 1 at {node}"
            assert self.rows[node] or node.lock_ref, f"rule 2 at {node}"
            below = sum(child.lock_ref for child in node.children.values())
            assert node.own_locks >= 0 and node.lock_ref == node.own_locks + below, f"rule 3 at {node}"
            assert node in self._queue or not _may_go(node), f"rule 4 at {node}"
            num_nodes += 1
            num_tokens += len(node)
            num_pins += node.own_locks
        assert num_nodes == len(self.rows), f"rule 1: {len(self.rows)} nodes have rows, but {num_nodes} are in the tree"
        assert not recorded, f"rule 1: rows at nodes that are not in the tree: {recorded}"
        assert num_pins == self.num_pins, f"rule 3: {num_pins=}, but {self.num_pins=}"
        assert num_tokens == self.num_tokens, f"rule 5: {num_tokens=}, but {self.num_tokens=}"
        self._queue.check_invariants()


def _may_go(node: TreeNode) -> bool:
    return not node.children and not node.lock_ref
