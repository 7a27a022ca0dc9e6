"""`Component`: the contract of data that nodes hold besides the full KV: window KV, and recurrent states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.explanation import Reason
from raydix.cache_core.tree.tree_node import TreeNode


class DataObserver(Protocol):
    """Is notified of data that comes to nodes of a tree and leaves them. It must not use the tree."""

    def gained(self, component: Component, node: TreeNode) -> None:
        """A node has got the data of a component, but not by `Component.add`."""

    def lost(self, component: Component, node: TreeNode) -> None:
        """A node has lost the data of a component. It may leave the tree in this step."""


class Component(ABC):
    """One kind of data on the nodes of a tree, with locks, sizes and an eviction order of its own.

    Attributes:
        evictable: the amount without a lock, in the component's own unit.
        protected: the locked amount.
        num_freed: the amount dropped since the start.
        observer: is notified of data that comes to nodes and leaves them; None: there is none.
        reason: of a match that ends because the component's data is missing.
    """

    reason: Reason

    evictable = 0
    protected = 0
    num_freed = 0
    observer: DataObserver | None = None

    @abstractmethod
    def usable(self, path: Sequence[TreeNode], end: int, count: int) -> int:
        """Return how many of the first `count` nodes of a path from the top a match may use, and end there.

        The last node of the whole path may be matched in part, up to `end`.
        """

    def add(self, leaf: TreeNode, live: bool) -> None:  # noqa: B027 -- states come by themselves
        """Add a new, unlocked leaf; `live`: with window KV."""

    @abstractmethod
    def touch(self, end: TreeNode, now: int) -> None:
        """Note that a match which ends at `end` uses the data that it needs now."""

    @abstractmethod
    def on_split(self, above: TreeNode, node: TreeNode) -> None:
        """Split the data of a node: `above` holds its prefix now."""

    @abstractmethod
    def on_remove(self, leaf: TreeNode) -> None:
        """Drop the data of an unlocked leaf that leaves the tree."""

    @abstractmethod
    def lock(self, node: TreeNode) -> Any:
        """Lock the data of a match that ends at `node`; return a receipt for `unlock`. The full KV is locked before."""

    @abstractmethod
    def unlock(self, node: TreeNode, receipt: Any) -> None:
        """Undo one `lock`. The full KV is unlocked before."""

    @abstractmethod
    def pop_victim(self) -> TreeNode | None:
        """Take the node with the next data to drop out of the queue; None if no data is without a lock."""

    @abstractmethod
    def drop(self, node: TreeNode) -> None:
        """Drop the data of a node that stays in the tree, if the node has any without a lock."""

    @abstractmethod
    def release_dropped(self) -> None:
        """Free dropped data to its pool.

        Raises:
            SlotError: the pool refused some.
        """

    def forget(self, node: TreeNode) -> None:  # noqa: B027 -- most have nothing to do
        """Drop the data of a node, locked or not, as the tree is reset."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything."""

    @abstractmethod
    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the component is broken. O(n)."""


def assert_queued(queue: RecencyQueue[Any], nodes: Collection[TreeNode]) -> None:
    """Raise AssertionError unless exactly `nodes` are in a component's queue, in order. O(n)."""
    missing = [node for node in nodes if node not in queue]
    assert not missing and len(queue) == len(nodes), f"{len(queue)} nodes are queued, not {len(nodes)}: {missing=}"
    queue.check_invariants()
