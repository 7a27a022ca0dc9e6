"""`RecurrentState`: recurrent states on the nodes of a tree.

A state is the one after its node's last token: it cannot be cut, so a match ends where a state is, however much full KV
lies deeper, and a split leaves the state on the child:

    [A 64, state | B 64 | C 32]     a query of all 160 hits 64, and says that 128 would be worth a state

Rules, checked by `check`:

1. The nodes with a state that no lock holds, and no others, stand in the queue.
2. `evictable` counts the states of nodes without locks of their own, `protected` the others.
3. No two nodes share a state slot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import index
from typing import Protocol, cast

from raydix.cache_core.components.component import Component, assert_queued
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.errors import SlotError
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.explanation import Reason
from raydix.cache_core.pool.release import call_pool
from raydix.cache_core.tree.tree_node import TreeNode


class StateSlots(Protocol):
    """The pool that evicted states are freed to."""

    def free_track_slot(self, slot: int) -> None:
        """Take back a state slot."""


class RecurrentState(Component):
    """State locks, counts and eviction order. Its unit is a state."""

    reason: Reason = "no_state"

    def __init__(self, pool: StateSlots | None) -> None:
        self._queue = RecencyQueue(_rank)
        self._pool = pool
        self._is_used = getattr(pool, "is_used", None)
        self._held: set[int] = set()  # slots that are the tree's
        self._dropped: deque[int] = deque()  # slots that left the tree and are not freed yet

    def checked(self, slot: int) -> int:
        """Return a state slot if the tree can adopt it.

        Raises:
            SlotError: it is not allocated, or the tree has it already.
            TypeError: it is no integer.
        """
        slot = index(slot)
        if slot < 1 or slot in self._held or not (self._is_used is None or self._is_used(slot)):
            why = "the tree has it already" if slot in self._held else "it was not handed out"
            raise SlotError(f"state slot {slot} cannot be taken over: {why}")
        return slot

    def usable(self, path: Sequence[TreeNode], end: int, count: int) -> int:
        """A match may end where a whole node ends with a state."""
        for place in range(count, 0, -1):
            node = cast(MambaTreeNode, path[place - 1])
            if node.mamba_value is not None and node.end <= end:
                return place
        return 0

    def attach(self, node: TreeNode, slot: int, now: int) -> None:
        """Give a node without a state the one in a slot, which the tree then owns."""
        holder = cast(MambaTreeNode, node)
        assert holder.mamba_value is None, f"{node} has a state"
        holder.mamba_value, holder.mamba_access_time = slot, now
        self._held.add(slot)
        if holder.mamba_lock_ref:
            self.protected += 1
        else:
            self.evictable += 1
            self._queue.push(holder)
        if self.observer is not None:
            self.observer.gained(self, node)

    def pop_victim(self) -> TreeNode | None:
        """Take out the node with the least recently used state without a lock; None if there is none."""
        return self._queue.pop()

    def coldest(self, num_states: int) -> list[TreeNode]:
        """Return the nodes with the states that are dropped next, in order; changes nothing."""
        return list(islice(self._queue.in_order(), num_states))

    def drop(self, node: TreeNode) -> None:
        """Drop the state of a node, if it has one without a lock."""
        holder = cast(MambaTreeNode, node)
        if holder.mamba_value is None or holder.own_locks:
            return
        self._queue.discard(holder)
        self.evictable -= 1
        self.num_freed += 1
        self._give_up(holder, holder.mamba_value)

    def release_dropped(self) -> None:
        """Free the slots of dropped states. If the pool refuses one, the next call frees the slots after it."""
        while self._dropped:
            slot = self._dropped.popleft()
            if self._pool is not None:
                call_pool(self._pool.free_track_slot, slot, refused="states that were in the tree")

    def touch(self, end: TreeNode, now: int) -> None:
        """Note the use of the state at the end; the states above are not used."""
        cast(MambaTreeNode, end).mamba_access_time = now
        if end in self._queue:
            self._queue.push(end)

    def on_split(self, above: TreeNode, node: TreeNode) -> None:
        """Leave the state where it is: it belongs to the node's last token."""

    def on_remove(self, leaf: TreeNode) -> None:
        """Drop the state of the leaf."""
        assert not leaf.own_locks, f"the state of {leaf} is held"
        self.drop(leaf)

    def lock(self, node: TreeNode) -> None:
        """Lock the state of this node, if it has one."""
        if cast(MambaTreeNode, node).mamba_value is not None and node.own_locks == 1:
            self.evictable -= 1
            self.protected += 1
            self._queue.discard(node)

    def unlock(self, node: TreeNode, receipt: None) -> None:
        """Undo one `lock`."""
        if cast(MambaTreeNode, node).mamba_value is not None and node.own_locks == 0:
            self.evictable += 1
            self.protected -= 1
            self._queue.push(node)

    def forget(self, node: TreeNode) -> None:
        """Drop the state of a node, locked or not."""
        holder = cast(MambaTreeNode, node)
        if holder.mamba_value is not None:
            self._give_up(holder, holder.mamba_value)

    def _give_up(self, holder: MambaTreeNode, slot: int) -> None:
        holder.mamba_value = None
        self._held.remove(slot)
        self._dropped.append(slot)
        if self.observer is not None:
            self.observer.lost(self, holder)

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self.evictable = self.protected = 0

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        holders = [cast(MambaTreeNode, node) for node in nodes if cast(MambaTreeNode, node).mamba_value is not None]
        assert_queued(self._queue, {node for node in holders if not node.mamba_lock_ref})
        locked = sum(node.mamba_lock_ref > 0 for node in holders)
        assert (self.evictable, self.protected) == (len(holders) - locked, locked), "rule 2"
        assert len({node.mamba_value for node in holders}) == len(holders), "rule 3"
        assert {node.mamba_value for node in holders} == self._held, "rule 3: a slot is forgotten"


def _rank(node: TreeNode) -> int:
    return cast(MambaTreeNode, node).mamba_access_time
