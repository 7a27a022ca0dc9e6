"""The queue of requests that wait for room in the pool: first in, first out, each with a deadline.

Requests that wait for a load, for writes, or for the disk's commit have tickets too, and stand in no queue.

If tenants share the pool, a request at its tenant's cap holds up its own tenant alone, and a request that stays within
its tenant's floor goes before other tenants' requests that wait for the pool.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any, NamedTuple

from raydix.actors.metrics.distribution import ACQUIRE_S, WAIT_S, Distribution
from raydix.actors.transport.error_map import to_cache_error
from raydix.cache_core import OutOfSlotsError
from raydix.schemas import CacheBusy, CacheError, Message, UnknownLease, WaitingResponse

COMMIT = "commit"  # `Waiter.waits_for` of a retirement that the disk has not committed
_RETRY_AFTER_S = 0.1

# Tries a request that has a ticket, and returns its answer. None: it waits for a load, outside the queue. Raises
# OutOfSlotsError while there is no room.
Attempt = Callable[["Waiter"], Message | None]


class Position(NamedTuple):
    """The facts by which the queue orders a request."""

    tenant: str | None
    urgent: bool  # a running lease grows: it goes before new ones, which wait for it to end
    is_within_floor: Callable[[], bool]  # whether its tenant need not wait for others
    num_tokens: int = 0  # size of the lease that is to begin, or its growth


@dataclass(eq=False, slots=True)
class Waiter:
    """A request with a ticket: it is queued for room, or waits for a load or for writes."""

    ticket: int
    session_id: str
    lease_id: str
    position: Position
    began_at: float
    outcome: asyncio.Future[Message]
    latency: Distribution | None  # counts the time to its answer
    timer: asyncio.TimerHandle | None = None  # ends the present wait
    is_queued: bool = False
    waited_s: float = 0.0  # seconds in the queue before the present wait
    waits_for: object = None  # the load, the writes or the commit that it waits for; None: none of them
    may_load: bool = True  # False: a load for it has failed, or was late
    # Set while it is queued:
    attempt: Attempt = field(init=False, repr=False)
    shortage: OutOfSlotsError = field(init=False, repr=False)  # result of its last attempt
    queued_at: float = 0.0


class WaitQueue:
    """Requests with tickets: they wait for room in order, or for a load or for writes.

    Code that frees slots calls `serve`. Outcomes are kept until they are collected or the session ends.

    Attributes:
        max_waiters: most queued requests of a tenant; 0: no request may wait for room.
        waiting: the number of queued requests, by tenant.
        num_waited: requests that were ever queued.
        wait_time: seconds of each wait in the queue.
        acquire_latency: seconds from the arrival of each `acquire` to its answer; the queue adds the requests that
            waited.
        lock_latency: seconds from the arrival of each `lock` to its answer.

    Args:
        max_waiters: see above.
        clock: returns seconds since any fixed time.
    """

    def __init__(self, max_waiters: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiters = max_waiters
        self.num_waited = 0
        self.wait_time = Distribution(WAIT_S)
        self.acquire_latency = Distribution(ACQUIRE_S)
        self.lock_latency = Distribution(ACQUIRE_S)
        self._clock = clock
        self._queue: list[Waiter] = []
        self.waiting: Counter[str | None] = Counter()
        self._by_ticket: dict[int, Waiter] = {}  # ticket -> request that waits, or with an outcome to collect
        self._by_lease: dict[tuple[str, str], list[Waiter]] = {}  # (session id, lease id) -> the same waiters
        self._next_ticket = count(1)

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def oldest_s(self) -> float:
        """The longest time that a queued request has waited so far, in seconds; 0: none is queued. O(queue)."""
        return max((self._clock() - waiter.queued_at for waiter in self._queue), default=0.0)

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

    @property
    def num_loading(self) -> int:
        """The number of requests that wait for a load or for writes. O(tickets)."""
        waiting = [waiter for waiter in self._by_ticket.values() if not waiter.outcome.done()]
        return sum(not waiter.is_queued and not waiter.lease_id.startswith("\0") for waiter in waiting)

    def find(self, session_id: str, lease_id: str) -> Waiter | None:
        """Return the waiting request of a lease that is to begin; None: there is none."""
        for waiter in self._by_lease.get((session_id, lease_id), ()):
            if not waiter.position.urgent and not waiter.outcome.done():
                return waiter
        return None

    def position_of(self, waiter: Waiter) -> int:
        """Return the number of requests ahead of a request in the queue; 0 if it is not queued."""
        return self._queue.index(waiter) if waiter.is_queued else 0

    def give_ticket(
        self, session_id: str, lease_id: str, position: Position, latency: Distribution | None = None
    ) -> Waiter:
        """Return a waiter with a new ticket. It waits for nothing yet.

        Args:
            latency: counts the time to its answer.
        """
        outcome = asyncio.get_running_loop().create_future()
        waiter = Waiter(next(self._next_ticket), session_id, lease_id, position, self._clock(), outcome, latency)
        self._by_ticket[waiter.ticket] = waiter
        self._by_lease.setdefault((session_id, lease_id), []).append(waiter)
        return waiter

    def answer_later(self, session_id: str, name: str, work: Coroutine[Any, Any, Message]) -> WaitingResponse:
        """Return a ticket for the result of work that is about no lease, and needs no slots.

        Args:
            name: of the work, in names of tasks.
            work: begins now, and is cancelled if the ticket ends first.
        """
        waiter = self.give_ticket(session_id, f"\0{name}", Position(None, False, lambda: False))
        task = asyncio.get_running_loop().create_task(work, name=f"raydix-{name}")

        def settle(task: asyncio.Task[Message]) -> None:
            if task.cancelled() or waiter.outcome.done():
                return
            error = task.exception()
            assert error is None or isinstance(error, Exception)
            self.settle(waiter, task.result() if error is None else to_cache_error(error))

        task.add_done_callback(settle)
        waiter.outcome.add_done_callback(lambda _: task.cancel())
        return WaitingResponse(ticket=waiter.ticket, position=0)

    def join(
        self,
        waiter: Waiter,
        attempt: Attempt,
        timeout_s: float,
        give_up: Callable[[OutOfSlotsError], Message | Exception],
        shortage: OutOfSlotsError,
    ) -> int:
        """Queue a request. Return the number of requests ahead.

        All its waits in the queue last `timeout_s` together, at most.

        Args:
            attempt: tries it again.
            give_up: takes its last shortage, and returns its outcome when its time has run out.
            shortage: result of its last attempt.

        Raises:
            CacheBusy: `max_waiters` requests of that tenant wait already.
        """
        self.check_room_for(waiter.position.tenant)
        self.num_waited += 1
        waiter.is_queued, waiter.queued_at = True, self._clock()
        waiter.attempt, waiter.shortage = attempt, shortage
        left_s = max(0.0, timeout_s - waiter.waited_s)
        waiter.timer = asyncio.get_running_loop().call_later(left_s, self._expire, waiter, give_up)
        urgent = waiter.position.urgent
        num_ahead = sum(other.position.urgent for other in self._queue) if urgent else len(self._queue)
        self._queue.insert(num_ahead, waiter)
        self.waiting[waiter.position.tenant] += 1
        return num_ahead

    def check_room_for(self, tenant: str | None) -> None:
        """Raise CacheBusy if `max_waiters` requests of a tenant wait for room already."""
        if self.waiting[tenant] >= self.max_waiters:
            raise CacheBusy(f"{self.waiting[tenant]} requests wait for room already", _RETRY_AFTER_S)

    def serve(self) -> None:
        """Serve queued requests from the front while there is room.

        None overtakes a request that waits for the same slots.
        """
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
            outcome: Message | Exception | None = waiter.attempt(waiter)
        except OutOfSlotsError as error:
            waiter.shortage = error.with_traceback(None)
            return False
        except Exception as error:  # an error of this request alone: the others go on
            outcome = error
        if outcome is not None:
            self.settle(waiter, outcome)
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
                self._answer(waiter, error or given_up)
            self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        """Drop a request's outcome: it was collected, or never will be. Idempotent."""
        if self._by_ticket.pop(waiter.ticket, None) is not None:
            lease = waiter.session_id, waiter.lease_id
            self._by_lease[lease].remove(waiter)
            if not self._by_lease[lease]:
                del self._by_lease[lease]

    def refuse_all(self, error: CacheError) -> None:
        """Fail every request that waits with `error`, but for retirements: these have happened."""
        for waiter in list(self._by_ticket.values()):
            if not waiter.outcome.done() and waiter.waits_for != COMMIT:
                self.settle(waiter, error)

    async def end_commits(self) -> None:
        """Wait until no retirement waits for the disk's commit. Each of them has a time limit."""
        waiters = [waiter for waiter in self._by_ticket.values() if waiter.waits_for == COMMIT]
        if waiters:
            await asyncio.wait([waiter.outcome for waiter in waiters])

    def change_loop(self) -> None:
        """Drop every request: the loop that they waited on was closed."""
        self._queue.clear()
        self.waiting.clear()
        self._by_ticket.clear()
        self._by_lease.clear()

    def _expire(self, waiter: Waiter, give_up: Callable[[OutOfSlotsError], Message | Exception]) -> None:
        self.settle(waiter, give_up(waiter.shortage))
        self.serve()  # the next in line may need less

    def settle(self, waiter: Waiter, outcome: Message | Exception) -> None:
        """Answer a request that waits."""
        if waiter.latency is not None:
            waiter.latency.add(self._clock() - waiter.began_at)
        self._answer(waiter, outcome)

    def leave(self, waiter: Waiter) -> None:
        """End the wait that a request is in, without an outcome."""
        if waiter.timer is not None:
            waiter.timer.cancel()
            waiter.timer = None
        if not waiter.is_queued:
            return
        waited_s = self._clock() - waiter.queued_at
        self.wait_time.add(waited_s)
        waiter.waited_s += waited_s
        waiter.is_queued = False
        del waiter.attempt  # it refers to the request
        self._queue.remove(waiter)
        self.waiting[waiter.position.tenant] -= 1
        if not self.waiting[waiter.position.tenant]:
            del self.waiting[waiter.position.tenant]

    def _answer(self, waiter: Waiter, outcome: Message | Exception) -> None:
        self.leave(waiter)
        waiter.waits_for = None
        if isinstance(outcome, Exception):
            waiter.outcome.set_exception(outcome)
            waiter.outcome.exception()  # seen, even if it is never collected
        else:
            waiter.outcome.set_result(outcome)
