"""The compressed radix tree itself: which runs of tokens hang below which. No locks, no recency, no slots' fate.

    root ── namespace tops ── runs of whole pages ── ...

Rules, checked by `check_structure`:

1. A run is a whole number of pages, never empty; a top is empty and hangs below the root under its namespace.
2. A node stands in its parent's `children` under the packed ids of its first page.
3. `node.end` is its parent's `end` plus its own length.
4. A node's slots are one per token, or one per page.
5. A top without children is not in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.slot_rows import Slots
from raydix.cache_core.tree_node import Namespace, TreeNode

_NO_SLOTS: Slots = np.empty(0, np.int64)
_FIRST_CHUNK = 1024  # bytes compared first where a run is matched in part

SpaceKey = tuple[str | None, int]


class Query:
    """A key brought to the width of its namespace: what a walk compares."""

    __slots__ = ("data", "num_tokens", "top", "unit")

    def __init__(self, data: bytes, unit: int, num_tokens: int, top: TreeNode) -> None:
        self.data = data
        self.unit = unit  # bytes of one token
        self.num_tokens = num_tokens  # whole pages of it take part
        self.top = top


class Walk:
    """How far a query goes: `path`, the nodes it matches wholly, and the run it matches in part, if any."""

    __slots__ = ("end", "part", "part_len", "path")

    def __init__(self, path: list[TreeNode], end: int, part: TreeNode | None, part_len: int) -> None:
        self.path = path
        self.end = end  # tokens matched, `part_len` included
        self.part = part
        self.part_len = part_len  # tokens matched in `part`, a multiple of page_size below its length


class RadixTree:
    """The structure that the radix caches share."""

    def __init__(self, page_size: int, node_type: type[TreeNode] = TreeNode) -> None:
        self.page_size = page_size
        self._node_type = node_type
        self._next_id = count()
        self.root = node_type(next(self._next_id), None, Namespace(None, 0, 4, 4), b"", _NO_SLOTS, 0, 0)
        self.tops: dict[SpaceKey, TreeNode] = {}

    def find_query(self, key: RadixKey, limit: int | None = None) -> Query | None:
        """The query for a lookup of the first `limit` tokens; None if the namespace is empty or no page is left."""
        top = self.tops.get((key.extra_key, key.arity))
        if top is None:
            return None
        num_tokens = len(key) if limit is None else min(limit, len(key))
        width = top.space.width
        if key.width != width:
            if width == 4:  # wide ids cannot be there: only what precedes them can match
                num_tokens = min(num_tokens, key.num_narrow())
                key = key[:num_tokens]
            key = key.with_width(width)
        num_tokens -= num_tokens % self.page_size
        return Query(key.data, key.unit, num_tokens, top) if num_tokens else None

    def make_query(self, key: RadixKey, now: int) -> Query:
        """The query for an insert: makes the namespace, and widens it, if need be."""
        top = self.tops.get((key.extra_key, key.arity))
        if top is None:
            space = Namespace(key.extra_key, key.arity, key.width, key.unit)
            top = self._node_type(next(self._next_id), self.root, space, b"", _NO_SLOTS, 0, now)
        elif key.width > top.space.width:
            self._widen(top)
        key = key.with_width(top.space.width)
        return Query(key.data, key.unit, len(key) - len(key) % self.page_size, top)

    def walk(self, query: Query, node: TreeNode) -> Walk:
        """Follow `query` from `node`, which it matches up to `node.end`. Costs a memcmp and a lookup per node."""
        data, unit = query.data, query.unit
        page = self.page_size * unit
        pos, stop = node.end * unit, query.num_tokens * unit
        path: list[TreeNode] = []
        while pos < stop:
            child = node.children.get(data[pos : pos + page])
            if child is None:
                break
            if not data.startswith(child.data, pos, stop):
                part_len = self._common_bytes(data, pos, stop, child.data) // page * self.page_size
                return Walk(path, pos // unit + part_len, child, part_len)
            path.append(child)
            pos += len(child.data)
            node = child
        return Walk(path, pos // unit, None, 0)

    @staticmethod
    def _common_bytes(data: bytes, pos: int, stop: int, run: bytes) -> int:
        """Leading bytes that `data[pos:stop]` and `run` share, looked for in chunks that grow."""
        limit = min(stop - pos, len(run))
        done, chunk = 0, _FIRST_CHUNK
        while done < limit:
            size = min(chunk, limit - done)
            theirs = run[done : done + size]
            if not data.startswith(theirs, pos + done):
                ours = np.frombuffer(data, np.uint8, size, pos + done)
                return done + int((ours != np.frombuffer(theirs, np.uint8)).argmax())
            done += size
            chunk *= 4
        return limit

    def split(self, node: TreeNode, length: int) -> TreeNode:
        """Cut `node` after `length` tokens; returns the new node above it, which takes over the prefix.

        The suffix keeps its identity and its recency; locks, hits and recency are copied to the prefix, hashes are
        shared out.
        """
        parent = node.parent
        assert parent is not None
        cut = length * node.space.unit
        assert 0 < cut < len(node.data) and length % self.page_size == 0, f"cannot split {node} at {length}"
        slots = node.slots
        assert slots is not None
        slot_cut = len(slots) * length // len(node)
        page = self.page_size * node.space.unit
        above = self._node_type(
            next(self._next_id),
            parent,
            node.space,
            node.data[:cut],
            slots[:slot_cut].copy(),
            node.end - len(node) + length,
            node.last_access_time,
        )
        above.lock_ref, above.hit_count, above.priority = node.lock_ref, node.hit_count, node.priority
        above.creation_time = node.creation_time
        if node.hash_values is not None:
            pages = length // self.page_size
            above.hash_values, node.hash_values = node.hash_values[:pages], node.hash_values[pages:]
        parent.children[node.data[:page]] = above
        node.data, node.slots, node.parent = node.data[cut:], slots[slot_cut:].copy(), above
        above.children[node.data[:page]] = node
        return above

    def add_leaf(
        self, parent: TreeNode, query: Query, start: int, stop: int, slots: Slots, now: int, priority: int
    ) -> TreeNode:
        """Hang tokens [start, stop) of the query below `parent`, with slots that become the tree's."""
        data = query.data[start * query.unit : stop * query.unit]
        leaf = self._node_type(next(self._next_id), parent, query.top.space, data, slots, stop, now)
        leaf.priority = priority
        parent.children[data[: self.page_size * query.unit]] = leaf
        if parent is query.top:  # the namespace is there from its first run on
            self.tops[parent.space.extra_key, parent.space.arity] = parent
        return leaf

    def remove_leaf(self, leaf: TreeNode) -> Slots:
        """Take a childless node out of the tree; returns its slots. A top left without children goes, too."""
        parent, slots = leaf.parent, leaf.slots
        assert parent is not None and slots is not None and not leaf.children, f"not a leaf: {leaf}"
        del parent.children[leaf.data[: self.page_size * leaf.space.unit]]
        leaf.slots = None
        if parent.parent is self.root and not parent.children:
            self._remove_top(parent)
        return slots

    def detach(self, top: TreeNode) -> None:
        """Make a namespace unmatchable. O(1): its nodes live on until they are removed."""
        top.space.live = False
        del self.tops[top.space.extra_key, top.space.arity]

    def _remove_top(self, top: TreeNode) -> None:
        top.slots = None
        if top.space.live:
            del self.tops[top.space.extra_key, top.space.arity]

    def _widen(self, top: TreeNode) -> None:
        """Give every id of a namespace 8 bytes. O(its tokens), once in its life, when its first wide id comes."""
        space = top.space
        for node in list(self.nodes_below(top)):
            node.data = np.frombuffer(node.data, "<u4").astype("<u8").tobytes()
        space.width, space.unit = 8, space.unit * 2
        page = self.page_size * space.unit
        for node in (top, *self.nodes_below(top)):
            node.children = {child.data[:page]: child for child in node.children.values()}

    @staticmethod
    def nodes_below(top: TreeNode) -> Iterator[TreeNode]:
        """Every node below `top`, parents before children."""
        stack = list(top.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def nodes(self) -> Iterator[TreeNode]:
        """Every node that can be matched."""
        for top in self.tops.values():
            yield from self.nodes_below(top)

    def check_structure(self, top: TreeNode) -> None:
        """Raise AssertionError if a rule of the module docstring is broken below `top`."""
        space, page = top.space, self.page_size
        assert not top.data and top.parent is self.root, f"rule 1 at {top}"
        assert top.children or not space.live, f"rule 5 at {top} of {space}"
        for node in self.nodes_below(top):
            parent = node.parent
            assert parent is not None and node.space is space, f"foreign namespace at {node}"
            assert len(node) > 0 and len(node) % page == 0, f"rule 1 at {node}"
            assert len(node.data) == len(node) * space.unit, f"rule 1 at {node}"
            assert parent.children.get(node.data[: page * space.unit]) is node, f"rule 2 at {node}"
            assert node.end == parent.end + len(node), f"rule 3 at {node}"
            assert node.slots is not None, f"rule 4 at {node}: evicted, yet in the tree"
            assert len(node.slots) in (len(node), len(node) // page), f"rule 4 at {node}"


def check_same_space(key: RadixKey, node: TreeNode) -> None:
    """Raise InvalidKeyError unless `node` can lie on the path of `key`."""
    space = node.space
    if (space.extra_key, space.arity) != (key.extra_key, key.arity) or node.end > len(key):
        raise InvalidKeyError(f"{node} of namespace {space.extra_key!r} does not end a prefix of {key}")


def check_on_path(query: Query, node: TreeNode) -> None:
    """Raise InvalidKeyError unless the runs down to `node` are the first tokens of a query. A memcmp of them."""
    end = node.end * query.unit
    while node.data:
        if not query.data.startswith(node.data, end - len(node.data), end):
            raise InvalidKeyError(f"{node} holds other tokens than the key has there: match the key first")
        end -= len(node.data)
        assert node.parent is not None
        node = node.parent
