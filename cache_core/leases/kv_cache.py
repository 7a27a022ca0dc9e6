"""`KVCache`: tree, allocator and leases joined; the one class that a service drives.

Synchronous, so every operation is atomic for whoever calls it from one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index

import numpy as np

from raydix.cache_core.base_prefix_cache import MatchResult, RadixKey, Starts
from raydix.cache_core.errors import LeaseRangeError, OutOfSlotsError
from raydix.cache_core.eviction.tenants import Tenant
from raydix.cache_core.leases.kv_accounting import KVLedger
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.leased_cache import Published
from raydix.cache_core.tree.radix_key import check_key

__all__ = ["KVCache", "Published"]

_RECLAIMED_AT_ONCE = 4096  # tokens of a retired namespace freed within the call that retired it


class KVCache(KVLedger):
    """Prefix reuse with leases over a pool of slots in pages, which a tree maps prefixes to: the verbs.

    Made as `KVLedger` says.
    """

    # ---------------------------------------------------------------- verbs

    def match(self, key: RadixKey) -> MatchResult:
        """A probe: what `acquire` would find, without any effect."""
        self.counters.probes += 1
        return self.tree.peek_prefix(self._tree_key(key))

    def check_len(self, num_tokens: int, key: RadixKey) -> None:
        """Raise OutOfSlotsError if the pools have fewer slots than so many tokens need, given what of `key` is cached.

        Of what is cached, the last window alone takes window slots.
        """
        num_pages = -(-num_tokens // self.page_size)
        self.room.check_capacity(num_pages, self._tenant_of(key))
        if self.room.exceeds_window(num_pages):
            prefix_len = self.tree.peek_prefix(self._tree_key(key)).prefix_len
            spared = prefix_len - self.room.held_by_prefix("window slots", prefix_len)
            self.room.check_window_capacity(num_pages - spared // self.page_size)

    def acquire(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        priority: int = 0,
    ) -> LeaseRecord:
        """Lock the cached prefix of `key` and allocate slots for the rest and `new_tokens` more; evict the shortfall.

        The same lease id again returns the open lease as it is. With states, the lease gets a state slot of its own,
        which holds a copy of the state at the end of the prefix, or zeros. What the lease uses and publishes is of its
        `priority` at least.

        Raises:
            OutOfSlotsError: there is no room, even after evicting; nothing was taken or evicted.
            LeaseRangeError: a negative `new_tokens` or `max_prefix_len`.
            UnknownLeaseError: the id is another session's.
        """
        new_tokens, priority = index(new_tokens), index(priority)
        if max_prefix_len is not None:
            max_prefix_len = index(max_prefix_len)
        if (open_lease := self.leases.find_unended(lease_id, session_id)) is not None:
            return open_lease
        if new_tokens < 0:
            raise LeaseRangeError(f"new_tokens must not be negative: {new_tokens}")
        if max_prefix_len is not None and max_prefix_len < 0:
            raise LeaseRangeError(f"max_prefix_len must not be negative: {max_prefix_len}")
        num_slots = len(key) + new_tokens
        num_pages = -(-num_slots // self.page_size)
        tenant = self._tenant_of(key)
        self.room.check_capacity(num_pages, tenant)
        return self._grant(lease_id, session_id, key, tenant, max_prefix_len, num_slots, num_pages, priority)

    def lock(self, lease_id: str, session_id: str, key: RadixKey, priority: int = 0) -> LeaseRecord:
        """Lock the cached prefix of `key` and allocate no KV slots; `extend` adds private ones to it."""
        if (open_lease := self.leases.find_unended(lease_id, session_id)) is not None:
            return open_lease
        lease = self._grant(lease_id, session_id, key, self._tenant_of(key), None, None, 0, index(priority))
        lease.only_locks = True
        return lease

    def _grant(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        tenant: Tenant,
        max_prefix_len: int | None,
        num_slots: int | None,
        num_pages: int,
        priority: int,
    ) -> LeaseRecord:
        match = self.tree.match_pages(self._tree_key(key), max_prefix_len, priority)
        self.room.verify(match.starts, match.last_node)
        receipt, state_slot = self.tree.inc_lock_ref(match.last_node), None
        try:
            if self.room.states is not None:
                self.room.check_pages(num_pages - len(match.starts), tenant)  # before a state is evicted in vain
                state_slot = self.room.take_state(tenant)
            private = self.room.take_pages(num_pages - len(match.starts), tenant)
        except BaseException as error:  # a pool may refuse what it is given back, too
            self.tree.dec_lock_ref(match.last_node, receipt)
            self.room.free_private(match.starts[:0], state_slot, tenant)
            if not isinstance(error, OutOfSlotsError):
                raise
            needed = error.needed + self.room.held_by_prefix(error.pool, match.prefix_len)
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
        if state_slot is not None:
            lease.state_slot = state_slot
            self.room.load_state(match.last_node, state_slot)
        self._count_grant(lease, max_prefix_len)
        return lease

    def extend(self, lease_id: str, session_id: str, num_tokens: int) -> Starts:
        """Cover `num_tokens` more: first the unused rest of the last page, then new pages, which are returned.

        Raises:
            OutOfSlotsError: there is no room; nothing was taken.
            UnknownLeaseError: no such open lease.
        """
        lease, num_tokens = self.leases.get(lease_id, session_id), index(num_tokens)
        if num_tokens < 0:
            raise LeaseRangeError(f"a lease cannot be extended by {num_tokens} tokens")
        lease.only_locks = False
        num_pages = -(-(lease.num_slots + num_tokens) // self.page_size)
        tenant = self.tenants.of(lease.key.extra_key)
        self.room.check_capacity(num_pages, tenant)
        if self.room.exceeds_window(num_pages):
            held = np.count_nonzero(self.allocator.swa_starts(lease.private_starts))
            self.room.check_window_capacity(int(held) + num_pages - len(lease.starts))
        added = self.room.take_pages(num_pages - len(lease.starts), tenant)
        if len(added):
            lease.add_pages(added)
            self.leases.note_growth()
        lease.num_slots += num_tokens
        return added

    def insert(
        self, lease_id: str, session_id: str, num_tokens: int, suffix: RadixKey, publish_state: bool = False
    ) -> Published:
        """Publish the whole pages of the lease's first `num_tokens` tokens; the lease goes on holding all of it.

        `suffix` brings the ids that the cache has not seen: it ends at `num_tokens`. Where the tree has a page
        already, the lease's own is freed and the tree's takes its place, in the same step. With `publish_state`, a copy
        of the lease's state is published as the one after the last of these tokens.

        Raises:
            LeaseRangeError: more tokens than the lease covers, ids missing in between, or other ids than the lease's;
                or a state is to be published after a number of tokens that is no whole number of pages.
            OutOfSlotsError: there is no room for the copy of the state; nothing was published.
            UnknownLeaseError: no such open lease.
        """
        lease, num_tokens = self.leases.get(lease_id, session_id), index(num_tokens)
        key = lease.known_key(num_tokens, suffix)
        tree_key = self._tree_key(key if len(key) == num_tokens else key[:num_tokens])
        if publish_state:
            self._check_state(lease, tree_key)
        published, retired = lease.num_published_pages, lease.retired
        new_pages = len(tree_key) // self.page_size - published
        tenant = self.tenants.of(lease.key.extra_key)
        state_slot = self.room.take_state(tenant) if publish_state and not retired else None
        if key is not lease.key and len(key) > len(lease.key):
            lease.key = key
        if retired or new_pages < 0 or (new_pages == 0 and state_slot is None):
            return Published(published * self.page_size, 0, 0, retired, lease.starts[:0])
        try:
            done = self._publish(lease, tree_key, published, published + new_pages, tenant)
        except BaseException:  # a pool may refuse the lease's duplicates
            self.room.free_private(lease.starts[:0], state_slot, tenant)
            raise
        if state_slot is not None:
            self.room.store_state(lease.state_slot, state_slot, lease.node)
        return done

    def _publish(self, lease: LeaseRecord, tree_key: RadixKey, first: int, stop: int, tenant: Tenant) -> Published:
        """Insert the lease's pages [first, stop) and repoint those that the tree does not hold."""
        page = self.page_size
        fresh = lease.starts[first:stop]
        result = self.tree.insert_pages(tree_key, fresh, lease.node, lease.swa_freed_len, lease.priority)
        receipt = self.tree.inc_lock_ref(result.last_node)
        self.tree.dec_lock_ref(lease.node, lease.receipt)
        lease.node, lease.receipt = result.last_node, receipt
        existing = duplicates = result.existing
        if len(existing):
            ours = lease.starts[first : first + len(existing)]
            duplicates = ours[ours != existing]
        if result.end:
            lease.starts[first : first + len(existing)] = existing
            lease.num_published_pages = stop  # before the pool may refuse what it is given back
            self.room.note_published(fresh, duplicates, tenant)
            for watch in self.observers:
                watch.published(lease)
        num_duplicates = len(duplicates) * page
        num_new = max(0, result.end - first * page) - num_duplicates
        self.counters.tokens_inserted += num_new
        self.counters.tokens_duplicate += num_duplicates
        return Published(result.prefix_len, num_new, num_duplicates, False, existing)

    def release_window(self, lease_id: str, session_id: str, up_to: int) -> None:
        """Free the window KV of a lease before token `up_to`, as decoding has left it behind.

        One page more than asked is kept, so that what is published next can be matched at a page boundary; and the last
        window of what is published, unless all of it lies before that page. No effect without a sliding window.

        Raises:
            LeaseRangeError: `up_to` is negative, or beyond what the lease covers.
            UnknownLeaseError: no such open lease.
        """
        up_to = index(up_to)
        super().release_window(lease_id, session_id, up_to)
        lease, page = self.leases.get(lease_id, session_id), self.page_size
        keep_from = (up_to // page - 1) * page
        published = lease.num_published_pages * page
        first = max(published, lease.swa_freed_len)
        if keep_from > first:
            self.room.free_window(lease.starts[first // page : keep_from // page])
            lease.swa_freed_len = keep_from
        if keep_from >= published:
            self.tree.release_window(lease.node, lease.receipt)

    # ---------------------------------------------------------------- eviction, retirement

    def evict(self, num_tokens: int, cause: str = "request") -> int:
        """Free at least `num_tokens` slots of the tree, or all that nobody holds; returns how many."""
        return self.room.evict(index(num_tokens), cause=cause).full_evicted

    def evict_window(self, num_tokens: int) -> int:
        """Free at least `num_tokens` window slots of the tree, or all that no window holds; returns how many."""
        return self.room.evict(0, index(num_tokens), cause="watermark").swa_evicted

    def evict_states(self, num_states: int) -> int:
        """Free at least `num_states` states of the tree, or all that nobody holds; returns how many."""
        return self.room.evict(0, num_states=index(num_states), cause="watermark").mamba_evicted

    def _retire_all(self) -> None:
        self.tree.retire_all()
        self._reclaim_some()

    def _retire(self, is_meant: Callable[[str | None], bool]) -> int:
        retired = self.tree.retire(is_meant)
        self._reclaim_some()
        return retired

    def reclaim(self, max_tokens: int) -> int:
        """Free about so many slots of what was retired and nobody holds; returns how many, 0 if none is left."""
        return self.tree.reclaim_retired(max_tokens)

    def _reclaim_some(self) -> None:
        """Free what is quick to free, and have the rest done later."""
        if self.tree.reclaim_retired(_RECLAIMED_AT_ONCE) >= _RECLAIMED_AT_ONCE and self._on_pressure is not None:
            self._on_pressure()

    # ---------------------------------------------------------------- parts

    def _tenant_of(self, key: RadixKey) -> Tenant:
        try:
            return self.tenants.of(key.extra_key)
        except AttributeError:
            check_key(key)
            raise

    def _check_state(self, lease: LeaseRecord, tree_key: RadixKey) -> None:
        """Raise LeaseRangeError if the lease's state cannot be published after these tokens."""
        if lease.state_slot is None:
            raise LeaseRangeError("this cache keeps no states, so none can be published")
        if not len(tree_key) or len(tree_key) % self.page_size:
            raise LeaseRangeError(f"a state is published after whole pages of {self.page_size}, not {len(tree_key)}")
        if len(tree_key) < lease.num_published_pages * self.page_size:
            raise LeaseRangeError("the lease's state is that of its last token: publish it at the end of its tokens")

    def _give_up_shared(self, lease: LeaseRecord) -> None:
        self.tree.dec_lock_ref(lease.node, lease.receipt)
        if lease.retired:
            self._reclaim_some()

    def _free_private(self, lease: LeaseRecord) -> None:
        self.room.free_private(lease.private_starts, lease.state_slot, self.tenants.of(lease.key.extra_key))

    def _tell_pressure(self) -> None:
        self.room.notify_pressure()
