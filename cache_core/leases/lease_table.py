"""Leases: `LeaseRecord`, the `LeaseTable` of the open ones, `EndedLeases` and the `Quarantine` of vanished sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from time import monotonic
from typing import Any

import numpy as np

from raydix.cache_core.errors import ExpiredLeaseError, InvalidKeyError, LeaseRangeError, UnknownLeaseError
from raydix.cache_core.tree.packed_slots import Starts
from raydix.cache_core.tree.radix_key import RadixKey


class LeaseRecord:
    """The slots of one request: pages of the tree, locked, then private pages.

    `starts[:num_published_pages]` are the tree's, the rest private. `key` holds every token of the request that the
    cache has seen: the tokens of the acquire, then those published since.
    """

    __slots__ = (
        "_buffer",
        "key",
        "lease_id",
        "node",
        "num_published_pages",
        "num_slots",
        "offer_id",
        "only_locks",
        "outdated",
        "prefix_len",
        "priority",
        "receipt",
        "retired",
        "session_id",
        "since",
        "starts",
        "state_slot",
        "swa_freed_len",
    )

    def __init__(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        node: Any,
        receipt: Any,
        prefix_len: int,
        starts: Starts,
        num_published_pages: int,
        num_slots: int,
        priority: int = 0,
    ) -> None:
        self.lease_id = lease_id
        self.session_id = session_id
        self.since = monotonic()  # when it was granted
        self.key = key.kept()
        self.node = node  # the locked node that ends the published part; the root, or None, if nothing is
        self.receipt = receipt  # for the unlock of that node
        self.prefix_len = prefix_len  # tokens found at the start; never changes
        self.starts = starts  # first slots of the pages, in token order
        self._buffer: Starts | None = None  # `starts` is the beginning of it, once it has grown
        self.num_published_pages = num_published_pages
        self.num_slots = num_slots  # tokens the lease covers, at most the pages' slots
        self.priority = priority  # of the pages that it uses and publishes, if the policy heeds it: higher stays longer
        self.retired = False  # its namespace was retired since it was granted: it publishes no more
        self.outdated = False  # another model may compute its namespace since it was granted
        self.swa_freed_len = 0  # leading tokens whose window KV the lease gave up; whole pages
        self.state_slot: int | None = None  # its own recurrent state
        self.offer_id = ""  # of the offer by which another session may adopt it; "": there is none
        self.only_locks = False  # it was made by `lock`, and no extend has been tried

    @property
    def private_starts(self) -> Starts:
        """The pages that are not in the tree."""
        return self.starts[self.num_published_pages :]

    def add_pages(self, starts: Starts) -> None:
        """Append private pages."""
        self.starts, self._buffer = append_in_place(self.starts, self._buffer, len(self.starts), starts)

    def known_key(self, num_tokens: int, suffix: RadixKey) -> RadixKey:
        """Return the tokens of the lease, continued by `suffix`, which ends at `num_tokens`.

        Raises:
            LeaseRangeError: more tokens than the lease covers, ids missing in between, or other ids than the lease's.
        """
        known, start = len(self.key), num_tokens - len(suffix)
        if start == num_tokens == known <= self.num_slots:
            return self.key
        if num_tokens > self.num_slots:
            raise LeaseRangeError(f"cannot publish {num_tokens} tokens: the lease covers {self.num_slots}, extend it")
        if not 0 <= start <= known:
            raise LeaseRangeError(f"the cache knows {known} tokens of this lease; those up to {start} are missing")
        overlap = min(known, num_tokens) - start
        if overlap and suffix[:overlap] != self.key[start : start + overlap]:
            raise LeaseRangeError("the tokens differ from those that the lease was acquired for")
        if num_tokens <= known:
            return self.key
        try:
            return self.key + suffix[overlap:]
        except InvalidKeyError as error:
            raise LeaseRangeError(str(error)) from error


def append_in_place(row: Starts, buffer: Starts | None, count: int, more: Starts) -> tuple[Starts, Starts]:
    """Return the first `count` slots of a row, followed by `more`, and the buffer that this is the beginning of.

    That is `buffer`, which the row must be the beginning of, while it is long enough: it is written over. Else it is
    new, a quarter longer than needed, so that a row that grows slowly is seldom copied.
    """
    stop = count + len(more)
    if buffer is None or len(buffer) < stop:
        buffer = np.empty(stop + stop // 4, np.int64)
        buffer[:count] = row[:count]
    buffer[count:stop] = more
    return buffer[:stop], buffer


class EndedLeases:
    """The last `capacity` ids of leases that ended, each with its session, so that late messages have no effect.

    An id that was ended before its grant counts also: the grant may still be on its way.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # by session and lease, oldest first; a plain dict would search for its first item through all removed ones
        self._expired: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def add(self, session_id: str, lease_id: str, expired: bool = False) -> None:
        """Remember an id; the first end of a lease counts."""
        self._expired.setdefault((session_id, lease_id), expired)
        while len(self._expired) > self._capacity:
            self._expired.popitem(last=False)

    def check(self, session_id: str, lease_id: str) -> None:
        """Raise if that lease of that session is remembered as ended.

        Raises:
            ExpiredLeaseError: its client was silent for too long, or its grant was not adopted in time.
            UnknownLeaseError: it was released or aborted, or handed over.
        """
        expired = self._expired.get((session_id, lease_id))
        if expired:
            raise ExpiredLeaseError(
                f"lease {lease_id!r} expired: its client was silent for too long or died, or its grant was "
                "not adopted in time"
            )
        if expired is not None:
            raise UnknownLeaseError(f"lease {lease_id!r} has ended")

    def __len__(self) -> int:
        return len(self._expired)


class Quarantine:
    """Ended leases of vanished sessions, by session. Their private slots are withheld: they may still be written."""

    def __init__(self) -> None:
        self._by_session: dict[str, list[LeaseRecord]] = {}

    def add(self, lease: LeaseRecord) -> None:
        """Withhold the private slots of a lease, which is no longer in the tree."""
        lease.node = lease.receipt = None
        self._by_session.setdefault(lease.session_id, []).append(lease)

    def take(self, session_id: str) -> list[LeaseRecord]:
        """Remove and return the leases of a session; the caller frees their slots."""
        return self._by_session.pop(session_id, [])

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._by_session

    def __iter__(self) -> Iterator[LeaseRecord]:
        for leases in self._by_session.values():
            yield from leases


class LeaseTable:
    """The open leases, and the ids of the last `remembered` that ended. A session sees its own only."""

    def __init__(self, remembered: int = 0) -> None:
        self.ended = EndedLeases(remembered)
        self.offers: dict[str, float] = {}  # by id of an offered lease, when the offer expires
        self.num_changes = 0  # of the leases, and of the slots that they cover
        self._leases: dict[str, LeaseRecord] = {}
        self._by_session: dict[str, dict[str, None]] = {}

    def add(self, lease: LeaseRecord) -> None:
        """Open a lease; its id must be new."""
        assert lease.lease_id not in self._leases, f"lease {lease.lease_id} is open already"
        self.num_changes += 1
        self._leases[lease.lease_id] = lease
        self._by_session.setdefault(lease.session_id, {})[lease.lease_id] = None

    def get(self, lease_id: str, session_id: str) -> LeaseRecord:
        """Return the open lease of that id.

        Raises:
            ExpiredLeaseError: it has expired.
            UnknownLeaseError: there is none, or it belongs to another session.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.session_id != session_id:
            lease = self.find_unended(lease_id, session_id)
        if lease is None:
            raise UnknownLeaseError(f"lease {lease_id!r} has ended, was never granted, or is another session's")
        return lease

    def find(self, lease_id: str, session_id: str) -> LeaseRecord | None:
        """Return the open lease of that id and session, or None.

        Raises:
            UnknownLeaseError: another session holds a lease of that id.
        """
        lease = self._leases.get(lease_id)
        if lease is not None and lease.session_id != session_id:
            raise UnknownLeaseError(f"lease {lease_id!r} belongs to another session")
        return lease

    def find_unended(self, lease_id: str, session_id: str) -> LeaseRecord | None:
        """Do `find`, but return None only for a new id.

        Raises:
            ExpiredLeaseError: it has expired.
            UnknownLeaseError: it has ended, or another session holds it.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            self.ended.check(session_id, lease_id)
        elif lease.session_id != session_id:
            raise UnknownLeaseError(f"lease {lease_id!r} belongs to another session")
        return lease

    def remove(self, lease: LeaseRecord, expired: bool = False) -> None:
        """Close a lease."""
        self.num_changes += 1
        if lease.offer_id:
            self.end_offer(lease)
        del self._leases[lease.lease_id]
        self._leave_session(lease)
        self.ended.add(lease.session_id, lease.lease_id, expired)

    def move(self, lease: LeaseRecord, session_id: str) -> None:
        """Give a lease to another session; for its old one it has ended."""
        self.num_changes += 1
        self._leave_session(lease)
        self.ended.add(lease.session_id, lease.lease_id)
        lease.session_id = session_id
        self._by_session.setdefault(session_id, {})[lease.lease_id] = None

    def offer(self, lease: LeaseRecord, offer_id: str, expires_at: float) -> None:
        """Let another session adopt a lease until a time. A later offer of the lease replaces an earlier one."""
        lease.offer_id = offer_id
        self.offers[lease.lease_id] = expires_at

    def end_offer(self, lease: LeaseRecord) -> None:
        """End the offer of a lease, which stays its session's."""
        lease.offer_id = ""
        self.offers.pop(lease.lease_id, None)

    def offered(self, lease_id: str, offer_id: str) -> LeaseRecord | None:
        """Return the lease of an offer that still stands, or None."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.offer_id == offer_id else None

    def overdue_offers(self, now: float) -> list[LeaseRecord]:
        """Return the leases whose offer has expired by `now`. O(offers)."""
        return [self._leases[lease_id] for lease_id, expires_at in self.offers.items() if expires_at <= now]

    def put_off_offers(self, seconds: float) -> None:
        """Postpone the expiry of every offer."""
        for lease_id in self.offers:
            self.offers[lease_id] += seconds

    def note_growth(self) -> None:
        """Count that a lease covers more slots."""
        self.num_changes += 1

    def _leave_session(self, lease: LeaseRecord) -> None:
        mine = self._by_session[lease.session_id]
        del mine[lease.lease_id]
        if not mine:
            del self._by_session[lease.session_id]

    def of_session(self, session_id: str) -> list[LeaseRecord]:
        """Return the open leases of a session."""
        return [self._leases[lease_id] for lease_id in self._by_session.get(session_id, ())]

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(self._leases.values())

    def __len__(self) -> int:
        return len(self._leases)
