"""`FullKV`: who holds the full-attention KV of a tree's nodes, and which of it goes next.

Rules, checked by `check`:

1. `evictable` is the tokens of nodes without locks, `protected` of those with; both together, all tokens.
2. A node's `lock_ref` counts its own locks and those of its children.
3. The unlocked leaves, and no others, stand in the eviction queue; of retired namespaces they are still to be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from raydix.cache_core.components.component import Component
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.eviction.queue import EvictionQueue
from raydix.cache_core.eviction.retired_nodes import RetiredNodes
from raydix.cache_core.eviction.tenants import TenantQueues, TenantRetired
from raydix.cache_core.kernels import Holdings, Victims
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode


class FullKV(Holdings):
    """Locks, sizes and eviction order of the full KV."""

    _queue: EvictionQueue | TenantQueues

    def __init__(self, tree: RadixTree, policy: EvictionPolicy, aux: Sequence[Component] = ()) -> None:
        super().__init__(EvictionQueue(policy.rank))
        self._tree = tree
        self._aux = aux  # told of nodes that leave
        self.policy = policy
        self.retired: RetiredNodes | TenantRetired = RetiredNodes()  # they go before all others

    def evict(self, num_tokens: int, victims: Victims) -> None:
        """Take out unlocked leaves, in the policy's order, until the victims hold `num_tokens`. O(log n) for each.

        Who is among the victims has left the tree, whatever is raised: the caller hands back what they held.
        """
        if self.retired.pending:
            num_tokens = min(index(num_tokens), self.evictable)
            self.evict_retired(num_tokens, victims)
        if self._aux:
            self._evict_each(num_tokens, victims)
            return
        try:
            self.fell(num_tokens, self._tree.page_size, victims)
        except OverflowError:  # more than it counts to, or less; nothing has happened yet
            self.fell(self.at_most(num_tokens), self._tree.page_size, victims)

    def at_most(self, num_tokens: int) -> int:
        """So many tokens, or as many as can be evicted, which the compiled loops can count to; none if negative."""
        return max(0, min(index(num_tokens), self.evictable))

    def _evict_each(self, num_tokens: int, victims: Victims) -> None:
        """`fell` where others are to know of each leaf."""
        while victims.num_tokens < num_tokens and (leaf := self._queue.pop()) is not None:
            self._remove(leaf, victims)

    def evict_retired(self, max_tokens: int | None, victims: Victims) -> None:
        """`evict` what is of retired namespaces; given a limit, until it is reached."""
        while max_tokens is None or victims.num_tokens < max_tokens:
            if (leaf := self.retired.pop()) is None:
                break
            self.take_out(leaf, victims)

    def _offer(self, leaf: TreeNode) -> None:
        """Queue an unlocked leaf where it belongs."""
        if leaf.space.live:
            self._queue.push(leaf)
        else:
            self.retired.offer(leaf)

    def clear(self) -> None:
        """Forget everything."""
        self._queue.clear()
        self.retired.clear()
        self.evictable = self.protected = 0

    def may_take(self, leaf: TreeNode) -> bool:
        """Whether an unlocked leaf may go whole, as far as its full KV is concerned."""
        return True

    def take_out(self, leaf: TreeNode, victims: Victims) -> None:
        """Take an unlocked leaf out of the tree, with all it holds; its parent may be the next candidate."""
        self._queue.discard(leaf)
        self._remove(leaf, victims)

    def _remove(self, leaf: TreeNode, victims: Victims) -> None:
        parent = leaf.parent
        assert parent is not None
        for component in self._aux:
            component.on_remove(leaf)
        num_tokens = leaf.end - parent.end
        victims.add(leaf, self._tree.remove_leaf(leaf), num_tokens)
        self.evictable -= num_tokens
        if not parent.children:
            self._left_bare(parent)

    def _left_bare(self, node: TreeNode) -> None:
        """The last child of a node has gone: it may go, too."""
        if not node.data:
            self._tree.remove_top(node)
        elif not node.lock_ref:
            self._offer(node)

    def check(self, nodes: Iterable[TreeNode]) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        evictable = protected = 0
        nodes = list(nodes)
        leaves = {node for node in nodes if not node.lock_ref and not node.children}
        retired = set(self.retired.known())
        assert all(leaf in retired for leaf in leaves if not leaf.space.live), "rule 3: a retired leaf is lost"
        self._queue.check({leaf for leaf in leaves if leaf.space.live or leaf in self._queue})
        for node in nodes:
            below = sum(child.lock_ref for child in node.children.values())
            assert node.lock_ref == node.own_locks + below, f"rule 2 at {node}: {node.own_locks=}, {below=}"
            evictable += 0 if node.lock_ref else len(node)
            protected += len(node) if node.lock_ref else 0
        assert evictable == self.evictable, f"rule 1: {evictable=}, but {self.evictable=}"
        assert protected == self.protected, f"rule 1: {protected=}, but {self.protected=}"
