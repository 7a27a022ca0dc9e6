"""`Component`: the contract of data that nodes hold besides the full KV: window KV, and recurrent states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from raydix.cache_core.explanation import Reason
from raydix.cache_core.tree.tree_node import TreeNode


class Component(ABC):
    """One kind of data on the nodes of a tree, with locks, sizes and an eviction order of its own.

    Attributes:
        evictable: what no lock holds, in the component's own unit.
        protected: what some lock holds.
        num_freed: what was given up since the start.
        reason: what a match lacks that ends for want of it.
    """

    reason: Reason

    evictable = 0
    protected = 0
    num_freed = 0

    @abstractmethod
    def usable(self, path: Sequence[TreeNode], end: int, count: int) -> int:
        """Of the first `count` nodes of a path from the top, how many a match may go through and end there.

        The last of the whole path may be matched in part: up to `end`.
        """

    def add(self, leaf: TreeNode, live: bool) -> None:  # noqa: B027 -- states come by themselves
        """A new, unlocked leaf came into the tree; `live`: with window KV."""

    @abstractmethod
    def touch(self, end: TreeNode, now: int) -> None:
        """A match ends at `end`: what it uses was used now."""

    @abstractmethod
    def on_split(self, above: TreeNode, node: TreeNode) -> None:
        """`node` was cut; `above` holds its prefix."""

    @abstractmethod
    def on_remove(self, leaf: TreeNode) -> None:
        """An unlocked leaf leaves the tree with all it holds."""

    @abstractmethod
    def lock(self, node: TreeNode) -> Any:
        """Hold what a match that ends at `node` uses; returns what `unlock` needs back. The full KV is locked first."""

    @abstractmethod
    def unlock(self, node: TreeNode, receipt: Any) -> None:
        """Undo one `lock`. The full KV is unlocked first."""

    @abstractmethod
    def pop_victim(self) -> TreeNode | None:
        """Take out of the queue the node whose data is to go next, of those that no lock holds; None if none is."""

    @abstractmethod
    def drop(self, node: TreeNode) -> None:
        """Give up the data of a node that stays in the tree, if it has any that no lock holds."""

    @abstractmethod
    def release_dropped(self) -> None:
        """Free dropped data to its pool.

        Raises:
            SlotError: the pool refused some.
        """

    def forget(self, node: TreeNode) -> None:  # noqa: B027 -- most have nothing to do
        """The tree is reset: `node` leaves it, locked or not."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the component is broken. O(n)."""
