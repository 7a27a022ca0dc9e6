"""KV that takes several messages: two of them are under way, in order, and none begins once one has failed."""

from __future__ import annotations

import asyncio

import pytest

from raydix.actors.client.attached_pool import _run_for_each
from raydix.schemas import UnknownLease

CHUNKS = [(start, start + 2) for start in range(0, 10, 2)]


class Work:
    """The work for a chunk: it waits until the test releases it, and ends some turns after it is cancelled."""

    def __init__(self, turns_to_end: int = 0) -> None:
        self._turns_to_end = turns_to_end
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self._ends: dict[int, asyncio.Future[None]] = {}

    async def __call__(self, start: int, stop: int) -> None:
        assert stop == start + 2
        self.begun.append(start)
        self._ends[start] = asyncio.get_running_loop().create_future()
        try:
            await self._ends[start]
        except asyncio.CancelledError:
            for _ in range(self._turns_to_end):
                await asyncio.sleep(0)
            self.cancelled.append(start)
            raise

    def end(self, start: int, error: Exception | None = None) -> None:
        if error is None:
            self._ends[start].set_result(None)
        else:
            self._ends[start].set_exception(error)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_two_are_under_way_and_the_next_begins_when_either_ends() -> None:
    work = Work()
    task = asyncio.create_task(_run_for_each(CHUNKS, work))
    await turns()
    assert work.begun == [0, 2]

    work.end(2)
    await turns()
    assert work.begun == [0, 2, 4]

    for start in (0, 4, 6, 8):
        work.end(start)
        await turns()
    await task
    assert (work.begun, work.cancelled) == ([0, 2, 4, 6, 8], [])


async def test_after_an_error_none_begins_and_what_is_under_way_is_waited_for() -> None:
    work = Work()
    task = asyncio.create_task(_run_for_each(CHUNKS, work))
    await turns()

    work.end(2, UnknownLease("gone"))
    await turns()
    assert not task.done()
    work.end(0)
    with pytest.raises(UnknownLease, match="gone"):
        await task

    assert (work.begun, work.cancelled) == ([0, 2], [])


async def test_of_two_errors_one_is_raised() -> None:
    work = Work()
    task = asyncio.create_task(_run_for_each(CHUNKS, work))
    await turns()

    work.end(2, UnknownLease("second"))
    work.end(0, UnknownLease("first"))
    with pytest.raises(UnknownLease, match="first"):
        await task

    assert work.begun == [0, 2]


async def test_none_begins_after_one_that_fails_without_waiting() -> None:
    begun = []

    async def refuse(start: int, stop: int) -> None:
        begun.append(start)
        raise UnknownLease("gone")

    with pytest.raises(UnknownLease, match="gone"):
        await _run_for_each(CHUNKS, refuse)

    assert begun == [0]


async def test_who_is_cancelled_leaves_nothing_under_way() -> None:
    work = Work(turns_to_end=3)
    task = asyncio.create_task(_run_for_each(CHUNKS, work))
    await turns()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (work.begun, sorted(work.cancelled)) == ([0, 2], [0, 2])


async def test_no_chunk_is_no_work() -> None:
    work = Work()
    await _run_for_each([], work)
    assert work.begun == []
