"""`LoopThread`: an event loop in a thread of its own, for callers that have no loop or block theirs."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread. It runs coroutines for callers in all other threads, and starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]] | None = None) -> T:
        """Run a coroutine, and return its result or raise its error.

        If the caller is interrupted (by Ctrl-C, or by another exception of a signal handler), the coroutine is
        cancelled and has ended when the interrupt goes on. If it has returned a result by then, `undo` is run with it.
        """
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
        with self._lock:
            return asyncio.run_coroutine_threadsafe(coroutine, self._ensure_loop())

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop, without waiting for it, in the order of the calls."""
        with self._lock:
            self._ensure_loop().call_soon_threadsafe(function, *args)

    def stop(self) -> None:
        """End the loop with its tasks, and the thread. Idempotent; a later `run` starts another."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, which is started if there is none. The caller must hold the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop_soon, self._loop).atexit = False
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


def _stop_soon(loop: asyncio.AbstractEventLoop) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
