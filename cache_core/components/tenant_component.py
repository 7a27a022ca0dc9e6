"""`TenantFullKV`: a `FullKV` that knows whose slots are whose, and keeps floors.

Rules, checked by `check` beside its own:

4. `cached` of a tenant is the tokens of its nodes, `evictable` those of nodes without locks, `dead` of these what is
   retired.
5. A namespace's `evictable` is the tokens of its nodes without locks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.eviction.tenants import Tenant, TenantQueues, TenantRetired, Tenants
from raydix.cache_core.kernels import Victims
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import Namespace, TreeNode


class TenantFullKV(FullKV):
    """Locks, sizes and eviction order of the full KV, by tenant. O(tenants) more per victim."""

    def __init__(self, tree: RadixTree, policy: EvictionPolicy, aux: Sequence[Component], tenants: Tenants) -> None:
        super().__init__(tree, policy, aux)
        self._tenants = tenants
        self._queue = TenantQueues(tenants, policy.rank)
        self.retired = TenantRetired(tenants)

    def add(self, leaf: TreeNode) -> None:
        """A new, unlocked leaf."""
        before = self.evictable
        super().add(leaf)
        self._note(leaf.space, self.evictable - before, self.evictable - before)

    def lock(self, node: TreeNode) -> None:
        """Lock a node and its ancestors. O(depth in nodes)."""
        before = self.evictable
        super().lock(node)
        self._note(node.space, self.evictable - before, 0)

    def unlock(self, node: TreeNode) -> bool:
        """Undo one lock of this very node, if it has any; a leaf without locks may then be evicted. O(depth)."""
        before = self.evictable
        was_locked = super().unlock(node)
        self._note(node.space, self.evictable - before, 0)
        return was_locked

    def may_take(self, leaf: TreeNode) -> bool:
        """Whether an unlocked leaf may go whole: no floor keeps it, or it is the caller's own."""
        tenant = self._tenants.of_node(leaf)
        return (
            tenant is self._tenants.caller
            or not leaf.space.live
            or tenant.held - tenant.dead - len(leaf) >= tenant.floor
        )

    def evict_own(self, tenant: Tenant, num_tokens: int, victims: Victims) -> None:
        """`evict` from what one tenant holds, for itself; there must be so much."""
        while victims.num_tokens < num_tokens:
            leaf = tenant.retired.pop() or tenant.queue.pop()
            assert leaf is not None, f"tenant {tenant.name!r} has not so much to evict"
            self.take_out(leaf, victims)

    def evict(self, num_tokens: int, victims: Victims) -> None:
        """As without tenants; what a floor keeps, stays."""
        self.evict_retired(index(num_tokens), victims)
        self._evict_each(num_tokens, victims)

    def _remove(self, leaf: TreeNode, victims: Victims) -> None:
        """Where a floor keeps a part of the leaf, its tail alone goes: exactly what may."""
        self._cut_to_spare(leaf)
        before, live = self.evictable, leaf.space.live
        super()._remove(leaf, victims)
        gone = self.evictable - before
        self._note(leaf.space, gone, gone)
        if live:
            self._tenants.of_node(leaf).evicted -= gone

    def _cut_to_spare(self, leaf: TreeNode) -> None:
        if not self.may_take(leaf):
            tenant = self._tenants.of_node(leaf)
            spare = tenant.held - tenant.dead - tenant.floor
            above = self._tree.split(leaf, leaf.end - spare)
            for component in self._aux:
                component.on_split(above, leaf)

    def _note(self, space: Namespace, evictable: int, cached: int) -> None:
        """So much more of a namespace is evictable, and in the tree."""
        tenant = self._tenants.of_space(space)
        tenant.cached += cached
        tenant.evictable += evictable
        space.evictable += evictable
        if not space.live:
            tenant.dead += evictable

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        for tenant in self._tenants:
            tenant.clear()

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        nodes = list(nodes)
        super().check(nodes)
        spaces = {id(node.space): node.space for node in nodes}
        for tenant in self._tenants:
            mine = [node for node in nodes if self._tenants.of(node.space.extra_key) is tenant]
            unlocked = [node for node in mine if not node.lock_ref]
            where = f"rule 4 at tenant {tenant.name!r}"
            assert tenant.cached == sum(map(len, mine)), f"{where}: {tenant.cached=}"
            assert tenant.evictable == sum(map(len, unlocked)), f"{where}: {tenant.evictable=}"
            assert tenant.dead == sum(len(node) for node in unlocked if not node.space.live), f"{where}: {tenant.dead=}"
        for space in spaces.values():
            evictable = sum(len(node) for node in nodes if node.space is space and not node.lock_ref)
            assert space.evictable == evictable, f"rule 5 at {space.extra_key!r}: {space.evictable=}"
