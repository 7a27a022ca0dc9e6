"""`PrefixCache`: prefixes of token ids to KV slots, with locks and eviction. `RadixCache`, `MambaRadixCache` extend it.

It consists of `TreeParts`: a radix tree, the full KV of its nodes, and components for window KV and recurrent states.
`lookup` and `insertion` have the steps of a match and of an insert.

Rule, checked by `check_invariants` besides the rules of the tree and of each component:

1. A node has hashes only if its parent has, and one for each page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import index
from typing import Any, cast

from raydix.cache_core.base_prefix_cache import (
    NO_SLOTS,
    BasePrefixCache,
    EvictResult,
    MatchResult,
    PageInsert,
    PageMatch,
    Starts,
)
from raydix.cache_core.components.component import Component
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.components.window_kv import WindowKV, WindowReceipt
from raydix.cache_core.errors import LockError, StaleNodeError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.policy import EvictionPolicy, TwoQ, make_policy
from raydix.cache_core.eviction.queue_walk import VictimWalk
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.eviction.two_queues import TwoQueues
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.kernels import Victims, gather
from raydix.cache_core.outline import Outline, OutlineLimits, outline, sample
from raydix.cache_core.pool.release import SlotPool, call_pool, page_variant, release_victims
from raydix.cache_core.radix import insertion
from raydix.cache_core.radix.explain_miss import explain_absence
from raydix.cache_core.radix.format import format_tree, node_line, outline_node
from raydix.cache_core.radix.group_events import GroupEvents
from raydix.cache_core.radix.lookup import goes_on_at, last_stop, locate, match, obstacle, peek, usable
from raydix.cache_core.radix.tree_parts import TreeParts
from raydix.cache_core.radix.usable_ends import UsableEnds
from raydix.cache_core.tree.packed_slots import unpack
from raydix.cache_core.tree.page_events import EndEventSink, Hashes, KVEventPublisher, KVEventSink, PageRun, page_run
from raydix.cache_core.tree.page_hashes import chain_hashes
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import NodePath, TreeNode, check_node, join_slots_of, nodes_to


class PrefixCache(BasePrefixCache):
    """A prefix cache over a radix tree. Time is a logical clock: equal operations have equal outcomes.

    The cache owns the slots it adopted, from the insert until it frees them to the pool.

    Args:
        page_size: tokens of a page; matches and inserts are floored to whole pages.
        sliding_window_size: tokens that a sliding-window layer attends to; None: full attention alone.
        pool: frees evicted slots by `free(indices)`, and window halves by `free_swa(indices)`. None drops them.
        on_node_evict: called with the id of each evicted node, after it left the tree.
        eviction_policy: a name of `eviction.policy.POLICIES`, or a policy.
        states: the recurrent states of a hybrid model; None without any.
        node_type: of the tree's nodes.
        branching_unit: `branching_len` of a match is a multiple of it.

    Attributes:
        root: the node above every namespace: where a miss ends. Locking it is a no-op.
        parts: the tree, its components, clock and observers.

    Raises:
        ValueError: a window is given with a pool that lacks `free_swa`, a size is out of range, there is no such
            policy, or "2q" is to evict from a pool of unknown size.
    """

    def __init__(
        self,
        page_size: int,
        sliding_window_size: int | None,
        pool: SlotPool | None,
        on_node_evict: Callable[[int], None] | None,
        eviction_policy: str | EvictionPolicy,
        states: RecurrentState | None = None,
        node_type: type[TreeNode] = TreeNode,
        branching_unit: int = 1,
    ) -> None:
        page_size = index(page_size)
        if sliding_window_size is not None and (sliding_window_size := index(sliding_window_size)) < 1:
            raise ValueError(f"sliding_window_size must be at least 1, not {sliding_window_size}")
        if sliding_window_size is not None and pool is not None and not hasattr(pool, "free_swa"):
            raise ValueError("a cache with a sliding window needs a pool with free_swa(indices)")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if (pool_pages := getattr(pool, "page_size", page_size)) != page_size:
            raise ValueError(f"the pool's pages are of {pool_pages} slots, so the cache's cannot be of {page_size}")
        window = None if sliding_window_size is None else WindowKV(sliding_window_size, page_size, pool)
        policy, two_queues = make_policy(eviction_policy), None
        if isinstance(policy, TwoQ):
            num_slots = policy.num_slots or getattr(pool, "num_slots", None)
            if num_slots is None:
                raise ValueError("policy '2q' needs a pool with num_slots, or TwoQ(num_slots=...)")
            two_queues = TwoQueues(policy.rank, page_size, num_slots)
        self.parts = TreeParts(page_size, policy, window, states, node_type, two_queues)
        self.page_size = page_size
        self.sliding_window_size = sliding_window_size
        self.pool = pool
        self.on_node_evict = on_node_evict
        self.root: TreeNode = self.parts.tree.root
        self._branching_unit = branching_unit
        self._free_pages = page_variant(pool, "free")
        # fast path: frees the slots of evicted leaves in one call. None without a pool, if the pool frees whole pages,
        # or if components or tenants must see each leaf
        self._free = None if pool is None or self._free_pages is not None or self.parts.components else pool.free
        # the compiled loop drops the error of `_free`, so the pool is called again to raise it
        self._refuse = partial(call_pool, cast(Any, self._free))

    @property
    def supports_swa(self) -> bool:
        """Whether a sliding window is kept."""
        return self.sliding_window_size is not None

    # ---------------------------------------------------------------- lookup

    def match_prefix(self, key: RadixKey, priority: int = 0) -> MatchResult:
        """The longest cached prefix of `key` that can be used, floored to whole pages.

        Refreshes recency and counts a hit along the matched path, and raises its priority to the request's; a match
        that ends inside a node splits it. Costs a memcmp of the match and a lookup per node.
        """
        node, path, end, full_end = match(self.parts, key, None, priority)
        indices = gather(path, self.page_size) if path else NO_SLOTS
        branching = None if end == full_end else self._branching(end, full_end)
        return MatchResult(indices, node, end, branching, full_end)

    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """`match_prefix` of the first `limit` tokens, in pages.

        The cache must have whole pages of consecutive slots only.
        """
        node, path, end, full_end = match(self.parts, key, limit, priority)
        branching = None if end == full_end else self._branching(end, full_end)
        return PageMatch(end, node, join_slots_of(path), full_end, branching)

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """As `match_prefix`, but nothing changes. `last_node` is the deepest node matched wholly."""
        path, end, full_end = peek(self.parts, key)
        branching = self._branching(end, full_end)
        if not path:
            return MatchResult(NO_SLOTS, self.root, 0, branching, full_end)
        whole = path[:-1] if path[-1].end > end else path
        last_node = whole[-1] if whole else self.root
        return MatchResult(gather(path, self.page_size)[:end], last_node, end, branching, full_end)

    def cached_lens(self, key: RadixKey) -> tuple[int, int]:
        """Return the tokens that a match of a key would find, and those with full KV. Changes nothing."""
        return peek(self.parts, key)[1:]

    def locate(self, key: RadixKey, limit: int) -> tuple[TreeNode, Starts]:
        """Find the full KV of the first `limit` tokens of a key in pages, usable or not. No use is noted.

        Returns:
            The node at the end (the root if nothing is found), and the first slots of the pages.
        """
        node, path = locate(self.parts, key, limit)
        return node, join_slots_of(path)

    def path_to(self, node: TreeNode) -> NodePath:
        """Return the tokens and the pages from the root to a node, which must be below the root. O(its path)."""
        nodes = nodes_to(node)
        namespace = node.namespace
        data = b"".join([above.data for above in nodes])
        key = RadixKey.from_packed(data, namespace.width, namespace.extra_key, namespace.arity)[:]
        return NodePath(key, join_slots_of(nodes))

    def usable_above(self, node: TreeNode) -> TreeNode:
        """Return the last node of a node's path, itself included, at which a match may end; else the root."""
        if not self.parts.components:
            return node
        nodes = nodes_to(node)
        path, _ = usable(self.parts, nodes, node.end)
        return path[-1] if path else self.root

    def last_stop(self, node: TreeNode) -> TreeNode:
        """Return the last stop of a node's path, itself included, at which a match may end; else the root.

        Requests come back to stops: see `WindowKV`. With states, a node with a state is one. In a cache without
        components each node is one.
        """
        if not self.parts.components:
            return node
        path = nodes_to(node)
        count = last_stop(self.parts, path)
        return path[count - 1] if count else self.root

    def live_from(self, node: TreeNode, stop: int | None = None) -> int:
        """Return from which token on a node's path has window KV up to its end, at most its tail, in whole pages.

        It is the node's end without a sliding window, or if the node has no window KV.

        Args:
            stop: a token of the path in place of the node's end.
        """
        stop = node.end if stop is None else stop
        if self.parts.window is None:
            return stop
        start, least = stop, max(0, stop - self.parts.window.tail)
        while start > least:
            assert node.parent is not None
            if node.parent.end < stop:  # else it lies behind `stop`
                if node.swa_tombstone:
                    break
                start = max(node.parent.end, least)
            node = node.parent
        return start

    def goes_on_at(self, key: RadixKey, stop: int) -> bool:
        """Return whether there are pages behind the first `stop` tokens of a key, which must all be there."""
        return goes_on_at(self.parts, key, stop)

    def _branching(self, usable: int, full_end: int) -> int | None:
        """Return how long a usable prefix would be worth publishing, if longer than the usable one is."""
        branching = full_end - full_end % self._branching_unit
        return branching if branching > usable else None

    def keep_history(self, history: EvictionHistory) -> None:
        """Record in `history` which nodes are evicted and retired from now on, for `explain`."""
        self.parts.history = history

    def explain(self, key: RadixKey) -> Explanation:
        """Where a match of `key` ends, and why it goes no further. Changes nothing. O(namespaces) at most.

        Evictions are known only since `keep_history` was called.
        """
        peeked = self.peek_prefix(key)
        found = Explanation.of_lengths(len(key), peeked.prefix_len, peeked.full_prefix_len, self.page_size)
        if found.prefix_len < found.full_prefix_len:
            found.reason = obstacle(self.parts, key)
        elif found.reason == "not_there":
            explain_absence(found, self.parts.tree, key, self.parts.history)
        return found

    # ---------------------------------------------------------------- insert

    def insert_pages(
        self,
        key: RadixKey,
        starts: Starts,
        from_node: TreeNode,
        swa_evicted_seqlen: int = 0,
        priority: int = 0,
        unnamed_from: int | None = None,
    ) -> PageInsert:
        """`insert` in pages: `starts` names the key's whole pages beyond `from_node`, which are adopted as they are.

        Not checked: `from_node` must be on the key's path. The tree copies the slots that it adopts; all of `starts`
        that differ from `existing`, page by page, stay the caller's to free. The caller locks the result's node, and
        notes the use of its window with `use_window` when it ends. `unnamed_from`, if it is not None, does `name_end`
        at the result's node.
        """
        parts = self.parts
        try:
            done = insertion.insert_pages(parts, key, starts, from_node, swa_evicted_seqlen, priority)
            if unnamed_from is not None and parts.events is not None:
                parts.events.note_end(done.last_node, unnamed_from)
            return done
        finally:
            if parts.components:
                self.end_insert()

    def end_insert(self) -> None:
        """Do the last steps of an insert into a cache with components, also if it has failed."""
        try:
            if self.parts.events is not None:
                self.parts.events.flush()
        finally:
            if self.parts.window is not None:
                self.parts.window.release_replaced()

    def name_end(self, node: TreeNode, unnamed_from: int) -> None:
        events = self.parts.events
        if events is not None and node.namespace.live:
            events.note_end(node, unnamed_from)
            events.flush()

    # ---------------------------------------------------------------- locks

    def inc_lock_ref(self, node: TreeNode) -> Any:
        """Keep `node` and its ancestors from eviction. O(depth in nodes).

        With a sliding window, returns a receipt that `dec_lock_ref` takes back once; else None.

        Raises:
            StaleNodeError: the node is no longer in the tree.
        """
        parts, receipt = self.parts, None
        if node is not self.root:
            try:
                if node.slots is None or node.namespace.tree is not parts.tree:  # a call would cost as much as the lock
                    parts.check_live(node)
            except AttributeError:
                check_node(node)
                raise
            parts.full.lock(node)
        if parts.components:
            for component in parts.components:
                receipt = component.lock(node) or receipt
        return receipt

    def dec_lock_ref(self, node: TreeNode, receipt: Any = None, *, swa_boundary_id: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`; once unlocked, a leaf may be evicted. O(depth in nodes).

        Args:
            receipt: the result of `inc_lock_ref`, also accepted as `swa_boundary_id`.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the node is not locked, or another cache's, or the receipt is missing, used, another lock's, or
                none was due.
        """
        parts, receipt = self.parts, swa_boundary_id if receipt is None else receipt
        if receipt is not None or parts.window is not None:
            self._check_receipt(node, receipt)
        try:
            if node is not self.root and (
                node.slots is None or node.namespace.home is not parts.tree or not parts.full.unlock(node)
            ):
                raise self._not_locked(node)
        except AttributeError:
            check_node(node)
            raise
        if parts.components:
            for component in parts.components:
                component.unlock(node, receipt)

    def _check_receipt(self, node: TreeNode, receipt: Any) -> None:
        if self.parts.window is None:
            raise LockError("this cache hands out no receipts, so it takes none back")
        if not self.parts.window.is_receipt_of(receipt, node):
            raise LockError("an unlock needs the receipt of this very lock, once")

    def _not_locked(self, node: TreeNode) -> StaleNodeError | LockError:
        if node.slots is None:
            return StaleNodeError(f"{node} is no longer in the tree")
        if node.namespace.home is not self.parts.tree:
            return LockError(f"{node} is a node of another cache")
        return LockError(f"{node} is not locked" + (" itself, only a node below it" if node.lock_ref else ""))

    def release_window(self, node: TreeNode, receipt: WindowReceipt) -> None:
        """Release the window of a lock early, as decoding has left it behind; the full KV stays locked. Idempotent.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the receipt is used, another lock's, or none.
        """
        window = self.parts.window
        if window is None or node is self.root:
            return
        self.parts.check_in_tree(node)
        if not window.is_receipt_of(receipt, node):
            raise LockError("release_window needs the unused receipt that inc_lock_ref returned for this node")
        window.release(node, receipt)

    @property
    def kept_tail(self) -> int:
        return 0 if self.parts.window is None else self.parts.window.tail

    def window_start(self, receipt: WindowReceipt | None) -> int | None:
        return None if receipt is None or receipt.released else receipt.start

    def use_window(self, node: TreeNode) -> None:
        window = self.parts.window
        if window is not None and node.namespace.live:
            self.parts.clock += 1
            window.touch(node, self.parts.clock)

    # ---------------------------------------------------------------- eviction

    def walk(self) -> VictimWalk:
        """Return a walk over the unlocked leaves in the order of eviction, which changes nothing."""
        return self.parts.full.walk()

    def watch_victims(self, on_victim: Callable[[TreeNode, Component | None], None] | None) -> None:
        """Call `on_victim` with each matchable node that is about to be evicted, or to lose window KV or a state.

        It gets the component of which the node loses its data, or None if the node leaves the tree. It must not change
        the tree. Evictions take longer meanwhile: the compiled loop over leaves is not used.
        """
        self.parts.full.on_victim = on_victim

    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Free `num_tokens` slots or more, then window KV of `swa_num_tokens` tokens and `num_states` states in all.

        Unlocked leaves go first, with all they hold, in the policy's order: whole ones, or the tail of the last one if
        it is long and full KV is all it holds. A parent becomes a candidate when its last child has gone. Window KV and
        states that are wanted besides are taken where they were longest unused: a node becomes a tombstone or loses its
        state, an unlocked leaf goes whole. A state goes with its window. O(log n) per victim, and one step for each
        node that comes up while a window lock holds it, once per lock. A split costs a copy of the leaf's head.

        Args:
            swa_num_tokens: counted as states by a cache with states and without a sliding window.

        Raises:
            SlotError: a pool refused slots or states. The nodes have left the tree, and are published as evicted.
        """
        parts, free = self.parts, self._free
        full = parts.full
        is_watched = self.on_node_evict is not None or parts.events is not None or parts.history is not None
        if free is not None and not is_watched and not full.tenants.rest.retired.pending:
            try:
                freed = full.free_leaves(num_tokens, self.page_size, free, self._refuse)
            except OverflowError:  # the compiled loop cannot count to it; nothing has happened yet
                freed = full.free_leaves(full.at_most(num_tokens), self.page_size, free, self._refuse)
            return EvictResult(freed, 0, 0)
        if not parts.components:
            return EvictResult(self._release(partial(full.evict, num_tokens)).num_tokens, 0, 0)
        num_tokens, swa_num_tokens, num_states = index(num_tokens), index(swa_num_tokens), index(num_states)
        if parts.window is None:
            tokens, states = self._evict(num_tokens, [max(swa_num_tokens, num_states)])
            return EvictResult(tokens, 0, states)
        return EvictResult(*self._evict(num_tokens, [swa_num_tokens, num_states][: len(parts.components)]))

    def _evict(self, num_tokens: int, wanted: Sequence[int]) -> tuple[int, ...]:
        """Free tokens, then as much of each component as is wanted, in its own unit. Return the freed amounts."""
        components = self.parts.components
        before = [component.num_freed for component in components]

        def take_out(victims: Victims) -> None:
            self.parts.full.evict(num_tokens, victims)
            self._evict_components(victims, [start + want for start, want in zip(before, wanted, strict=True)])

        victims = self._release(take_out)
        freed = (component.num_freed - start for component, start in zip(components, before, strict=True))
        return victims.num_tokens, *freed

    def _evict_components(self, victims: Victims, goals: Sequence[int]) -> None:
        """Let each component drop data until it has freed as much as its goal since the start."""
        components, full = self.parts.components, self.parts.full
        for place, (component, goal) in enumerate(zip(components, goals, strict=True)):
            while component.num_freed < goal and (node := component.pop_victim()) is not None:
                if not node.children and not node.lock_ref and full.may_take(node):
                    full.take_out(node, victims)
                    continue
                if full.on_victim is not None and node.namespace.live:
                    full.on_victim(node, component)
                for later in components[place:]:
                    later.drop(node)

    def evict_own(self, tenant: Tenant, num_tokens: int) -> int:
        """Free at least `num_tokens` slots of a tenant's unlocked nodes; return the number. There must be enough.

        Retired ones go first, then leaves in the policy's order, as `evict` takes them.
        """
        return self._release(partial(self.parts.full.evict_own, tenant, num_tokens)).num_tokens

    def drop_below(self, node: TreeNode) -> int:
        """Free a node of which the KV cannot be used, and all nodes below it without locks; return tokens. O(nodes)."""

        def take_out(victims: Victims) -> None:
            for found in reversed(list(node.subtree())):  # children before parents
                if not found.children and not found.lock_ref:
                    self.parts.full.take_out(found, victims)

        return self._release(take_out).num_tokens

    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free the unlocked nodes of retired namespaces, `max_tokens` or a node more of them; returns tokens."""
        return self._release(partial(self.parts.full.evict_retired, max_tokens)).num_tokens

    def divide(self, tenants: Tenants) -> None:
        """Keep the tenants' floors from now on, and count their slots. The cache must be empty."""
        assert not self.parts.tops(), "the tree is not empty"
        self.parts.full.divide(tenants)
        self._free = None

    def _release(self, take_out: Callable[[Victims], None]) -> Victims:
        """Take nodes out of the tree and free their slots, even if taking out more of them raises."""
        victims = Victims()
        try:
            take_out(victims)
        finally:
            self._release_victims(victims)
        return victims

    def _release_victims(self, victims: Victims) -> None:
        """Free dropped data and the slots of victims, which have left the tree; publish the evictions in any case.

        The full slots go last, as the pool frees their window halves with them.
        """
        try:
            for component in self.parts.components:
                component.release_dropped()
            if victims.num_tokens and self.pool is not None:
                release_victims(victims, self.pool.free, self._free_pages, self.page_size)
        finally:
            self._publish_evicted(victims)

    def _publish_evicted(self, victims: Victims) -> None:
        nodes = victims.nodes
        if self.parts.events is not None:
            self.parts.events.removed(nodes)
            if self.parts.components:
                self.parts.events.flush()
        if self.parts.history is not None:
            self.parts.history.record_evicted(nodes, self.page_size)
        if self.on_node_evict is not None:
            for node in nodes:
                self.on_node_evict(node.id)

    # ---------------------------------------------------------------- reset and retirement

    def reset(self) -> None:
        """Forget everything, locked or not, and give back every slot. Nodes from before are stale."""
        parts, victims = self.parts, Victims()
        for node in parts.nodes():
            victims.add(node, node.slots, len(node))
        for top in list(parts.tree.tops.values()):
            parts.tree.detach(top)
        nodes = victims.nodes
        for node in nodes:
            node.slots = None
        parts.full.clear()
        for component in parts.components:
            for node in nodes:
                component.forget(node)
            component.clear()
        parts.tree.detached.clear()
        if parts.events is not None:
            parts.events.cleared()
        self._release_victims(victims)

    def retire_all(self) -> None:
        """Make every node unmatchable. Unlocked nodes can be reclaimed now, locked ones once they are unlocked."""
        for top in list(self.parts.tree.tops.values()):
            self._retire(top)
        if self.parts.two_queues is not None:
            self.parts.two_queues.memory.clear()
        if self.parts.events is not None:
            self.parts.events.cleared()

    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """`retire_all` of the namespaces with an `extra_key` that is meant; returns how many there were.

        O(namespaces), whatever they hold; a cache that publishes events publishes each page, children first.
        """
        parts = self.parts
        tops = [top for (extra_key, _), top in parts.tree.tops.items() if is_meant(extra_key)]
        for top in tops:
            if parts.events is not None:
                parts.events.retired(reversed(list(parts.tree.nodes_below(top))))
            self._retire(top)
        return len(tops)

    def _retire(self, top: TreeNode) -> None:
        if self.parts.history is not None:
            self.parts.history.record_retired(top.namespace.extra_key)
        self.parts.tree.detach(top)
        self.parts.full.tenants.retire(top)
        if self.parts.two_queues is not None:
            self.parts.two_queues.retire(top.namespace.extra_key)

    # ---------------------------------------------------------------- sizes

    def evictable_size(self) -> int:
        """Tokens of nodes without a lock. O(1)."""
        return self.parts.full.evictable

    def protected_size(self) -> int:
        """Tokens of locked nodes. O(1)."""
        return self.parts.full.protected

    def swa_evictable_size(self) -> int:
        """Tokens with live window KV that no window lock holds. O(1)."""
        return 0 if self.parts.window is None else self.parts.window.evictable

    def swa_protected_size(self) -> int:
        """Tokens with live window KV that a window lock holds. O(1)."""
        return 0 if self.parts.window is None else self.parts.window.protected

    # ---------------------------------------------------------------- observation

    @property
    def now(self) -> int:
        """The time of the last match or insert, in ticks of the cache's own clock."""
        return self.parts.clock

    def sample(self, max_nodes: int) -> Outline:
        """Return an estimate of the content of each namespace, from about `max_nodes` nodes."""
        return sample(self.parts.tree.tops.values(), outline_node, max_nodes, self.parts.clock)

    def compute_node_hash(self, node: TreeNode) -> list[str]:
        """The chained SHA-256 of each page of `node`, as hex; computed once and kept, with its ancestors'."""
        try:
            return chain_hashes(node, self.page_size)
        except AttributeError:
            check_node(node)
            raise

    def publish_events_to(self, sink: KVEventSink, stride: int | None = None) -> None:
        """Publish to `sink` which pages come and go: see `page_events`. Every insert hashes its pages from now on.

        With components `GroupEvents` publishes; with a stride, `UsableEnds`: then `sink` must be an `EndEventSink`.
        """
        parts = self.parts
        if not parts.components:
            parts.events = KVEventPublisher(sink, self.page_size, stride)
        elif stride is None:
            parts.events = GroupEvents(sink, self.page_size, parts.window, parts.states)
        else:
            parts.events = UsableEnds(cast(EndEventSink, sink), self.page_size, stride, parts.window, parts.states)

    def resident_pages(self) -> Iterator[PageRun]:
        """The pages that can be matched, parents before children. O(n); hashes what has no hashes yet."""
        publisher = self.parts.events
        if publisher is None:
            return (page_run(node, self.page_size) for node in self.parts.tree.nodes())
        return (run for node in self.parts.tree.nodes() for run in publisher.runs(node))

    def walk_pages(self) -> Iterator[Iterable[PageRun]]:
        """Yield the published pages node by node, parents before children; the tree may change in between."""
        publisher = self.parts.events
        if publisher is None:
            yield from ([run] for run in self.resident_pages())
            return
        # A split puts a new node above an old one, without an event: so each node is noted with its first token.
        waiting = [(iter(list(top.children.values())), 0) for top in self.parts.tree.tops.values()]
        while waiting:
            nodes, first = waiting[-1]
            node = next(nodes, None)
            if node is None:
                waiting.pop()
                continue
            path, above = [node], node.parent
            while above is not None and above.end > first:
                path.append(above)
                above = above.parent
            waiting.append((iter(list(node.children.values())), node.end))
            there = [part for part in reversed(path) if part.slots is not None and part.namespace.live]
            yield [run for part in there for run in publisher.runs(part)]

    def usable_ends(self) -> Hashes | None:
        return None if self.parts.events is None else self.parts.events.ends()

    def digest_at(self, node: TreeNode) -> bytes | None:
        """Return the digest of the last page of a node, to which the digest of the next page is chained."""
        digests = chain_hashes(node, self.page_size)
        return bytes.fromhex(digests[-1]) if digests else None

    def pretty_print(self) -> None:
        """Print the tree: one line per node with its tokens, slots, locks, hits and age."""
        print(format_tree(self.parts.tree.tops.values(), partial(node_line, now=self.parts.clock)))

    def outline(self, limits: OutlineLimits) -> Outline:
        """Return the largest branches that can be matched. Bounded work, however much is cached."""
        return outline(self.parts.tree.tops.values(), outline_node, limits, self.parts.clock)

    # ---------------------------------------------------------------- checks

    def tree_starts(self) -> list[Starts]:
        """The page starts (or slots) of every node, matchable or retired. O(n)."""
        return [unpack(node.slots) for node in self.parts.nodes() if node.slots is not None]

    def num_locks(self) -> int:
        """Locks taken and not given back. O(namespaces)."""
        return sum(top.lock_ref for top in self.parts.tops())

    def check_window_locks(self, receipts: Iterable[WindowReceipt | None]) -> None:
        if self.parts.window is not None:
            self.parts.window.check_locks(self.parts.nodes(), (receipt for receipt in receipts if receipt is not None))

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this module, the tree or a component is broken. O(n)."""
        for top in self.parts.tops():
            self.parts.tree.check_structure(top)
        nodes = list(self.parts.nodes())
        self.parts.full.check(nodes)
        for component in self.parts.components:
            component.check(nodes)
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if node.hash_values is not None:
                assert not parent.data or parent.hash_values, f"rule 1 at {node}"
                assert len(node.hash_values) * self.page_size == len(node), f"rule 1 at {node}"
