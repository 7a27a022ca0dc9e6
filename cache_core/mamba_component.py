"""`MambaComponent`: recurrent states on the nodes of a tree.

A state is the one after its node's last token: it cannot be cut, so a match ends where a state is, however much full KV
lies deeper, and a split leaves the state on the child:

    [A 64, state | B 64 | C 32]     a query of all 160 hits 64, and says that 128 would be worth a state

Rules, checked by `check`:

1. A node with a state stands in `lru`, and no other node.
2. `evictable` counts the states of nodes without locks of their own, `protected` the others.
3. No two nodes share a state slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

from raydix.cache_core.aux_component import AuxComponent, Validator
from raydix.cache_core.lru_list import LRUList
from raydix.cache_core.mamba_tree_node import MambaTreeNode
from raydix.cache_core.tree_node import TreeNode


class StateSlots(Protocol):
    """What evicted states are given back to."""

    def free_track_slot(self, slot: int) -> None:
        """Take back a state slot."""


class MambaComponent(AuxComponent):
    """State locks, counts and eviction order."""

    def __init__(self, pool: StateSlots | None) -> None:
        self.evictable = 0  # states
        self.protected = 0  # states
        self.lru = LRUList(mamba=True)
        self.num_freed = 0  # states given back since the start
        self._pool = pool

    def validator(self) -> Validator:
        """A match may end where a whole node ends with a state."""
        return lambda node, length: length == len(node) and cast(MambaTreeNode, node).mamba_value is not None

    def attach(self, node: TreeNode, slot: int) -> None:
        """Give a node without a state one; the slot is the tree's from now on."""
        holder = cast(MambaTreeNode, node)
        assert holder.mamba_value is None, f"{node} has a state"
        holder.mamba_value = slot
        self.lru.insert_mru(holder)
        if holder.mamba_lock_ref:
            self.protected += 1
        else:
            self.evictable += 1

    def drop(self, node: TreeNode) -> None:
        """Take the state of an unlocked node away, and give its slot back."""
        holder = cast(MambaTreeNode, node)
        assert holder.mamba_value is not None and not holder.mamba_lock_ref, f"cannot drop the state of {node}"
        self.lru.remove(holder)
        self.evictable -= 1
        self.num_freed += 1
        if self._pool is not None:
            self._pool.free_track_slot(holder.mamba_value)
        holder.mamba_value = None

    def touch(self, end: TreeNode, now: int) -> None:
        """The state at the end was used; those above were not."""
        if end in self.lru:
            self.lru.touch_mru(cast(MambaTreeNode, end))

    def on_split(self, above: TreeNode, node: TreeNode) -> None:
        """The state stays where it is: it belongs to the node's last token."""

    def on_remove(self, leaf: TreeNode) -> None:
        """Its state goes with it."""
        if cast(MambaTreeNode, leaf).mamba_value is not None:
            self.drop(leaf)

    def lock(self, node: TreeNode) -> None:
        """Hold the state of this very node, if it has one. Called once the node's own lock was counted."""
        if cast(MambaTreeNode, node).mamba_value is not None and node.own_locks == 1:
            self.evictable -= 1
            self.protected += 1

    def unlock(self, node: TreeNode, receipt: None) -> None:
        """Undo one `lock`. Called once the node's own lock was given back."""
        if cast(MambaTreeNode, node).mamba_value is not None and node.own_locks == 0:
            self.evictable += 1
            self.protected -= 1

    def clear(self) -> None:
        """Give every state back, and forget everything."""
        for node in list(self.lru):
            self.lru.remove(node)
            if self._pool is not None and node.mamba_value is not None:
                self._pool.free_track_slot(node.mamba_value)
            node.mamba_value = None
        self.evictable = self.protected = 0

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        holders = [cast(MambaTreeNode, node) for node in nodes if cast(MambaTreeNode, node).mamba_value is not None]
        assert {node.id for node in holders} == {node.id for node in self.lru}, "rule 1"
        assert len(holders) == len(self.lru) == sum(1 for _ in self.lru), "rule 1"
        locked = sum(node.mamba_lock_ref > 0 for node in holders)
        assert (self.evictable, self.protected) == (len(holders) - locked, locked), "rule 2"
        assert len({node.mamba_value for node in holders}) == len(holders), "rule 3"
