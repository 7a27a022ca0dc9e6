"""`FullComponent`: who holds the full-attention KV of a tree's nodes, and which of it goes next.

Rules, checked by `check`:

1. `evictable` is the tokens of nodes without locks, `protected` of those with; both together, all tokens.
2. A node's `lock_ref` counts its own locks and those of its children.
3. The unlocked leaves, and no others, stand in the eviction queue; of retired namespaces they are still to be found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from raydix.cache_core.aux_component import AuxComponent
from raydix.cache_core.eviction_policy import EvictionPolicy
from raydix.cache_core.eviction_queue import EvictionQueue
from raydix.cache_core.radix_tree import RadixTree
from raydix.cache_core.retired_nodes import RetiredNodes
from raydix.cache_core.slot_rows import Slots, expand_slots
from raydix.cache_core.tree_node import TreeNode


@dataclass(slots=True)
class Victims:
    """Nodes that left the tree, with the slots they held: for the pool to take back."""

    nodes: list[TreeNode] = field(default_factory=list)
    rows: list[Slots] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, node: TreeNode, slots: Slots | None) -> None:
        """One more node and what it held."""
        assert slots is not None, f"{node} had been evicted before"
        self.nodes.append(node)
        self.rows.append(slots)
        self.num_tokens += len(node)

    def in_pages(self, page_size: int) -> bool:
        """Whether every row names the first slots of its pages."""
        return all(len(row) * page_size == len(node) for node, row in zip(self.nodes, self.rows, strict=True))

    def token_rows(self) -> list[Slots]:
        """The rows with one slot per token."""
        return [expand_slots(row, len(node)) for node, row in zip(self.nodes, self.rows, strict=True)]


class FullComponent:
    """Locks, sizes and eviction order of the full KV."""

    def __init__(self, tree: RadixTree, policy: EvictionPolicy, aux: Sequence[AuxComponent] = ()) -> None:
        self.evictable = 0  # tokens
        self.protected = 0  # tokens
        self._tree = tree
        self._aux = aux  # told of nodes that leave
        self._queue = EvictionQueue(policy.rank)
        self.retired = RetiredNodes()  # they go before all others

    def add(self, leaf: TreeNode) -> None:
        """A new, unlocked leaf."""
        assert leaf.parent is not None
        self.evictable += len(leaf)
        self._queue.discard(leaf.parent)
        self._queue.push(leaf)

    def touch(self, end: TreeNode) -> None:
        """A match or an insert ends at `end`: of what it went through, only that can be a leaf."""
        self._queue.touch(end)

    def lock(self, node: TreeNode) -> None:
        """Lock a node and its ancestors. O(depth in nodes)."""
        node.own_locks += 1
        self._queue.discard(node)
        while node.parent is not None:
            if not node.lock_ref:
                self.evictable -= len(node)
                self.protected += len(node)
            node.lock_ref += 1
            node = node.parent

    def unlock(self, node: TreeNode) -> None:
        """Undo one lock of this very node; a leaf without locks may then be evicted. O(depth in nodes)."""
        assert node.own_locks > 0, f"unlock of {node}"
        node.own_locks -= 1
        leaf = node
        while node.parent is not None:
            node.lock_ref -= 1
            if not node.lock_ref:
                self.evictable += len(node)
                self.protected -= len(node)
            node = node.parent
        if not leaf.lock_ref and not leaf.children:
            self._offer(leaf)

    def evict(self, num_tokens: int) -> Victims:
        """Take out unlocked leaves, in the policy's order, until they hold `num_tokens`. O(log n) for each."""
        victims = Victims()
        while victims.num_tokens < num_tokens and (leaf := self.retired.pop() or self._queue.pop()) is not None:
            self.take_out(leaf, victims)
        return victims

    def evict_retired(self, max_tokens: int | None) -> Victims:
        """Take out what is unlocked of retired namespaces; given a limit, until it is reached."""
        victims = Victims()
        while max_tokens is None or victims.num_tokens < max_tokens:
            if (leaf := self.retired.pop()) is None:
                break
            self.take_out(leaf, victims)
        return victims

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

    def take_out(self, leaf: TreeNode, victims: Victims) -> None:
        """Take an unlocked leaf out of the tree, with all it holds; its parent may be the next candidate."""
        parent = leaf.parent
        self._queue.discard(leaf)
        for component in self._aux:
            component.on_remove(leaf)
        assert parent is not None
        victims.add(leaf, self._tree.remove_leaf(leaf))
        self.evictable -= len(leaf)
        if not parent.children and not parent.lock_ref and parent.data:
            self._offer(parent)

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
