"""`LeaseRecord`, the `LeaseTable` of open leases, `EndedLeases`, and the `Quarantine` of vanished sessions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count
from time import monotonic
from typing import Any

import numpy as np

from raydix.cache_core.errors import ExpiredLeaseError, InvalidKeyError, LeaseRangeError, UnknownLeaseError
from raydix.cache_core.tree.packed_slots import Starts
from raydix.cache_core.tree.radix_key import RadixKey

TIERS = "tiers"  # the session of the leases that move KV between tiers; no client may have its id


class LeaseRecord:
    """The slots of one request: locked pages of the tree, followed by private pages.

    `starts[:num_published_pages]` are pages of the tree, and all later ones are private. `key` has all tokens of the
    request that the cache knows: the tokens of the acquire, followed by the tokens published later.
    """

    __slots__ = (
        "_buffer",
        "boundary_len",
        "boundary_slot",
        "disk_loaded_len",
        "filling_for",
        "key",
        "lease_id",
        "loaded_len",
        "loads",
        "named_len",
        "node",
        "num_published_pages",
        "num_slots",
        "offer_id",
        "only_locks",
        "outdated",
        "prefix_len",
        "priority",
        "prompt_pages",
        "receipt",
        "resumed",
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
        self.since = monotonic()  # time at which it began, in seconds of `monotonic`
        self.key = key
        self.node = node  # the locked node at the end of the published pages; without any, the root or None
        self.receipt = receipt  # the receipt of the lock on `node`; the unlock needs it
        self.prefix_len = prefix_len  # cached tokens at its beginning; a load makes it longer before the hand-out
        self.starts = starts  # first slots of the pages, in token order
        self._buffer: Starts | None = None  # memory with room for more pages; `starts` is a view of its beginning
        self.num_published_pages = num_published_pages
        self.num_slots = num_slots  # tokens that the lease covers; at most the slots of its pages
        self.priority = priority  # rank of its pages; a priority policy evicts pages with a higher one later
        self.retired = False  # the namespace was retired after the lease began: inserts publish nothing
        self.outdated = False  # a later reset or retirement may have changed the namespace's model
        self.swa_freed_len = 0  # leading tokens without window KV, because the lease freed it; whole pages
        self.state_slot: int | None = None  # slot of its private recurrent state
        self.boundary_slot: int | None = None  # slot for a copy of it at the end of a page; None: none, or published
        self.boundary_len = 0  # length of the prefix with that copy published at its end
        # in a cache that publishes the ends of matches: tokens up to which its pages have their ends; else None
        self.named_len: int | None = None
        self.prompt_pages: int | None = None  # whole pages of the prompt, until its end is published
        self.offer_id = ""  # id of the open offer to other sessions; "" without one
        self.resumed = False  # its request had a lease before, which was preempted
        self.only_locks = False  # `lock` opened it, and `extend` was not called
        # while a load fills it: the session that it is for, "" if that has ended it; it stands under `TIERS` meanwhile
        self.filling_for: str | None = None
        self.loaded_len = 0  # tokens of `prefix_len` that loads brought
        self.disk_loaded_len = 0  # the tokens among them that came from the disk
        self.loads: tuple[tuple[Any, int], ...] = ()  # the `LoadCounts` of each load, and its tokens

    @property
    def private_starts(self) -> Starts:
        """The private pages, by their first slots."""
        return self.starts[self.num_published_pages :]

    @property
    def state_slots(self) -> list[int]:
        """The slots of its private states."""
        return [slot for slot in (self.state_slot, self.boundary_slot) if slot is not None]

    def add_pages(self, starts: Starts) -> None:
        """Append private pages."""
        self.starts, self._buffer = append_in_place(self.starts, self._buffer, len(self.starts), starts)

    def known_key(self, num_tokens: int, suffix: RadixKey) -> RadixKey:
        """Return the lease's tokens, continued by `suffix`. The suffix ends at token `num_tokens`.

        Raises:
            LeaseRangeError: the lease covers fewer tokens, or `suffix` leaves a gap after the known tokens or differs
                from them.
        """
        known, start = len(self.key), num_tokens - len(suffix)
        if start == num_tokens == known <= self.num_slots:
            return self.key
        if num_tokens > self.num_slots:
            raise LeaseRangeError(f"cannot publish {num_tokens} tokens: the lease covers {self.num_slots}, extend it")
        if not 0 <= start <= known:
            raise LeaseRangeError(f"the cache knows {known} tokens of this lease; the tokens up to {start} are missing")
        overlap = min(known, num_tokens) - start
        if overlap and suffix[:overlap] != self.key[start : start + overlap]:
            raise LeaseRangeError("the tokens differ from the lease's: publish its tokens, or acquire another lease")
        if num_tokens <= known:
            return self.key
        try:
            return self.key + suffix[overlap:]
        except InvalidKeyError as error:
            raise LeaseRangeError(str(error)) from error


def append_in_place(row: Starts, buffer: Starts | None, count: int, more: Starts) -> tuple[Starts, Starts]:
    """Return the first `count` slots of `row`, followed by `more`, and the buffer that the result is a view of.

    If `buffer` is given, `row` must be a view of its beginning. If `buffer` is long enough, it is overwritten. Else a
    new buffer is allocated, 25 % longer than needed, so that repeated growth seldom copies.
    """
    stop = count + len(more)
    if buffer is None or len(buffer) < stop:
        buffer = np.empty(stop + stop // 4, np.int64)
        buffer[:count] = row[:count]
    buffer[count:stop] = more
    return buffer[:stop], buffer


class EndedLeases:
    """The session and id of the last `capacity` leases that ended, so that late messages have no effect.

    An id can end before its lease begins, because the request may still be in transit.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # (session, lease) -> whether it expired, the oldest first. A plain dict would take O(removed items) to find its
        # first item.
        self._ended: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def add(self, session_id: str, lease_id: str, expired: bool = False) -> None:
        """Remember an ended lease. If it is remembered already, the first end counts."""
        self._ended.setdefault((session_id, lease_id), expired)
        while len(self._ended) > self._capacity:
            self._ended.popitem(last=False)

    def check(self, session_id: str, lease_id: str) -> None:
        """Raise if a lease of a session is remembered as ended.

        Raises:
            ExpiredLeaseError: its client was silent for too long or died, or its grant was not adopted in time.
            UnknownLeaseError: it was released, aborted or adopted by another session.
        """
        expired = self._ended.get((session_id, lease_id))
        if expired:
            raise ExpiredLeaseError(
                f"lease {lease_id!r} expired: its client was silent for too long or died, or its grant was "
                "not adopted in time"
            )
        if expired is not None:
            raise UnknownLeaseError(f"lease {lease_id!r} has ended")

    def __len__(self) -> int:
        return len(self._ended)


class Quarantine:
    """Ended leases of vanished sessions, by session. The cache withholds their private slots from other leases.

    The process of a vanished session may still write to them.
    """

    def __init__(self) -> None:
        self._by_session: dict[str, list[LeaseRecord]] = {}

    def add(self, lease: LeaseRecord) -> None:
        """Withhold the private slots of a lease. Its published pages must be unlocked."""
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
    """The open leases, and the ids of the last `remembered` leases that ended. A session finds only its own leases."""

    def __init__(self, remembered: int = 0) -> None:
        self.ended = EndedLeases(remembered)
        self.offers: dict[str, float] = {}  # lease id -> time at which its offer expires
        self.num_changes = 0  # beginnings, ends, moves and growths of leases
        self._leases: dict[str, LeaseRecord] = {}
        self._by_session: dict[str, dict[str, None]] = {}
        self._numbers = count(1)

    def add(self, lease: LeaseRecord) -> None:
        """Open a lease; its id must be new."""
        assert lease.lease_id not in self._leases, f"lease {lease.lease_id} is open already"
        self.num_changes += 1
        self._leases[lease.lease_id] = lease
        self._by_session.setdefault(lease.session_id, {})[lease.lease_id] = None

    def get(self, lease_id: str, session_id: str) -> LeaseRecord:
        """Return the open lease of that id.

        Raises:
            ExpiredLeaseError: the lease has expired.
            UnknownLeaseError: no such open lease, or it belongs to another session.
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
            UnknownLeaseError: the lease belongs to another session.
        """
        lease = self._leases.get(lease_id)
        if lease is not None and lease.session_id != session_id:
            raise UnknownLeaseError(f"lease {lease_id!r} belongs to another session")
        return lease

    def find_unended(self, lease_id: str, session_id: str) -> LeaseRecord | None:
        """Return the open lease of that id and session, or None if the id is new.

        Raises:
            ExpiredLeaseError: the lease has expired.
            UnknownLeaseError: the lease has ended, or belongs to another session.
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
        """Move a lease to another session. For the old session it has ended."""
        self.ended.add(lease.session_id, lease.lease_id)
        self._enter_session(lease, session_id)

    def _enter_session(self, lease: LeaseRecord, session_id: str) -> None:
        self.num_changes += 1
        self._leave_session(lease)
        lease.session_id = session_id
        self._by_session.setdefault(session_id, {})[lease.lease_id] = None

    # ---------------------------------------------------------------- moves between tiers

    def new_id(self) -> str:
        """Return an id for a lease of a move."""
        while (lease_id := f"{TIERS}-{next(self._numbers)}") in self._leases:
            pass
        return lease_id

    def drop(self, lease: LeaseRecord) -> None:
        """Close a lease of a move. It is not remembered: no message can name it."""
        assert lease.session_id == TIERS, f"lease {lease.lease_id} is a client's"
        self.num_changes += 1
        del self._leases[lease.lease_id]
        self._leave_session(lease)

    def begin_fill(self, lease: LeaseRecord) -> None:
        """Keep a lease from its session while a load fills it."""
        assert lease.filling_for is None and not lease.offer_id, f"lease {lease.lease_id} is in use"
        lease.filling_for = lease.session_id
        self._enter_session(lease, TIERS)

    def end_fill(self, lease: LeaseRecord) -> None:
        """Hand a filled lease to its session."""
        assert lease.filling_for, f"lease {lease.lease_id} is not for a session"
        self._enter_session(lease, lease.filling_for)
        lease.filling_for = None

    def abandon(self, lease_id: str, session_id: str) -> LeaseRecord | None:
        """End a lease that is being filled for a session, but not its load; None if there is no such lease."""
        lease = self._leases.get(lease_id)
        if lease is None or not session_id or lease.filling_for != session_id:
            return None
        lease.filling_for = ""
        self.ended.add(session_id, lease_id)
        return lease

    def give_up_fill(self, lease: LeaseRecord) -> None:
        """Let a lease that is being filled be for no session any more. Its id may be used again: it gets another."""
        lease.filling_for = ""
        self.drop(lease)
        lease.lease_id = self.new_id()
        self.add(lease)

    def of_clients(self) -> Iterator[tuple[str, LeaseRecord]]:
        """Yield the open leases of clients, the oldest first, each with its session; those that are being filled, too.

        Leases of moves, and those that are filled for no session any more, are left out.
        """
        for lease in self._leases.values():
            if session_id := lease.session_id if lease.filling_for is None else lease.filling_for:
                if session_id != TIERS:
                    yield session_id, lease

    @property
    def num_of_clients(self) -> int:
        """The number of leases that `of_clients` yields. O(moves in flight)."""
        moving = self._by_session.get(TIERS, ())
        return len(self._leases) - sum(not self._leases[lease_id].filling_for for lease_id in moving)

    def filling_for(self, session_id: str) -> list[LeaseRecord]:
        """Return the leases that are being filled for a session. O(moves in flight)."""
        return [lease for lease in self.of_session(TIERS) if lease.filling_for == session_id]

    # ---------------------------------------------------------------- offers

    def offer(self, lease: LeaseRecord, offer_id: str, expires_at: float) -> None:
        """Let another session adopt a lease until `expires_at`. A new offer of the lease replaces the old one."""
        lease.offer_id = offer_id
        self.offers[lease.lease_id] = expires_at

    def end_offer(self, lease: LeaseRecord) -> None:
        """End the offer of a lease. The lease stays with its session."""
        lease.offer_id = ""
        self.offers.pop(lease.lease_id, None)

    def offered(self, lease_id: str, offer_id: str) -> LeaseRecord | None:
        """Return the lease of an open offer, or None."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.offer_id == offer_id else None

    def overdue_offers(self, now: float) -> list[LeaseRecord]:
        """Return the leases with an offer that expired by `now`. O(offers)."""
        return [self._leases[lease_id] for lease_id, expires_at in self.offers.items() if expires_at <= now]

    def put_off_offers(self, seconds: float) -> None:
        """Postpone the expiry of every offer."""
        for lease_id in self.offers:
            self.offers[lease_id] += seconds

    def note_growth(self) -> None:
        """Count the growth of a lease in `num_changes`."""
        self.num_changes += 1

    @property
    def oldest_since(self) -> float | None:
        """The time at which the oldest lease of a client began, in seconds of `monotonic`; None: none is open."""
        return next((lease.since for _, lease in self.of_clients()), None)

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
