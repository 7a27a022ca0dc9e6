"""`LeasedCache`: a cache whose slots requests hold by leases; what a service drives, whatever keeps the prefixes.

Synchronous, so every operation is atomic for whoever calls it from one thread. After each,
`free_slots + private_slots + total_size() + quarantined_slots == num_slots`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import index

from raydix.cache_core.base_prefix_cache import RadixKey, Starts
from raydix.cache_core.errors import LeaseRangeError, UnknownLeaseError
from raydix.cache_core.leases.cache_facts import CacheFacts
from raydix.cache_core.leases.counters import Counters
from raydix.cache_core.leases.lease_table import LeaseRecord, LeaseTable
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.cache_core.radix.page_events import KVEventSink


@dataclass(slots=True)
class Published:
    """What an insert did to a lease."""

    prefix_len: int  # leading tokens that were in the tree before
    num_inserted: int  # tokens the tree took over
    num_duplicates: int  # private slots freed because the tree had their tokens
    retired: bool  # the namespace was retired since the lease was granted: nothing was published
    repointed: Starts  # the tree's pages that took the place of the duplicates


class LeasedCache(CacheFacts):
    """Prefix reuse with leases over a pool of slots.

    Attributes:
        leases: the open ones.
        counters: what has happened since the start.
        watches: told of every request.
    """

    def __init__(self, remembered_leases: int = 0) -> None:
        super().__init__()
        self.leases = LeaseTable(remembered_leases)
        self.counters = Counters()
        self.observers: list[RequestObserver] = []

    # ---------------------------------------------------------------- verbs

    @abstractmethod
    def check_len(self, num_tokens: int, key: RadixKey) -> None:
        """Raise unless a cache with nothing else in it has room for a lease of `key` over so many tokens.

        Raises:
            OutOfSlotsError: a pool is too small; `can_ever_fit` is False.
            LeaseRangeError: no lease of this cache may be so long.
        """

    @abstractmethod
    def acquire(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        priority: int = 0,
    ) -> LeaseRecord:
        """Hold the cached prefix of `key` and slots for the rest and `new_tokens` more; evict the shortfall.

        The same lease id again returns the open lease as it is. What the lease uses and publishes is of its `priority`
        at least, where the cache heeds priorities.

        Raises:
            OutOfSlotsError: there is no room, even after evicting; nothing was taken or evicted.
            LeaseRangeError: more tokens than a lease may cover, or a negative `new_tokens` or `max_prefix_len`.
            UnknownLeaseError: the id is another session's.
        """

    @abstractmethod
    def lock(self, lease_id: str, session_id: str, key: RadixKey, priority: int = 0) -> LeaseRecord:
        """Hold the cached prefix of `key` alone; `extend` adds to it."""

    @abstractmethod
    def extend(self, lease_id: str, session_id: str, num_tokens: int) -> Starts:
        """Cover `num_tokens` more; returns what was added to the lease's `starts`.

        Raises:
            OutOfSlotsError: there is no room; nothing was taken.
            LeaseRangeError: more tokens than a lease may cover.
            UnknownLeaseError: no such open lease.
        """

    @abstractmethod
    def insert(
        self, lease_id: str, session_id: str, num_tokens: int, suffix: RadixKey, publish_state: bool = False
    ) -> Published:
        """Publish the whole pages of the lease's first `num_tokens` tokens; the lease goes on holding all of it.

        `suffix` brings the ids that the cache has not seen: it ends at `num_tokens`.

        Raises:
            LeaseRangeError: more tokens than the lease covers, ids missing in between, or other ids than the lease's.
            UnknownLeaseError: no such open lease.
        """

    def release_window(self, lease_id: str, session_id: str, up_to: int) -> None:
        """Free the window KV of a lease before token `up_to`. No effect without a sliding window.

        Raises:
            LeaseRangeError: `up_to` is negative, or beyond what the lease covers.
            UnknownLeaseError: no such open lease.
        """
        lease = self.leases.get(lease_id, session_id)
        if not 0 <= index(up_to) <= lease.num_slots:
            raise LeaseRangeError(f"the lease covers tokens up to {lease.num_slots}, not {up_to}")

    def release(self, lease_id: str, session_id: str) -> bool:
        """End a lease: its private slots are freed, what it inserted stays. False if no such lease is open.

        An id that is not open is remembered as ended: its grant may be on its way still.
        """
        lease = self.leases.find(lease_id, session_id)
        if lease is None:
            self.leases.ended.add(session_id, lease_id)
            return False
        self._end(lease)
        return True

    def end_session(self, session_id: str) -> int:
        """End every lease of a session; returns how many."""
        return self._end_all(session_id)

    def quarantine_session(self, session_id: str) -> int:
        """End every lease of a session that has vanished; returns how many.

        Locks go at once. Private slots are withheld until `free_withheld`: whoever held them may still write them.
        """
        return self._end_all(session_id, vanished=True)

    def free_withheld(self, session_id: str) -> int:
        """Free what is in quarantine of a session: nobody writes it any more. Returns how many slots."""
        leases = self.quarantine.take(session_id)
        num_slots = sum(map(self._private_size, leases))
        _for_each(leases, self._free_private)
        return num_slots

    def offer(self, lease_id: str, session_id: str, offer_id: str, expires_at: float) -> LeaseRecord:
        """Let another session adopt a lease, once, until `expires_at` by the clock of `expire_offers`.

        Args:
            offer_id: unique, not empty; the adopter must name it. A later offer of the lease replaces this one.

        Raises:
            UnknownLeaseError: no such open lease.
        """
        assert offer_id, "an offer needs an id"
        lease = self.leases.get(lease_id, session_id)
        self.leases.offer(lease, offer_id, expires_at)
        return lease

    def adopt(self, lease_id: str, from_session: str, session_id: str, offer_id: str) -> LeaseRecord:
        """Make an offered lease that of another session; its slots and locks stay as they are.

        Raises:
            ExpiredLeaseError: its offer expired, or it expired with the session that offered it.
            UnknownLeaseError: it has ended, was adopted already, or was not offered by that session.
        """
        lease = self.leases.get(lease_id, from_session)
        if not offer_id or lease.offer_id != offer_id:
            raise UnknownLeaseError(f"lease {lease_id!r} is not offered to anyone: a grant is good once")
        self.leases.end_offer(lease)
        if session_id != from_session:
            self.leases.move(lease, session_id)
        return lease

    def take_back(self, lease_id: str, session_id: str, offer_id: str) -> None:
        """End an offer without ending its lease. No effect if the offer has ended or is another session's."""
        lease = self.leases.offered(lease_id, offer_id)
        if lease is not None and lease.session_id == session_id:
            self.leases.end_offer(lease)

    def revoke(self, lease_id: str, session_id: str, offer_id: str) -> bool:
        """End an offered lease as `release` does; False if the offer has been adopted, or has ended.

        Raises:
            UnknownLeaseError: another session offers it.
        """
        lease = self.leases.offered(lease_id, offer_id) if offer_id else None
        if lease is None:
            return False
        if lease.session_id != session_id:
            raise UnknownLeaseError(f"lease {lease_id!r} belongs to another session")
        self._end(lease)
        return True

    def expire_offers(self, now: float) -> int:
        """End every lease whose offer was not adopted in time; returns how many. O(offers).

        Its private slots are free: the granter gave up writing them, and no session has adopted them.
        """
        overdue = self.leases.overdue_offers(now)
        _for_each(overdue, partial(self._end, expired=True))
        return len(overdue)

    def _end_all(self, session_id: str, vanished: bool = False) -> int:
        leases = self.leases.of_session(session_id)
        _for_each(leases, partial(self._end, vanished=vanished))
        return len(leases)

    def _end(self, lease: LeaseRecord, vanished: bool = False, expired: bool = False) -> None:
        for watch in self.observers:
            watch.ended(lease)
        self.leases.remove(lease, expired=vanished or expired)
        try:
            self._give_up_shared(lease)
        finally:  # a pool may refuse what was retired
            if vanished:
                self.quarantine.add(lease)
            else:
                self._free_private(lease)
        self._tell_pressure()  # what it held can be evicted now

    @abstractmethod
    def _give_up_shared(self, lease: LeaseRecord) -> None:
        """Unlock what an ended lease held together with others."""

    @abstractmethod
    def _free_private(self, lease: LeaseRecord) -> None:
        """Free what an ended lease held by itself."""

    @abstractmethod
    def _tell_pressure(self) -> None:
        """Tell whoever listens if slots run short."""

    @abstractmethod
    def evict(self, num_tokens: int, cause: str = "request") -> int:
        """Free at least `num_tokens` slots of what is cached, or all that nobody holds; returns how many.

        `cause` is what `explain` tells of it later.
        """

    def reset(self) -> None:
        """Make everything unmatchable at once; leases keep their slots, but publish no more."""
        for lease in (*self.leases, *self.quarantine):
            lease.retired = True
        for watch in self.observers:
            watch.retired(lambda _: True)
        self._retire_all()

    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """`reset` for the namespaces whose `extra_key` is meant; returns how many there were.

        O(namespaces and leases). What nobody holds is freed here and now as far as that is quick, then by `reclaim`.
        """
        for lease in (*self.leases, *self.quarantine):
            lease.retired = lease.retired or is_meant(lease.key.extra_key)
        for watch in self.observers:
            watch.retired(is_meant)
        return self._retire(is_meant)

    @abstractmethod
    def _retire_all(self) -> None:
        """Make everything unmatchable."""

    @abstractmethod
    def _retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """Make some namespaces unmatchable; returns how many."""

    def reclaim(self, max_tokens: int) -> int:
        """Free about so many slots of what was retired and nobody holds; returns how many, 0 if none is left."""
        return 0

    # ---------------------------------------------------------------- who is told

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Tell the times of evictions by this clock, in seconds; else by `time.monotonic`."""

    def publish_events_to(self, sink: KVEventSink) -> None:
        """Tell of pages that come and go, from now on. No effect for caches that keep no tree of pages."""

    def count_refusal(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Count a request for a lease of `key` over `num_tokens` tokens that the caller refuses for want of room."""
        counters = self.counters
        counters.tokens_requested += len(key)
        counters.tokens_refused += len(key)
        if not can_ever_fit:
            counters.num_too_large += 1
            counters.tokens_too_large += len(key)
            num_slots = -(-num_tokens // self.page_size) * self.page_size
            counters.largest_too_large = max(counters.largest_too_large, num_slots)
        for watch in self.observers:
            watch.refused(key, num_tokens, can_ever_fit)

    def _count_grant(self, lease: LeaseRecord, max_prefix_len: int | None = None) -> None:
        self.leases.add(lease)
        self.counters.acquires += 1
        self.counters.hits += lease.prefix_len > 0
        self.counters.tokens_requested += len(lease.key)
        self.counters.tokens_reused += lease.prefix_len
        for watch in self.observers:
            watch.granted(lease, max_prefix_len)


def _for_each(leases: Sequence[LeaseRecord], give_back: Callable[[LeaseRecord], None]) -> None:
    """Have each give back something, in order, though a pool may refuse what one of them had."""
    with ExitStack() as last_first:
        for lease in reversed(leases):
            last_first.callback(give_back, lease)
