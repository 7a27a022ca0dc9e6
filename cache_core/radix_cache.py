"""`RadixCache`: prefixes of token ids to KV slots, with locks, LRU eviction of leaves, and page hashes.

Rules, checked by `check_invariants` beside those of the tree and of `FullComponent`:

1. A node was used at least as recently as its children.
2. A node has hashes only if its parent has, and one for each page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from raydix.cache_core.base_prefix_cache import (
    BasePrefixCache,
    EvictResult,
    InsertResult,
    MatchResult,
    PageInsert,
    PageMatch,
    Starts,
    no_slots,
)
from raydix.cache_core.errors import InvalidKeyError, LockError, StaleNodeError
from raydix.cache_core.full_component import FullComponent, Victims
from raydix.cache_core.page_hashes import chain_hashes
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import Query, RadixTree, Walk, check_on_path, check_same_space
from raydix.cache_core.slot_rows import Slots, as_slots, compact_slots, expand_slots, join_rows
from raydix.cache_core.tree_format import format_tree
from raydix.cache_core.tree_node import TreeNode


class SlotPool(Protocol):
    """What the cache gives evicted slots back to."""

    def free(self, indices: torch.Tensor) -> None:
        """Take back slots, int64, whole pages of them."""


class RadixCache(BasePrefixCache):
    """The prefix cache for full attention.

    The cache owns the slots it adopted, from the insert until it frees them to the pool (evicted, or reset). Keys and
    values are copied on insert. Time is a logical clock: equal operations have equal outcomes.

    Args:
        page_size: tokens a page; matches and inserts are floored to whole pages.
        sliding_window_size: must be None.
        token_to_kv_pool_allocator: gets evicted slots back by `free(indices)`; None drops them.
        on_node_evict: called with the id of each evicted node, after it left the tree.
    """

    def __init__(
        self,
        page_size: int = 1,
        sliding_window_size: int | None = None,
        token_to_kv_pool_allocator: SlotPool | None = None,
        on_node_evict: Callable[[int], None] | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if sliding_window_size is not None:
            raise ValueError("this cache serves full attention only: sliding_window_size must be None")
        self.page_size = page_size
        self.pool = token_to_kv_pool_allocator
        self.on_node_evict = on_node_evict
        self._free_pages = getattr(token_to_kv_pool_allocator, "free_pages", None)
        self._tree = RadixTree(page_size)
        self._full = FullComponent(self._tree)
        self._clock = 0
        self._retired: list[TreeNode] = []  # tops of retired namespaces that still have nodes

    @property
    def root(self) -> TreeNode:
        """The node above every namespace: where a miss ends. Locking it is a no-op."""
        return self._tree.root

    # ---------------------------------------------------------------- match

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, floored to whole pages.

        Refreshes recency and counts a hit along the matched path; a match that ends inside a node splits it. Costs a
        memcmp of the match and a lookup per node.
        """
        node, end, rows = self._match(key, None)
        indices = torch.from_numpy(self._expand(rows)) if rows else no_slots()
        return MatchResult(indices, node, end)

    def match_pages(self, key: RadixKey, limit: int | None = None) -> PageMatch:
        """`match_prefix` of the first `limit` tokens, in pages.

        Only for caches whose slots were all inserted in whole pages of consecutive slots.
        """
        node, end, rows = self._match(key, limit)
        return PageMatch(end, node, join_rows([node.slots for node in rows if node.slots is not None]))

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """As `match_prefix`, but nothing changes. `last_node` is the deepest node matched wholly."""
        query = self._tree.find_query(key)
        if query is None:
            return MatchResult(no_slots(), self.root)
        walk = self._tree.walk(query, query.top)
        last_node = walk.path[-1] if walk.path else self.root
        if walk.part is None:
            return MatchResult(torch.from_numpy(self._expand(walk.path)), last_node, walk.end)
        indices = self._expand([*walk.path, walk.part])[: walk.end]
        return MatchResult(torch.from_numpy(indices), last_node, walk.end)

    def _match(self, key: RadixKey, limit: int | None) -> tuple[TreeNode, int, list[TreeNode]]:
        query = self._tree.find_query(key, limit)
        if query is None:
            return self.root, 0, []
        walk = self._tree.walk(query, query.top)
        path = self._touch_path(walk, query.top)
        for node in path:
            node.hit_count += 1
        return (path[-1] if path else self.root), walk.end, path

    def _touch_path(self, walk: Walk, start: TreeNode) -> list[TreeNode]:
        """Cut the tree where a walk from `start` ended, stamp what it matched. The rest keeps its recency."""
        path = walk.path
        if walk.part is not None:
            path.append(self._split(walk.part, walk.part_len))
        self._clock += 1
        for node in path:
            node.last_access_time = self._clock
        node = start
        while node.data:  # what lies above a resumed node was used as well
            node.last_access_time = self._clock
            assert node.parent is not None
            node = node.parent
        return path

    def _split(self, node: TreeNode, length: int) -> TreeNode:
        return self._tree.split(node, length)

    def _expand(self, path: list[TreeNode]) -> Slots:
        if self.page_size == 1:
            return join_rows([node.slots for node in path if node.slots is not None])
        return join_rows([expand_slots(node.slots, len(node)) for node in path if node.slots is not None])

    # ---------------------------------------------------------------- insert

    def insert(
        self,
        key: RadixKey,
        value: torch.Tensor | None = None,
        *,
        prev_prefix_len: int = 0,
        swa_evicted_seqlen: int = 0,
        from_node: TreeNode | None = None,
        **kwargs: Any,
    ) -> InsertResult:
        """Make the KV in `value` findable under `key`, whole pages of it.

        The tree adopts (and copies) the slots in [prefix_len, aligned length). It frees none: of those in
        [prev_prefix_len, prefix_len), `duplicate_indices` names the ones it does not hold, the caller's to free. The
        tail beyond the last whole page stays the caller's, too.

        Args:
            value: int64, one slot per token of `key`; None takes the ids themselves (for simulation).
            prev_prefix_len: leading slots known to be the tree's own.
            swa_evicted_seqlen: no effect without a sliding window; so have arguments of other kinds of caches.
            from_node: `last_node` of a match of a prefix of this key: the walk starts there, and the slots before it
                are taken to be the tree's own.

        Raises:
            InvalidKeyError: `value` is shorter than the key, `from_node` does not lie on its path, or fewer than
                `prev_prefix_len` tokens are in the tree.
            StaleNodeError: `from_node` is no longer in the tree.
        """
        aligned = len(key) - len(key) % self.page_size
        slots = as_slots(key, value, aligned)
        node = self._resume_node(key, from_node)
        if not aligned:
            return InsertResult(0, self.root)
        query = self._tree.make_query(key, self._clock)
        node = query.top if node is self.root else node
        resumed_at = node.end
        check_on_path(query, node)
        walk = self._tree.walk(query, node)
        end = walk.end
        if not 0 <= prev_prefix_len <= end:
            raise InvalidKeyError(f"prev_prefix_len is {prev_prefix_len}, but {end} tokens of {key} are in the tree")
        path = self._touch_path(walk, node)
        duplicates = self._duplicates(slots, max(prev_prefix_len, resumed_at), end, resumed_at, path)
        last_node = path[-1] if path else node
        if end < aligned:
            last_node = self._adopt(last_node, query, end, compact_slots(slots[end:aligned], self.page_size))
        return InsertResult(end, last_node, False, duplicates)

    def insert_pages(self, key: RadixKey, starts: Starts, from_node: TreeNode) -> PageInsert:
        """`insert` in pages: `starts` are those of the key's whole pages beyond `from_node`, adopted as they are.

        The caller answers for `from_node` lying on the key's path.

        The tree copies what it adopts; the pages of `starts` that it already had under other slots (the first
        `len(existing)`) stay the caller's to free.
        """
        node = self._resume_node(key, from_node)
        if len(key) < self.page_size:
            return PageInsert(0, 0, self.root, starts[:0])
        query = self._tree.make_query(key, self._clock)
        node = query.top if node is self.root else node
        resumed_at = node.end
        walk = self._tree.walk(query, node)
        path, end = self._touch_path(walk, node), walk.end
        existing = join_rows([node.slots for node in path if node.slots is not None])
        last_node = path[-1] if path else node
        if end < query.num_tokens:
            first, stop = (
                (end - resumed_at) // self.page_size,
                (query.num_tokens - resumed_at) // self.page_size,
            )
            last_node = self._adopt(last_node, query, end, starts[first:stop].copy())
        return PageInsert(end, query.num_tokens, last_node, existing)

    def _resume_node(self, key: RadixKey, from_node: TreeNode | None) -> TreeNode:
        if from_node is None or from_node is self.root:
            return self.root
        self._check_live(from_node)
        check_same_space(key, from_node)
        return from_node

    def _adopt(self, parent: TreeNode, query: Query, start: int, slots: Slots) -> TreeNode:
        leaf = self._tree.add_leaf(parent, query, start, slots, self._clock)
        self._full.add(leaf)
        return leaf

    def _duplicates(self, slots: Slots, start: int, stop: int, resumed_at: int, path: list[TreeNode]) -> torch.Tensor:
        """The incoming slots in [start, stop) that are not those of the tree at the same place."""
        if start >= stop:
            return no_slots()
        incoming, held = slots[start:stop], self._expand(path)[start - resumed_at :]
        return torch.from_numpy(incoming[incoming != held])

    # ---------------------------------------------------------------- locks

    def inc_lock_ref(self, node: TreeNode) -> None:
        """Keep `node` and its ancestors from eviction. O(depth in nodes).

        Raises:
            StaleNodeError: the node is no longer in the tree.
        """
        if node is not self.root:
            self._check_live(node)
            self._full.lock(node)

    def dec_lock_ref(self, node: TreeNode, receipt: object = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`; once unlocked, a leaf may be evicted. O(depth in nodes).

        Full attention needs no receipt: None is accepted, positionally or as `swa_boundary_id`.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the node is not locked, or a receipt of another cache was given.
        """
        if receipt is not None or any(given is not None for given in kwargs.values()):
            raise LockError("this cache hands out no receipts, so it takes none back")
        if node is self.root:
            return
        if node.slots is None:
            raise StaleNodeError(f"{node} is no longer in the tree")
        if not node.own_locks:
            raise LockError(f"{node} is not locked" + (" itself, only a node below it" if node.lock_ref else ""))
        self._full.unlock(node)

    def _check_live(self, node: TreeNode) -> None:
        top = self._tree.tops.get((node.space.extra_key, node.space.arity))
        if node.slots is None or top is None or top.space is not node.space:
            raise StaleNodeError(f"{node} is no longer in the tree: match again")

    # ---------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, swa_num_tokens: int = 0) -> EvictResult:
        """Free whole unlocked leaves, least recently used first, until at least `num_tokens` slots are free.

        A parent becomes a candidate when its last child has gone. O(log n) per evicted node.
        """
        victims = self._full.evict(num_tokens)
        self._give_back(victims)
        return EvictResult(victims.num_tokens)

    def reclaim_retired(self) -> int:
        """Free the unlocked nodes of retired namespaces; returns tokens."""
        victims = self._full.evict_retired()
        self._give_back(victims)
        self._retired = [top for top in self._retired if top.slots is not None]
        return victims.num_tokens

    def _give_back(self, victims: Victims) -> None:
        """Hand evicted slots to the pool in one call, then tell of each node."""
        if victims.rows and self.pool is not None:
            if self._free_pages is not None and victims.in_pages(self.page_size):
                self._free_pages(join_rows(victims.rows))
            else:
                self.pool.free(torch.from_numpy(join_rows(victims.token_rows())))
        if self.on_node_evict is not None:
            for node in victims.nodes:
                self.on_node_evict(node.id)

    def reset(self) -> None:
        """Forget everything, locked or not, and give back every slot. Nodes from before are stale."""
        victims = Victims()
        for top in self._all_tops():
            for node in self._tree.nodes_below(top):
                victims.add(node, node.slots)
        self._tree.detach_all()
        for node in victims.nodes:
            node.slots = None
        self._full.clear()
        self._retired.clear()
        self._give_back(victims)

    def retire_all(self) -> None:
        """Make everything unmatchable at once. What is unlocked can be reclaimed, the rest once it is unlocked."""
        tops = self._tree.detach_all()
        self._retired.extend(tops)
        for top in tops:
            self._full.retire(self._tree.nodes_below(top))

    # ---------------------------------------------------------------- sizes, hashes, people

    def evictable_size(self) -> int:
        """Tokens of nodes that nobody has locked. O(1)."""
        return self._full.evictable

    def protected_size(self) -> int:
        """Tokens of nodes that somebody has locked. O(1)."""
        return self._full.protected

    def compute_node_hash(self, node: TreeNode) -> list[str]:
        """The chained SHA-256 of each page of `node`, as hex; computed once and kept, with its ancestors'."""
        return chain_hashes(node, self.page_size)

    def pretty_print(self) -> None:
        """Print the tree: one line per node with its tokens, slots, locks, hits and age."""
        print("\n".join(format_tree(self._tree.tops.values(), self._clock)))

    def tree_starts(self) -> list[Starts]:
        """The page starts (or slots) of every node, matchable or retired. O(n)."""
        nodes = (node for top in self._all_tops() for node in self._tree.nodes_below(top))
        return [node.slots for node in nodes if node.slots is not None]

    def num_locks(self) -> int:
        """Locks taken and not given back. O(namespaces)."""
        return sum(top.lock_ref for top in self._all_tops())

    def _all_tops(self) -> list[TreeNode]:
        return [*self._tree.tops.values(), *(top for top in self._retired if top.slots is not None)]

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this module or of the tree is broken. O(n)."""
        nodes: list[TreeNode] = []
        for top in self._all_tops():
            self._tree.check_structure(top)
            nodes.extend(self._tree.nodes_below(top))
        self._full.check(nodes)
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert not parent.data or node.last_access_time <= parent.last_access_time, f"rule 1 at {node}"
            if node.hash_values is not None:
                assert not parent.data or parent.hash_values, f"rule 2 at {node}"
                assert len(node.hash_values) * self.page_size == len(node), f"rule 2 at {node}"
