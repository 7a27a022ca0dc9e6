"""A model of how tenants share a pool: it visits the whole tree and all leases each time, and keeps no state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from raydix.cache_core.eviction.tenants import Tenant
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.tree.packed_slots import expand_slots
from raydix.cache_core.tree.tree_node import TreeNode


@dataclass(eq=False)
class Node:
    """A copy of a tree's node, with the values that policies rank by."""

    id: int
    tenant: Tenant
    slots: list[int]
    is_locked: bool
    is_live: bool
    own_access_time: int
    own_hits: int
    own_priority: int
    creation_time: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)


class Shares:
    """The slots that each tenant holds, and the nodes that may be evicted for each.

    Attributes:
        free: slots.
        held: by tenant, slots in the tree and private ones, without those of `dead`.
        dead: by tenant, unlocked slots of retired namespaces.
        least_spared: a victim is cut only if at least so many slots of it stay; None: it goes whole.
    """

    def __init__(self, cache: KVCache) -> None:
        full = cache.tree.parts.full  # type: ignore[attr-defined]
        self.least_spared = None if cache.tree.parts.components else full.least_spared  # type: ignore[attr-defined]
        self.rank, self.page_size = full.policy.rank, cache.page_size
        self.free = cache.free_slots
        self.nodes: list[Node] = []
        for top in cache.tree.parts.tops():  # type: ignore[attr-defined]
            self._copy(top, None, cache.tenants.of(top.namespace.extra_key))
        self.dead = Counter[Tenant]()
        self.held = Counter[Tenant]()
        for node in self.nodes:
            where = self.held if node.is_live or node.is_locked else self.dead
            where[node.tenant] += len(node.slots)
        for lease in (*cache.leases, *cache.quarantine):
            private = len(lease.starts) - lease.num_published_pages
            self.held[cache.tenants.of(lease.key.extra_key)] += private * cache.page_size

    def _copy(self, node: TreeNode, parent: Node | None, tenant: Tenant) -> None:
        copied = parent
        if node.data and node.slots is not None:
            slots = expand_slots(node.slots, len(node)).tolist()
            uses = (node.own_access_time, node.own_hits, node.own_priority, node.creation_time)
            copied = Node(node.id, tenant, slots, node.lock_ref > 0, node.namespace.live, *uses, parent)
            self.nodes.append(copied)
            if parent is not None:
                parent.children.append(copied)
        for child in node.children.values():
            self._copy(child, copied, tenant)

    def live_slots(self) -> set[int]:
        """The slots that can be matched."""
        return {slot for node in self.nodes if node.is_live for slot in node.slots}

    def unlocked(self, tenant: Tenant) -> int:
        """Live slots of a tenant that no lease has locked."""
        return sum(len(node.slots) for node in self.nodes if node.tenant is tenant and self._may_ever_go(node))

    def fits(self, tenant: Tenant, num_slots: int) -> bool:
        """Whether the tenant can have so many more slots."""
        own = self.unlocked(tenant) + self.dead[tenant]
        if tenant.cap is not None and self.held[tenant] + self.dead[tenant] + num_slots - own > tenant.cap:
            return False
        others = {node.tenant for node in self.nodes} - {tenant}
        spare = sum(min(self.unlocked(other), max(0, self.held[other] - other.floor)) for other in others)
        dead = sum(self.dead[other] for other in others)
        return num_slots <= self.free + own + spare + dead

    def take(self, tenant: Tenant, num_slots: int) -> None:
        """Evict what the tenant needs for so many more slots: first its own, as far as its cap demands."""
        own = 0
        if tenant.cap is not None:
            own = self.evict(self.held[tenant] + num_slots - tenant.cap, tenant, only=tenant)
        self.evict(num_slots - self.free - own - sum(self.dead.values()), tenant)

    def evict(self, num_slots: int, caller: Tenant | None, only: Tenant | None = None) -> int:
        """Evict so many live slots; returns how many went, or all that could."""
        freed = 0
        while freed < num_slots:
            leaves = [
                node
                for node in self.nodes
                if self._may_ever_go(node)
                and not node.children
                and only in (None, node.tenant)
                and (node.tenant is caller or self.held[node.tenant] > node.tenant.floor)
            ]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: (self.rank(node), node.id))  # type: ignore[arg-type,return-value]
            spare = len(leaf.slots) if leaf.tenant is caller else self.held[leaf.tenant] - leaf.tenant.floor
            gone = min(spare, self._needed_of(leaf, num_slots - freed))
            del leaf.slots[len(leaf.slots) - gone :]
            self.held[leaf.tenant] -= gone
            freed += gone
            if not leaf.slots:
                self._remove(leaf)
        return freed

    def _needed_of(self, leaf: Node, num_slots: int) -> int:
        """The slots at the end of a leaf that go for so many: whole pages, and an eighth at least."""
        size = len(leaf.slots)
        tail = -(-max(num_slots, size // 8) // self.page_size) * self.page_size
        return tail if self.least_spared is not None and size - tail >= self.least_spared else size

    def _may_ever_go(self, node: Node) -> bool:
        return node.is_live and not node.is_locked

    def _remove(self, leaf: Node) -> None:
        self.nodes.remove(leaf)
        if (parent := leaf.parent) is not None:
            parent.children.remove(leaf)
            parent.own_access_time = max(parent.own_access_time, leaf.own_access_time)
            parent.own_hits += leaf.own_hits
            parent.own_priority = max(parent.own_priority, leaf.own_priority)
