"""`TreeMatch`: how the radix caches find prefixes, and what a match does to the nodes it goes through."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raydix.cache_core.aux_component import AuxComponent
from raydix.cache_core.base_prefix_cache import BasePrefixCache, MatchResult, PageMatch, no_slots
from raydix.cache_core.eviction_policy import EvictionPolicy
from raydix.cache_core.full_component import FullComponent
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import RadixTree, Walk
from raydix.cache_core.slot_rows import Slots, expand_slots, join_rows
from raydix.cache_core.tree_node import TreeNode


class TreeMatch(BasePrefixCache):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them: the half that looks things up.

    Time is a logical clock: equal operations have equal outcomes.
    """

    def __init__(
        self, page_size: int, policy: EvictionPolicy, aux: Sequence[AuxComponent], node_type: type[TreeNode]
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self._aux = tuple(aux)  # each may go without those after it, none without those before
        self._tree = RadixTree(page_size, node_type)
        self._full = FullComponent(self._tree, policy, self._aux)
        self._clock = 0

    @property
    def root(self) -> TreeNode:
        """The node above every namespace: where a miss ends. Locking it is a no-op."""
        return self._tree.root

    def match_prefix(self, key: RadixKey, priority: int = 0) -> MatchResult:
        """The longest cached prefix of `key` that can be used, floored to whole pages.

        Refreshes recency and counts a hit along the matched path, and raises its priority to the request's; a match
        that ends inside a node splits it. Costs a memcmp of the match and a lookup per node.
        """
        node, path, full_end = self._match(key, None, priority)
        indices = torch.from_numpy(self._expand(path)) if path else no_slots()
        return MatchResult(indices, node, node.end, self._branching(node.end, full_end), full_end)

    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """`match_prefix` of the first `limit` tokens, in pages.

        Only for caches whose slots were all inserted in whole pages of consecutive slots.
        """
        node, path, full_end = self._match(key, limit, priority)
        starts = join_rows([each.slots for each in path if each.slots is not None])
        return PageMatch(node.end, node, starts, full_end, self._branching(node.end, full_end))

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """As `match_prefix`, but nothing changes. `last_node` is the deepest node matched wholly."""
        query = self._tree.find_query(key)
        if query is None:
            return MatchResult(no_slots(), self.root)
        walk = self._tree.walk(query, query.top)
        full_end, walk = walk.end, self._usable(walk)
        last_node = walk.path[-1] if walk.path else self.root
        path = walk.path if walk.part is None else [*walk.path, walk.part]
        indices = torch.from_numpy(self._expand(path)[: walk.end])
        return MatchResult(indices, last_node, walk.end, self._branching(walk.end, full_end), full_end)

    def _match(self, key: RadixKey, limit: int | None, priority: int) -> tuple[TreeNode, list[TreeNode], int]:
        """Where the usable match ends, the nodes it uses, and how far the full KV alone would reach."""
        query = self._tree.find_query(key, limit)
        if query is None:
            return self.root, [], 0
        walk = self._tree.walk(query, query.top)
        full_end, walk = walk.end, self._usable(walk)
        path = self._touch_path(walk, query.top, priority)
        for node in path:
            node.hit_count += 1
        end = path[-1] if path else self.root
        self._touch_end(end)
        return end, path, full_end

    def _usable(self, walk: Walk) -> Walk:
        """A walk cut back to where every component lets a match end."""
        if not self._aux:
            return walk
        judges = [component.validator() for component in self._aux]
        usable = 0
        for count, node in enumerate(walk.path, 1):
            verdicts = [may_end(node, len(node)) for may_end in judges]  # each judge sees every node
            usable = count if all(verdicts) else usable
        if walk.part is not None and all(may_end(walk.part, walk.part_len) for may_end in judges):
            return walk
        path = walk.path[:usable]
        return Walk(path, path[-1].end if path else 0, None, 0)

    def _branching(self, usable: int, full_end: int) -> int | None:
        """Where it would be worth making the prefix usable, beyond what is."""
        return full_end if full_end > usable else None

    def _touch_path(self, walk: Walk, start: TreeNode, priority: int) -> list[TreeNode]:
        """Cut the tree where a walk from `start` ended, stamp what it matched. The rest keeps its recency."""
        path = walk.path
        if walk.part is not None:
            path.append(self._split(walk.part, walk.part_len))
        self._clock += 1
        for node in path:
            node.last_access_time = self._clock
            node.priority = max(node.priority, priority)
        node = start
        while node.data:  # what lies above a resumed node was used as well
            node.last_access_time = self._clock
            node.priority = max(node.priority, priority)
            assert node.parent is not None
            node = node.parent
        return path

    def _touch_end(self, end: TreeNode) -> None:
        """A match or an insert ends here: what of it counts as used depends on what is kept."""
        self._full.touch(end)
        for component in self._aux:
            component.touch(end, self._clock)

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        above = self._tree.split(node, length)
        for component in self._aux:
            component.on_split(above, node)
        return above

    def _expand(self, path: list[TreeNode]) -> Slots:
        if self.page_size == 1:
            return join_rows([node.slots for node in path if node.slots is not None])
        return join_rows([expand_slots(node.slots, len(node)) for node in path if node.slots is not None])
