"""The queue of requests that wait for room in the pool: first in, first out, each with a deadline.

If tenants share the pool, a request at its tenant's cap holds up its own tenant alone, and a request that stays within
its tenant's floor goes before other tenants' requests that wait for the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

from raydix.actors.metrics.distribution import ACQUIRE_S, WAIT_S, Distribution
from raydix.cache_core import OutOfSlotsError
from raydix.schemas import CacheBusy, CacheError, Message, UnknownLease

_RETRY_AFTER_S = 0.1

Attempt = Callable[[], Message]  # raises OutOfSlotsError while there is no room


class Position(NamedTuple):
    """The facts by which the queue orders a request."""

    tenant: str | None
    urgent: bool  # a running lease grows: it goes before new ones, which wait for it to end
    is_within_floor: Callable[[], bool]  # whether its tenant need not wait for others
    num_tokens: int = 0  # size of the lease that is to begin, or its growth


@dataclass(eq=False, slots=True)
class Waiter:
    """One queued request."""

    ticket: int
    session_id: str
    lease_id: str
    position: Position
    attempt: Attempt
    shortage: OutOfSlotsError  # result of its last attempt
    joined_at: float
    outcome: asyncio.Future[Message] = field(init=False)
    timer: asyncio.TimerHandle = field(init=False)


class WaitQueue:
    """Requests that found no room.

    Code that frees slots calls `serve`. Outcomes are kept until they are collected or the session ends.

    Attributes:
        max_waiters: of each tenant; 0: no request may wait.
        waiting: the number of queued requests, by tenant.
        num_waited: requests that were ever queued.
        wait_time: seconds that each was queued.
        acquire_latency: seconds from the arrival of each `acquire` to its answer; the queue adds the requests that
            waited.

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
        self._queue: list[Waiter] = []
        self.waiting: Counter[str | None] = Counter()
        self._by_ticket: dict[int, Waiter] = {}  # queued, or with an outcome that was not collected yet
        self._by_lease: dict[tuple[str, str], list[Waiter]] = {}  # (session id, lease id) -> the same waiters
        self._next_ticket = count(1)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """The seconds that the longest of the queued requests has waited so far; 0: none is queued. O(queue)."""
        return max((self._clock() - waiter.joined_at for waiter in self._queue), default=0.0)

    def num_tokens(self) -> int:
        """Return the tokens that the queued requests ask for. O(queue)."""
        return sum([waiter.position.num_tokens for waiter in self._queue])

    def is_waiting(self, tenant: str | None) -> bool:
        """Return whether a request of that tenant is queued."""
        return tenant in self.waiting

    def only_tenant_caps_block(self) -> bool:
        """Return whether each request waits for its tenant's cap, or behind one of its tenant that does."""
        at_cap: set[str | None] = set()
        for waiter in self._queue:
            if waiter.shortage.tenant is not None:
                at_cap.add(waiter.position.tenant)
            elif waiter.position.tenant not in at_cap:
                return False
        return True

    def growing(self) -> list[Waiter]:
        """Return the requests of running leases that grow, in order: they come before all others."""
        return list(takewhile(lambda waiter: waiter.position.urgent, self._queue))

    def refuse(self, waiter: Waiter, error: CacheError) -> None:
        """Remove a request from the queue; its outcome is `error`."""
        self._settle(waiter, error)

    def join(
        self,
        session_id: str,
        lease_id: str,
        position: Position,
        attempt: Attempt,
        timeout_s: float,
        refusal: Callable[[OutOfSlotsError], Exception],
        shortage: OutOfSlotsError,
    ) -> tuple[int, int]:
        """Queue a request for `timeout_s`; after that it fails with the `refusal` of its last shortage.

        Return the ticket, and the number of requests ahead.

        Raises:
            CacheBusy: as many requests of that tenant wait as may.
        """
        for waiter in self._by_lease.get((session_id, lease_id), ()):
            if waiter.position.urgent == position.urgent and not waiter.outcome.done():
                return waiter.ticket, self._queue.index(waiter)  # it is a retry
        if self.waiting[position.tenant] >= self.max_waiters:
            raise CacheBusy(f"{self.waiting[position.tenant]} requests wait for room already", _RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        waiter = Waiter(next(self._next_ticket), session_id, lease_id, position, attempt, shortage, self._clock())
        self.num_waited += 1
        waiter.outcome = loop.create_future()
        waiter.timer = loop.call_later(timeout_s, self._expire, waiter, refusal)
        num_ahead = sum(other.position.urgent for other in self._queue) if position.urgent else len(self._queue)
        self._queue.insert(num_ahead, waiter)
        self.waiting[position.tenant] += 1
        self._by_ticket[waiter.ticket] = waiter
        self._by_lease.setdefault((session_id, lease_id), []).append(waiter)
        return waiter.ticket, num_ahead

    def serve(self) -> None:
        """Serve from the front as many as there is room for; none overtakes one that waits for the same."""
        index, is_full = 0, False
        passed: set[str | None] = set()  # tenants of which a request was passed over
        while index < len(self._queue) and len(passed) < len(self.waiting):
            waiter = self._queue[index]
            if waiter.position.tenant not in passed:
                if not is_full or waiter.position.is_within_floor():
                    if self._try(waiter):
                        continue
                    is_full = is_full or waiter.shortage.tenant is None
                passed.add(waiter.position.tenant)
            index += 1

    def _try(self, waiter: Waiter) -> bool:
        """Try to serve a request; return False if there is no room for it."""
        try:
            outcome: Message | Exception = waiter.attempt()
        except OutOfSlotsError as error:
            waiter.shortage = error.with_traceback(None)
            return False
        except Exception as error:  # its own fault, found late: it alone fails
            outcome = error
        self._settle(waiter, outcome)
        return True

    async def outcome(self, session_id: str, ticket: int) -> Message:
        """Wait for the outcome of a ticket and collect it. If the wait is cancelled, the request stays queued.

        Raises:
            UnknownLease: no such ticket of that session, or it was withdrawn.
            CacheError: the request failed with it.
        """
        waiter = self._by_ticket.get(ticket)
        if waiter is None or waiter.session_id != session_id:
            raise UnknownLease(f"ticket {ticket} is not queued: it was collected, or given up while it waited")
        try:
            return await asyncio.shield(waiter.outcome)
        finally:
            if waiter.outcome.done():
                self._forget(waiter)

    def withdraw(self, session_id: str, lease_id: str | None = None, error: CacheError | None = None) -> None:
        """Remove the requests of a session, or of one of its leases, and drop their outcomes.

        A caller that waits for one gets `error`; None: `UnknownLease`. O(1) for a lease that waits for nothing.
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
        """Drop a request's outcome: it was collected, or never will be. Idempotent."""
        if self._by_ticket.pop(waiter.ticket, None) is not None:
            lease = waiter.session_id, waiter.lease_id
            self._by_lease[lease].remove(waiter)
            if not self._by_lease[lease]:
                del self._by_lease[lease]

    def refuse_all(self, error: CacheError) -> None:
        """Fail every queued request with `error`."""
        for waiter in list(self._queue):
            self._settle(waiter, error)

    def change_loop(self) -> None:
        """Drop every request: the loop that they waited on was closed."""
        self._queue.clear()
        self.waiting.clear()
        self._by_ticket.clear()
        self._by_lease.clear()

    def _expire(self, waiter: Waiter, refusal: Callable[[OutOfSlotsError], Exception]) -> None:
        self._settle(waiter, refusal(waiter.shortage))
        self.serve()  # the next in line may need less

    def _settle(self, waiter: Waiter, outcome: Message | Exception) -> None:
        """Answer a request, and remove it from the queue."""
        if not waiter.position.urgent:
            self.acquire_latency.add(self._clock() - waiter.joined_at)
        self._leave(waiter, outcome)

    def _leave(self, waiter: Waiter, outcome: Message | Exception) -> None:
        self.wait_time.add(self._clock() - waiter.joined_at)
        waiter.timer.cancel()
        self._queue.remove(waiter)
        self.waiting[waiter.position.tenant] -= 1
        if not self.waiting[waiter.position.tenant]:
            del self.waiting[waiter.position.tenant]
        if isinstance(outcome, Exception):
            waiter.outcome.set_exception(outcome)
            waiter.outcome.exception()  # seen, even if it is never collected
        else:
            waiter.outcome.set_result(outcome)
