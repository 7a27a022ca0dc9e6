"""`KVCache`: a `LeasedCache` over a pool of pages and the tree that maps prefixes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index

import numpy as np
import torch

from raydix.cache_core.base_prefix_cache import BasePrefixCache, MatchResult
from raydix.cache_core.components.component import Component
from raydix.cache_core.errors import LeaseRangeError, OutOfSlotsError
from raydix.cache_core.eviction.history import EvictionRecord
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.leases.kv_accounting import check_accounting
from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.leases.pending_pages import PendingPages
from raydix.cache_core.leases.results import PoolSizes, Published
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_checks import PoolChecks
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts
from raydix.cache_core.tree.page_events import Hashes, KVEventSink, PageRun, SlimEventSink
from raydix.cache_core.tree.radix_key import RadixKey, check_key
from raydix.cache_core.tree.tree_node import NodePath, TreeNode

_RECLAIMED_AT_ONCE = 4096  # retired slots that `retire`, `reset` and `release` free; `reclaim` frees all others


class KVCache(LeasedCache):
    """Prefix reuse with leases over a pool of slots in pages.

    If the cache has states, each lease gets a private state slot. It begins as a copy of the state at the end of the
    cached prefix, or as zeros. A lease may get a second one, for a copy of its state at the end of a page: a decoding
    request does not know which page will be its last, so it copies its state at each, and publishes the last copy.

    Args:
        tree: the empty cache that maps prefixes to pages; it must free to `allocator`.
        allocator: allocates the slots.
        pressure_floor: `on_pressure` is called after an operation that leaves fewer free slots than this.
            `swa_pressure_floor` and `state_pressure_floor` are the same for window slots and states.
        on_pressure: called without arguments when slots are short.
        states: the state slots of a hybrid model; `tree` must free to it. None: the cache has no states.
        bigram: the tree's keys are pairs of neighbouring tokens, as EAGLE drafts need: n tokens make n - 1 units.
        remembered_leases: the number of ended lease ids to remember. No lease is opened under a remembered id.
        checks: checks of the slots' content, or None. With checks, `acquire` and `lock` raise ContentError if the
            prefix was written after it was published.
        tenants: the tenants that share the slots; their floors must add up to at most `num_slots`. None: one tenant
            without a floor or a cap has all slots.

    Attributes:
        pools: allocates the slots and states of leases.
    """

    def __init__(
        self,
        tree: BasePrefixCache,
        allocator: TokenToKVPoolAllocator,
        pressure_floor: int = 0,
        on_pressure: Callable[[], None] | None = None,
        *,
        states: MambaPool | None = None,
        bigram: bool = False,
        swa_pressure_floor: int = 0,
        state_pressure_floor: int = 0,
        remembered_leases: int = 0,
        checks: PoolChecks | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        super().__init__(remembered_leases)
        self.tree = tree
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.num_slots = allocator.num_slots
        self.tenants = Tenants() if tenants is None else tenants
        floors = (pressure_floor, swa_pressure_floor, state_pressure_floor)
        self.pools = LeaseAllocator(tree, allocator, states, self.tenants, self.counters, floors, on_pressure, checks)
        self._on_pressure = on_pressure
        self._bigram = bigram
        self._pending: PendingPages | None = None
        self._names_ends = False

    # ---------------------------------------------------------------- requests

    def match(self, key: RadixKey) -> MatchResult:
        self.counters.probes += 1
        return self.tree.peek_prefix(self._tree_key(key))

    def check_len(self, num_tokens: int, key: RadixKey) -> None:
        """Check the pools and the tenant's cap. The cached prefix of `key` needs window slots for its last window."""
        num_pages = -(-num_tokens // self.page_size)
        self.pools.check_capacity(num_pages, self._tenant_of_key(key))
        if self.pools.exceeds_window(num_pages):
            prefix_len = self.tree.peek_prefix(self._tree_key(key)).prefix_len
            spared = prefix_len - self.pools.held_by_prefix("window slots", prefix_len)
            self.pools.check_window_capacity(num_pages - spared // self.page_size)

    def _open_lease(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        num_slots: int | None,
        max_prefix_len: int | None,
        priority: int,
    ) -> LeaseRecord:
        tenant, num_pages = self._tenant_of_key(key), 0
        if num_slots is not None:
            num_pages = -(-num_slots // self.page_size)
            self.pools.check_capacity(num_pages, tenant)
        match = self.tree.match_pages(self._tree_key(key), max_prefix_len, priority)
        self.pools.verify(match.starts, match.last_node)
        receipt, state_slot = self.tree.inc_lock_ref(match.last_node), None
        try:
            if self.pools.states is not None:
                # A request that does not fit must fail before a state is evicted for it.
                self.pools.check_pages(num_pages - len(match.starts), tenant)
                state_slot = self.pools.take_state(tenant)
            private = self.pools.take_pages(num_pages - len(match.starts), tenant)
        except BaseException as error:  # a pool may raise while an eviction frees pages to it
            self.tree.dec_lock_ref(match.last_node, receipt)
            self.pools.free_private(match.starts[:0], (state_slot,), tenant)
            if not isinstance(error, OutOfSlotsError):
                raise
            needed = error.needed + self.pools.held_by_prefix(error.pool, match.prefix_len)
            if needed <= error.capacity:
                raise
            raise OutOfSlotsError(needed, error.free, error.evictable, error.capacity, error.pool) from error
        lease = LeaseRecord(
            lease_id,
            session_id,
            key,
            match.last_node,
            receipt,
            match.prefix_len,
            np.concatenate((match.starts, private)) if len(match.starts) else private,
            len(match.starts),
            match.prefix_len if num_slots is None else num_slots,
            priority,
        )
        if self._names_ends:
            lease.named_len, lease.prompt_pages = match.prefix_len, (len(key) - self._bigram) // self.page_size
        if state_slot is not None:
            lease.state_slot = state_slot
            self.pools.load_state(match.last_node, state_slot)
        return lease

    def _extend(self, lease: LeaseRecord, num_tokens: int) -> Starts:
        """Use the free slots of the last page first, then new pages."""
        num_pages = -(-(lease.num_slots + num_tokens) // self.page_size)
        tenant = self.tenants.of(lease.key.extra_key)
        self.pools.check_capacity(num_pages, tenant)
        if self.pools.exceeds_window(num_pages):
            held = np.count_nonzero(self.allocator.swa_starts(lease.private_starts))
            self.pools.check_window_capacity(int(held) + num_pages - len(lease.starts))
        added = self.pools.take_pages(num_pages - len(lease.starts), tenant)
        if len(added):
            lease.add_pages(added)
            self.leases.note_growth()
        lease.num_slots += num_tokens
        return added

    def _add_boundary_slot(self, lease: LeaseRecord) -> None:
        try:
            lease.boundary_slot = self.pools.take_state(self.tenants.of(lease.key.extra_key))
        except OutOfSlotsError:
            self.counters.boundary_states_refused += 1

    def insert(
        self,
        lease_id: str,
        session_id: str,
        num_tokens: int,
        suffix: RadixKey,
        publish_state: bool = False,
        boundary_len: int | None = None,
    ) -> Published:
        """Insert the lease's pages into the tree. A state can be published only at the end of a page.

        If the tree already has a page, the lease's duplicate is freed and the lease uses the tree's page, in the same
        step.
        """
        lease, num_tokens = self.leases.get(lease_id, session_id), index(num_tokens)
        key = lease.known_key(num_tokens, suffix)
        tree_key = self._tree_key(key if len(key) == num_tokens else key[:num_tokens])
        if publish_state:
            self._check_state(lease, tree_key)
        if boundary_len is not None:
            boundary_len = index(boundary_len)
            self._check_boundary(lease, tree_key, boundary_len)
            if publish_state or boundary_len == lease.boundary_len:
                boundary_len = None  # the lease's own state follows the same token, or it was published before
        published, retired = lease.num_published_pages, lease.retired
        new_pages = len(tree_key) // self.page_size - published
        tenant = self.tenants.of(lease.key.extra_key)
        state_slot = self.pools.take_state(tenant) if publish_state and not retired else None
        if key is not lease.key and len(key) > len(lease.key):
            lease.key = key
        if retired or new_pages < 0 or (new_pages == 0 and state_slot is boundary_len is None):
            if not retired and new_pages == 0 and lease.prompt_pages is not None and published >= lease.prompt_pages:
                self._name_end(lease)
            return Published(published * self.page_size, 0, 0, retired, lease.starts[:0])
        try:
            done = self._publish(lease, tree_key, published, published + new_pages, tenant)
        except BaseException:  # the pool may raise while the duplicates are freed
            self.pools.free_private(lease.starts[:0], (state_slot,), tenant)
            raise
        if state_slot is not None:
            self.pools.store_state(lease.state_slot, state_slot, lease.node)
        if boundary_len is not None:
            slot, lease.boundary_slot, lease.boundary_len = lease.boundary_slot, None, boundary_len
            assert slot is not None, "the check found one"
            self.pools.publish_state(slot, lease.node)
        return done

    def _check_boundary(self, lease: LeaseRecord, tree_key: RadixKey, boundary_len: int) -> None:
        """Raise LeaseRangeError if the lease's boundary state cannot be published after so many tokens."""
        end = len(tree_key) - len(tree_key) % self.page_size
        if not end or boundary_len != end + self._bigram:
            raise LeaseRangeError(f"boundary_len must be the end of the last whole page, {end}, not {boundary_len}")
        if lease.boundary_slot is None and boundary_len != lease.boundary_len:
            raise LeaseRangeError("boundary_len must be None: the lease has no boundary state, or has published it")
        if end < lease.num_published_pages * self.page_size:
            raise LeaseRangeError("boundary_len needs all published tokens: a state is published after the last one")

    def _check_state(self, lease: LeaseRecord, tree_key: RadixKey) -> None:
        """Raise LeaseRangeError if the lease's state cannot be published after the tokens of a key."""
        if lease.state_slot is None:
            raise LeaseRangeError("publish_state must be False: this cache keeps no states")
        if not len(tree_key) or len(tree_key) % self.page_size:
            raise LeaseRangeError(f"publish_state needs whole pages of {self.page_size} tokens, not {len(tree_key)}")
        if len(tree_key) < lease.num_published_pages * self.page_size:
            raise LeaseRangeError("publish_state needs all published tokens: the lease's state follows the last one")

    def _publish(self, lease: LeaseRecord, tree_key: RadixKey, first: int, stop: int, tenant: Tenant) -> Published:
        """Insert the lease's pages [first, stop) into the tree. Replace duplicates with the tree's pages."""
        page = self.page_size
        fresh = lease.starts[first:stop]
        has_prompt = lease.prompt_pages is not None and stop >= lease.prompt_pages
        unnamed_from = lease.named_len if has_prompt else None
        swa_freed_len, priority = lease.swa_freed_len, lease.priority
        result = self.tree.insert_pages(tree_key, fresh, lease.node, swa_freed_len, priority, unnamed_from)
        if has_prompt:
            lease.named_len, lease.prompt_pages = result.end, None
        receipt = self.tree.inc_lock_ref(result.last_node)
        self.tree.dec_lock_ref(lease.node, lease.receipt)
        lease.node, lease.receipt = result.last_node, receipt
        existing = duplicates = result.existing
        if len(existing):
            ours = lease.starts[first : first + len(existing)]
            duplicates = ours[ours != existing]
        if result.end:
            lease.starts[first : first + len(existing)] = existing
            lease.num_published_pages = stop  # first: the pool may raise while the duplicates are freed
            self.pools.note_published(fresh, duplicates, tenant)
            for observer in self.observers:
                observer.published(lease)
        num_duplicates = len(duplicates) * page
        num_new = max(0, result.end - first * page) - num_duplicates
        self.counters.tokens_inserted += num_new
        self.counters.tokens_duplicate += num_duplicates
        return Published(result.prefix_len, num_new, num_duplicates, False, existing)

    def _release_window(self, lease: LeaseRecord, up_to: int) -> None:
        page, window = self.page_size, self.tree.sliding_window_size
        if window is None:
            return
        num_computed = max(0, up_to + window - 1)  # the next token attends to `up_to` and what follows
        keep_from = num_computed // page * page - self.tree.kept_tail
        published = lease.num_published_pages * page
        first = max(published, lease.swa_freed_len)
        if keep_from > first:
            self.pools.free_window(lease.starts[first // page : keep_from // page])
            lease.swa_freed_len = keep_from
        if keep_from >= published:
            self.tree.release_window(lease.node, lease.receipt)

    def _name_end(self, lease: LeaseRecord) -> None:
        """Publish the end of the lease's published pages, in a cache that publishes ends."""
        if lease.named_len is not None:
            self.tree.name_end(lease.node, lease.named_len)
            lease.named_len, lease.prompt_pages = lease.num_published_pages * self.page_size, None

    def _unlock(self, lease: LeaseRecord) -> None:
        if lease.named_len is not None and lease.named_len < lease.num_published_pages * self.page_size:
            self._name_end(lease)
        self.tree.use_window(lease.node)
        self.tree.dec_lock_ref(lease.node, lease.receipt)
        if lease.retired:
            self._reclaim_some()

    def _free_private(self, lease: LeaseRecord) -> None:
        self.pools.free_private(lease.private_starts, lease.state_slots, self.tenants.of(lease.key.extra_key))

    def _notify_pressure(self) -> None:
        self.pools.notify_pressure()

    # ---------------------------------------------------------------- moves between tiers

    @property
    def radix(self) -> PrefixCache:
        """The tree; moves need one of nodes with pages."""
        assert isinstance(self.tree, PrefixCache), f"a {type(self.tree).__name__} has no tiers"
        return self.tree

    def tree_key(self, key: RadixKey) -> RadixKey:
        """Return the tree's key of a request's tokens."""
        return self._tree_key(key)

    def lock_node(self, node: TreeNode, path: NodePath) -> LeaseRecord:
        """Lock a node as the source of a copy. The use of its path is not noted, and no request is counted.

        Args:
            path: the path to the node.
        """
        return self._add_quiet(path.key, node, path.starts, len(path.starts), node.end)

    def hold_window(self, lease: LeaseRecord, live_from: int) -> None:
        """Lock all window KV of a source from a token on, besides its tail. No effect without a sliding window."""
        if (window := self.radix.parts.window) is not None:
            window.hold_from(lease.receipt, live_from)

    def find_source(self, key: RadixKey, limit: int) -> LeaseRecord:
        """Lock the cached prefix of the first `limit` units of a tree's key as the source of a copy: a request."""
        match = self.tree.match_pages(key, limit)
        self.pools.verify(match.starts, match.last_node)
        lease = self._add_quiet(key, match.last_node, match.starts, len(match.starts), match.prefix_len)
        self.count_request(lease, 1)
        return lease

    def open_target(
        self, key: RadixKey, limit: int, with_state: bool = False, live_from: int | None = None
    ) -> LeaseRecord:
        """Take private pages for the tokens of a tree's key behind its full KV up to `limit`, which is locked.

        The use of the path is not noted, and no request is counted.

        Args:
            with_state: the lease gets a state slot.
            live_from: the pages before this token get no window slots; None: all pages get some.

        Raises:
            OutOfSlotsError: too few slots or states are free or evictable; nothing was allocated.
        """
        tenant, num_pages = self.tenants.of(key.extra_key), len(key) // self.page_size
        node, starts = self.radix.locate(key, limit)
        lease = self._add_quiet(key, node, starts, len(starts), len(starts) * self.page_size)
        num_windows = None
        if live_from is not None and self.tree.sliding_window_size is not None:
            lease.swa_freed_len = min(live_from, len(key))
            num_windows = num_pages - max(len(starts), lease.swa_freed_len // self.page_size)
        try:
            self.pools.check_pages(num_pages - len(starts), tenant, num_windows)
            if with_state:
                lease.state_slot = self.pools.take_state(tenant)
            lease.add_pages(self.pools.take_pages(num_pages - len(starts), tenant, num_windows))
        except BaseException:  # a pool may raise while an eviction frees pages to it
            self.end_quietly(lease)
            raise
        lease.num_slots = len(lease.starts) * self.page_size
        return lease

    def _add_quiet(
        self, key: RadixKey, node: TreeNode, starts: Starts, num_published: int, num_tokens: int
    ) -> LeaseRecord:
        receipt = self.tree.inc_lock_ref(node)
        lease_id = self.leases.new_id()
        lease = LeaseRecord(lease_id, TIERS, key, node, receipt, num_tokens, starts, num_published, num_tokens)
        lease.only_locks = True
        self.leases.add(lease)
        return lease

    def publish_copy(self, lease: LeaseRecord, key: RadixKey, live_from: int, state_slot: int | None = None) -> int:
        """Publish pages of a lease that a copy has filled: those of a tree's key, which has whole pages.

        Args:
            live_from: the copied pages before this token have full KV only.
            state_slot: the slot of the state after the last token, which goes to the tree; None without one.

        Returns:
            The tokens that the tree did not have.
        """
        page, first = self.page_size, lease.num_published_pages
        live_from = min(live_from, len(key))
        has_windows_from = max(first * page, lease.swa_freed_len)
        if self.tree.sliding_window_size is not None and live_from > has_windows_from:
            self.pools.free_window(lease.starts[has_windows_from // page : live_from // page])
            lease.swa_freed_len = live_from
        num_new = 0
        if len(key) > first * page:
            tenant = self.tenants.of(key.extra_key)
            num_new = self._publish(lease, key, first, len(key) // page, tenant).num_inserted
        if state_slot is not None:
            self.pools.publish_state(state_slot, lease.node)
        if self._names_ends:
            self.tree.name_end(lease.node, first * page)
        return num_new

    def end_quietly(self, lease: LeaseRecord, is_use: bool = False, notify: bool = True) -> None:
        """End a lease of a move: free its private slots, and keep its published pages.

        Args:
            is_use: the window KV at its end was in use until now.
            notify: call `on_pressure` if slots are short.
        """
        self.leases.drop(lease)
        try:
            if is_use:
                self.tree.use_window(lease.node)
            self.tree.dec_lock_ref(lease.node, lease.receipt)
            if lease.retired:
                self._reclaim_some()
        finally:  # the pool may raise while retired pages are freed
            self._free_private(lease)
        if notify:
            self._notify_pressure()

    def begin_fill(self, lease: LeaseRecord, num_tokens: int) -> None:
        """Keep an open lease from its session while a load fills its pages up to a token.

        A lease that only locks gets pages for it.

        Raises:
            OutOfSlotsError: too few slots are free or evictable; nothing was allocated.
        """
        if lease.num_slots < num_tokens:
            tenant, num_pages = self.tenants.of(lease.key.extra_key), -(-num_tokens // self.page_size)
            self.pools.check_capacity(num_pages, tenant)
            lease.add_pages(self.pools.take_pages(num_pages - len(lease.starts), tenant))
            lease.num_slots = num_tokens
        self.leases.begin_fill(lease)

    def reload_state(self, lease: LeaseRecord) -> None:
        """Undo a copy into the lease's state slot: copy the state at the end of its cached prefix again."""
        if lease.state_slot is not None:
            self.pools.load_state(lease.node, lease.state_slot)

    def hand_out(self, lease: LeaseRecord, prefix_len: int) -> None:
        """Give a filled lease to its session. Its cached prefix is `prefix_len` tokens long now.

        The loaded tokens are counted as reused. A lease that only locks gives back its private pages.
        """
        loaded, counters = prefix_len - lease.prefix_len, self.counters
        if lease.resumed:
            counters.tokens_reused_resumed += loaded
        else:
            counters.hits += loaded > 0 and not lease.prefix_len
            counters.tokens_reused += loaded
        lease.loaded_len += loaded
        lease.prefix_len = prefix_len
        if loaded:
            for observer in self.observers:
                observer.loaded(lease, loaded)
        self._trim(lease)
        self.leases.end_fill(lease)

    def take_back_fill(self, lease: LeaseRecord, notify: bool = True) -> None:
        """End a lease that is not handed out. Its session may open another one of the same id.

        Its request was not counted, unless the session has ended the lease.

        Args:
            notify: as in `end_quietly`.
        """
        self._uncount_fill(lease)
        self.end_quietly(lease, notify=notify)

    def give_up_fill(self, lease: LeaseRecord) -> None:
        """Take a lease from its session while a load fills it. Its session may open another one of the same id.

        Its request is uncounted as by `take_back_fill`. The lease stays open until the load has ended.
        """
        self._uncount_fill(lease)
        self.leases.give_up_fill(lease)

    def _uncount_fill(self, lease: LeaseRecord) -> None:
        if lease.filling_for:
            self.count_request(lease, -1)
            for observer in self.observers:
                observer.ended(lease)

    def _trim(self, lease: LeaseRecord) -> None:
        """Free the private pages of a lease that only locks."""
        private = lease.private_starts
        if lease.only_locks and len(private):
            lease.starts = lease.starts[: lease.num_published_pages]
            lease.num_slots = len(lease.starts) * self.page_size
            self.leases.note_growth()
            self.pools.free_private(private.copy(), (), self.tenants.of(lease.key.extra_key))
            self._notify_pressure()

    def drop_page(self, key: RadixKey, first: int) -> int:
        """Free the page of a tree's key that begins at a token, and all pages below it, as its KV cannot be used.

        Pages that leases lock stay; call it again when these have ended.

        Returns:
            The tokens that were freed.
        """
        node, _ = self.radix.locate(key, first + self.page_size)
        if node.end != first + self.page_size:
            return 0
        if len(node) > self.page_size:
            self.radix.locate(key, first)  # splits the node before the page
        return self.radix.drop_below(node)

    # ---------------------------------------------------------------- eviction, retirement

    def watch_victims(self, on_victim: Callable[[TreeNode, Component | None], None] | None) -> None:
        """Call `on_victim` before each eviction: see `PrefixCache.watch_victims`."""
        self.radix.watch_victims(on_victim)

    def evict(self, num_tokens: int, cause: str = "request") -> int:
        return self.pools.evict(index(num_tokens), cause=cause).full_evicted

    def evict_window(self, num_tokens: int) -> int:
        """Evict at least `num_tokens` window slots, or all that no lock holds; return their number."""
        return self.pools.evict(0, index(num_tokens), cause="watermark").swa_evicted

    def evict_states(self, num_states: int) -> int:
        """Evict at least `num_states` states, or all that no lock holds; return their number."""
        return self.pools.evict(0, num_states=index(num_states), cause="watermark").mamba_evicted

    def _retire_all(self) -> None:
        self.tree.retire_all()
        self._reclaim_some()

    def _retire(self, is_meant: Callable[[str | None], bool]) -> int:
        retired = self.tree.retire(is_meant)
        self._reclaim_some()
        return retired

    def reclaim(self, max_tokens: int) -> int:
        return self.tree.reclaim_retired(max_tokens)

    def _reclaim_some(self) -> None:
        """Free a bounded number of retired slots. If more may be left, call `on_pressure`."""
        if self.tree.reclaim_retired(_RECLAIMED_AT_ONCE) >= _RECLAIMED_AT_ONCE and self._on_pressure is not None:
            self._on_pressure()

    # ---------------------------------------------------------------- sizes

    @property
    def free_slots(self) -> int:
        return self.allocator.available_size()

    @property
    def private_slots(self) -> int:
        return sum(tenant.private for tenant in self.tenants) - self.quarantined_slots

    def evictable_size(self) -> int:
        return self.tree.evictable_size()

    def protected_size(self) -> int:
        return self.tree.protected_size()

    def sizes_of(self, pool: str, extra_key: str | None = None) -> PoolSizes:
        sizes = super().sizes_of(pool, extra_key)
        if pool != "slots":
            return sizes
        evictable = self.pools.evictable_for(self.tenants.of(extra_key))
        return sizes._replace(evictable=evictable, kept=sizes.evictable - evictable)

    def swa_sizes(self) -> PoolSizes | None:
        tree, swa = self.tree, self.allocator.swa
        if swa is None:
            return None
        halves = sum(int((self.allocator.swa_starts(lease.private_starts) > 0).sum()) for lease in self.quarantine)
        evictable, protected = tree.swa_evictable_size(), tree.swa_protected_size()
        return PoolSizes(swa.num_slots, swa.available_size(), evictable, protected, halves * self.page_size)

    def state_sizes(self) -> PoolSizes | None:
        tree, states = self.tree, self.pools.states
        if states is None:
            return None
        withheld = sum(len(lease.state_slots) for lease in self.quarantine)
        evictable, protected = tree.mamba_evictable_size(), tree.mamba_protected_size()
        return PoolSizes(states.num_slots, states.available_size(), evictable, protected, withheld)

    def _private_size(self, lease: LeaseRecord) -> int:
        return len(lease.private_starts) * self.page_size

    # ---------------------------------------------------------------- tenants

    def _tenant_of_key(self, key: RadixKey) -> Tenant:
        if not self.tenants.configured:
            return self.tenants.rest
        try:
            return self.tenants.of(key.extra_key)
        except AttributeError:
            check_key(key)
            raise

    def configured_tenants(self) -> Sequence[Tenant]:
        return tuple(self.tenants) if self.tenants.configured else ()

    def tenant_of(self, extra_key: str | None) -> str | None:
        return self.tenants.of(extra_key).name

    def share_of(self, name: str) -> PoolSizes:
        tenant = next(tenant for tenant in self.tenants if tenant.name == name)
        assert tenant.cap is not None, f"tenant {name!r} has no cap"
        return PoolSizes(tenant.cap, tenant.cap - tenant.held, tenant.evictable, tenant.cached - tenant.evictable)

    def is_within_floor(self, key: RadixKey, num_tokens: int) -> bool:
        tenant = self.tenants.of(key.extra_key)
        if not tenant.floor:
            return False
        new_tokens = num_tokens - self.tree.peek_prefix(self._tree_key(key)).prefix_len
        return tenant.held + -(-new_tokens // self.page_size) * self.page_size <= tenant.floor

    # ---------------------------------------------------------------- cached pages

    def _tree_key(self, key: RadixKey) -> RadixKey:
        if not self._bigram:
            return key
        check_key(key)
        return key.bigrams()

    def explain(self, key: RadixKey) -> Explanation:
        found = self.tree.explain(self._tree_key(key))
        found.num_tokens = len(key)
        return found

    @property
    def now(self) -> int:
        return self.tree.now

    def sample_tree(self, max_nodes: int) -> Outline:
        return self.tree.sample(max_nodes)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.pools.history.use_clock(clock)

    def evictions(self) -> list[EvictionRecord]:
        return self.pools.history.evictions()

    def outline(self, limits: OutlineLimits) -> Outline:
        return self.tree.outline(limits)

    def publish_events_to(self, sink: KVEventSink) -> None:
        self.tree.publish_events_to(sink)

    def publish_slim_events_to(self, sink: SlimEventSink, stride: int) -> None:
        self.tree.publish_events_to(sink, stride)
        if isinstance(self.tree, PrefixCache):
            self._pending = PendingPages(self.tree, self._tree_key, stride, sink)
            self.observers.append(self._pending)
            self._names_ends = self.tree.usable_ends() is not None

    def pending_pages(self) -> Hashes:
        return super().pending_pages() if self._pending is None else self._pending.hashes()

    def usable_ends(self) -> Hashes | None:
        return self.tree.usable_ends()

    def resident_pages(self) -> Iterable[PageRun]:
        return self.tree.resident_pages()

    def walk_pages(self) -> Iterator[Iterable[PageRun]]:
        return self.tree.walk_pages()

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the accounting, the tree or the allocator is broken. O(n)."""
        self.tree.check_invariants()
        self.allocator.check_invariants()
        leases, withheld = list(self.leases), list(self.quarantine)
        check_accounting(self.tree, self.allocator, self.pools.states, self.tenants, leases, withheld)

    # ---------------------------------------------------------------- the slots of a lease

    def lease_sizes(self, leases: Iterable[LeaseRecord]) -> Iterator[int]:
        seen = np.zeros(self.num_slots // self.page_size + 1, np.bool_)  # page number -> counted; page 0 is reserved
        for lease in leases:
            shared = lease.starts[: lease.num_published_pages] // self.page_size
            num_pages = len(lease.private_starts) + np.count_nonzero(~seen[shared])
            seen[shared] = True
            yield int(num_pages) * self.page_size

    def published_len(self, lease: LeaseRecord) -> int:
        return lease.num_published_pages * self.page_size

    def covers(self, lease: LeaseRecord, slots: Starts) -> bool:
        return bool(np.isin(slots - slots % self.page_size, lease.starts).all())

    def holds_privately(self, lease: LeaseRecord, slots: Starts) -> bool:
        return bool(np.isin(slots - slots % self.page_size, lease.private_starts).all())

    def swa_starts(self, lease: LeaseRecord) -> Starts:
        if self.allocator.swa is None:
            return NO_STARTS
        halves = self.allocator.swa_starts(lease.starts)
        window_start = self.tree.window_start(lease.receipt)
        held_from = lease.num_published_pages if window_start is None else window_start // self.page_size
        halves[:held_from] = 0
        return halves

    def swa_slots(self, slots: torch.Tensor) -> torch.Tensor | None:
        return self.allocator.swa_slots(slots)
