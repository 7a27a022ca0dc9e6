"""`MambaTreeNode`: a node that may hold the recurrent state after its last token."""

from __future__ import annotations

from typing import Any

from raydix.cache_core.tree.tree_node import Namespace, TreeNode


class MambaTreeNode(TreeNode):
    """A node of `MambaRadixCache`: full KV always, and a state or a Mamba tombstone.

    Attributes:
        mamba_value: the state slot with the state after this node's last token; None if there is none.
        mamba_access_time: when the state came, or a match last ended there, in ticks of the cache's clock.
        prev, next, mamba_prev, mamba_next: links of the `LRUList`s it stands in, towards the more and the less
            recently used.
    """

    __slots__ = ("mamba_access_time", "mamba_next", "mamba_prev", "mamba_value", "next", "prev")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mamba_value: int | None = None
        self.mamba_access_time = 0
        self.prev: MambaTreeNode | None = None
        self.next: MambaTreeNode | None = None
        self.mamba_prev: MambaTreeNode | None = None
        self.mamba_next: MambaTreeNode | None = None

    @property
    def full_lock_ref(self) -> int:
        """Locks on the full KV: on this node and below. Never less than `mamba_lock_ref`."""
        return self.lock_ref

    @property
    def mamba_lock_ref(self) -> int:
        """Locks on the state, which are taken on this very node."""
        return self.own_locks

    @property
    def mamba_tombstone(self) -> bool:
        """Whether the full KV is there without a state."""
        return self.slots is not None and self.mamba_value is None


def sentinel() -> MambaTreeNode:
    """A node that only ends a list."""
    return MambaTreeNode(-1, None, Namespace(None, 0, 4, 4), b"", None, 0, 0)
