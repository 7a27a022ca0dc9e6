"""The line of those who wait for room in the pool: first in, first out, each with a deadline.

Where tenants share the pool, nobody waits for what another lacks: one at its cap holds up its own tenant alone, and
whoever stays within a floor goes before those of other tenants who wait for the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

from raydix.actors.distribution import ACQUIRE_S, WAIT_S, Distribution
from raydix.cache_core import OutOfSlotsError
from raydix.schemas import CacheBusy, CacheError, Message, UnknownLease

_RETRY_AFTER_S = 0.1

Attempt = Callable[[], Message]  # raises OutOfSlotsError while there is no room


class Place(NamedTuple):
    """Where a request stands in line."""

    tenant: str | None
    urgent: bool  # a running lease that grows: it goes before new ones, which wait for it to end
    is_within_floor: Callable[[], bool]  # whether its tenant need not wait for others


@dataclass(eq=False, slots=True)
class Waiter:
    """One request in line."""

    ticket: int
    session_id: str
    lease_id: str
    place: Place
    attempt: Attempt
    shortage: OutOfSlotsError  # what it found when it was last tried
    joined_at: float
    outcome: asyncio.Future[Message] = field(init=False)
    timer: asyncio.TimerHandle = field(init=False)


class WaitQueue:
    """Requests that found no room.

    Whoever frees slots calls `serve`. Outcomes are kept until they are collected or the session ends.

    Attributes:
        max_waiters: of each tenant; 0: nobody may stand in line.
        waiting: how many stand in line, by tenant.
        num_waited: requests that ever stood in line.
        wait_time: seconds that each stood there.
        acquire_latency: seconds from the arrival of each `acquire` to its answer; the line adds those that waited.

    Args:
        max_waiters: see above.
        clock: seconds, of any origin.
    """

    def __init__(self, max_waiters: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiters = max_waiters
        self.num_waited = 0
        self.wait_time = Distribution(WAIT_S)
        self.acquire_latency = Distribution(ACQUIRE_S)
        self._clock = clock
        self._line: list[Waiter] = []
        self.waiting: Counter[str | None] = Counter()
        self._by_ticket: dict[int, Waiter] = {}  # those in line, and those whose outcome was not collected yet
        self._by_lease: dict[tuple[str, str], list[Waiter]] = {}  # the same
        self._next_ticket = count(1)

    def __len__(self) -> int:
        return len(self._line)

    def is_waiting(self, tenant: str | None) -> bool:
        """Whether somebody of that tenant stands in line."""
        return tenant in self.waiting

    def only_tenant_caps_block(self) -> bool:
        """Whether everybody in line waits for a tenant's cap, or behind somebody of the same tenant who does."""
        at_cap: set[str | None] = set()
        for waiter in self._line:
            if waiter.shortage.tenant is not None:
                at_cap.add(waiter.place.tenant)
            elif waiter.place.tenant not in at_cap:
                return False
        return True

    def growing(self) -> list[Waiter]:
        """Return the requests of running leases that grow, in order: they come before all others."""
        return list(takewhile(lambda waiter: waiter.place.urgent, self._line))

    def refuse(self, waiter: Waiter, error: CacheError) -> None:
        """Take a request out of line; its outcome is `error`."""
        self._settle(waiter, error)

    def join(
        self,
        session_id: str,
        lease_id: str,
        place: Place,
        attempt: Attempt,
        timeout_s: float,
        refusal: Callable[[OutOfSlotsError], Exception],
        shortage: OutOfSlotsError,
    ) -> tuple[int, int]:
        """Stand in line for `timeout_s`, then fail with the `refusal` of the last shortage.

        Returns the ticket and how many stand before.

        Raises:
            CacheBusy: the line is full: so many of that tenant wait.
        """
        for waiter in self._by_lease.get((session_id, lease_id), ()):
            if waiter.place.urgent == place.urgent and not waiter.outcome.done():
                return waiter.ticket, self._line.index(waiter)  # it is a retry
        if self.waiting[place.tenant] >= self.max_waiters:
            raise CacheBusy(f"{self.waiting[place.tenant]} requests wait for room already", _RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        waiter = Waiter(next(self._next_ticket), session_id, lease_id, place, attempt, shortage, self._clock())
        self.num_waited += 1
        waiter.outcome = loop.create_future()
        waiter.timer = loop.call_later(timeout_s, self._expire, waiter, refusal)
        position = sum(other.place.urgent for other in self._line) if place.urgent else len(self._line)
        self._line.insert(position, waiter)
        self.waiting[place.tenant] += 1
        self._by_ticket[waiter.ticket] = waiter
        self._by_lease.setdefault((session_id, lease_id), []).append(waiter)
        return waiter.ticket, position

    def serve(self) -> None:
        """Serve from the front as many as there is room for; nobody overtakes who waits for the same."""
        position, is_full = 0, False
        passed: set[str | None] = set()  # tenants of whom somebody was passed over
        while position < len(self._line) and len(passed) < len(self.waiting):
            waiter = self._line[position]
            if waiter.place.tenant not in passed:
                if not is_full or waiter.place.is_within_floor():
                    if self._try(waiter):
                        continue
                    is_full = is_full or waiter.shortage.tenant is None
                passed.add(waiter.place.tenant)
            position += 1

    def _try(self, waiter: Waiter) -> bool:
        """Try to serve one; False if there is no room for it."""
        try:
            outcome: Message | Exception = waiter.attempt()
        except OutOfSlotsError as error:
            waiter.shortage = error.with_traceback(None)
            return False
        except Exception as error:  # its own mistake, found out late: it alone fails
            outcome = error
        self._settle(waiter, outcome)
        return True

    async def outcome(self, session_id: str, ticket: int) -> Message:
        """Wait for the outcome of a ticket and collect it. If the wait is cancelled, the ticket stays in line.

        Raises:
            UnknownLease: no such ticket of that session, or it was withdrawn.
            CacheError: what the request failed with.
        """
        waiter = self._by_ticket.get(ticket)
        if waiter is None or waiter.session_id != session_id:
            raise UnknownLease(f"ticket {ticket} is not in line: it was collected, or given up while it waited")
        try:
            return await asyncio.shield(waiter.outcome)
        finally:
            if waiter.outcome.done():
                self._forget(waiter)

    def withdraw(self, session_id: str, lease_id: str | None = None, error: CacheError | None = None) -> None:
        """Take a session's requests, or those of one of its leases, out of line and drop their outcomes.

        Whoever waits for one is told `error`; None: that it was given up. O(1) for a lease that waits for nothing.
        """
        if lease_id is not None:
            gone = list(self._by_lease.get((session_id, lease_id), ()))
        else:
            gone = [waiter for waiter in self._by_ticket.values() if waiter.session_id == session_id]
        for waiter in gone:
            if not waiter.outcome.done():
                given_up = UnknownLease(f"lease {waiter.lease_id!r} was given up while it waited")
                self._leave(waiter, error or given_up)
            self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        """Its outcome was collected, or nobody will collect it. Idempotent."""
        if self._by_ticket.pop(waiter.ticket, None) is not None:
            place = waiter.session_id, waiter.lease_id
            self._by_lease[place].remove(waiter)
            if not self._by_lease[place]:
                del self._by_lease[place]

    def refuse_all(self, error: CacheError) -> None:
        """Nobody in line is served any more: they are told `error`."""
        for waiter in list(self._line):
            self._settle(waiter, error)

    def change_loop(self) -> None:
        """The loop before was closed: nobody waits on it any more, and no deadline passes there."""
        self._line.clear()
        self.waiting.clear()
        self._by_ticket.clear()
        self._by_lease.clear()

    def _expire(self, waiter: Waiter, refusal: Callable[[OutOfSlotsError], Exception]) -> None:
        self._settle(waiter, refusal(waiter.shortage))
        self.serve()  # the next in line may need less

    def _settle(self, waiter: Waiter, outcome: Message | Exception) -> None:
        """Answer a request, and take it out of line."""
        if not waiter.place.urgent:
            self.acquire_latency.add(self._clock() - waiter.joined_at)
        self._leave(waiter, outcome)

    def _leave(self, waiter: Waiter, outcome: Message | Exception) -> None:
        self.wait_time.add(self._clock() - waiter.joined_at)
        waiter.timer.cancel()
        self._line.remove(waiter)
        self.waiting[waiter.place.tenant] -= 1
        if not self.waiting[waiter.place.tenant]:
            del self.waiting[waiter.place.tenant]
        if isinstance(outcome, Exception):
            waiter.outcome.set_exception(outcome)
            waiter.outcome.exception()  # seen, even if nobody collects it
        else:
            waiter.outcome.set_result(outcome)
