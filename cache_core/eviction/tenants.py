"""`Tenants`: the tenants that share a pool of slots, with their floors, caps and eviction candidates.

A tenant is one namespace with a floor, a cap, or both; all other namespaces together are one tenant with neither,
`Tenants.rest`. A tenant holds the tree's tokens of its namespace and the private slots of its leases:

    floor 40    others take nothing of it up to here; slots above are lent, and are evicted when others need them
    cap 100     it never holds more: it evicts its own slots first, and a request beyond that is refused

A floor reserves nothing: others may use the slots that its tenant does not. Only full slots count, no window or state:
where windows or states run short, a leaf that a floor keeps may lose its window or its state, and end no match then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from raydix.cache_core.eviction.queue import EvictionQueue, Rank
from raydix.cache_core.tree.tree_node import TreeNode


class RetiredNodes:
    """The nodes of a tenant's retired namespaces.

    A retirement adds the namespace's top alone. `pop` looks for the unlocked leaves below it when slots are wanted, and
    visits each node once. A leaf that is locked by then is offered again when it is unlocked. The order is no policy's.

    Attributes:
        pending: leaves, and nodes below which `pop` has not looked yet; empty if there is nothing to pop.
    """

    def __init__(self) -> None:
        self.pending: list[TreeNode] = []

    def add(self, node: TreeNode) -> None:
        """Add the top of a retired namespace, or a retired node that became an unlocked leaf. O(1)."""
        self.pending.append(node)

    def pop(self) -> TreeNode | None:
        """Take out an unlocked leaf; None if there is none. One step per node, over all calls."""
        while self.pending:
            node = self.pending.pop()
            if node.children:
                self.pending.extend(node.children.values())
            elif node.slots is not None and node.data and not node.lock_ref:
                return node
        return None

    def known(self) -> Iterable[TreeNode]:
        """Yield every node that `pop` may come to, for checks. O(n)."""
        stack = [*self.pending]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


class Tenant:
    """A tenant: the slots it may hold, the slots it holds, and its eviction candidates. Counts are in slots.

    `cached`, `evictable` and `dead` are counted only in a tree that is divided among tenants.

    Args:
        name: in reports and errors; None for `Tenants.rest`.
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
        self.private = 0  # slots of its leases alone; leases in quarantine are included
        self.evicted = 0  # slots since the start; retired nodes are not counted
        self.clear()

    def clear(self) -> None:
        """Forget the cached slots."""
        self.cached = 0  # slots in the tree
        self.evictable = 0  # cached slots without a lock
        self.dead = 0  # evictable slots of retired namespaces, which no floor keeps
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
        """Return how many of its own slots it must evict before it takes `num_slots` more; not positive if none."""
        return 0 if self.cap is None else self.held + num_slots - self.cap


class Tenants:
    """The tenants of one pool, with one tenant for all other namespaces. As one queue, it holds their candidates.

    Attributes:
        configured: the tenants with a floor or a cap.
        rest: all other namespaces.
        caller: the tenant that needs slots now: its own floor keeps nothing from it. None: every floor keeps its slots.
    """

    def __init__(self, tenants: Iterable[Tenant] = ()) -> None:
        self.configured = tuple(tenants)
        self.rest = Tenant(None, None)
        self.caller: Tenant | None = None
        self._all = (*self.configured, self.rest)
        self._by_key = {tenant.extra_key: tenant for tenant in self.configured}

    def of(self, extra_key: str | None) -> Tenant:
        """Return the tenant of a namespace. O(1)."""
        return self._by_key.get(extra_key, self.rest)

    def of_node(self, node: TreeNode) -> Tenant:
        """Return the tenant of a node's namespace. O(1)."""
        return self._by_key.get(node.namespace.extra_key, self.rest)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._all)

    def kept_from(self, caller: Tenant) -> int:
        """Return the number of evictable slots that the floors of other tenants keep from a caller. O(tenants)."""
        return sum(tenant.evictable - tenant.spare for tenant in self.configured if tenant is not caller)

    # ---------------------------------------------------------------- the queue

    def rank_by(self, rank: Callable[[TreeNode], Rank]) -> None:
        """Order the candidates of each tenant by this rank. Every tenant forgets its cached nodes."""
        for tenant in self._all:
            tenant.queue = EvictionQueue(rank)
            tenant.clear()

    def push(self, node: TreeNode) -> None:
        """Add a candidate."""
        self.of_node(node).queue.push(node)

    def discard(self, node: TreeNode) -> None:
        """Take a node out, if it is a candidate."""
        self.of_node(node).queue.discard(node)

    def touch(self, node: TreeNode) -> None:
        """Move a node to its place, as its rank may have changed, if it is a candidate."""
        self.of_node(node).queue.touch(node)

    def pop(self) -> TreeNode | None:
        """Take out the candidate that goes next; None if the caller may take none."""
        node = self.next_victim()
        if node is not None:
            self.discard(node)
        return node

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

    def clear(self) -> None:
        """Forget every candidate, retired node and count of cached slots."""
        for tenant in self._all:
            tenant.queue.clear()
            tenant.clear()

    def __contains__(self, node: TreeNode) -> bool:
        return node in self.of_node(node).queue

    def check(self, candidates: set[TreeNode]) -> None:
        """Raise AssertionError unless exactly `candidates` are queued, each in its tenant's queue. O(n log n)."""
        for tenant in self._all:
            tenant.queue.check({node for node in candidates if self.of_node(node) is tenant})

    # ---------------------------------------------------------------- retired namespaces

    def retire(self, top: TreeNode) -> None:
        """Add a retired namespace: no floor keeps it from now on. O(1)."""
        tenant = self.of_node(top)
        tenant.retired.add(top)
        tenant.dead += top.namespace.evictable

    def pop_retired(self) -> TreeNode | None:
        """Take out an unlocked leaf of a retired namespace, of any tenant; None if there is none."""
        leaves = (tenant.retired.pop() for tenant in self._all)
        return next((leaf for leaf in leaves if leaf is not None), None)

    @property
    def has_retired(self) -> bool:
        """Whether `pop_retired` has nodes to look at. O(tenants)."""
        return bool(self.rest.retired.pending) or any(tenant.retired.pending for tenant in self.configured)

    def known_retired(self) -> Iterator[TreeNode]:
        """Yield every node that `pop_retired` may come to, for checks. O(n)."""
        return chain.from_iterable(tenant.retired.known() for tenant in self._all)
