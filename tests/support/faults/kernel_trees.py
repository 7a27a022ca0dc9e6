"""Small trees that grow by the kernels alone, with the accounting of their locks."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from raydix.cache_core.kernels import (
    Key,
    LockAccounting,
    Node,
    Victims,
    add_leaf,
    gather,
    pack_slots,
    walk_and_split,
)

FIELDS = (
    "creation_time",
    "data",
    "end",
    "hash_values",
    "lock_ref",
    "own_access_time",
    "own_hits",
    "own_locks",
    "own_priority",
    "slots",
    "swa_access_time",
    "swa_boundary_id",
    "swa_lock_ref",
    "swa_stop",
    "swa_tombstone",
)


class Tree:
    """A tree of keys with ids of `unit` bytes. The slot of token i is `first + i * step`; a page's hash is its prefix.

    Attributes:
        nodes: all nodes that ever were in the tree; a node's id is its place.
        accounting: the locks on the tree.
    """

    def __init__(
        self, page_size: int = 1, unit: int = 1, first: int = 0, step: int = 1, node_type: type[Node] = Node
    ) -> None:
        self.page_size, self.unit, self.first, self.step, self.node_type = page_size, unit, first, step, node_type
        self.namespace = SimpleNamespace(unit=unit)
        self.root = node_type(0, None, self.namespace, b"", b"", 0, 0)
        self.top = node_type(0, self.root, self.namespace, b"", b"", 0, 0)
        self.nodes: list[Any] = [self.top]
        self.ids = count(1)
        self.accounting = FirstInFirstOut()

    def insert(self, data: bytes, now: int = 7) -> Any:
        """Insert the whole pages of a key; return the node at its end."""
        key, page = Key.from_packed(data, self.unit), self.page_size
        num_tokens = key.num_tokens // page * page
        path, end, _ = walk_and_split(self.node_type, self.ids, self.top, key, page, num_tokens)
        node = path[-1] if path else self.top
        if node.id == len(self.nodes):
            self.nodes.append(node)
        if end < num_tokens:
            slots = pack_slots(torch.arange(num_tokens) * self.step + self.first, page, end, num_tokens)
            node = add_leaf(self.node_type, self.ids, page, node, key, num_tokens, slots, now)
            node.hash_values = [data[: stop * self.unit] for stop in range(end + page, num_tokens + 1, page)]
            self.nodes.append(node)
            self.accounting.add(node)
        return node

    def prefix(self, node: Any) -> bytes:
        """Return the packed ids from the root to the end of a node."""
        return b"" if node.parent is None else self.prefix(node.parent) + node.data

    def facts(self) -> list[tuple[Any, ...]]:
        """Return all fields of all nodes, and the sums of the accounting."""
        sums = (self.accounting.evictable, self.accounting.protected, len(self.accounting.leaves))
        return [
            sums,
            *((*(getattr(node, name) for name in FIELDS), node.parent, list(node.children)) for node in self.nodes),
        ]

    def check(self) -> None:
        """Raise AssertionError unless the nodes, their slots, their hashes and the accounting agree."""
        known = [node for node in self.nodes[1:] if node.slots is not None]
        for node in known:
            tokens = torch.arange(node.parent.end, node.end)
            prefix, page = self.prefix(node), self.page_size * self.unit
            assert len(node) == len(tokens) > 0 and len(node) % self.page_size == 0
            assert len(prefix) == node.end * self.unit
            assert node.parent.children.get(node.data[:page]) is node and node.namespace is self.namespace
            assert gather([node], self.page_size).tolist() == (tokens * self.step + self.first).tolist()
            stops = range(node.parent.end * self.unit + page, len(prefix) + 1, page)
            assert node.hash_values == [prefix[:stop] for stop in stops]
            assert node.lock_ref == node.own_locks + sum(child.lock_ref for child in node.children)
        assert sum(len(node.children) for node in (self.top, *known)) == len(known)
        assert self.accounting.evictable == sum(len(node) for node in known if not node.lock_ref)
        assert self.accounting.protected == sum(len(node) for node in known if node.lock_ref)
        leaves = [node for node in known if not node.children and not node.lock_ref]
        assert sorted(node.id for node in self.accounting.leaves) == [node.id for node in leaves]

    def evict(self, num_tokens: int) -> tuple[int, list[int]]:
        """Evict leaves until so many tokens are evicted; return the tokens and the ids of the nodes."""
        victims = Victims()
        self.accounting.evict_leaves(num_tokens, victims)
        return victims.num_tokens, [node.id for node in victims.nodes]


class ListQueue:
    """A queue that evicts the leaf first that came first.

    Attributes:
        touched: the ids of the nodes that were touched.
    """

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves
        self.touched: list[int] = []

    def push(self, leaf: Any) -> None:
        """Add a leaf."""
        self.leaves.append(leaf)

    def discard(self, leaf: Any) -> None:
        """Take a leaf out, if it is here."""
        if leaf in self.leaves:
            self.leaves.remove(leaf)

    def touch(self, leaf: Any) -> None:
        """Note a use of a leaf."""
        self.touched.append(leaf.id)

    def pop(self) -> Any:
        """Take out the first leaf; None if there is none."""
        return self.leaves.pop(0) if self.leaves else None


class FirstInFirstOut(LockAccounting):
    """Accounting over a `ListQueue`.

    Attributes:
        leaves: the leaves that stand in the queue.
        childless: the ids of the nodes that lost their last child.
    """

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.queue = ListQueue(self.leaves)
        self.childless: list[int] = []
        super().__init__(self.queue)

    def _add_candidate(self, leaf: Any) -> None:
        self.queue.push(leaf)

    def _on_last_child_removed(self, node: Any) -> None:
        self.childless.append(node.id)
        if node.data and not node.lock_ref:
            self.queue.push(node)
