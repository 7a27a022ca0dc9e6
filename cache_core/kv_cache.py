"""`KVCache`: tree, allocator and leases joined; the one class that a service drives.

Synchronous, so every operation is atomic for whoever calls it from one thread. Rules, checked by `check_invariants`:

1. Each page is free, private to one lease, or in the tree, once: `free + private + tree == num_slots`.
2. A lease's published pages are the tree's, locked; its node ends them.
3. The locks on the tree's nodes are those of the open leases, no more and no fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raydix.cache_core.base_prefix_cache import BasePrefixCache, MatchResult, RadixKey, Starts
from raydix.cache_core.errors import InvalidKeyError, LeaseRangeError, OutOfSlotsError
from raydix.cache_core.lease_table import LeaseRecord, LeaseTable
from raydix.cache_core.slot_allocator import TokenToKVPoolAllocator


@dataclass(slots=True)
class Counters:
    """What has happened since the start, in events and tokens."""

    acquires: int = 0
    hits: int = 0
    tokens_requested: int = 0
    tokens_reused: int = 0
    tokens_inserted: int = 0
    tokens_duplicate: int = 0
    tokens_evicted: int = 0
    probes: int = 0


@dataclass(slots=True)
class Published:
    """What an insert did to a lease."""

    prefix_len: int  # leading tokens that were in the tree before
    num_inserted: int  # tokens the tree took over
    num_duplicates: int  # private slots freed because the tree had their tokens
    retired: bool  # the namespace was retired since the lease was granted: nothing was published
    repointed: Starts  # the tree's pages that took the place of the duplicates


class KVCache:
    """Prefix reuse with leases over a pool of slots.

    Args:
        tree: the empty cache that maps prefixes to pages; it must free to `allocator`.
        allocator: the slots.
        pressure_floor: `on_pressure` is called after an operation that leaves fewer free slots than this.
        on_pressure: told that slots run short.
    """

    def __init__(
        self,
        tree: BasePrefixCache,
        allocator: TokenToKVPoolAllocator,
        pressure_floor: int = 0,
        on_pressure: Callable[[], None] | None = None,
    ) -> None:
        self.tree = tree
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.num_slots = allocator.num_slots
        self.leases = LeaseTable()
        self.counters = Counters()
        self._pressure_floor = pressure_floor
        self._on_pressure = on_pressure
        self._private_pages = 0
        self._generation = 0

    # ---------------------------------------------------------------- sizes

    @property
    def free_slots(self) -> int:
        """Slots that can be handed out as they are."""
        return self.allocator.available_size()

    @property
    def private_slots(self) -> int:
        """Slots of leases that no tree holds, in whole pages."""
        return self._private_pages * self.page_size

    def held_slots(self) -> int:
        """Slots that cannot be evicted because leases hold them."""
        return self.private_slots + self.tree.protected_size()

    # ---------------------------------------------------------------- verbs

    def match(self, key: RadixKey) -> MatchResult:
        """A probe: what `acquire` would find, without any effect."""
        self.counters.probes += 1
        return self.tree.peek_prefix(key)

    def acquire(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
    ) -> LeaseRecord:
        """Lock the cached prefix of `key` and allocate slots for the rest and `new_tokens` more; evict the shortfall.

        The same lease id again returns the open lease as it is.

        Raises:
            OutOfSlotsError: there is no room, even after evicting; nothing was taken or evicted.
            UnknownLeaseError: the id is another session's.
        """
        if (open_lease := self.leases.find(lease_id, session_id)) is not None:
            return open_lease
        if new_tokens < 0:
            raise LeaseRangeError(f"new_tokens must not be negative: {new_tokens}")
        num_slots = len(key) + new_tokens
        num_pages = -(-num_slots // self.page_size)
        if num_pages * self.page_size > self.num_slots:
            self._refuse(num_pages)
        match = self.tree.match_pages(key, max_prefix_len)
        receipt = self.tree.inc_lock_ref(match.last_node)
        try:
            private = self._take(num_pages - len(match.starts))
        except OutOfSlotsError:
            self.tree.dec_lock_ref(match.last_node, receipt)
            raise
        starts = np.concatenate((match.starts, private))
        lease = LeaseRecord(
            lease_id,
            session_id,
            key,
            match.last_node,
            receipt,
            match.prefix_len,
            starts,
            len(match.starts),
            num_slots,
            self._generation,
        )
        self._count_grant(lease)
        return lease

    def lock(self, lease_id: str, session_id: str, key: RadixKey) -> LeaseRecord:
        """Lock the cached prefix of `key` and allocate nothing; the lease covers the prefix, `extend` adds to it."""
        if (open_lease := self.leases.find(lease_id, session_id)) is not None:
            return open_lease
        match = self.tree.match_pages(key)
        receipt = self.tree.inc_lock_ref(match.last_node)
        lease = LeaseRecord(
            lease_id,
            session_id,
            key,
            match.last_node,
            receipt,
            match.prefix_len,
            match.starts,
            len(match.starts),
            match.prefix_len,
            self._generation,
        )
        self._count_grant(lease)
        return lease

    def extend(self, lease_id: str, session_id: str, num_tokens: int) -> Starts:
        """Cover `num_tokens` more: first the unused rest of the last page, then new pages, which are returned.

        Raises:
            OutOfSlotsError: there is no room; nothing was taken.
            UnknownLeaseError: no such open lease.
        """
        lease = self.leases.get(lease_id, session_id)
        if num_tokens < 0:
            raise LeaseRangeError(f"a lease cannot be extended by {num_tokens} tokens")
        num_pages = -(-(lease.num_slots + num_tokens) // self.page_size)
        if num_pages * self.page_size > self.num_slots:
            self._refuse(num_pages)
        added = self._take(num_pages - len(lease.starts))
        lease.starts = np.concatenate((lease.starts, added))
        lease.num_slots += num_tokens
        return added

    def insert(self, lease_id: str, session_id: str, num_tokens: int, suffix: RadixKey) -> Published:
        """Publish the whole pages of the lease's first `num_tokens` tokens; the lease goes on holding all of it.

        `suffix` brings the ids that the cache has not seen: it ends at `num_tokens`. Where the tree has a page
        already, the lease's own is freed and the tree's takes its place, in the same step.

        Raises:
            LeaseRangeError: more tokens than the lease covers, ids missing in between, or other ids than the lease's.
            UnknownLeaseError: no such open lease.
        """
        lease = self.leases.get(lease_id, session_id)
        key = self._known_key(lease, num_tokens, suffix)
        lease.key = key if len(key) > len(lease.key) else lease.key
        published = lease.num_published_pages
        num_pages = num_tokens // self.page_size
        if lease.generation != self._generation or num_pages <= published:
            retired = lease.generation != self._generation
            return Published(published * self.page_size, 0, 0, retired, lease.starts[:0])
        aligned = key if len(key) == num_tokens else key[:num_tokens]
        result = self.tree.insert_pages(aligned, lease.starts[published:num_pages], lease.node)
        existing = result.existing
        receipt = self.tree.inc_lock_ref(result.last_node)
        self.tree.dec_lock_ref(lease.node, lease.receipt)
        lease.node, lease.receipt = result.last_node, receipt
        if len(existing):
            self.allocator.free_pages(lease.starts[published : published + len(existing)].copy())
            lease.starts[published : published + len(existing)] = existing
        lease.num_published_pages = result.end // self.page_size
        num_new = result.end - published * self.page_size - len(existing) * self.page_size
        self._private_pages -= lease.num_published_pages - published
        self.counters.tokens_inserted += num_new
        self.counters.tokens_duplicate += len(existing) * self.page_size
        return Published(result.prefix_len, num_new, len(existing) * self.page_size, False, existing)

    def release(self, lease_id: str, session_id: str) -> bool:
        """End a lease: its private pages are freed, what it inserted stays. False if no such lease is open."""
        lease = self.leases.find(lease_id, session_id)
        if lease is None:
            return False
        self._end(lease)
        return True

    def end_session(self, session_id: str) -> int:
        """End every lease of a session; returns how many."""
        leases = self.leases.of_session(session_id)
        for lease in leases:
            self._end(lease)
        return len(leases)

    def evict(self, num_tokens: int) -> int:
        """Free at least `num_tokens` slots of the tree, or all that nobody holds; returns how many."""
        evicted = self.tree.evict(num_tokens).full_evicted
        self.counters.tokens_evicted += evicted
        return evicted

    def reset(self) -> None:
        """Make everything unmatchable and free what nobody holds; leases keep their slots, but publish no more."""
        self._generation += 1
        self.tree.retire_all()
        self.tree.reclaim_retired()

    # ---------------------------------------------------------------- parts

    def _known_key(self, lease: LeaseRecord, num_tokens: int, suffix: RadixKey) -> RadixKey:
        """The lease's tokens, `suffix` included, once it is certain that it fits."""
        start = num_tokens - len(suffix)
        known = len(lease.key)
        if num_tokens > lease.num_slots:
            raise LeaseRangeError(f"cannot publish {num_tokens} tokens: the lease covers {lease.num_slots}, extend it")
        if not 0 <= start <= known:
            raise LeaseRangeError(f"the cache knows {known} tokens of this lease; those up to {start} are missing")
        overlap = min(known, num_tokens) - start
        if overlap and suffix[:overlap] != lease.key[start : start + overlap]:
            raise LeaseRangeError("the tokens differ from those that the lease was acquired for")
        if num_tokens <= known:
            return lease.key
        try:
            return lease.key + suffix[overlap:]
        except InvalidKeyError as error:
            raise LeaseRangeError(str(error)) from error

    def _take(self, num_pages: int) -> Starts:
        """Allocate pages, after evicting what is missing, or refuse before anything changes."""
        if num_pages <= 0:
            return np.empty(0, np.int64)
        shortfall = num_pages * self.page_size - self.allocator.available_size()
        if shortfall > 0:
            if shortfall > self.tree.evictable_size():
                self._refuse(num_pages)
            self.evict(shortfall)
        starts = self.allocator.alloc_pages(num_pages)
        self._private_pages += num_pages
        self._tell_pressure()
        return starts

    def _tell_pressure(self) -> None:
        if self._on_pressure is not None and self.allocator.available_size() < self._pressure_floor:
            self._on_pressure()

    def _refuse(self, num_pages: int) -> None:
        needed = num_pages * self.page_size
        raise OutOfSlotsError(needed, self.free_slots, self.tree.evictable_size(), self.num_slots)

    def _count_grant(self, lease: LeaseRecord) -> None:
        self.leases.add(lease)
        self.counters.acquires += 1
        self.counters.hits += lease.prefix_len > 0
        self.counters.tokens_requested += len(lease.key)
        self.counters.tokens_reused += lease.prefix_len

    def _end(self, lease: LeaseRecord) -> None:
        self.leases.remove(lease)
        private = lease.private_starts
        if len(private):
            self.allocator.free_pages(private)
            self._private_pages -= len(private)
        self.tree.dec_lock_ref(lease.node, lease.receipt)
        if lease.generation != self._generation:
            self.tree.reclaim_retired()
        self._tell_pressure()  # what it held can be evicted now

    # ---------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this module, the tree or the allocator is broken. O(everything)."""
        self.tree.check_invariants()
        self.allocator.check_invariants()
        private = [lease.private_starts for lease in self.leases]
        tree = self.tree.tree_starts()
        pages = np.concatenate((self.allocator.free_starts(), *private, *tree)) // self.page_size
        assert len(pages) * self.page_size == self.num_slots, f"rule 1: {len(pages)} pages accounted for"
        assert len(np.unique(pages)) == len(pages), "rule 1: a page has two owners"
        assert sum(map(len, private)) == self._private_pages, f"rule 1: {self._private_pages=}"
        in_tree = set(np.concatenate(tree).tolist()) if tree else set()
        locks = 0
        for lease in self.leases:
            published = lease.starts[: lease.num_published_pages].tolist()
            assert in_tree.issuperset(published), f"rule 2 at lease {lease.lease_id}: its pages left the tree"
            end = lease.node.end if lease.node is not None else 0
            assert end == len(published) * self.page_size, f"rule 2 at lease {lease.lease_id}"
            assert lease.num_slots <= len(lease.starts) * self.page_size, f"lease {lease.lease_id} covers too much"
            locks += bool(end)
        assert locks == self.tree.num_locks(), f"rule 3: {locks} leases hold {self.tree.num_locks()} locks"
