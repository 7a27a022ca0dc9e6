"""`FullKV`: the full-attention KV of a tree's nodes: locks, sizes, tenants, and which leaf is evicted next.

Rules, checked by `check`:

1. `evictable` is the tokens of nodes without locks, `protected` of nodes with a lock; both together, all tokens.
2. A node's `lock_ref` counts its own locks and its children's.
3. The unlocked leaves, and no others, stand in the eviction queue; `Tenants` finds the leaves of retired namespaces.

In a tree that is divided among tenants, also:

4. A tenant's `cached` is the tokens of its nodes; its `evictable`, the tokens of its nodes without locks; its `dead`,
   the evictable tokens in retired namespaces.
5. A namespace's `evictable` is the tokens of its nodes without locks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import index

from raydix.cache_core.components.component import Component
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.eviction.queue import EvictionQueue
from raydix.cache_core.eviction.queue_walk import QueueWalk, TenantsWalk, TwoQueuesWalk, VictimWalk
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.eviction.two_queues import TwoQueues
from raydix.cache_core.kernels import LockAccounting, Victims
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import Namespace, TreeNode


class FullKV(LockAccounting):
    """Locks, sizes and eviction order of the full KV, by tenant.

    If no tenant is configured, no node is counted by tenant, and the compiled loops do all of the work.

    Attributes:
        policy: the eviction policy.
        tenants: the tenants, with their candidates and retired nodes. Retired nodes go before all others.
        is_divided: whether tokens are counted by tenant.
        on_victim: called with each live node that is about to leave the tree, and None, or to lose its window KV or its
            state, and that component. It must not change the tree. None: not called.
    """

    _queue: EvictionQueue | Tenants | TwoQueues  # the compiled loops push to it and pop from it

    two_queues: TwoQueues | None

    def __init__(
        self,
        tree: RadixTree,
        policy: EvictionPolicy,
        aux: Sequence[Component] = (),
        two_queues: TwoQueues | None = None,
    ) -> None:
        self.tenants = Tenants()
        self.tenants.rank_by(policy.rank)
        super().__init__(self.tenants.rest.queue if two_queues is None else two_queues)
        self.two_queues = two_queues
        self._tree = tree
        self._aux = aux  # the components that hear of nodes that leave
        self.policy = policy
        self.is_divided = False
        self.on_victim: Callable[[TreeNode, Component | None], None] | None = None

    def divide(self, tenants: Tenants) -> None:
        """Count tokens by tenant from now on, and keep the tenants' floors. The tree must be empty.

        Raises:
            ValueError: the policy is "2q".
        """
        if self.two_queues is not None:
            raise ValueError("policy '2q' takes no tenants: choose another policy, or leave the tenants out")
        self.tenants, self.is_divided, self._queue = tenants, True, tenants
        tenants.rank_by(self.policy.rank)
        # set on the instance, so that a tree without tenants keeps the compiled methods
        self.add, self.lock, self.unlock = self._add, self._lock, self._unlock  # type: ignore[method-assign,assignment]

    # ---------------------------------------------------------------- counts by tenant

    def _add(self, leaf: TreeNode) -> None:
        before = self.evictable
        super().add(leaf)
        self._count(leaf.namespace, self.evictable - before, self.evictable - before)

    def _lock(self, node: TreeNode) -> None:
        before = self.evictable
        super().lock(node)
        self._count(node.namespace, self.evictable - before, 0)

    def _unlock(self, node: TreeNode) -> bool:
        before = self.evictable
        was_locked = super().unlock(node)
        self._count(node.namespace, self.evictable - before, 0)
        return was_locked

    def _count(self, namespace: Namespace, evictable: int, cached: int) -> None:
        """Add to the evictable and cached tokens of a namespace."""
        tenant = self.tenants.of(namespace.extra_key)
        tenant.cached += cached
        tenant.evictable += evictable
        namespace.evictable += evictable
        if not namespace.live:
            tenant.dead += evictable

    def may_take(self, leaf: TreeNode) -> bool:
        """Return whether an unlocked leaf may go whole: no floor keeps it, or it is the caller's own."""
        if not self.is_divided:
            return True
        tenant = self.tenants.of_node(leaf)
        return (
            tenant is self.tenants.caller
            or not leaf.namespace.live
            or tenant.held - tenant.dead - len(leaf) >= tenant.floor
        )

    # ---------------------------------------------------------------- eviction

    def walk(self) -> VictimWalk:
        """Return a walk over the unlocked leaves in the order of eviction, which changes nothing."""
        if self.two_queues is not None:
            return TwoQueuesWalk(self.two_queues)
        return TenantsWalk(self.tenants) if self.is_divided else QueueWalk(self.tenants.rest.queue)

    def evict(self, num_tokens: int, victims: Victims) -> None:
        """Take out unlocked leaves until the victims hold `num_tokens`: retired ones, then in the policy's order.

        Of a long leaf, the tail alone goes if that is enough: see `_spare_head`. Floors keep their leaves. A victim has
        left the tree, whatever is raised: the caller frees its slots. O(log n) for each, and O(tenants) in a divided
        tree.
        """
        if self.tenants.has_retired:
            num_tokens = min(index(num_tokens), self.evictable)
            self.evict_retired(num_tokens, victims)
        if self._aux or self.is_divided or self.on_victim is not None:
            while victims.num_tokens < num_tokens and (leaf := self._queue.pop()) is not None:
                self._spare_head(leaf, num_tokens - victims.num_tokens)
                self._remove(leaf, victims)
            return
        try:
            self.evict_leaves(num_tokens, victims)
        except OverflowError:  # the compiled loop cannot count to it; nothing has happened yet
            self.evict_leaves(self.at_most(num_tokens), victims)

    def evict_own(self, tenant: Tenant, num_tokens: int, victims: Victims) -> None:
        """`evict` from the nodes of one tenant, for the tenant itself. It must have that many unlocked tokens."""
        while victims.num_tokens < num_tokens:
            leaf = tenant.retired.pop() or tenant.queue.pop()
            assert leaf is not None, f"tenant {tenant.name!r} has fewer than {num_tokens} tokens to evict"
            self._spare_head(leaf, num_tokens - victims.num_tokens)
            self.take_out(leaf, victims)

    def evict_retired(self, max_tokens: int | None, victims: Victims) -> None:
        """`evict` from retired namespaces, up to a limit if one is given."""
        while max_tokens is None or victims.num_tokens < max_tokens:
            if (leaf := self.tenants.pop_retired()) is None:
                break
            self.take_out(leaf, victims)

    def at_most(self, num_tokens: int) -> int:
        """Return `num_tokens`, limited to `evictable`, which the compiled loops can count to; 0 if negative."""
        return max(0, min(index(num_tokens), self.evictable))

    def take_out(self, leaf: TreeNode, victims: Victims) -> None:
        """Remove an unlocked leaf from the queue and the tree; its parent may be the next candidate."""
        self._queue.discard(leaf)
        self._remove(leaf, victims)

    def _remove(self, leaf: TreeNode, victims: Victims) -> None:
        if self.is_divided:
            self._cut_to_spare(leaf)
        parent, live = leaf.parent, leaf.namespace.live
        assert parent is not None
        if live and self.on_victim is not None:
            self.on_victim(leaf, None)
        for component in self._aux:
            component.on_remove(leaf)
        if self.two_queues is not None:
            self.two_queues.removed(leaf)
        num_tokens = leaf.end - parent.end
        victims.add(leaf, self._tree.remove_leaf(leaf), num_tokens)
        self.evictable -= num_tokens
        if self.is_divided:
            self._count(leaf.namespace, -num_tokens, -num_tokens)
            self.tenants.of_node(leaf).evicted += num_tokens if live else 0
        if not parent.children:
            self._on_last_child_removed(parent)

    def _spare_head(self, leaf: TreeNode, num_tokens: int) -> None:
        """Split an unlocked leaf that is longer than needed by `least_spared` tokens, so that its tail alone goes.

        The tail is at least an eighth of the leaf: many small evictions from a long leaf copy it a few times in all.
        With windows or states, a match ends where they are, at the end of the leaf: so the leaf goes whole.
        """
        if self._aux:
            return
        page = self._tree.page_size
        tail = -(-max(num_tokens, len(leaf) // 8) // page) * page
        if len(leaf) - tail >= self.least_spared:
            self._tree.split(leaf, leaf.end - tail)

    def _cut_to_spare(self, leaf: TreeNode) -> None:
        """Where a floor keeps a part of a leaf, split it, so that the tail alone goes."""
        if not self.may_take(leaf):
            tenant = self.tenants.of_node(leaf)
            above = self._tree.split(leaf, leaf.end - (tenant.held - tenant.dead - tenant.floor))
            for component in self._aux:
                component.on_split(above, leaf)

    def _add_candidate(self, leaf: TreeNode) -> None:
        """Queue an unlocked leaf, by the policy or among the retired."""
        if leaf.namespace.live:
            self._queue.push(leaf)
        else:
            self.tenants.of_node(leaf).retired.add(leaf)

    def _on_last_child_removed(self, node: TreeNode) -> None:
        """Handle a node without children: remove a top, queue any other node if it is unlocked."""
        if not node.data:
            self._tree.remove_top(node)
        elif not node.lock_ref:
            self._add_candidate(node)

    def clear(self) -> None:
        """Forget everything."""
        self.tenants.clear()
        if self.two_queues is not None:
            self.two_queues.clear()
        self.evictable = self.protected = 0

    # ---------------------------------------------------------------- checks

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        evictable = protected = 0
        nodes = list(nodes)
        leaves = {node for node in nodes if not node.lock_ref and not node.children}
        retired = set(self.tenants.known_retired())
        assert all(leaf in retired for leaf in leaves if not leaf.namespace.live), "rule 3: a retired leaf is lost"
        self._queue.check({leaf for leaf in leaves if leaf.namespace.live or leaf in self._queue})
        if self.two_queues is not None:
            self.two_queues.check_nodes(nodes)
        for node in nodes:
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref == node.own_locks + below, f"rule 2 at {node}: {node.own_locks=}, {below=}"
            evictable += 0 if node.lock_ref else len(node)
            protected += len(node) if node.lock_ref else 0
        assert evictable == self.evictable, f"rule 1: {evictable=}, but {self.evictable=}"
        assert protected == self.protected, f"rule 1: {protected=}, but {self.protected=}"
        if self.is_divided:
            self._check_tenants(nodes)

    def _check_tenants(self, nodes: list[TreeNode]) -> None:
        for tenant in self.tenants:
            mine = [node for node in nodes if self.tenants.of_node(node) is tenant]
            unlocked = [node for node in mine if not node.lock_ref]
            where = f"rule 4 at tenant {tenant.name!r}"
            assert tenant.cached == sum(map(len, mine)), f"{where}: {tenant.cached=}"
            assert tenant.evictable == sum(map(len, unlocked)), f"{where}: {tenant.evictable=}"
            assert tenant.dead == sum(len(node) for node in unlocked if not node.namespace.live), (
                f"{where}: {tenant.dead=}"
            )
        for namespace in {id(node.namespace): node.namespace for node in nodes}.values():
            evictable = sum(len(node) for node in nodes if node.namespace is namespace and not node.lock_ref)
            assert namespace.evictable == evictable, f"rule 5 at {namespace.extra_key!r}: {namespace.evictable=}"
