"""Walks over the candidates of a tree in the order of eviction, which leave the queues as they are.

    walk = full.walk()
    while (leaf := walk.take()) is not None: ...

A walk goes from the leaf that would be evicted first to the last one, as if each one went and no node above it became
a candidate. A step is O(1), besides O(log n) where late nodes stand, and O(tenants) in a divided tree. Between two
steps the queues may change: the node that a step returned may leave them. If the node of the next step leaves them,
the walk is stale and ends: begin another one.
"""

from __future__ import annotations

from typing import Protocol

from raydix.cache_core.eviction.queue import Entry, EvictionQueue, Rank
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.eviction.two_queues import TwoQueues
from raydix.cache_core.tree.tree_node import TreeNode


class VictimWalk(Protocol):
    """A walk over the candidates of a tree.

    Attributes:
        is_stale: the queues have changed at the place of the walk, so that it has ended early.
    """

    @property
    def is_stale(self) -> bool: ...

    def take(self) -> TreeNode | None:
        """Return the next candidate; None at the end, or if the walk is stale."""

    def note_above(self, node: TreeNode) -> None:
        """Note that a node above a candidate would go with it: the counts that choose a queue include it."""


class QueueWalk:
    """A walk over one queue."""

    def __init__(self, queue: EvictionQueue) -> None:
        self.is_stale = False
        self._queue = queue
        self._ranked: TreeNode | None = queue.ranked_after(None)
        self._place: tuple[Rank, int] | None = None  # rank and id of the last node

    def peek(self) -> Entry | None:
        """Return the entry of the next step; None at the end, or if the walk is stale."""
        queue, ranked = self._queue, self._ranked
        if ranked is not None and not queue.is_ranked(ranked):
            self.is_stale = True
            return None
        late = queue.late_after(self._place)
        if ranked is None:
            return late
        entry = (queue.rank(ranked), ranked.id, ranked)
        return late if late is not None and late[:2] < entry[:2] else entry

    def take(self) -> TreeNode | None:
        """Return the next candidate; None at the end, or if the walk is stale."""
        entry = self.peek()
        if entry is None:
            return None
        node = entry[2]
        if node is self._ranked:
            self._ranked = self._queue.ranked_after(node)
        self._place = entry[:2]
        return node

    def note_above(self, node: TreeNode) -> None:
        """Do nothing: there is one queue."""


class TwoQueuesWalk:
    """A walk over the two queues of policy "2q", each in its turn, as the count of protected tokens falls."""

    def __init__(self, queues: TwoQueues) -> None:
        self._probation, self._protected = QueueWalk(queues.probation), QueueWalk(queues.protected)
        self._num_slots = queues.num_slots
        self._num_protected = queues.num_protected

    @property
    def is_stale(self) -> bool:
        """Whether the walk has ended early."""
        return self._probation.is_stale or self._protected.is_stale

    def take(self) -> TreeNode | None:
        """Return the next candidate, by the rule of `TwoQueues.pop`."""
        first, other = self._probation, self._protected
        if self._num_protected >= self._num_slots - self._num_protected:
            first, other = other, first
        node = first.take()
        if node is None and not first.is_stale:
            node = other.take()
        if node is not None:
            self.note_above(node)
        return node

    def note_above(self, node: TreeNode) -> None:
        """Count a node that would go, if it is protected."""
        if node.is_protected:
            self._num_protected -= len(node)


class TenantsWalk:
    """A walk over the queues of tenants: floors keep their leaves, as from a caller without a tenant."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._walks = {tenant: QueueWalk(tenant.queue) for tenant in tenants}
        self._spare = {tenant: tenant.held - tenant.dead - tenant.floor for tenant in tenants}

    @property
    def is_stale(self) -> bool:
        """Whether the walk has ended early."""
        return any(walk.is_stale for walk in self._walks.values())

    def take(self) -> TreeNode | None:
        """Return the next candidate, by the rule of `Tenants.next_victim`."""
        heads: list[tuple[Entry, Tenant]] = []
        for tenant, walk in self._walks.items():
            if self._spare[tenant] > 0 and (entry := walk.peek()) is not None:
                heads.append((entry, tenant))
        if not heads or self.is_stale:
            return None
        _, tenant = min(heads, key=lambda head: head[0][:2])
        node = self._walks[tenant].take()
        if node is not None:
            self.note_above(node)
        return node

    def note_above(self, node: TreeNode) -> None:
        """Count a node that would go as no longer held."""
        self._spare[self._tenants.of_node(node)] -= len(node)
