"""`TreeCache`: what the radix caches share: matches, inserts, locks, eviction and hashes over one tree.

Rules, checked by `check_invariants` beside those of the tree and of each component:

1. A node was used at least as recently as its children.
2. A node has hashes only if its parent has, and one for each page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from raydix.cache_core.aux_component import AuxComponent
from raydix.cache_core.base_prefix_cache import (
    BasePrefixCache,
    EvictResult,
    MatchResult,
    PageInsert,
    PageMatch,
    Starts,
    no_slots,
)
from raydix.cache_core.errors import InvalidKeyError, LockError, StaleNodeError
from raydix.cache_core.full_component import FullComponent, Victims
from raydix.cache_core.kv_events import KVEventSink, KVEventTeller, PageRun, page_run
from raydix.cache_core.page_hashes import chain_hashes
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import Query, RadixTree, Walk, check_on_path, check_same_space
from raydix.cache_core.slot_rows import Slots, expand_slots, join_rows
from raydix.cache_core.tree_format import format_tree
from raydix.cache_core.tree_node import TreeNode

Take = Callable[[int, int], Slots]


class SlotPool(Protocol):
    """What a cache gives evicted slots back to."""

    def free(self, indices: torch.Tensor) -> None:
        """Take back slots, int64, whole pages of them, with whatever else hangs on them."""


class Inserted(NamedTuple):
    """What an insert found and made."""

    prefix_len: int  # leading tokens that were in the tree before
    resumed_at: int  # tokens before the node it resumed at
    path: list[TreeNode]  # the nodes over [resumed_at, prefix_len)
    last_node: TreeNode  # where the key ends


class TreeCache(BasePrefixCache):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them.

    Time is a logical clock: equal operations have equal outcomes.
    """

    def __init__(
        self,
        page_size: int,
        pool: SlotPool | None,
        on_node_evict: Callable[[int], None] | None,
        aux: Sequence[AuxComponent],
        node_type: type[TreeNode] = TreeNode,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.pool = pool
        self.on_node_evict = on_node_evict
        self._free_pages = getattr(pool, "free_pages", None)
        self._aux = tuple(aux)
        self._tree = RadixTree(page_size, node_type)
        self._full = FullComponent(self._tree, self._aux)
        self._clock = 0
        self._retired: list[TreeNode] = []  # tops of retired namespaces that still have nodes
        self._events: KVEventTeller | None = None

    @property
    def root(self) -> TreeNode:
        """The node above every namespace: where a miss ends. Locking it is a no-op."""
        return self._tree.root

    # ---------------------------------------------------------------- match

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key` that can be used, floored to whole pages.

        Refreshes recency and counts a hit along the matched path; a match that ends inside a node splits it. Costs a
        memcmp of the match and a lookup per node.
        """
        node, path, full_end = self._match(key, None)
        indices = torch.from_numpy(self._expand(path)) if path else no_slots()
        return MatchResult(indices, node, node.end, self._branching(node.end, full_end), full_end)

    def match_pages(self, key: RadixKey, limit: int | None = None) -> PageMatch:
        """`match_prefix` of the first `limit` tokens, in pages.

        Only for caches whose slots were all inserted in whole pages of consecutive slots.
        """
        node, path, full_end = self._match(key, limit)
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

    def _match(self, key: RadixKey, limit: int | None) -> tuple[TreeNode, list[TreeNode], int]:
        """Where the usable match ends, the nodes it uses, and how far the full KV alone would reach."""
        query = self._tree.find_query(key, limit)
        if query is None:
            return self.root, [], 0
        walk = self._tree.walk(query, query.top)
        full_end, walk = walk.end, self._usable(walk)
        path = self._touch_path(walk, query.top)
        for node in path:
            node.hit_count += 1
        end = path[-1] if path else self.root
        for component in self._aux:
            component.touch(end, self._clock)
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
        above = self._tree.split(node, length)
        for component in self._aux:
            component.on_split(above, node)
        return above

    def _expand(self, path: list[TreeNode]) -> Slots:
        if self.page_size == 1:
            return join_rows([node.slots for node in path if node.slots is not None])
        return join_rows([expand_slots(node.slots, len(node)) for node in path if node.slots is not None])

    # ---------------------------------------------------------------- insert

    def insert_pages(
        self, key: RadixKey, starts: Starts, from_node: TreeNode, swa_evicted_seqlen: int = 0
    ) -> PageInsert:
        """`insert` in pages: `starts` are those of the key's whole pages beyond `from_node`, adopted as they are.

        The caller answers for `from_node` lying on the key's path. The tree copies what it adopts; those of `starts`
        that differ from `existing`, page by page, stay the caller's to free.
        """
        if len(key) < self.page_size:
            return PageInsert(0, 0, self.root, starts[:0])
        page, resumed_at = self.page_size, from_node.end

        def take(start: int, stop: int) -> Slots:
            return starts[(start - resumed_at) // page : (stop - resumed_at) // page].copy()

        done = self._insert(key, from_node, take, None, self._aligned(swa_evicted_seqlen))
        existing = join_rows([node.slots for node in done.path if node.slots is not None])
        return PageInsert(done.prefix_len, done.last_node.end, done.last_node, existing)

    def _aligned(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def _insert(
        self,
        key: RadixKey,
        from_node: TreeNode | None,
        take: Take,
        prev_prefix_len: int | None = None,
        fresh_from: int = 0,
    ) -> Inserted:
        """Insert the whole pages of `key`, of which there is at least one.

        Args:
            take: gives the tree its own row of the incoming slots of [start, stop).
            prev_prefix_len: leading tokens whose slots are the tree's own, checked; None: those before `from_node`,
                for which the caller answers.
            fresh_from: incoming slots before this token bring full KV only.
        """
        node = self._resume_node(key, from_node)
        query = self._tree.make_query(key, self._clock)
        node = query.top if node is self.root else node
        resumed_at = node.end
        walk = self._tree.walk(query, node)
        if prev_prefix_len is not None:
            check_on_path(query, node)
            if not 0 <= prev_prefix_len <= walk.end:
                raise InvalidKeyError(f"prev_prefix_len is {prev_prefix_len}, but {walk.end} tokens are in the tree")
        end = walk.end
        path = self._touch_path(walk, node)
        path = self._absorb(path, max(self._aligned(prev_prefix_len or 0), resumed_at, fresh_from), take)
        last_node = path[-1] if path else node
        for start, stop, live in self._cuts(end, query.num_tokens, fresh_from):
            last_node = self._adopt(last_node, query, start, stop, take(start, stop), live)
        for component in self._aux:
            component.touch(last_node, self._clock)
        return Inserted(end, resumed_at, path, last_node)

    def _absorb(self, path: list[TreeNode], fresh_from: int, take: Take) -> list[TreeNode]:
        """Let nodes that lack something take it from the incoming slots; returns the path as it is then."""
        return path

    def _cuts(self, start: int, stop: int, fresh_from: int) -> list[tuple[int, int, bool]]:
        """The new nodes over [start, stop): from, to, and whether they have all their KV."""
        return [(start, stop, True)] if start < stop else []

    def _adopt(self, parent: TreeNode, query: Query, start: int, stop: int, slots: Slots, live: bool) -> TreeNode:
        leaf = self._tree.add_leaf(parent, query, start, stop, slots, self._clock)
        self._full.add(leaf)
        if self._events is not None:
            self._events.stored(leaf)
        return leaf

    def _resume_node(self, key: RadixKey, from_node: TreeNode | None) -> TreeNode:
        if from_node is None or from_node is self.root:
            return self.root
        self._check_live(from_node)
        check_same_space(key, from_node)
        return from_node

    def _duplicates(self, slots: Slots, start: int, inserted: Inserted) -> torch.Tensor:
        """The incoming slots from `start` on that are not those of the tree at the same place."""
        if start >= inserted.prefix_len:
            return no_slots()
        incoming = slots[start : inserted.prefix_len]
        held = self._expand(inserted.path)[start - inserted.resumed_at :]
        return torch.from_numpy(incoming[incoming != held])

    # ---------------------------------------------------------------- locks

    def inc_lock_ref(self, node: TreeNode) -> Any:
        """Keep `node` and its ancestors from eviction. O(depth in nodes). Returns a receipt where there is one.

        Raises:
            StaleNodeError: the node is no longer in the tree.
        """
        if node is not self.root:
            self._check_live(node)
            self._full.lock(node)
            for component in self._aux:
                component.lock(node)

    def dec_lock_ref(self, node: TreeNode, receipt: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`; once unlocked, a leaf may be evicted. O(depth in nodes).

        There is no receipt: None is accepted, positionally or as `swa_boundary_id`.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the node is not locked, or a receipt of another cache was given.
        """
        if receipt is not None or any(given is not None for given in kwargs.values()):
            raise LockError("this cache hands out no receipts, so it takes none back")
        if node is not self.root:
            self._check_locked(node)
            self._full.unlock(node)
            for component in self._aux:
                component.unlock(node, None)

    def _check_locked(self, node: TreeNode) -> None:
        if node.slots is None:
            raise StaleNodeError(f"{node} is no longer in the tree")
        if not node.own_locks:
            raise LockError(f"{node} is not locked" + (" itself, only a node below it" if node.lock_ref else ""))

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

    def _give_back_slots(self, row: Slots, num_tokens: int) -> None:
        """Hand the slots of one run to the pool."""
        if self.pool is not None:
            self.pool.free(torch.from_numpy(expand_slots(row, num_tokens)))

    def _give_back(self, victims: Victims) -> None:
        """Hand evicted slots to the pool in one call, then tell of each node."""
        if victims.rows and self.pool is not None:
            if self._free_pages is not None and victims.in_pages(self.page_size):
                self._free_pages(join_rows(victims.rows))
            else:
                self.pool.free(torch.from_numpy(join_rows(victims.token_rows())))
        if self._events is not None:
            self._events.removed(victims.nodes)
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
        for component in self._aux:
            component.clear()
        self._retired.clear()
        if self._events is not None:
            self._events.cleared()
        self._give_back(victims)

    def retire_all(self) -> None:
        """Make everything unmatchable at once. What is unlocked can be reclaimed, the rest once it is unlocked."""
        tops = self._tree.detach_all()
        self._retired.extend(tops)
        for top in tops:
            self._full.retire(self._tree.nodes_below(top))
        if self._events is not None:
            self._events.cleared()

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

    def tell_events(self, sink: KVEventSink) -> None:
        """Tell `sink` of pages that come and go from now on: see `kv_events`. Every insert then hashes its pages."""
        self._events = KVEventTeller(sink, self.page_size)

    def resident_pages(self) -> Iterator[PageRun]:
        """The pages that can be matched, parents before children. O(n); hashes what has no hashes yet."""
        return (page_run(node, self.page_size) for node in self._tree.nodes())

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
        for component in self._aux:
            component.check(nodes)
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert not parent.data or node.last_access_time <= parent.last_access_time, f"rule 1 at {node}"
            if node.hash_values is not None:
                assert not parent.data or parent.hash_values, f"rule 2 at {node}"
                assert len(node.hash_values) * self.page_size == len(node), f"rule 2 at {node}"
