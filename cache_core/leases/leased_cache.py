"""`LeasedCache`: the contract of a cache with leases, and the life cycle of a lease. The service drives such a cache.

A cache is synchronous: if one thread makes all calls, each operation is atomic. After each operation,
`free_slots + private_slots + total_size() + quarantined_slots == num_slots`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import index

import numpy as np
import torch

from raydix.cache_core.base_prefix_cache import MatchResult
from raydix.cache_core.errors import LeaseRangeError, UnknownLeaseError
from raydix.cache_core.eviction.history import EvictionRecord
from raydix.cache_core.eviction.tenants import Tenant
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.leases.lease_table import LeaseRecord, LeaseTable, Quarantine
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.cache_core.leases.results import Counters, PoolSizes, Published
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts
from raydix.cache_core.tree.page_events import Hashes, KVEventSink, PageRun, SlimEventSink
from raydix.cache_core.tree.radix_key import RadixKey


class LeasedCache(ABC):
    """Prefix reuse with leases over a pool of slots.

    A subclass keeps the prefixes and the slots. This class keeps the leases, the counters and the observers.

    Attributes:
        num_slots: slots of the pool.
        page_size: tokens of a page; leases find and publish whole pages.
        leases: the open leases.
        quarantine: ended leases of vanished sessions; their private slots are withheld.
        counters: counts of events since the start.
        observers: objects that are notified of every request.
        below: the cache of the tier below, which is reset and retired with this one; None without one.
    """

    num_slots: int
    page_size: int

    def __init__(self, remembered_leases: int = 0) -> None:
        self.leases = LeaseTable(remembered_leases)
        self.quarantine = Quarantine()
        self.counters = Counters()
        self.observers: list[RequestObserver] = []
        self.below: LeasedCache | None = None

    # ---------------------------------------------------------------- requests

    @abstractmethod
    def check_len(self, num_tokens: int, key: RadixKey) -> None:
        """Raise if a lease of `key` over `num_tokens` tokens cannot fit, even without other leases.

        Raises:
            OutOfSlotsError: a pool is too small; `can_ever_fit` is False.
            LeaseRangeError: leases of this cache must be shorter.
        """

    def acquire(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        priority: int = 0,
        resumed: bool = False,
        boundary_state: bool = False,
    ) -> LeaseRecord:
        """Lock the cached prefix of `key`, and allocate slots for its other tokens and `new_tokens` more.

        If too few slots are free, the shortfall is evicted. The lease reuses at most `max_prefix_len` tokens of the
        cached prefix. If the cache evicts by priority, the pages that the lease uses and publishes get at least its
        `priority`. If the session has this lease open already, returns it.

        Args:
            resumed: the request had a lease before, which was preempted. It is counted apart from other requests.
            boundary_state: the lease gets a second state slot, if one is free or evictable: for a copy of its state at
                the end of a page, which `insert` publishes. No effect for a cache without states.

        Raises:
            OutOfSlotsError: too few slots are free or evictable; nothing was allocated or evicted.
            LeaseRangeError: more tokens than a lease may cover, or a negative `new_tokens` or `max_prefix_len`.
            UnknownLeaseError: the lease has ended, or belongs to another session.
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
        lease = self._open_lease(lease_id, session_id, key, len(key) + new_tokens, max_prefix_len, priority)
        lease.resumed = resumed
        self._add_lease(lease, max_prefix_len)
        if boundary_state:
            self._add_boundary_slot(lease)
        return lease

    def _add_boundary_slot(self, lease: LeaseRecord) -> None:  # noqa: B027 -- no effect without states
        """Give an open lease a second state slot, or count that there is none."""

    def lock(self, lease_id: str, session_id: str, key: RadixKey, priority: int = 0) -> LeaseRecord:
        """Lock the cached prefix of `key`, without slots for more tokens. `extend` adds private slots.

        Raises:
            OutOfSlotsError: too few slots are free or evictable; nothing was allocated or evicted.
            UnknownLeaseError: the lease has ended, or belongs to another session.
        """
        if (open_lease := self.leases.find_unended(lease_id, session_id)) is not None:
            return open_lease
        lease = self._open_lease(lease_id, session_id, key, None, None, index(priority))
        lease.only_locks = True
        self._add_lease(lease, None)
        return lease

    @abstractmethod
    def _open_lease(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        num_slots: int | None,
        max_prefix_len: int | None,
        priority: int,
    ) -> LeaseRecord:
        """Return a new lease over `num_slots` tokens. None: over the cached prefix alone."""

    def _add_lease(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        self.leases.add(lease)
        self.count_request(lease, 1)
        for observer in self.observers:
            observer.granted(lease, max_prefix_len)

    def count_request(self, lease: LeaseRecord, times: int) -> None:
        """Count a granted request and its prefix; -1 times: it begins again, so these and its loads count no more."""
        counters, prefix_len = self.counters, lease.prefix_len
        if lease.resumed:
            counters.num_resumed += times
            counters.tokens_resumed += times * len(lease.key)
            counters.tokens_reused_resumed += times * prefix_len
        else:
            counters.acquires += times
            counters.hits += times * (prefix_len > 0)
            counters.tokens_requested += times * len(lease.key)
            counters.tokens_reused += times * prefix_len

    def count_refusal(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Count that the caller refuses a lease of `key` over `num_tokens` tokens for lack of slots."""
        counters = self.counters
        counters.tokens_refused += len(key)
        if not can_ever_fit:
            counters.num_too_large += 1
            counters.tokens_too_large += len(key)
            num_slots = -(-num_tokens // self.page_size) * self.page_size
            counters.largest_too_large = max(counters.largest_too_large, num_slots)
        for observer in self.observers:
            observer.refused(key, num_tokens, can_ever_fit)

    def extend(self, lease_id: str, session_id: str, num_tokens: int) -> Starts:
        """Extend a lease by `num_tokens` tokens; return the first slots of the pages added to its `starts`.

        Raises:
            OutOfSlotsError: too few slots are free or evictable; nothing was allocated.
            LeaseRangeError: more tokens than a lease may cover, or a negative `num_tokens`.
            UnknownLeaseError: no such open lease.
        """
        lease, num_tokens = self.leases.get(lease_id, session_id), index(num_tokens)
        if num_tokens < 0:
            raise LeaseRangeError(f"num_tokens must not be negative: {num_tokens}")
        lease.only_locks = False
        return self._extend(lease, num_tokens)

    @abstractmethod
    def _extend(self, lease: LeaseRecord, num_tokens: int) -> Starts:
        """Extend a lease by `num_tokens` tokens; return the first slots of the pages added."""

    @abstractmethod
    def insert(
        self,
        lease_id: str,
        session_id: str,
        num_tokens: int,
        suffix: RadixKey,
        publish_state: bool = False,
        boundary_len: int | None = None,
    ) -> Published:
        """Publish the whole pages of the lease's first `num_tokens` tokens. The lease keeps holding them.

        Args:
            suffix: the token ids that the cache does not know yet; it ends at `num_tokens`.
            publish_state: also publish a copy of the lease's state, as the state after `num_tokens` tokens.
            boundary_len: also publish the state in the lease's boundary slot, as the state after so many tokens: the
                end of the last whole page. The slot goes to the tree. Again with the same length: no effect.

        Raises:
            LeaseRangeError: the lease covers fewer tokens; `suffix` leaves a gap or differs from the lease's tokens; or
                the state cannot be published there.
            OutOfSlotsError: no state slot is free or evictable for the copy; nothing was published.
            UnknownLeaseError: no such open lease.
        """

    def release_window(self, lease_id: str, session_id: str, up_to: int) -> None:
        """Free the window KV of a lease before token `up_to`. No effect without a sliding window.

        The window KV of the last whole pages is kept where a later request needs it, also if that request is cut one or
        two tokens before their end: `kept_tail`. The published pages keep their window KV, unless all of it lies
        before.

        Args:
            up_to: the first token that the next computed token attends to, so `up_to + window - 1` are computed.

        Raises:
            LeaseRangeError: `up_to` is negative, or beyond the lease's tokens.
            UnknownLeaseError: no such open lease.
        """
        lease, up_to = self.leases.get(lease_id, session_id), index(up_to)
        if not 0 <= up_to <= lease.num_slots:
            raise LeaseRangeError(f"up_to must be in [0, {lease.num_slots}], the tokens of the lease, not {up_to}")
        self._release_window(lease, up_to)

    def _release_window(self, lease: LeaseRecord, up_to: int) -> None:  # noqa: B027 -- optional
        """Free the window KV of a lease before a token that it covers."""

    # ---------------------------------------------------------------- the end of leases

    def release(self, lease_id: str, session_id: str) -> bool:
        """End a lease: free its private slots and keep its published pages. Return False if no such lease is open.

        If the lease is not open, its id is remembered as ended, because its request may still be in transit.
        """
        try:
            lease = self.leases.find(lease_id, session_id)
        except UnknownLeaseError:
            if not self._abandon(lease_id, session_id):
                raise
            return True
        if lease is None:
            self.leases.ended.add(session_id, lease_id)
            return False
        self._end(lease)
        return True

    def _abandon(self, lease_id: str, session_id: str) -> bool:
        """End a lease that is being filled for a session. Its slots are freed when the copy into them has ended.

        Return whether there is such a lease.
        """
        lease = self.leases.abandon(lease_id, session_id)
        if lease is None:
            return False
        for observer in self.observers:
            observer.ended(lease)
        return True

    def end_session(self, session_id: str) -> int:
        """End every lease of a session; return their number."""
        return self._end_all(session_id)

    def quarantine_session(self, session_id: str) -> int:
        """End every lease of a vanished session; return their number.

        Their published pages are unlocked immediately. Their private slots are withheld until `free_withheld`, because
        the session's process may still write them.
        """
        return self._end_all(session_id, vanished=True)

    def free_withheld(self, session_id: str) -> int:
        """Free the slots of a session in quarantine, after its process has ended; return their number."""
        leases = self.quarantine.take(session_id)
        num_slots = sum(map(self._private_size, leases))
        _for_each(leases, self._free_private)
        return num_slots

    def _end_all(self, session_id: str, vanished: bool = False) -> int:
        leases = self.leases.of_session(session_id)
        _for_each(leases, partial(self._end, vanished=vanished))
        filling = self.leases.filling_for(session_id)
        for lease in filling:
            self._abandon(lease.lease_id, session_id)
        return len(leases) + len(filling)

    def _end(self, lease: LeaseRecord, vanished: bool = False, expired: bool = False) -> None:
        for observer in self.observers:
            observer.ended(lease)
        self.leases.remove(lease, expired=vanished or expired)
        try:
            self._unlock(lease)
        finally:  # the pool may raise while retired pages are freed
            if vanished:
                self.quarantine.add(lease)
            else:
                self._free_private(lease)
        self._notify_pressure()  # only now: the lease's pages have become evictable

    @abstractmethod
    def _unlock(self, lease: LeaseRecord) -> None:
        """Unlock the published pages of an ended lease."""

    @abstractmethod
    def _free_private(self, lease: LeaseRecord) -> None:
        """Free the private slots of an ended lease."""

    @abstractmethod
    def _notify_pressure(self) -> None:
        """Call `on_pressure` if slots are short."""

    def offer(self, lease_id: str, session_id: str, offer_id: str, expires_at: float) -> LeaseRecord:
        """Let another session adopt a lease once, until `expires_at`, a time in the clock of `expire_offers`.

        Args:
            offer_id: unique and not empty; `adopt` needs it. A new offer of the lease replaces the old one.

        Raises:
            UnknownLeaseError: no such open lease.
        """
        assert offer_id, "an offer needs an id"
        lease = self.leases.get(lease_id, session_id)
        self.leases.offer(lease, offer_id, expires_at)
        return lease

    def adopt(self, lease_id: str, from_session: str, session_id: str, offer_id: str) -> LeaseRecord:
        """Move an offered lease to another session. It keeps its slots and locks.

        Raises:
            ExpiredLeaseError: the offer expired, or the session that offered the lease vanished.
            UnknownLeaseError: the lease has ended, was adopted already, or that session did not offer it.
        """
        lease = self.leases.get(lease_id, from_session)
        if not offer_id or lease.offer_id != offer_id:
            raise UnknownLeaseError(f"lease {lease_id!r} is not offered by this grant: adopt a grant once")
        self.leases.end_offer(lease)
        if session_id != from_session:
            self.leases.move(lease, session_id)
        return lease

    def take_back(self, lease_id: str, session_id: str, offer_id: str) -> None:
        """End an offer without ending its lease. No effect if the offer has ended or belongs to another session."""
        lease = self.leases.offered(lease_id, offer_id)
        if lease is not None and lease.session_id == session_id:
            self.leases.end_offer(lease)

    def revoke(self, lease_id: str, session_id: str, offer_id: str) -> bool:
        """End an offered lease as `release` does. Return False if the offer was adopted or has ended.

        Raises:
            UnknownLeaseError: the lease belongs to another session.
        """
        lease = self.leases.offered(lease_id, offer_id) if offer_id else None
        if lease is None:
            return False
        if lease.session_id != session_id:
            raise UnknownLeaseError(f"lease {lease_id!r} belongs to another session")
        self._end(lease)
        return True

    def expire_offers(self, now: float) -> int:
        """End every lease with an offer that expired by `now`; return their number. O(offers).

        Their private slots are freed: the session that offered a lease no longer writes them.
        """
        overdue = self.leases.overdue_offers(now)
        _for_each(overdue, partial(self._end, expired=True))
        return len(overdue)

    @abstractmethod
    def evict(self, num_tokens: int, cause: str = "request") -> int:
        """Evict at least `num_tokens` cached slots, or all that no lease locks; return their number.

        `explain` returns `cause` for the evicted pages.
        """

    def reset(self) -> None:
        """Make all cached pages unmatchable, in the tiers below, too.

        Open leases keep their slots, but their inserts publish nothing.
        """
        try:
            self._retire_leases(lambda extra_key: True)
            self._retire_all()
        finally:  # the pool may raise while retired pages are freed
            if self.below is not None:
                self.below.reset()

    def retire(self, is_meant: Callable[[str | None], bool], above: LeasedCache | None = None) -> int:
        """Do `reset` for each namespace if `is_meant(extra_key)` returns True; return their number in this tier.

        O(namespaces and leases). Frees a bounded number of unlocked pages; `reclaim` frees all others.

        Args:
            above: the cache of a tier below this one, which is left alone, as are those below it; None: none is.
        """
        try:
            self._retire_leases(is_meant)
            return self._retire(is_meant)
        finally:  # the pool may raise while retired pages are freed
            if self.below is not None and self.below is not above:
                self.below.retire(is_meant, above)

    def _retire_leases(self, is_meant: Callable[[str | None], bool]) -> None:
        for lease in (*self.leases, *self.quarantine):
            lease.retired = lease.retired or is_meant(lease.key.extra_key)
        for observer in self.observers:
            observer.retired(is_meant)

    @abstractmethod
    def _retire_all(self) -> None:
        """Make all cached pages unmatchable."""

    @abstractmethod
    def _retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """Make the cached pages of some namespaces unmatchable; return the number of namespaces."""

    def reclaim(self, max_tokens: int) -> int:
        """Free about `max_tokens` retired slots that no lease locks; return their number, 0 if none is left."""
        return 0

    # ---------------------------------------------------------------- sizes

    @property
    @abstractmethod
    def free_slots(self) -> int:
        """Slots that can be allocated without an eviction."""

    @property
    @abstractmethod
    def private_slots(self) -> int:
        """Private slots of open leases, in whole pages."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Return the number of cached slots that no lease locks."""

    @abstractmethod
    def protected_size(self) -> int:
        """Return the number of cached slots that leases lock."""

    @property
    def quarantined_slots(self) -> int:
        """Private slots of the leases in quarantine. O(leases in quarantine)."""
        return sum(map(self._private_size, self.quarantine))

    def total_size(self) -> int:
        """Return the number of cached slots."""
        return self.evictable_size() + self.protected_size()

    def sizes_of(self, pool: str, extra_key: str | None = None) -> PoolSizes:
        """Return the sizes of the pool that an `OutOfSlotsError` names, for requests of a namespace."""
        sizes = {"window slots": self.swa_sizes, "states": self.state_sizes}.get(pool, lambda: None)()
        return sizes or PoolSizes(self.num_slots, self.free_slots, self.evictable_size(), self.protected_size())

    def swa_sizes(self) -> PoolSizes | None:
        """Return the sizes of the pool of window slots; None without a sliding window."""
        return None

    def state_sizes(self) -> PoolSizes | None:
        """Return the sizes of the pool of recurrent states; None for a cache without states."""
        return None

    def configured_tenants(self) -> Sequence[Tenant]:
        """Return the configured tenants, followed by the tenant of all other namespaces; empty without tenants."""
        return ()

    def tenant_of(self, extra_key: str | None) -> str | None:
        """Return the name of a namespace's tenant; None if the namespace has no configured tenant."""
        return None

    def share_of(self, name: str) -> PoolSizes:
        """Return the share of a tenant with a cap, as the sizes of a pool of `cap` slots."""
        raise AssertionError(f"there is no tenant {name!r}")

    def is_within_floor(self, key: RadixKey, num_tokens: int) -> bool:
        """Return whether the tenant of `key` would hold at most its floor with a lease over `num_tokens` tokens."""
        return False

    # ---------------------------------------------------------------- cached pages

    @abstractmethod
    def match(self, key: RadixKey) -> MatchResult:
        """Return the prefix that `acquire` would find. Counts a probe, and changes nothing else."""

    @abstractmethod
    def explain(self, key: RadixKey) -> Explanation:
        """Return where a match of `key` ends, and why. Changes nothing. At most O(namespaces)."""

    @property
    def now(self) -> int:
        """The cache's own clock, in ticks; 0 for a cache without one."""
        return 0

    def sample_tree(self, max_nodes: int) -> Outline:
        """Return the size of each namespace and of its branches, estimated from about `max_nodes` nodes."""
        return Outline([], 0, 0)

    def use_clock(self, clock: Callable[[], float]) -> None:  # noqa: B027 -- optional
        """Take the times of evictions from `clock`, in seconds. The default is `time.monotonic`."""

    def evictions(self) -> list[EvictionRecord]:
        """Return the recent evictions, latest last."""
        return []

    @abstractmethod
    def outline(self, limits: OutlineLimits) -> Outline:
        """Return the largest matchable branches. The work is bounded for any number of cached pages."""

    def publish_events_to(self, sink: KVEventSink) -> None:  # noqa: B027 -- optional
        """From now on, publish stored and removed pages to `sink`. No effect for a cache without pages."""

    def publish_slim_events_to(self, sink: SlimEventSink, stride: int) -> None:  # noqa: B027 -- optional
        """From now on, publish to `sink` every `stride`-th page that is stored, removed or pending.

        No effect for a cache without pages.
        """

    def pending_pages(self) -> Hashes:
        """Return the pages that slim events have named as pending and not ended, each once."""
        return np.empty(0, np.int64)

    def usable_ends(self) -> Hashes | None:
        """Return the pages at which slim events say that a match may end; None if every stored page is such a page."""
        return None

    def resident_pages(self) -> Iterable[PageRun]:
        """Return the matchable pages as events describe them, parents before children. O(n)."""
        return ()

    def walk_pages(self) -> Iterator[Iterable[PageRun]]:
        """Yield the pages of `resident_pages` part by part; the cache may change in between.

        Each page that no event names meanwhile is there once.
        """
        yield self.resident_pages()

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the cache or of its parts is broken. O(n)."""

    @abstractmethod
    def lease_sizes(self, leases: Iterable[LeaseRecord]) -> Iterator[int]:
        """Yield for each lease the number of its slots that no earlier lease of `leases` holds."""

    def holds(self, lease: LeaseRecord, pool: str) -> bool:
        """Return whether a lease holds any slot of the pool that an `OutOfSlotsError` names, private or locked."""
        match pool:
            case "window slots":
                return bool(self.swa_starts(lease).any())
            case "states":
                return lease.state_slot is not None
        return len(lease.starts) > 0

    @abstractmethod
    def published_len(self, lease: LeaseRecord) -> int:
        """Return the number of leading tokens of a lease that other leases may read; whole pages."""

    def starts_behind(self, lease: LeaseRecord, known_len: int) -> Starts:
        """Return the first slots of a lease's published pages behind its first `known_len` tokens."""
        return lease.starts[known_len // self.page_size : self.published_len(lease) // self.page_size]

    @abstractmethod
    def covers(self, lease: LeaseRecord, slots: Starts) -> bool:
        """Return whether the lease may read all of `slots`."""

    @abstractmethod
    def holds_privately(self, lease: LeaseRecord, slots: Starts) -> bool:
        """Return whether the lease may write all of `slots`: no other lease can read them."""

    def swa_starts(self, lease: LeaseRecord) -> Starts:
        """Return the first window slot of each page of a lease, 0 where the lease does not hold its window KV."""
        return NO_STARTS

    def swa_slots(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return the window slot of each slot, 0 where it has none; None without a sliding window."""
        return None

    @abstractmethod
    def _private_size(self, lease: LeaseRecord) -> int:
        """Return the number of private slots of a lease."""


def _for_each(leases: Sequence[LeaseRecord], release: Callable[[LeaseRecord], None]) -> None:
    """Call `release` for each lease in order. If calls raise, the last error is raised after the last call."""
    with ExitStack() as last_first:
        for lease in reversed(leases):
            last_first.callback(release, lease)
