"""`RadixTree`: the structure of a compressed radix tree, without locks, recency or the owners of slots.

    root ── namespace tops ── runs of whole pages ── ...

Rules, checked by `check_structure`:

1. A run is a whole number of pages, never empty; a top is empty and hangs below the root under its namespace.
2. A node stands in its parent's `children` under the packed ids of its first page.
3. `node.end` is its parent's `end` plus its own length.
4. A node's slots are one per token, or one per page; none in a tree that holds no slots.
5. A top without children is not in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from raydix.cache_core.kernels import add_leaf, detach_leaf, namespace_root, rekey_children, split_node
from raydix.cache_core.tree.packed_slots import Row, unpack
from raydix.cache_core.tree.radix_key import RadixKey, check_key
from raydix.cache_core.tree.tree_node import Namespace, TreeNode

_NO_SLOTS: Row = b""

SpaceKey = tuple[str | None, int]


class RadixTree:
    """The structure that the radix caches share.

    Attributes:
        node_type, ids: the type of its nodes, and an iterator over the ids of new ones.
        holds_slots: whether each node has the slots of its tokens.
        tops: the node that each namespace starts at.
        detached: the tops of namespaces that cannot be matched any more, as long as they have nodes.
    """

    def __init__(self, page_size: int, node_type: type[TreeNode] = TreeNode, *, holds_slots: bool = True) -> None:
        self.page_size = page_size
        self.holds_slots = holds_slots
        self.node_type = node_type
        self.ids = count()
        self.root = node_type(next(self.ids), None, Namespace(None, 0, 4, 4, self), b"", _NO_SLOTS, 0, 0)
        self.tops: dict[SpaceKey, TreeNode] = {}
        self.detached: dict[TreeNode, None] = {}

    def find_namespace(self, key: RadixKey) -> tuple[TreeNode | None, RadixKey]:
        """Return the top that a lookup of `key` starts at, None if its namespace is empty; and the key at its width.

        A key with wide ids is cut before the first of them if the namespace has none.
        """
        try:
            top: TreeNode | None = namespace_root(self.tops, key)
        except (AttributeError, TypeError):
            check_key(key)
            raise
        if top is not None and key.width != top.namespace.width:
            if top.namespace.width == 4:  # wide ids cannot be there: only the ids before them can match
                key = key[: key.num_narrow()]
            key = key.with_width(top.namespace.width)
        return top, key

    def ensure_namespace(self, key: RadixKey, now: int) -> tuple[TreeNode, RadixKey]:
        """Return the top that an insert of `key` starts at, made or widened if need be; and the key at its width."""
        top = self.tops.get((key.extra_key, key.arity))
        if top is None:
            namespace = Namespace(key.extra_key, key.arity, key.width, key.unit, self)
            top = self.node_type(next(self.ids), self.root, namespace, b"", _NO_SLOTS, 0, now)
        elif key.width != top.namespace.width:
            if key.width == 8:
                self._widen(top)
            key = key.with_width(8)
        return top, key

    def split(self, node: TreeNode, end: int) -> TreeNode:
        """Split `node` at `end`, tokens from the root; return the new node above it, which takes over the prefix.

        The suffix keeps its identity and its uses, which so count for the prefix, too; locks are copied to the prefix,
        hashes are shared out.
        """
        above: TreeNode = split_node(self.node_type, self.ids, self.page_size, node, end)
        return above

    def add_leaf(self, parent: TreeNode, key: RadixKey, stop: int, slots: Row, now: int, priority: int) -> TreeNode:
        """Add the tokens of `key` from the end of `parent` to `stop` below it, with slots that become the tree's."""
        leaf: TreeNode = add_leaf(self.node_type, self.ids, self.page_size, parent, key, stop, slots, now)
        if priority:
            leaf.own_priority = priority
        if parent.parent is self.root:  # the namespace is there from its first run on
            self.tops[parent.namespace.extra_key, parent.namespace.arity] = parent
        return leaf

    def remove_leaf(self, leaf: TreeNode) -> Row:
        """Remove a node without children; return its slots, and count its uses for its parent.

        The caller removes a top that has no children then.
        """
        return detach_leaf(leaf)

    def remove_top(self, top: TreeNode) -> None:
        """Forget a namespace without nodes."""
        top.slots = None
        if top.namespace.live:
            del self.tops[top.namespace.extra_key, top.namespace.arity]
        else:
            del self.detached[top]

    def detach(self, top: TreeNode) -> None:
        """Make a namespace unmatchable. O(1): its nodes live on until they are removed."""
        top.namespace.tree = None
        del self.tops[top.namespace.extra_key, top.namespace.arity]
        self.detached[top] = None

    def _widen(self, top: TreeNode) -> None:
        """Give every id of a namespace 8 bytes. O(its tokens), once in its life, when its first wide id comes."""
        namespace = top.namespace
        for node in list(self.nodes_below(top)):
            node.data = np.frombuffer(node.data, "<u4").astype("<u8").tobytes()
        namespace.width, namespace.unit = 8, namespace.unit * 2
        page = self.page_size * namespace.unit
        for node in (top, *self.nodes_below(top)):
            if node.children:
                rekey_children(node, page)

    @staticmethod
    def nodes_below(top: TreeNode) -> Iterator[TreeNode]:
        """Every node below `top`, parents before children."""
        nodes = top.subtree()
        next(nodes)
        return nodes

    def nodes(self) -> Iterator[TreeNode]:
        """Every node that can be matched."""
        for top in self.tops.values():
            yield from self.nodes_below(top)

    def check_structure(self, top: TreeNode) -> None:
        """Raise AssertionError if a rule of the module docstring is broken below `top`."""
        namespace, page = top.namespace, self.page_size
        assert not top.data and top.parent is self.root, f"rule 1 at {top}"
        assert top.children or not namespace.live, f"rule 5 at {top} of {namespace}"
        for node in self.nodes_below(top):
            parent = node.parent
            assert parent is not None and node.namespace is namespace, f"foreign namespace at {node}"
            assert len(node) > 0 and len(node) % page == 0, f"rule 1 at {node}"
            assert len(node.data) == len(node) * namespace.unit, f"rule 1 at {node}"
            assert parent.children.get(node.data[: page * namespace.unit]) is node, f"rule 2 at {node}"
            assert node.end == parent.end + len(node), f"rule 3 at {node}"
            assert node.slots is not None, f"rule 4 at {node}: evicted, yet in the tree"
            sizes = (len(node), len(node) // page) if self.holds_slots else (0,)
            assert unpack(node.slots).size in sizes, f"rule 4 at {node}"
