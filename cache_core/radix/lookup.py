"""`TreeMatch`: how the radix caches find prefixes, and what a match does to the nodes it goes through."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from raydix.cache_core.base_prefix_cache import NO_SLOTS, BasePrefixCache, MatchResult, PageMatch, match_result
from raydix.cache_core.components.component import Component
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.explanation import Explanation, Reason
from raydix.cache_core.kernels import gather, reach, walk
from raydix.cache_core.outline import Outline, sample
from raydix.cache_core.radix.explain_miss import explain_absence
from raydix.cache_core.radix.format import outline_node
from raydix.cache_core.tree.packed_slots import join_slots
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode, packed_slots_of


class TreeMatch(BasePrefixCache):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them: the half that looks things up.

    Time is a logical clock: equal operations have equal outcomes.

    Attributes:
        root: the node above every namespace: where a miss ends. Locking it is a no-op.
    """

    def __init__(
        self, page_size: int, policy: EvictionPolicy, aux: Sequence[Component], node_type: type[TreeNode]
    ) -> None:
        page_size = index(page_size)
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self._aux = tuple(aux)  # each may go without those after it, none without those before
        self._tree = RadixTree(page_size, node_type)
        self.root: TreeNode = self._tree.root
        self._full = FullKV(self._tree, policy, self._aux)
        self._clock = 0
        self._history: EvictionHistory | None = None

    def match_prefix(self, key: RadixKey, priority: int = 0) -> MatchResult:
        """The longest cached prefix of `key` that can be used, floored to whole pages.

        Refreshes recency and counts a hit along the matched path, and raises its priority to the request's; a match
        that ends inside a node splits it. Costs a memcmp of the match and a lookup per node.
        """
        node, path, end, full_end = self._match(key, None, priority)
        indices = gather(path, self.page_size) if path else NO_SLOTS
        branching = None if end == full_end else self._branching(end, full_end)
        return match_result(indices, node, end, branching, full_end)

    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """`match_prefix` of the first `limit` tokens, in pages.

        Only for caches whose slots were all inserted in whole pages of consecutive slots.
        """
        node, path, end, full_end = self._match(key, limit, priority)
        branching = None if end == full_end else self._branching(end, full_end)
        return PageMatch(end, node, join_slots(packed_slots_of(path)), full_end, branching)

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """As `match_prefix`, but nothing changes. `last_node` is the deepest node matched wholly."""
        top, key = self._tree.find_namespace(key)
        if top is None:
            return MatchResult(NO_SLOTS, self.root)
        path, end, rest = walk(top, key, self.page_size, key.num_tokens)
        full_end = end
        if self._aux:
            path, end = self._usable(path, full_end)
            rest = path[-1].end - end if path else 0
        if not path:
            return MatchResult(NO_SLOTS, self.root, 0, self._branching(0, full_end), full_end)
        indices = gather(path, self.page_size)[:end]
        whole = path[:-1] if rest else path
        last_node = whole[-1] if whole else self.root
        return MatchResult(indices, last_node, end, self._branching(end, full_end), full_end)

    @property
    def now(self) -> int:
        """The time of the last match or insert, in ticks of the cache's own clock."""
        return self._clock

    def sample(self, max_nodes: int) -> Outline:
        """Return an estimate of what each namespace holds, from about `max_nodes` nodes."""
        tops = [(top.space.extra_key, top) for top in self._tree.tops.values()]
        return sample(tops, outline_node, max_nodes, self._clock)

    # ---------------------------------------------------------------- reasons

    def keep_history(self, history: EvictionHistory) -> None:
        """Note in `history` what is evicted and retired from now on, for `explain`."""
        self._history = history

    def explain(self, key: RadixKey) -> Explanation:
        """Where a match of `key` ends, and why it goes no further. Changes nothing. O(namespaces) at most.

        What was evicted, and when, is known only to a cache that was told to `keep_history`.
        """
        peeked = self.peek_prefix(key)
        found = Explanation.of_lengths(len(key), peeked.prefix_len, peeked.full_prefix_len, self.page_size)
        if found.prefix_len < found.full_prefix_len:
            found.reason = self._obstacle(key)
        elif found.reason == "not_there":
            explain_absence(found, self._tree, key, self._history)
        return found

    def _obstacle(self, key: RadixKey) -> Reason:
        """Which component alone keeps a match furthest from what the full KV allows."""
        top, key = self._tree.find_namespace(key)
        assert top is not None, f"nothing of {key} is there"
        path, end, _ = walk(top, key, self.page_size, key.num_tokens)
        return min(
            (self._usable(path, end, [component])[1], place, component.reason)
            for place, component in enumerate(self._aux)
        )[2]

    # ---------------------------------------------------------------- parts

    def _match(self, key: RadixKey, limit: int | None, priority: int) -> tuple[TreeNode, list[TreeNode], int, int]:
        """The node that the usable match ends at, those it uses, its tokens, and how many the full KV alone has."""
        tree = self._tree
        if priority:
            priority = index(priority)
        top, key = tree.find_namespace(key)
        if top is None:
            return self.root, [], 0, 0
        num_tokens = key.num_tokens if limit is None else min(index(limit), key.num_tokens)
        if self._aux:
            path, full_end, _ = walk(top, key, self.page_size, num_tokens)
            path, end = self._usable(path, full_end)
            if path and path[-1].end > end:
                path[-1] = self._split(path[-1], end)
        else:
            path, end, _ = reach(tree.node_type, tree.ids, top, key, self.page_size, num_tokens)
            full_end = end
        if not path:
            return self.root, path, 0, full_end
        node = path[-1]
        self._clock += 1
        self._full.use(node, self._clock, 1, priority)
        if self._aux:
            self._touch(node)
        return node, path, end, full_end

    def _usable(
        self, path: list[TreeNode], end: int, aux: Sequence[Component] | None = None
    ) -> tuple[list[TreeNode], int]:
        """A walk cut back to where every component, or each of these, lets a match end."""
        count, before = len(path), -1
        parts = self._aux if aux is None else aux
        while count != before:  # where one lets it end, another one may not
            before = count
            for component in parts:
                count = component.usable(path, end, count)
        return path[:count], min(path[count - 1].end, end) if count else 0

    def _branching(self, usable: int, full_end: int) -> int | None:
        """Where it would be worth making the prefix usable, beyond what is."""
        return full_end if full_end > usable else None

    def _touch(self, end: TreeNode) -> None:
        """A match or an insert ends here, now: what of the aux components' counts as used, which may be new."""
        for component in self._aux:
            component.touch(end, self._clock)

    def _split(self, node: TreeNode, end: int) -> TreeNode:
        """Cut a node at `end`, which lies within it; returns the one that ends there. The rest keeps its recency."""
        above = self._tree.split(node, end)
        for component in self._aux:
            component.on_split(above, node)
        return above
