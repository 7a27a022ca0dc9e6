"""`LoopThread`: an event loop in a thread of its own, for callers that have no loop or block theirs."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from raydix.schemas import InvalidRequest

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread. It runs coroutines for callers in all other threads, and starts with the first one.

    A forked process has no such thread: there, all methods but `stop` raise InvalidRequest.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()  # the process that started the loop, if there is a loop

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]] | None = None) -> T:
        """Run a coroutine, and return its result or raise its error.

        If the caller is interrupted (by Ctrl-C, or by another exception of a signal handler), the coroutine is
        cancelled and has ended when the interrupt goes on. If it has returned a result by then, `undo` is run with it.

        Raises:
            InvalidRequest: this process was forked from the one in which the loop runs.
        """
        self._check_process(coroutine)
        loop: asyncio.AbstractEventLoop | None = None
        done = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(asyncio.get_running_loop().create_task(coroutine))
            tasks[0].add_done_callback(lambda _: done.set())

        def cancel() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before the task was made
                coroutine.close()
                done.set()

        try:
            with self._lock:  # `stop` runs either before, and this starts another loop, or after, and cancels the task
                loop = self._ensure_loop()
                loop.call_soon_threadsafe(begin)
            done.wait()
            return tasks[0].result()
        except BaseException:  # the error of the coroutine, which is done then, or an interrupt
            if loop is not None and not done.is_set():
                loop.call_soon_threadsafe(cancel)
                done.wait()
            if undo is not None and tasks and not tasks[0].cancelled() and tasks[0].exception() is None:
                self.run(undo(tasks[0].result()))
            raise

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine without waiting for it; its result or error goes to the future.

        Coroutines start in the order of the calls.
        """
        self._check_process(coroutine)
        with self._lock:
            return asyncio.run_coroutine_threadsafe(coroutine, self._ensure_loop())

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop, without waiting for it, in the order of the calls."""
        self._check_process()
        with self._lock:
            self._ensure_loop().call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the loop with its tasks, and the thread. Idempotent; a later `run` starts another.

        In a forked process it has no effect, as the loop belongs to the process before.
        """
        if self._is_forked:
            return
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    @property
    def _is_forked(self) -> bool:
        return self._loop is not None and self._pid != os.getpid()

    def _check_process(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> None:
        """Raise InvalidRequest in a forked process, and close the coroutine that it cannot run.

        The lock may be held there for ever, so it is not taken.
        """
        if self._is_forked:
            if coroutine is not None:
                coroutine.close()
            raise InvalidRequest(
                f"this client runs in process {self._pid}, from which process {os.getpid()} was forked: make another "
                "client after a fork, or start processes with multiprocessing's method 'spawn'"
            )

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, which is started if there is none. The caller must hold the lock."""
        if self._loop is None:
            self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop_soon, self._loop, self._pid).atexit = False
        if self._thread is threading.current_thread():
            raise RuntimeError("a plain call would wait for the loop that it runs on: await the coroutine instead")
        return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run the thread. It refers to the loop alone, so that a client that is dropped can be collected."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _stop_soon(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    if pid == os.getpid() and not loop.is_closed():  # a forked process would wake the loop of the other one
        loop.call_soon_threadsafe(loop.stop)
