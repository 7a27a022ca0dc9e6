"""KV that takes several messages: two of them are under way, in order, and none once one has failed."""

from __future__ import annotations

import asyncio

import pytest

from raydix.actors.attached_pool import _for_each
from raydix.schemas import UnknownLease

CHUNKS = [(start, start + 2) for start in range(0, 10, 2)]


class Work:
    """What is done for a chunk: it waits until it is let go."""

    def __init__(self) -> None:
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
    task = asyncio.create_task(_for_each(CHUNKS, work))
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


async def test_the_first_error_is_raised_and_ends_the_others() -> None:
    work = Work()
    task = asyncio.create_task(_for_each(CHUNKS, work))
    await turns()

    work.end(2, UnknownLease("gone"))
    with pytest.raises(UnknownLease, match="gone"):
        await task

    assert (work.begun, work.cancelled) == ([0, 2], [0])


async def test_who_is_cancelled_leaves_nothing_under_way() -> None:
    work = Work()
    task = asyncio.create_task(_for_each(CHUNKS, work))
    await turns()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (work.begun, sorted(work.cancelled)) == ([0, 2], [0, 2])


async def test_no_chunk_is_no_work() -> None:
    work = Work()
    await _for_each([], work)
    assert work.begun == []
