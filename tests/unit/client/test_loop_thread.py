"""Plain callers of coroutines: results, errors, and interrupts that leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from support.processes.alarm import MAIN, Alarm
from support.waiting import wait_until

from raydix.actors.client.loop_thread import LoopThread
from raydix.schemas import InvalidRequest


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
    ctrl_c = Alarm(KeyboardInterrupt(), by=signal.SIGINT)

    async def wait() -> None:
        ctrl_c.ring()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            steps.append("cleaned up")
            raise

    with ctrl_c, pytest.raises(KeyboardInterrupt):
        thread.run(wait())

    assert steps == ["cleaned up"]
    thread.stop()


def test_what_was_given_just_before_an_interrupt_is_undone(thread: LoopThread) -> None:
    undone = []
    ctrl_c = Alarm(KeyboardInterrupt(), by=signal.SIGINT)

    async def give() -> str:
        ctrl_c.ring()
        return "a lease"

    async def undo(given: str) -> None:
        undone.append(given)

    with ctrl_c, pytest.raises(KeyboardInterrupt):
        thread.run(give(), undo)

    assert undone == ["a lease"]
    thread.stop()


async def ring(alarm: Alarm) -> None:
    """Ring once the caller waits: a TimeoutError that comes while it wakes the loop is lost in asyncio."""
    while sys._current_frames()[MAIN].f_code.co_name != "wait":  # noqa: ASYNC110 -- another thread
        await asyncio.sleep(0.001)
    alarm.ring()


@pytest.mark.parametrize("error", [SystemExit(1), TimeoutError("too late"), asyncio.CancelledError()], ids=repr)
def test_whatever_a_signals_handler_raises_cancels_what_runs(thread: LoopThread, error: BaseException) -> None:
    ended = []
    alarm = Alarm(error)

    async def wait() -> None:
        await ring(alarm)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with alarm, pytest.raises(type(error)) as caught:
        thread.run(wait())

    assert caught.value is error
    assert ended == [True]
    thread.stop()


def test_what_was_given_just_before_an_alarm_is_undone_and_nothing_is_where_the_error_is_the_coroutines_own(
    thread: LoopThread,
) -> None:
    undone = []
    alarm = Alarm(TimeoutError("too late"))

    async def give() -> str:
        await ring(alarm)
        return "a lease"

    async def fail() -> str:
        raise TimeoutError("no room")

    async def undo(given: str) -> None:
        undone.append(given)

    with alarm, pytest.raises(TimeoutError, match="too late"):
        thread.run(give(), undo)
    with pytest.raises(TimeoutError, match="no room"):
        thread.run(fail(), undo)

    assert undone == ["a lease"]
    thread.stop()


def test_a_call_that_begins_while_another_thread_stops_the_loop_does_not_wait_for_ever(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert thread.run(double(1)) == 2
    loop = thread._loop
    assert loop is not None
    call_soon, stopping = loop.call_soon_threadsafe, threading.Thread(target=thread.stop)

    def stopped_first(callback: Callable[..., Any]) -> Any:
        if callback.__name__ == "begin":
            stopping.start()
            stopping.join(0.3)  # as if this thread were held up just here
        return call_soon(callback)

    monkeypatch.setattr(loop, "call_soon_threadsafe", stopped_first)

    with suppress(asyncio.CancelledError):  # if it comes just before the stop
        assert thread.run(double(4)) == 8

    stopping.join(10)
    assert not stopping.is_alive()
    assert thread.run(double(4)) == 8
    thread.stop()


def test_a_call_in_a_forked_process_is_refused_instead_of_waiting_for_ever(thread: LoopThread) -> None:
    assert thread.run(double(1)) == 2
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        for use in (lambda: thread.run(double(1)), lambda: thread.spawn(double(1)), lambda: thread.call(print)):
            try:
                use()
            except InvalidRequest as error:
                os.write(write, f"{error}\n".encode())
        thread.stop()
        os._exit(0)
    os.close(write)
    try:
        wait_until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, 300)
        refused = os.read(read, 4096).decode().splitlines()
        assert len(refused) == 3
        assert set(refused) == {refused[0]}
        assert refused[0].startswith(f"this client runs in process {os.getpid()}, from which process {child} was")
        assert thread.run(double(4)) == 8
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
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
