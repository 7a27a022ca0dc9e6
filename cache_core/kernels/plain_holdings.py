"""What of a tree is locked, and which of the rest goes next, in plain Python: the twin of `_holdings.c`."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, TypeAlias

import torch

from raydix.cache_core.kernels.plain_rows import expand_each

FreeSlots: TypeAlias = Callable[[torch.Tensor], object]


class Holdings:
    """Tokens of a tree with locks and without, and its unlocked leaves: what `FullKV` is made of.

    Its heir says what becomes of a leaf without locks, by `_offer`, and of a node whose last child has gone, by
    `_left_bare`.

    Args:
        queue: of the unlocked leaves, to `push`, `discard`, `touch` and `pop` them.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.evictable = 0  # tokens of nodes without locks
        self.protected = 0  # tokens of nodes with locks

    def add(self, leaf: Any, /) -> None:
        """A new, unlocked leaf."""
        parent = leaf.parent
        self.evictable += leaf.end - parent.end
        if len(parent.children) == 1:  # it was a leaf until now
            self._queue.discard(parent)
        self._queue.push(leaf)

    def use(self, end: Any, now: int, num_hits: int, priority: int, /) -> None:
        """What was looked up or inserted ends at a node, now: so many matches, by a request of that priority."""
        if end.own_priority < priority:
            end.own_priority = priority
        end.own_access_time = now
        end.own_hits += num_hits
        if not end.children:  # of all that was gone through, only this can be a leaf
            self._queue.touch(end)

    def lock(self, node: Any, /) -> None:
        """Lock a node and its ancestors. O(depth in nodes)."""
        moved = _lock_path(node)
        self.evictable -= moved
        self.protected += moved
        if moved and not node.children:
            self._queue.discard(node)

    def unlock(self, node: Any, /) -> bool:
        """Undo one lock of this very node; a leaf without locks may then be evicted. O(depth in nodes).

        Returns whether it had any."""
        if node.own_locks < 1:
            return False
        moved = _unlock_path(node)
        self.evictable += moved
        self.protected -= moved
        if moved and not node.children:
            self._offer(node)
        return True

    def fell(self, num_tokens: int, page_size: int, victims: Any, /) -> None:
        """Take the leaves that go next out of the queue and the tree, until the victims hold so many tokens, or there
        is none."""
        wanted = index(num_tokens)
        while victims.num_tokens < wanted and (leaf := self._queue.pop()) is not None:
            parent = leaf.parent
            size = leaf.end - parent.end
            victims.add(leaf, uproot(leaf, page_size * leaf.space.unit), size)
            self.evictable -= size
            if not parent.children:
                self._left_bare(parent)

    def free_leaves(self, num_tokens: int, page_size: int, free: FreeSlots, free_each: FreeSlots, /) -> int:
        """`fell`, and hand the slots of all that went to `free`, in one call, if there are any; to `free_each` if that
        refuses. What went before an error is handed back, too. Returns how many."""
        victims = Victims()
        try:
            self.fell(num_tokens, page_size, victims)
        finally:
            if victims.num_tokens:
                _give_back(victims.slots(page_size), free, free_each)
        return victims.num_tokens

    def _offer(self, leaf: Any) -> None:
        raise NotImplementedError

    def _left_bare(self, node: Any) -> None:
        raise NotImplementedError


class Victims:
    """Nodes that left the tree, with the slots they held."""

    __slots__ = ("_sizes", "nodes", "num_tokens", "rows")

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.rows: list[bytes] = []
        self._sizes: list[int] = []
        self.num_tokens = 0

    def add(self, node: Any, row: bytes | None, num_tokens: int, /) -> None:
        """One more node, what it held, and for how many tokens."""
        assert row is not None, f"{node!r} had been evicted before"
        self.nodes.append(node)
        self.rows.append(row)
        self._sizes.append(num_tokens)
        self.num_tokens += num_tokens

    def slots(self, page_size: int, /) -> torch.Tensor:
        """One slot per token, whether rows say the slots of tokens or those of pages; a copy."""
        return expand_each(self.rows, self._sizes, page_size)


def _give_back(slots: torch.Tensor, free: FreeSlots, free_each: FreeSlots) -> None:
    try:
        free(slots)
    except AssertionError:
        raise
    except Exception:
        free_each(slots)


def uproot(leaf: Any, page_bytes: int, /) -> bytes:
    """Take a leaf out of its parent's children; returns its slots, which it no longer has.

    What went through it went through its parent as well: of its uses the parent tells from now on.
    """
    parent, slots = leaf.parent, leaf.slots
    assert slots is not None and not leaf.children, f"not a leaf: {leaf}"
    del parent.children[leaf.data[:page_bytes]]
    leaf.slots = None
    parent.own_hits += leaf.own_hits
    parent.own_access_time = max(parent.own_access_time, leaf.own_access_time)
    parent.own_priority = max(parent.own_priority, leaf.own_priority)
    return slots  # type: ignore[no-any-return]


def _lock_path(node: Any) -> int:
    """Count a lock on a node and on all above it; returns how many tokens became locked that were not."""
    node.own_locks += 1
    end, parent = node.end, node.parent
    while parent is not None and not node.lock_ref:
        node.lock_ref = 1
        node, parent = parent, parent.parent
    moved: int = end - node.end
    while parent is not None:
        node.lock_ref += 1
        node, parent = parent, parent.parent
    return moved


def _unlock_path(node: Any) -> int:
    """Undo one `_lock_path`; returns how many tokens are no longer locked."""
    node.own_locks -= 1
    end, parent = node.end, node.parent
    while parent is not None and node.lock_ref == 1:
        node.lock_ref = 0
        node, parent = parent, parent.parent
    moved: int = end - node.end
    while parent is not None:
        node.lock_ref -= 1
        node, parent = parent, parent.parent
    return moved
