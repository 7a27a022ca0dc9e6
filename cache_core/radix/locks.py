"""`TreeLocks`: the part of a tree's cache that keeps nodes from eviction."""

from __future__ import annotations

from typing import Any

from raydix.cache_core.errors import LockError, StaleNodeError
from raydix.cache_core.radix.insertion import TreeInsert
from raydix.cache_core.tree.tree_node import TreeNode, check_node


class TreeLocks(TreeInsert):
    """A `TreeInsert` whose nodes can be locked: the full KV, and what components have there."""

    def inc_lock_ref(self, node: TreeNode) -> Any:
        """Keep `node` and its ancestors from eviction. O(depth in nodes).

        With a sliding window, returns a receipt that `dec_lock_ref` takes back once; else None.

        Raises:
            StaleNodeError: the node is no longer in the tree.
        """
        if node is not self.root:
            try:
                if node.slots is None or node.space.tree is not self._tree:  # a call would cost as much as the lock
                    self._check_live(node)
            except AttributeError:
                check_node(node)
                raise
            self._full.lock(node)
        receipt = None
        if self._aux:
            for component in self._aux:
                receipt = component.lock(node) or receipt
        return receipt

    def dec_lock_ref(self, node: TreeNode, receipt: Any = None, *, swa_boundary_id: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`; once unlocked, a leaf may be evicted. O(depth in nodes).

        Args:
            receipt: what `inc_lock_ref` returned, also accepted as `swa_boundary_id`.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the node is not locked, or another cache's, or the receipt is missing, used, another lock's, or
                none was due.
        """
        receipt, aux = swa_boundary_id if receipt is None else receipt, self._aux
        if receipt is not None or aux:
            self._check_receipt(node, receipt)
        try:
            if node is not self.root and (
                node.slots is None or node.space.home is not self._tree or not self._full.unlock(node)
            ):
                raise self._not_locked(node)
        except AttributeError:
            check_node(node)
            raise
        if aux:
            for component in aux:
                component.unlock(node, receipt)

    def _check_receipt(self, node: TreeNode, receipt: Any) -> None:
        if receipt is not None:
            raise LockError("this cache hands out no receipts, so it takes none back")

    def _not_locked(self, node: TreeNode) -> StaleNodeError | LockError:
        if node.slots is None:
            return StaleNodeError(f"{node} is no longer in the tree")
        if node.space.home is not self._tree:
            return LockError(f"{node} is a node of another cache")
        return LockError(f"{node} is not locked" + (" itself, only a node below it" if node.lock_ref else ""))

    def _check_in_tree(self, node: TreeNode) -> None:
        """Raise StaleNodeError unless it is a node of this cache, which may be retired."""
        try:
            if node.slots is not None and node.space.home is self._tree:
                return
        except AttributeError:
            check_node(node)
            raise
        raise StaleNodeError(f"{node} is not in the tree")
