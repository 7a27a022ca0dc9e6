"""Plain callers of coroutines: results, errors, and interrupts that leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from raydix.actors.loop_thread import LoopThread


@pytest.fixture
def thread() -> LoopThread:
    return LoopThread("test")


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_a_call_gives_the_coroutines_result_or_its_error(thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("as it should")

    assert thread.run(double(4)) == 8
    with pytest.raises(ValueError, match="as it should"):
        thread.run(fail())
    thread.stop()


async def test_it_works_where_a_loop_runs_already(thread: LoopThread) -> None:
    assert thread.run(double(4)) == 8
    thread.stop()


def test_stopping_ends_the_thread_with_what_runs_there_and_a_later_call_starts_another(thread: LoopThread) -> None:
    ended = threading.Event()

    async def linger() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(linger())
        await asyncio.sleep(0)
        return task

    task = thread.run(begin())
    thread.stop()
    thread.stop()

    assert ended.is_set()
    assert task.cancelled()
    assert not [each for each in threading.enumerate() if each.name == "test"]
    assert thread.run(double(1)) == 2
    thread.stop()


def test_a_thread_that_is_dropped_ends() -> None:
    thread = LoopThread("dropped")
    thread.run(double(1))
    (running,) = [each for each in threading.enumerate() if each.name == "dropped"]

    del thread

    running.join(10)
    assert not running.is_alive()


def test_an_interrupt_cancels_what_runs_and_goes_on_when_that_has_ended(thread: LoopThread) -> None:
    steps = []

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            steps.append("cleaned up")
            raise

    with pytest.raises(KeyboardInterrupt):
        thread.run(wait())

    assert steps == ["cleaned up"]
    thread.stop()


def test_what_was_given_just_before_an_interrupt_is_undone(thread: LoopThread) -> None:
    undone = []

    async def give() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "a lease"

    async def undo(given: str) -> None:
        undone.append(given)

    with pytest.raises(KeyboardInterrupt):
        thread.run(give(), undo)

    assert undone == ["a lease"]
    thread.stop()


def test_a_call_from_its_own_loop_is_refused_instead_of_waiting_for_ever(thread: LoopThread) -> None:
    async def nested() -> None:
        coroutine = double(1)
        try:
            thread.run(coroutine)
        finally:
            coroutine.close()

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        thread.run(nested())
    thread.stop()
