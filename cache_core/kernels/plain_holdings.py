"""Locks, token counts and evictions of a tree in plain Python: the equivalent of `c/_holdings.c`."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, TypeAlias

import torch

from raydix.cache_core.kernels.plain_rows import expand_each

FreeSlots: TypeAlias = Callable[[torch.Tensor], object]


class Holdings:
    """The locked and unlocked tokens of a tree, and the queue of its unlocked leaves; the base of `FullKV`.

    The subclass must define `_offer`, called with a leaf after its last unlock, and `_left_bare`, called with a node
    after the removal of its last child.

    Args:
        queue: the eviction queue of the unlocked leaves, with `push`, `discard`, `touch` and `pop`.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.evictable = 0  # tokens of nodes without locks
        self.protected = 0  # tokens of nodes with locks

    def add(self, leaf: Any, /) -> None:
        """Count and queue a new, unlocked leaf."""
        parent = leaf.parent
        self.evictable += leaf.end - parent.end
        if len(parent.children) == 1:  # the parent was a leaf until now
            self._queue.discard(parent)
        self._queue.push(leaf)

    def use(self, end: Any, now: int, num_hits: int, priority: int, /) -> None:
        """Record that a match or insert ends at a node: the tick, the number of matches, the request's priority."""
        if end.own_priority < priority:
            end.own_priority = priority
        end.own_access_time = now
        end.own_hits += num_hits
        if not end.children:  # of the nodes on the path, only the last can be a leaf
            self._queue.touch(end)

    def lock(self, node: Any, /) -> None:
        """Lock a node and its ancestors. O(depth in nodes)."""
        moved = _lock_path(node)
        self.evictable -= moved
        self.protected += moved
        if moved and not node.children:
            self._queue.discard(node)

    def unlock(self, node: Any, /) -> bool:
        """Undo one lock that was taken on the node itself; an unlocked leaf may then be evicted. O(depth in nodes).

        Returns whether the node had such a lock."""
        if node.own_locks < 1:
            return False
        moved = _unlock_path(node)
        self.evictable += moved
        self.protected -= moved
        if moved and not node.children:
            self._offer(node)
        return True

    def fell(self, num_tokens: int, page_size: int, victims: Any, /) -> None:
        """Move leaves from the queue and the tree to `victims`, in queue order, until these have `num_tokens` tokens
        or the queue is empty."""
        wanted = index(num_tokens)
        while victims.num_tokens < wanted and (leaf := self._queue.pop()) is not None:
            parent = leaf.parent
            size = leaf.end - parent.end
            victims.add(leaf, uproot(leaf, page_size * leaf.space.unit), size)
            self.evictable -= size
            if not parent.children:
                self._left_bare(parent)

    def free_leaves(self, num_tokens: int, page_size: int, free: FreeSlots, free_each: FreeSlots, /) -> int:
        """Evict leaves as `fell`, then free their slots by one call of `free`, or of `free_each` if that raises. Return
        the number of evicted tokens. If `fell` raises, the leaves evicted before are freed, too."""
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
    """Evicted nodes, with the slots that they had."""

    __slots__ = ("_sizes", "nodes", "num_tokens", "rows")

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.rows: list[bytes] = []
        self._sizes: list[int] = []
        self.num_tokens = 0

    def add(self, node: Any, row: bytes | None, num_tokens: int, /) -> None:
        """Add a node, its packed slots and its number of tokens."""
        assert row is not None, f"{node!r} had been evicted before"
        self.nodes.append(node)
        self.rows.append(row)
        self._sizes.append(num_tokens)
        self.num_tokens += num_tokens

    def slots(self, page_size: int, /) -> torch.Tensor:
        """Return one slot per token, int64, in a copy; each node's slots may be packed per token or per page."""
        return expand_each(self.rows, self._sizes, page_size)


def _give_back(slots: torch.Tensor, free: FreeSlots, free_each: FreeSlots) -> None:
    try:
        free(slots)
    except AssertionError:
        raise
    except Exception:
        free_each(slots)


def uproot(leaf: Any, page_bytes: int, /) -> bytes:
    """Remove a leaf from its parent's children; return its slots, which are None on the leaf afterwards.

    The parent adds the uses of the leaf to its own: each use of the leaf was also one of the parent.
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
    """Add a lock to a node and its ancestors; return the number of tokens that were unlocked before."""
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
    """Undo one `_lock_path`; return the number of tokens that are unlocked now."""
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
