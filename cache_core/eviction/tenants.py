"""`Tenants`: who shares a pool of slots, and what each may hold.

A tenant is one namespace with a floor, a cap, or both; all other namespaces together are the rest, with neither. It
holds the tree's tokens of its namespace and the private slots of its leases:

    floor 40    what others need takes nothing of it below; slots above are lent, and are evicted when others need them
    cap 100     it never holds more: it evicts its own first, and what does not fit even so is refused

A floor reserves nothing: what its tenant does not use, others may. Only full slots count, not window slots or states:
where those run short, a leaf that a floor keeps may lose its window or its state, and end no match then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from raydix.cache_core.eviction.queue import EvictionQueue, Rank
from raydix.cache_core.eviction.retired_nodes import RetiredNodes
from raydix.cache_core.tree.tree_node import Namespace, TreeNode


class Tenant:
    """One who shares the pool: what it may hold, what it holds, and what of it goes next. Counts are in slots.

    Args:
        name: for people; None: the rest.
        extra_key: its namespace.
        floor: as long as it holds no more, its slots are kept from others. Whole pages.
        cap: it holds no more; None: as much as there is. Whole pages.
    """

    __slots__ = (
        "cached",
        "cap",
        "dead",
        "evictable",
        "evicted",
        "extra_key",
        "floor",
        "name",
        "private",
        "queue",
        "retired",
    )

    queue: EvictionQueue

    def __init__(self, name: str | None, extra_key: str | None, floor: int = 0, cap: int | None = None) -> None:
        self.name = name
        self.extra_key = extra_key
        self.floor = floor
        self.cap = cap
        self.private = 0  # its leases' own, those in quarantine included
        self.evicted = 0  # since the start; not what was retired
        self.clear()

    def clear(self) -> None:
        """Forget what is cached."""
        self.cached = 0  # in the tree
        self.evictable = 0  # of that, what no lease has locked
        self.dead = 0  # of that, what was retired: nobody can match it, so no floor keeps it
        self.retired = RetiredNodes()

    @property
    def held(self) -> int:
        """Slots that it holds."""
        return self.cached + self.private

    @property
    def spare(self) -> int:
        """Evictable slots that others may take."""
        return min(self.evictable, max(self.dead, self.held - self.floor))

    def excess(self, num_slots: int) -> int:
        """How many of its own must go before it may take so many more; none if that is not positive."""
        return 0 if self.cap is None else self.held + num_slots - self.cap


class Tenants:
    """The tenants of one pool, and the rest.

    Attributes:
        configured: the tenants with a floor or a cap.
        rest: all other namespaces.
        caller: for whom slots are wanted now: from it, no floor keeps its own. None: for nobody in particular.
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.configured = tuple(tenants)
        self.rest = Tenant(None, None)
        self.caller: Tenant | None = None
        self._all = (*self.configured, self.rest)
        self._by_key = {tenant.extra_key: tenant for tenant in self.configured}

    def of(self, extra_key: str | None) -> Tenant:
        """Whose namespace that is."""
        return self._by_key.get(extra_key, self.rest)

    def of_node(self, node: TreeNode) -> Tenant:
        """Who holds the slots of a node."""
        return self.of_space(node.space)

    def of_space(self, space: Namespace) -> Tenant:
        """Who holds the slots of a namespace's nodes."""
        if space.tenant is None:
            space.tenant = self.of(space.extra_key)
        return space.tenant

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._all)

    def kept_from(self, caller: Tenant) -> int:
        """Return the number of evictable slots that the floors of other tenants keep from a caller. O(tenants)."""
        return sum(tenant.evictable - tenant.spare for tenant in self.configured if tenant is not caller)

    def next_victim(self) -> TreeNode | None:
        """The lowest in the policy's order of all live leaves that the caller may take, in part at least; None if it
        may take none. It stays queued. O(tenants)."""
        heads = (
            tenant.queue.first()
            for tenant in self._all
            if tenant is self.caller or tenant.held - tenant.dead > tenant.floor
        )
        first = min((head for head in heads if head is not None), default=None)
        return None if first is None else first[2]


class TenantQueues:
    """The `EvictionQueue`s of all tenants, for who need not know whose a node is."""

    def __init__(self, tenants: Tenants, rank: Callable[[TreeNode], Rank]) -> None:
        self._tenants = tenants
        for tenant in tenants:
            tenant.queue = EvictionQueue(rank)

    def push(self, node: TreeNode) -> None:
        """A node became a candidate."""
        self._tenants.of_node(node).queue.push(node)

    def discard(self, node: TreeNode) -> None:
        """A node is no candidate (now), if it was one."""
        self._tenants.of_node(node).queue.discard(node)

    def touch(self, node: TreeNode) -> None:
        """The rank of a node may have changed, if it is a candidate."""
        self._tenants.of_node(node).queue.touch(node)

    def pop(self) -> TreeNode | None:
        """Take out the candidate of the lowest rank that the caller may have; None if there is none."""
        if (node := self._tenants.next_victim()) is not None:
            self.discard(node)
        return node

    def clear(self) -> None:
        """Forget every candidate."""
        for tenant in self._tenants:
            tenant.queue.clear()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._tenants.of_node(node).queue

    def check(self, candidates: set[TreeNode]) -> None:
        """Raise AssertionError unless these are exactly the candidates, each in its tenant's queue. O(n log n)."""
        for tenant in self._tenants:
            tenant.queue.check({node for node in candidates if self._tenants.of_node(node) is tenant})


class TenantRetired:
    """The `RetiredNodes` of all tenants, likewise."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants

    def add(self, top: TreeNode) -> None:
        """A namespace was retired: no floor keeps it any more."""
        tenant = self._tenants.of_node(top)
        tenant.retired.add(top)
        tenant.dead += top.space.evictable

    def offer(self, leaf: TreeNode) -> None:
        """A retired node became an unlocked leaf."""
        self._tenants.of_node(leaf).retired.offer(leaf)

    def pop(self) -> TreeNode | None:
        """An unlocked leaf of any tenant, and no longer here; None if there is none."""
        leaves = (tenant.retired.pop() for tenant in self._tenants)
        return next((leaf for leaf in leaves if leaf is not None), None)

    @property
    def pending(self) -> list[TreeNode]:
        """Where there may be something to pop: those of the first tenant that has any."""
        return next((tenant.retired.pending for tenant in self._tenants if tenant.retired.pending), [])

    def clear(self) -> None:
        """Forget everything."""
        for tenant in self._tenants:
            tenant.retired.clear()

    def known(self) -> Iterator[TreeNode]:
        """Every node that a `pop` may come upon, for checks. O(n)."""
        return chain.from_iterable(tenant.retired.known() for tenant in self._tenants)
