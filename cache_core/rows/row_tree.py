"""The tree below `PrefixCacheManager`: which rows hold which prefix. No policy, no versions.

A row is a slot's worth of KV for one sequence, and a node is a run of tokens. A row is recorded at each node of its
path, down to its tail, so that every prefix of it can be found.

Rules, checked by `check`:

1. A run is never empty, stands in its parent's `children` under its first token, and ends `len` after its parent.
2. A row is recorded at its tail and at all nodes above it and nowhere else; the one recorded last stands last.
3. A node without rows is locked. A top has children.
4. A node was used at least as recently as its children.
5. `num_tokens` is the tokens of all nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from raydix.cache_core.outline import SHOWN, NodeFacts, head_of
from raydix.cache_core.tree.radix_key import RadixKey

WIDTH = 8  # bytes of each id in the tree


class Row:
    """What is recorded of a slot: its version, and the node at which its valid prefix ends."""

    __slots__ = ("last_used", "recorded_at", "slot", "tail", "version")

    def __init__(self, slot: int, version: int, tail: RowNode, now: int) -> None:
        self.slot = slot
        self.version = version
        self.tail = tail
        self.recorded_at = now  # tick of the last insert
        self.last_used = now  # tick of the last insert, or of the last find that returned it

    def __repr__(self) -> str:
        return f"Row(slot={self.slot}, version={self.version}, len={self.tail.end})"


class RowNode:
    """A run of tokens below its parent, and the slots of the rows that hold everything from the root to its end."""

    __slots__ = (
        "children", "data", "end", "last_used", "lock_ref", "namespace", "own_pins", "parent", "rows",
    )  # fmt: skip

    def __init__(self, parent: RowNode | None, namespace: str | None, data: bytes, end: int, last_used: int) -> None:
        self.parent = parent  # None: a top
        self.namespace = namespace
        self.data = data  # packed ids of this run
        self.end = end  # tokens from the root to the end of this run
        self.last_used = last_used  # tick of the cache's own clock
        self.children: dict[bytes, RowNode] = {}  # by their first token, packed
        self.rows: dict[int, None] = {}  # slots, in the order in which they were recorded
        self.own_pins = 0
        self.lock_ref = 0  # pins of this node and of those below

    def __len__(self) -> int:
        return len(self.data) // WIDTH

    def __repr__(self) -> str:
        return f"RowNode(len={len(self)}, end={self.end}, rows={list(self.rows)}, lock_ref={self.lock_ref})"

    def path_up(self) -> Iterator[RowNode]:
        """This node and those above it, the top excluded."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def key(self) -> RadixKey:
        """The tokens from the root to the end of this node. O(their number)."""
        runs = [node.data for node in self.path_up()]
        return RadixKey.from_packed(b"".join(reversed(runs)), WIDTH, self.namespace)[:]


class RowTree:
    """The structure: walks, splits, new leaves, removals."""

    def __init__(self) -> None:
        self.tops: dict[str | None, RowNode] = {}  # by namespace
        self.num_tokens = 0

    def walk(self, key: RadixKey) -> tuple[RowNode, int]:
        """The deepest node that shares tokens with `key`, and how many from the root; a top and 0 if none does.

        Costs a memcmp and a lookup per node.
        """
        top = self.tops.get(key.extra_key)
        if top is None:
            return RowNode(None, key.extra_key, b"", 0, 0), 0
        data, node, pos = key.data, top, 0
        while pos < len(data):
            child = node.children.get(data[pos : pos + WIDTH])
            if child is None:
                break
            if not data.startswith(child.data, pos):
                return child, pos // WIDTH + _common_tokens(data, pos, child.data)
            node = child
            pos += len(child.data)
        return node, pos // WIDTH

    def split(self, node: RowNode, end: int) -> RowNode:
        """Cut `node` so that a node ends after `end` tokens; returns it. The suffix keeps its identity."""
        parent = node.parent
        cut = len(node.data) - (node.end - end) * WIDTH
        assert parent is not None and 0 < cut < len(node.data), f"cannot split {node} at {end}"
        above = RowNode(parent, node.namespace, node.data[:cut], end, node.last_used)
        above.rows, above.lock_ref = dict(node.rows), node.lock_ref
        parent.children[node.data[:WIDTH]] = above
        node.data, node.parent = node.data[cut:], above
        above.children[node.data[:WIDTH]] = node
        return above

    def add_leaf(self, parent: RowNode, data: bytes, now: int) -> RowNode:
        """Hang a run below `parent`, which may be a new top."""
        if parent.parent is None:
            self.tops[parent.namespace] = parent
        leaf = RowNode(parent, parent.namespace, data, parent.end + len(data) // WIDTH, now)
        parent.children[data[:WIDTH]] = leaf
        self.num_tokens += len(leaf)
        return leaf

    def trim(self, leaf: RowNode, length: int) -> None:
        """Cut the last `length` tokens off a leaf, not all of it."""
        assert not leaf.children and 0 < length < len(leaf), f"cannot trim {leaf} by {length}"
        leaf.data = leaf.data[: -length * WIDTH]
        leaf.end -= length
        self.num_tokens -= length

    def remove_leaf(self, leaf: RowNode) -> RowNode:
        """Take a childless node out; returns its parent. A top left without children goes, too."""
        parent = leaf.parent
        assert parent is not None and not leaf.children, f"not a leaf: {leaf}"
        del parent.children[leaf.data[:WIDTH]]
        self.num_tokens -= len(leaf)
        if parent.parent is None and not parent.children:
            del self.tops[parent.namespace]
        return parent

    def nodes(self) -> Iterator[tuple[int, RowNode]]:
        """Every node with its depth, parents before children, namespace by namespace."""
        for top in self.tops.values():
            stack = [(1, child) for child in reversed(top.children.values())]
            while stack:
                depth, node = stack.pop()
                yield depth, node
                stack.extend((depth + 1, child) for child in reversed(node.children.values()))

    def format_lines(self, now: int) -> Iterator[str]:
        """One line per run, indented by depth."""
        for depth, node in self.nodes():
            parent = node.parent
            if depth == 1 and parent is not None and next(iter(parent.children.values())) is node:
                yield f"namespace {node.namespace!r}"
            tokens = RadixKey.from_packed(node.data, WIDTH)[: SHOWN + 1].token_ids
            pins = f" pinned x{node.lock_ref}" if node.lock_ref else ""
            age = now - node.last_used
            yield f"{'  ' * depth}{head_of(tokens)} len={len(node)} rows={head_of(list(node.rows))}{pins} age={age}"

    def check(self, rows: Iterable[Row]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(nodes, and the rows at each)."""
        recorded: dict[RowNode, list[int]] = {}
        for row in sorted(rows, key=lambda row: row.recorded_at):
            for node in row.tail.path_up():
                recorded.setdefault(node, []).append(row.slot)
        num_tokens = 0
        for _, node in self.nodes():
            parent = node.parent
            assert parent is not None and len(node) > 0, f"rule 1 at {node}"
            assert parent.children.get(node.data[:WIDTH]) is node, f"rule 1 at {node}"
            assert node.end == parent.end + len(node) and node.namespace == parent.namespace, f"rule 1 at {node}"
            assert list(node.rows) == recorded.pop(node, []), f"rule 2 at {node}"
            assert node.rows or node.lock_ref, f"rule 3 at {node}"
            assert parent.parent is None or node.last_used <= parent.last_used, f"rule 4 at {node}"
            num_tokens += len(node)
        assert not recorded, f"rule 2: rows at nodes that are not in the tree: {recorded}"
        assert all(top.children for top in self.tops.values()), "rule 3: an empty top"
        assert num_tokens == self.num_tokens, f"rule 5: {num_tokens=}, but {self.num_tokens=}"


def facts_of(node: RowNode) -> NodeFacts:
    """What a node tells of itself in an outline."""
    ids = np.frombuffer(node.data[: SHOWN * WIDTH], np.uint64).tolist()
    return NodeFacts(ids, len(node), node.lock_ref, None, node.last_used)


def _common_tokens(data: bytes, pos: int, run: bytes) -> int:
    """Leading tokens that `data[pos:]` and `run` share; they are not all of the run's."""
    num_tokens = min(len(data) - pos, len(run)) // WIDTH
    ours = np.frombuffer(data, np.uint64, num_tokens, pos)
    differs = ours != np.frombuffer(run, np.uint64, num_tokens)
    return int(differs.argmax()) if differs.any() else num_tokens
