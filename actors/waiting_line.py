"""The line of those who wait for room in the pool: first in, first out, each with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from raydix.cache_core import OutOfSlotsError
from raydix.schemas import CacheBusy, CacheError, Message, UnknownLease

_RETRY_AFTER_S = 0.1

Attempt = Callable[[], Message]  # raises OutOfSlotsError while there is no room


@dataclass(eq=False, slots=True)
class Waiter:
    """One request in line."""

    ticket: int
    session_id: str
    lease_id: str
    attempt: Attempt
    urgent: bool  # a running lease that grows: it goes before new ones, which wait for it to end
    outcome: asyncio.Future[Message] = field(init=False)
    timer: asyncio.TimerHandle = field(init=False)


class WaitingLine:
    """Requests that found no room.

    Whoever frees slots calls `serve`. Outcomes are kept until they are collected or the session ends.
    """

    def __init__(self, max_waiters: int) -> None:
        self._max_waiters = max_waiters
        self._line: list[Waiter] = []
        self._by_ticket: dict[int, Waiter] = {}
        self._next_ticket = count(1)

    def __len__(self) -> int:
        return len(self._line)

    def join(
        self,
        session_id: str,
        lease_id: str,
        attempt: Attempt,
        timeout_s: float,
        refusal: Callable[[], Exception],
        urgent: bool = False,
    ) -> tuple[int, int]:
        """Stand in line for `timeout_s`, then fail with `refusal()`. Returns the ticket and how many stand before.

        Raises:
            CacheBusy: the line is full.
        """
        for waiter in self._line:  # a retry of a request that waits already
            if (waiter.session_id, waiter.lease_id, waiter.urgent) == (session_id, lease_id, urgent):
                return waiter.ticket, self._line.index(waiter)
        if len(self._line) >= self._max_waiters:
            raise CacheBusy(f"{len(self._line)} requests wait for room already", _RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        waiter = Waiter(next(self._next_ticket), session_id, lease_id, attempt, urgent)
        waiter.outcome = loop.create_future()
        waiter.timer = loop.call_later(timeout_s, self._expire, waiter, refusal)
        position = sum(other.urgent for other in self._line) if urgent else len(self._line)
        self._line.insert(position, waiter)
        self._by_ticket[waiter.ticket] = waiter
        return waiter.ticket, position

    def serve(self) -> None:
        """Serve from the front as many as there is room for; nobody overtakes."""
        while self._line:
            waiter = self._line[0]
            try:
                outcome: Message | Exception = waiter.attempt()
            except OutOfSlotsError:
                return
            except Exception as error:  # its own mistake, found out late: it alone fails
                outcome = error
            self._settle(waiter, outcome)

    async def outcome(self, session_id: str, ticket: int) -> Message:
        """Wait for the outcome of a ticket and collect it. If the wait is cancelled, the ticket stays in line.

        Raises:
            UnknownLease: no such ticket of that session, or it was withdrawn.
            CacheError: what the request failed with.
        """
        waiter = self._by_ticket.get(ticket)
        if waiter is None or waiter.session_id != session_id:
            raise UnknownLease(f"ticket {ticket} is not in line: it was collected or withdrawn")
        try:
            return await asyncio.shield(waiter.outcome)
        finally:
            if waiter.outcome.done():
                self._by_ticket.pop(ticket, None)

    def withdraw(self, session_id: str, lease_id: str | None = None, error: CacheError | None = None) -> None:
        """Take a session's requests, or those of one of its leases, out of line and drop their outcomes.

        Whoever waits for one is told `error`; None: that it was given up.
        """
        if not self._by_ticket:
            return
        for waiter in list(self._by_ticket.values()):
            if waiter.session_id == session_id and lease_id in (None, waiter.lease_id):
                if not waiter.outcome.done():
                    given_up = UnknownLease(f"lease {waiter.lease_id!r} was given up while it waited")
                    self._settle(waiter, error or given_up)
                self._by_ticket.pop(waiter.ticket, None)

    def refuse_all(self, error: CacheError) -> None:
        """Nobody in line is served any more: they are told `error`."""
        for waiter in list(self._line):
            self._settle(waiter, error)

    def _expire(self, waiter: Waiter, refusal: Callable[[], Exception]) -> None:
        self._settle(waiter, refusal())
        self.serve()  # the next in line may need less

    def _settle(self, waiter: Waiter, outcome: Message | Exception) -> None:
        waiter.timer.cancel()
        self._line.remove(waiter)
        if isinstance(outcome, Exception):
            waiter.outcome.set_exception(outcome)
            waiter.outcome.exception()  # seen, even if nobody collects it
        else:
            waiter.outcome.set_result(outcome)
