"""`WaitQueue` alone: the outcomes that it keeps for each ticket, and for how long."""

from __future__ import annotations

import pytest
from support.processes.fake_clock import Clock

from raydix.actors.sessions.wait_queue import Position, Waiter, WaitQueue
from raydix.cache_core import OutOfSlotsError
from raydix.schemas import Ack, Message, UnknownLease

SHORTAGE = OutOfSlotsError(2, 0, 0, 8)


class Crowd:
    """A queue, and how much room there is for its requests."""

    def __init__(self) -> None:
        self.clock = Clock(100.0)
        self.queue = WaitQueue(8, self.clock)
        self.room = 0

    def join(self, session_id: str, lease_id: str, urgent: bool = False) -> tuple[int, int]:
        queue = self.queue
        waiter = None if urgent else queue.find(session_id, lease_id)
        if waiter is not None:
            return waiter.ticket, queue.position_of(waiter)
        waiter = queue.give_ticket(session_id, lease_id, Position(None, urgent, lambda: False))
        return waiter.ticket, queue.join(waiter, self._attempt, 60.0, lambda shortage: shortage, SHORTAGE)

    def _attempt(self, waiter: Waiter) -> Message:
        if not self.room:
            raise SHORTAGE
        self.room -= 1
        return Ack()

    def nothing_is_kept(self) -> bool:
        return not (len(self.queue) or self.queue._by_ticket or self.queue._by_lease or self.queue.waiting)


async def test_a_retry_keeps_its_place() -> None:
    crowd = Crowd()
    crowd.join("s", "a")

    assert crowd.join("s", "b") == (2, 1)
    assert crowd.join("s", "b") == (2, 1)
    assert crowd.join("t", "b") == (3, 2)
    assert crowd.join("s", "b", urgent=True) == (4, 0)
    crowd.queue.withdraw("s")
    crowd.queue.withdraw("t")


async def test_a_lease_that_is_given_up_takes_its_own_requests_out_and_no_others() -> None:
    crowd = Crowd()
    for session_id, lease_id, urgent in (("s", "a", False), ("s", "b", False), ("s", "b", True), ("t", "b", False)):
        crowd.join(session_id, lease_id, urgent)

    crowd.queue.withdraw("s", "b")
    crowd.queue.withdraw("s", "unknown")

    assert len(crowd.queue) == 2
    for ticket in (2, 3):
        with pytest.raises(UnknownLease, match="not queued"):
            await crowd.queue.outcome("s", ticket)
    crowd.queue.withdraw("s")
    assert len(crowd.queue) == 1
    crowd.queue.withdraw("t", "b")
    assert crowd.nothing_is_kept()


async def test_an_outcome_is_kept_until_it_is_collected_or_given_up() -> None:
    crowd = Crowd()
    tickets = [crowd.join("s", lease_id)[0] for lease_id in ("a", "b")]
    crowd.room = 2
    crowd.queue.serve()

    assert crowd.join("s", "a") == (3, 0), "what was served before is no retry"
    assert await crowd.queue.outcome("s", tickets[0]) == Ack()
    crowd.queue.withdraw("s", "b")
    assert len(crowd.queue) == 1
    crowd.queue.withdraw("s", "a")
    assert crowd.nothing_is_kept()


async def test_the_oldest_request_need_not_be_the_first_in_the_queue() -> None:
    crowd = Crowd()
    assert crowd.queue.oldest_s == 0
    crowd.join("s", "a")
    crowd.clock.now += 5
    crowd.join("s", "b", urgent=True)
    crowd.clock.now += 2

    assert crowd.queue.oldest_s == 7
    crowd.queue.withdraw("s", "a")
    assert crowd.queue.oldest_s == 2
    crowd.queue.withdraw("s")
    assert crowd.queue.oldest_s == 0
