"""`TreeCache`: what the radix caches share beside matches, inserts and locks: eviction and hashes over one tree.

Rule, checked by `check_invariants` beside those of the tree and of each component:

1. A node has hashes only if its parent has, and one for each page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch

from raydix.cache_core.base_prefix_cache import Starts
from raydix.cache_core.components.component import Component
from raydix.cache_core.eviction.policy import EvictionPolicy, make_policy
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.kernels import Victims
from raydix.cache_core.outline import Outline, OutlineLimits, outline
from raydix.cache_core.pool.release import release_in_parts, release_victims, taking_pages
from raydix.cache_core.radix.format import format_tree, node_line, outline_node
from raydix.cache_core.radix.locks import TreeLocks
from raydix.cache_core.radix.page_events import KVEventPublisher, KVEventSink, PageRun, page_run
from raydix.cache_core.tree.packed_slots import unpack
from raydix.cache_core.tree.page_hashes import chain_hashes
from raydix.cache_core.tree.tree_node import TreeNode, check_node


class SlotPool(Protocol):
    """What a cache gives evicted slots back to."""

    def free(self, indices: torch.Tensor) -> None:
        """Take back slots, int64, whole pages of them, with whatever else hangs on them."""


class TreeCache(TreeLocks):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them."""

    def __init__(
        self,
        page_size: int,
        pool: SlotPool | None,
        on_node_evict: Callable[[int], None] | None,
        aux: Sequence[Component],
        eviction_policy: str | EvictionPolicy,
        node_type: type[TreeNode] = TreeNode,
    ) -> None:
        super().__init__(page_size, make_policy(eviction_policy), aux, node_type)
        pool_pages = getattr(pool, "page_size", page_size)
        if pool_pages != page_size:
            raise ValueError(f"the pool's pages are of {pool_pages} slots, so the cache's cannot be of {page_size}")
        self.pool = pool
        self.on_node_evict = on_node_evict
        self._free_pages = taking_pages(pool, "free")
        # what frees the slots of leaves; None: the pool takes pages, or components or tenants are to know of each
        self._free = None if pool is None or self._free_pages is not None or aux else pool.free
        self._free_each = partial(release_in_parts, cast(Any, self._free), page_size, "slots")  # if that refuses

    # ---------------------------------------------------------------- eviction

    def _evict(self, num_tokens: int, wanted: Sequence[int]) -> tuple[int, ...]:
        """Free whole unlocked leaves, in the policy's order, until at least `num_tokens` slots are free; then what
        each component is to give up, in its own unit, in all. Returns what was freed, tokens first. What a pool refuses
        to take back raises when all else is done.

        A parent becomes a candidate when its last child has gone. Where a component's victim is an unlocked leaf, it
        goes whole; else it loses what the component has there, and what is of no use without it. O(log n) per victim.
        """
        before = [component.num_freed for component in self._aux]

        def take_out(victims: Victims) -> None:
            self._full.evict(num_tokens, victims)
            self._evict_aux(victims, [start + want for start, want in zip(before, wanted, strict=True)])

        victims = self._handed_back(take_out)
        freed = (component.num_freed - start for component, start in zip(self._aux, before, strict=True))
        return victims.num_tokens, *freed

    def _evict_aux(self, victims: Victims, goals: Sequence[int]) -> None:
        """Let each component give up its own until it has given up so much since the start."""
        for place, (component, goal) in enumerate(zip(self._aux, goals, strict=True)):
            while component.num_freed < goal and (node := component.pop_victim()) is not None:
                if not node.children and not node.lock_ref and self._full.may_take(node):
                    self._full.take_out(node, victims)
                    continue
                for each in self._aux[place:]:
                    each.drop(node)

    def divide(self, tenants: Tenants) -> None:
        """Keep the floors of these tenants from now on, and count their slots. The cache must be empty."""
        assert not self._all_tops(), "the tree is not empty"
        self._full.divide(tenants)
        self._free = None

    def evict_own(self, tenant: Tenant, num_tokens: int) -> int:
        """Free at least so many slots that a tenant has in the tree and nobody has locked; returns how many.

        There must be as many. Retired ones go first, then whole leaves, in the policy's order.
        """
        return self._handed_back(partial(self._full.evict_own, tenant, num_tokens)).num_tokens

    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free the unlocked nodes of retired namespaces, `max_tokens` or a node more of them; returns tokens."""
        return self._handed_back(partial(self._full.evict_retired, max_tokens)).num_tokens

    def _handed_back(self, take_out: Callable[[Victims], None]) -> Victims:
        """Have nodes taken out, and hand back what they held, whatever is raised meanwhile."""
        victims = Victims()
        try:
            take_out(victims)
        finally:
            self._give_back(victims)
        return victims

    def _give_back(self, victims: Victims) -> None:
        """Hand to the pools what was evicted, in one call each, and tell of each node. The nodes have left the tree by
        now, so one pool's refusal keeps nothing from the others."""
        try:
            if self._aux:
                self._give_back_aux(len(self._aux))
        finally:
            try:
                if victims.num_tokens and self.pool is not None:
                    release_victims(victims, self.pool.free, self._free_pages, self.page_size)
            finally:
                self._tell_of(victims)

    def _give_back_aux(self, count: int) -> None:
        """Have so many components hand back what they gave up, the last first."""
        if count:
            try:
                self._aux[count - 1].give_back()
            finally:
                self._give_back_aux(count - 1)

    def _tell_of(self, victims: Victims) -> None:
        nodes = victims.nodes
        if self._events is not None:
            self._events.removed(nodes)
        if self._history is not None:
            self._history.record_evicted(nodes, self.page_size)
        if self.on_node_evict is not None:
            for node in nodes:
                self.on_node_evict(node.id)

    def reset(self) -> None:
        """Forget everything, locked or not, and give back every slot. Nodes from before are stale."""
        victims = Victims()
        for top in self._all_tops():
            for node in self._tree.nodes_below(top):
                victims.add(node, node.slots, len(node))
        for top in list(self._tree.tops.values()):
            self._tree.detach(top)
        nodes = victims.nodes
        for node in nodes:
            node.slots = None
        self._full.clear()
        for component in self._aux:
            for node in nodes:
                component.forget(node)
            component.clear()
        self._tree.detached.clear()
        if self._events is not None:
            self._events.cleared()
        self._give_back(victims)

    def retire_all(self) -> None:
        """Make everything unmatchable at once. What is unlocked can be reclaimed, the rest once it is unlocked."""
        for top in list(self._tree.tops.values()):
            self._retire(top)
        if self._events is not None:
            self._events.cleared()

    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """`retire_all` of the namespaces whose `extra_key` is meant; returns how many there were.

        O(namespaces), whatever they hold; a cache that tells events has to tell of each page, children first.
        """
        tops = [top for (extra_key, _), top in self._tree.tops.items() if is_meant(extra_key)]
        for top in tops:
            if self._events is not None:
                self._events.removed(reversed(list(self._tree.nodes_below(top))))
            self._retire(top)
        return len(tops)

    def _retire(self, top: TreeNode) -> None:
        if self._history is not None:
            self._history.record_retired(top.space.extra_key)
        self._tree.detach(top)
        self._full.tenants.retire(top)

    # ---------------------------------------------------------------- sizes, hashes, people

    def evictable_size(self) -> int:
        """Tokens of nodes that nobody has locked. O(1)."""
        return self._full.evictable

    def protected_size(self) -> int:
        """Tokens of nodes that somebody has locked. O(1)."""
        return self._full.protected

    def compute_node_hash(self, node: TreeNode) -> list[str]:
        """The chained SHA-256 of each page of `node`, as hex; computed once and kept, with its ancestors'."""
        try:
            return chain_hashes(node, self.page_size)
        except AttributeError:
            check_node(node)
            raise

    def publish_events_to(self, sink: KVEventSink) -> None:
        """Tell `sink` of pages that come and go from now on: see `kv_events`. Every insert then hashes its pages."""
        self._events = KVEventPublisher(sink, self.page_size)

    def resident_pages(self) -> Iterator[PageRun]:
        """The pages that can be matched, parents before children. O(n); hashes what has no hashes yet."""
        return (page_run(node, self.page_size) for node in self._tree.nodes())

    def pretty_print(self) -> None:
        """Print the tree: one line per node with its tokens, slots, locks, hits and age."""
        print(format_tree(self._tree.tops.values(), partial(node_line, now=self._clock)))

    def outline(self, limits: OutlineLimits) -> Outline:
        """The largest branches of what can be matched. Bounded work, however much is cached."""
        tops = self._tree.tops
        nodes = outline(((top.space.extra_key, top) for top in tops.values()), outline_node, limits)
        return Outline(nodes, self._clock, len(tops))

    def tree_starts(self) -> list[Starts]:
        """The page starts (or slots) of every node, matchable or retired. O(n)."""
        nodes = (node for top in self._all_tops() for node in self._tree.nodes_below(top))
        return [unpack(node.slots) for node in nodes if node.slots is not None]

    def num_locks(self) -> int:
        """Locks taken and not given back. O(namespaces)."""
        return sum(top.lock_ref for top in self._all_tops())

    def _all_tops(self) -> list[TreeNode]:
        return [*self._tree.tops.values(), *self._tree.detached]

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
            if node.hash_values is not None:
                assert not parent.data or parent.hash_values, f"rule 1 at {node}"
                assert len(node.hash_values) * self.page_size == len(node), f"rule 1 at {node}"
