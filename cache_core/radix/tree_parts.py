"""`TreeParts`: the parts of a prefix cache, which lookup, insertion and eviction share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.errors import StaleNodeError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.eviction.two_queues import TwoQueues
from raydix.cache_core.tree.page_events import KVEventPublisher
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode, check_node


class TreeParts:
    """A radix tree, the data on its nodes, its clock and its observers.

    Attributes:
        page_size: tokens of a page.
        tree: the structure.
        full: the full KV of every node.
        window: the sliding-window KV; None without a sliding window.
        states: the recurrent states; None without any.
        two_queues: the candidates of policy "2q"; None under another policy.
        components: the window and the states, as far as there are any. Each may be evicted from a node without the
            earlier ones, none without the later ones.
        clock: the logical time of the last match or insert: equal operations have equal outcomes.
        events: publishes pages that come and go; None: no sink.
        history: records evictions and retirements; None: nothing is recorded.
    """

    __slots__ = (
        "clock",
        "components",
        "events",
        "full",
        "history",
        "page_size",
        "states",
        "tree",
        "two_queues",
        "window",
    )

    def __init__(
        self,
        page_size: int,
        policy: EvictionPolicy,
        window: WindowKV | None,
        states: RecurrentState | None,
        node_type: type[TreeNode],
        two_queues: TwoQueues | None = None,
    ) -> None:
        self.page_size = page_size
        self.window = window
        self.states = states
        self.components: tuple[Component, ...] = tuple(part for part in (window, states) if part is not None)
        self.tree = RadixTree(page_size, node_type)
        self.two_queues = two_queues
        self.full = FullKV(self.tree, policy, self.components, two_queues)
        self.clock = 0
        self.events: KVEventPublisher | None = None
        self.history: EvictionHistory | None = None

    def split(self, node: TreeNode, end: int) -> TreeNode:
        """Split a node at `end`, which lies within it; return the upper node. The lower one keeps its recency."""
        above = self.tree.split(node, end)
        for component in self.components:
            component.on_split(above, node)
        return above

    def touch(self, end: TreeNode) -> None:
        """Note in each component that a match ends at a node now."""
        for component in self.components:
            component.touch(end, self.clock)

    def is_stop(self, node: TreeNode) -> bool:
        """Return whether requests come back to the end of a node: with states it has one, else `WindowKV` says it."""
        if self.states is not None:
            return cast(MambaTreeNode, node).mamba_value is not None
        return self.window is None or node.swa_stop

    def tops(self) -> list[TreeNode]:
        """Return the top of each namespace, matchable or retired."""
        return [*self.tree.tops.values(), *self.tree.detached]

    def nodes(self) -> Iterator[TreeNode]:
        """Yield every node, matchable or retired, parents before children."""
        return (node for top in self.tops() for node in self.tree.nodes_below(top))

    def check_live(self, node: TreeNode) -> None:
        """Raise StaleNodeError unless the node can be matched in this tree."""
        if node.slots is None or node.namespace.tree is not self.tree:
            raise StaleNodeError(f"{node} is no longer in the tree: match again")

    def check_in_tree(self, node: TreeNode) -> None:
        """Raise StaleNodeError unless the node is in this tree, matchable or retired."""
        try:
            if node.slots is not None and node.namespace.home is self.tree:
                return
        except AttributeError:
            check_node(node)
            raise
        raise StaleNodeError(f"{node} is not in the tree")
