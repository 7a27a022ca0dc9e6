"""`TreeCache`: what the radix caches share beside matching: inserts, locks, eviction and hashes over one tree.

Rule, checked by `check_invariants` beside those of the tree and of each component:

1. A node has hashes only if its parent has, and one for each page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from raydix.cache_core.aux_component import AuxComponent
from raydix.cache_core.base_prefix_cache import InsertResult, PageInsert, Starts, no_slots
from raydix.cache_core.errors import InvalidKeyError, LockError, StaleNodeError
from raydix.cache_core.eviction_policy import EvictionPolicy, make_policy
from raydix.cache_core.full_component import Victims
from raydix.cache_core.kv_events import KVEventSink, KVEventTeller, PageRun, page_run
from raydix.cache_core.page_hashes import chain_hashes
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import check_on_path, check_same_space
from raydix.cache_core.slot_rows import Row, Slots, as_slots, compact_slots, expand_row, expand_rows, join_rows, unpack
from raydix.cache_core.tree_format import format_tree
from raydix.cache_core.tree_match import TreeMatch, rows_of
from raydix.cache_core.tree_node import TreeNode

Take = Callable[[int, int], Row]


class SlotPool(Protocol):
    """What a cache gives evicted slots back to."""

    def free(self, indices: torch.Tensor) -> None:
        """Take back slots, int64, whole pages of them, with whatever else hangs on them."""


class Inserted:
    """What an insert found and made."""

    __slots__ = ("last_node", "path", "prefix_len", "resumed_at")

    def __init__(self, prefix_len: int, resumed_at: int, path: list[TreeNode], last_node: TreeNode) -> None:
        self.prefix_len = prefix_len  # leading tokens that were in the tree before
        self.resumed_at = resumed_at  # tokens before the node it resumed at
        self.path = path  # the nodes over [resumed_at, prefix_len)
        self.last_node = last_node  # where the key ends


class TreeCache(TreeMatch):
    """A radix tree with the full KV on its nodes, and what `aux` components add to them."""

    def __init__(
        self,
        page_size: int,
        pool: SlotPool | None,
        on_node_evict: Callable[[int], None] | None,
        aux: Sequence[AuxComponent],
        eviction_policy: str | EvictionPolicy,
        node_type: type[TreeNode] = TreeNode,
    ) -> None:
        super().__init__(page_size, make_policy(eviction_policy), aux, node_type)
        self.pool = pool
        self.on_node_evict = on_node_evict
        self._free_pages = getattr(pool, "free_pages", None)
        self._retired: list[TreeNode] = []  # tops of retired namespaces that still have nodes
        self._events: KVEventTeller | None = None

    # ---------------------------------------------------------------- insert

    def _insert_slots(
        self,
        key: RadixKey,
        value: torch.Tensor | None,
        prev_prefix_len: int,
        fresh_from: int,
        from_node: TreeNode | None,
        priority: int,
    ) -> InsertResult:
        """`insert` with one slot per token in `value`."""
        page = self.page_size
        aligned = key.num_tokens - key.num_tokens % page
        slots = as_slots(key, value, aligned)
        if not aligned:
            self._resume_node(key, from_node)
            return InsertResult(0, self.root, False, no_slots())

        def take(start: int, stop: int) -> Row:
            return compact_slots(slots[start:stop], page)

        done = self._insert(key, from_node, take, prev_prefix_len, fresh_from, priority)
        first = max(prev_prefix_len, done.resumed_at)
        duplicates = self._duplicates(slots, first, done) if first < done.prefix_len else no_slots()
        return InsertResult(done.prefix_len, done.last_node, False, duplicates)

    def insert_pages(
        self, key: RadixKey, starts: Starts, from_node: TreeNode, swa_evicted_seqlen: int = 0, priority: int = 0
    ) -> PageInsert:
        """`insert` in pages: `starts` are those of the key's whole pages beyond `from_node`, adopted as they are.

        The caller answers for `from_node` lying on the key's path. The tree copies what it adopts; those of `starts`
        that differ from `existing`, page by page, stay the caller's to free.
        """
        if key.num_tokens < self.page_size:
            return PageInsert(0, 0, self.root, starts[:0])
        page, resumed_at = self.page_size, from_node.end

        def take(start: int, stop: int) -> Row:
            return starts[(start - resumed_at) // page : (stop - resumed_at) // page].tobytes()

        done = self._insert(key, from_node, take, None, self._aligned(swa_evicted_seqlen), priority)
        return PageInsert(done.prefix_len, done.last_node.end, done.last_node, join_rows(rows_of(done.path)))

    def _aligned(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size) * self.page_size

    def _insert(
        self,
        key: RadixKey,
        from_node: TreeNode | None,
        take: Take,
        prev_prefix_len: int | None = None,
        fresh_from: int = 0,
        priority: int = 0,
    ) -> Inserted:
        """Insert the whole pages of `key`, of which there is at least one.

        Args:
            take: gives the tree its own row of the incoming slots of [start, stop).
            prev_prefix_len: leading tokens whose slots are the tree's own, checked; None: those before `from_node`,
                for which the caller answers.
            fresh_from: incoming slots before this token bring full KV only.
        """
        node = self._resume_node(key, from_node)
        top, key = self._tree.make_space(key, self._clock)
        if node is self.root:
            node = top
        resumed_at, num_tokens = node.end, key.num_tokens - key.num_tokens % self.page_size
        path, end = self._tree.walk(key, num_tokens, node)
        if prev_prefix_len is not None:
            self._check_on_path(key, node)
            if not 0 <= prev_prefix_len <= end:
                raise InvalidKeyError(f"prev_prefix_len is {prev_prefix_len}, but {end} tokens are in the tree")
        last_node = self._cut_at(path, end) if path else node
        self._clock += 1
        if self._aux:
            path = self._absorb(path, max(self._aligned(prev_prefix_len or 0), resumed_at, fresh_from), take)
        if end < num_tokens:
            cuts = self._cuts(end, num_tokens, fresh_from) if self._aux else ((end, num_tokens, True),)
            for start, stop, live in cuts:
                last_node = self._tree.add_leaf(last_node, key, stop, take(start, stop), self._clock, priority)
                self._adopt(last_node, live)
            self._touch(last_node)
        else:
            self._use(last_node, priority)
        return Inserted(end, resumed_at, path, last_node)

    def _check_on_path(self, key: RadixKey, node: TreeNode) -> None:
        """Raise InvalidKeyError unless the tokens down to `node` are the first of `key`, in the namespace of both."""
        if self._last_match is not None:  # as a rule the insert goes on where that ended: one memcmp tells
            matched, known = self._last_match
            if matched is node and known.unit == key.unit and key.data.startswith(known.data):
                return
        check_on_path(key, node)

    def _absorb(self, path: list[TreeNode], fresh_from: int, take: Take) -> list[TreeNode]:
        """Let nodes that lack something take it from the incoming slots; returns the path as it is then."""
        return path

    def _cuts(self, start: int, stop: int, fresh_from: int) -> Sequence[tuple[int, int, bool]]:
        """The new nodes over [start, stop), which is not empty: from, to, and whether they have all their KV."""
        return ((start, stop, True),)

    def _adopt(self, leaf: TreeNode, live: bool) -> None:
        """A new, unlocked leaf came into the tree."""
        self._full.add(leaf)
        for component in self._aux:
            component.add(leaf, live)
        if self._events is not None:
            self._events.stored(leaf)

    def _resume_node(self, key: RadixKey, from_node: TreeNode | None) -> TreeNode:
        if from_node is None or from_node is self.root:
            return self.root
        self._check_live(from_node)
        check_same_space(key, from_node)
        return from_node

    def _duplicates(self, slots: Slots, start: int, inserted: Inserted) -> torch.Tensor:
        """The incoming slots from `start` on that are not those of the tree at the same place."""
        incoming = slots[start : inserted.prefix_len]
        path, num_tokens = inserted.path, inserted.prefix_len - inserted.resumed_at
        held = expand_rows(rows_of(path), path, num_tokens, self.page_size).numpy()
        return torch.from_numpy(incoming[incoming != held[start - inserted.resumed_at :]])

    # ---------------------------------------------------------------- locks

    def inc_lock_ref(self, node: TreeNode) -> Any:
        """Keep `node` and its ancestors from eviction. O(depth in nodes).

        With a sliding window, returns a receipt that `dec_lock_ref` takes back once; else None.

        Raises:
            StaleNodeError: the node is no longer in the tree.
        """
        if node is not self.root:
            self._check_live(node)
            self._full.lock(node)
        receipt = None
        for component in self._aux:
            receipt = component.lock(node) or receipt
        return receipt

    def dec_lock_ref(self, node: TreeNode, receipt: Any = None, *, swa_boundary_id: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`; once unlocked, a leaf may be evicted. O(depth in nodes).

        Args:
            receipt: what `inc_lock_ref` returned, also accepted as `swa_boundary_id`.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the node is not locked, or the receipt is missing, used, another lock's, or none was due.
        """
        receipt = swa_boundary_id if receipt is None else receipt
        if receipt is not None or self._aux:
            self._check_receipt(node, receipt)
        if node is not self.root:
            self._check_locked(node)
            self._full.unlock(node)
        for component in self._aux:
            component.unlock(node, receipt)

    def _check_receipt(self, node: TreeNode, receipt: Any) -> None:
        if receipt is not None:
            raise LockError("this cache hands out no receipts, so it takes none back")

    def _check_locked(self, node: TreeNode) -> None:
        if node.slots is None:
            raise StaleNodeError(f"{node} is no longer in the tree")
        if not node.own_locks:
            raise LockError(f"{node} is not locked" + (" itself, only a node below it" if node.lock_ref else ""))

    def _check_live(self, node: TreeNode) -> None:
        if node.slots is None or node.space.tree is not self._tree:
            raise StaleNodeError(f"{node} is no longer in the tree: match again")

    # ---------------------------------------------------------------- eviction

    def _evict(self, num_tokens: int, wanted: Sequence[int]) -> tuple[int, ...]:
        """Free whole unlocked leaves, in the policy's order, until at least `num_tokens` slots are free; then what
        each component is to give up, in its own unit, in all. Returns what was freed, tokens first.

        A parent becomes a candidate when its last child has gone. Where a component's victim is an unlocked leaf, it
        goes whole; else it loses what the component has there, and what is of no use without it. O(log n) per victim.
        """
        if not self._aux:
            victims = self._full.evict(num_tokens)
            self._give_back(victims)
            return (victims.num_tokens,)
        before = [component.num_freed for component in self._aux]
        victims = self._full.evict(num_tokens)
        self._evict_aux(victims, [start + want for start, want in zip(before, wanted, strict=True)])
        self._give_back(victims)
        freed = (component.num_freed - start for component, start in zip(self._aux, before, strict=True))
        return victims.num_tokens, *freed

    def _evict_aux(self, victims: Victims, goals: Sequence[int]) -> None:
        """Let each component give up its own until it has given up so much since the start."""
        for place, (component, goal) in enumerate(zip(self._aux, goals, strict=True)):
            while component.num_freed < goal and (node := component.pop_victim()) is not None:
                if not node.children and not node.lock_ref:
                    self._full.take_out(node, victims)
                    continue
                for each in self._aux[place:]:
                    each.drop(node)
        for component in self._aux:
            component.give_back()

    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free the unlocked nodes of retired namespaces, `max_tokens` or a node more of them; returns tokens."""
        victims = self._full.evict_retired(max_tokens)
        self._give_back(victims)
        if not self._full.retired:
            self._retired = [top for top in self._retired if top.slots is not None]
        return victims.num_tokens

    def _give_back_slots(self, row: Row, num_tokens: int) -> None:
        """Hand the slots of one run to the pool."""
        if self.pool is not None:
            self.pool.free(torch.from_numpy(expand_row(row, num_tokens)))

    def _give_back(self, victims: Victims) -> None:
        """Hand evicted slots to the pool in one call, then tell of each node."""
        if victims.rows and self.pool is not None:
            if self._free_pages is not None and victims.in_pages(self.page_size):
                self._free_pages(join_rows(victims.rows))
            else:
                self.pool.free(victims.slots(self.page_size))
        if self._events is not None:
            self._events.removed(victims.nodes)
        if self._history is not None:
            for node in victims.nodes:
                if node.space.live:
                    self._history.note_evicted(node, self.page_size * node.space.unit)
        if self.on_node_evict is not None:
            for node in victims.nodes:
                self.on_node_evict(node.id)

    def reset(self) -> None:
        """Forget everything, locked or not, and give back every slot. Nodes from before are stale."""
        victims = Victims()
        for top in self._all_tops():
            for node in self._tree.nodes_below(top):
                victims.add(node, node.slots, len(node))
        for top in list(self._tree.tops.values()):
            self._tree.detach(top)
        for node in victims.nodes:
            node.slots = None
        self._full.clear()
        for component in self._aux:
            for node in victims.nodes:
                component.forget(node)
            component.clear()
        self._retired.clear()
        self._last_match = None
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
            self._history.note_retired(top.space.extra_key)
        self._tree.detach(top)
        self._retired.append(top)
        self._full.retired.add(top)

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
        return [unpack(node.slots) for node in nodes if node.slots is not None]

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
            if node.hash_values is not None:
                assert not parent.data or parent.hash_values, f"rule 1 at {node}"
                assert len(node.hash_values) * self.page_size == len(node), f"rule 1 at {node}"
