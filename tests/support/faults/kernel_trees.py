"""Small trees of the nodes of either twin, grown kernel by kernel."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch

from raydix.cache_core.kernels import plain_kernels

FIELDS = [name for name in plain_kernels.Node.__slots__ if name not in ("parent", "children", "space")]


class Branch:
    """A tree of one twin's nodes, grown by keys of single bytes."""

    def __init__(self, kernel: Any, page_size: int, unit: int = 1, first: int = 0, step: int = 1) -> None:
        self.kernel, self.page_size, self.unit, self.first, self.step = kernel, page_size, unit, first, step
        self.space = SimpleNamespace(unit=unit)
        self.root = kernel.Node(0, None, self.space, b"", b"", 0, 0)
        self.top = kernel.Node(1, self.root, self.space, b"", b"", 0, 0)
        self.nodes = [self.top]
        self.ids = count(1)  # places in `nodes`

    def insert(self, data: bytes) -> Any:
        """Hang what is new of a key below what it goes through, cutting where it leaves a run; the node it ends at."""
        key = self.kernel.Key.from_packed(data, self.unit)
        num_tokens = key.num_tokens // self.page_size * self.page_size
        path, end, _ = self.kernel.reach(type(self.top), self.ids, self.top, key, self.page_size, num_tokens)
        node = path[-1] if path else self.top
        if path and node.id == len(self.nodes):  # it was cut off
            self._added(node)
        if end < num_tokens:
            all_slots = torch.arange(num_tokens) * self.step + self.first
            slots = self.kernel.compact(all_slots, 1, end, num_tokens)
            leaf = self.kernel.grow(type(self.top), self.ids, self.page_size, node, key, num_tokens, slots, 7)
            if leaf.id % 2:
                leaf.hash_values = [f"{leaf.id}/{page}" for page in range((num_tokens - end) // self.page_size)]
            node = self._added(leaf)
        return node

    def _added(self, node: Any) -> Any:
        self.nodes.append(node)
        return node

    def facts(self) -> list[tuple[Any, ...]]:
        """All there is to know of every node, in the order in which they were made."""
        return [
            (
                *(getattr(node, name) for name in FIELDS),
                node.parent.id,
                node.space is self.space,
                [child.id for child in node.children.values()],
            )
            for node in self.nodes
        ]


class ListQueue:
    """The simplest queue: first in, first out. It records its calls."""

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves
        self.told: list[tuple[str, int]] = []

    def push(self, leaf: Any) -> None:
        self.told.append(("push", leaf.id))
        self.leaves.append(leaf)

    def discard(self, leaf: Any) -> None:
        self.told.append(("discard", leaf.id))
        if leaf in self.leaves:
            self.leaves.remove(leaf)

    def touch(self, leaf: Any) -> None:
        self.told.append(("touch", leaf.id))

    def pop(self) -> Any:
        return self.leaves.pop(0) if self.leaves else None


def held_by(kernel: Any, *leaves: Any) -> Any:
    """Holdings of a twin, over a queue of these leaves."""

    class Heir(kernel.Holdings):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(ListQueue([*leaves]))
            self.bare: list[int] = []

        def _offer(self, leaf: Any) -> None:
            self._queue.push(leaf)

        def _left_bare(self, node: Any) -> None:
            self.bare.append(node.id)
            if node.data and not node.lock_ref:
                self._queue.push(node)

    return Heir()
