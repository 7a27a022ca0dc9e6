"""`LoopThread`: an event loop in a thread of its own, for callers who have none, or whose own is busy with them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for whoever calls, from any thread but its own. The thread starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, Any]] | None = None) -> T:
        """The coroutine's result, or its error.

        If the caller is interrupted (Ctrl-C, or whatever else a signal's handler raises), the coroutine is cancelled
        and has ended when the interrupt goes on. What it had given by then is undone, as nobody will get it.
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
            else:  # interrupted before it was begun
                coroutine.close()
                done.set()

        try:
            with self._lock:  # `stop` comes before, and this starts another loop, or after, and cancels it
                loop = self._started()
                loop.call_soon_threadsafe(begin)
            done.wait()
            return tasks[0].result()
        except BaseException:  # the coroutine's own, which is done then, or an interrupt
            if loop is not None and not done.is_set():
                loop.call_soon_threadsafe(cancel)
                done.wait()
            if undo is not None and tasks and not tasks[0].cancelled() and tasks[0].exception() is None:
                self.run(undo(tasks[0].result()))
            raise

    def stop(self) -> None:
        """End the loop with all that still runs on it, and the thread. Idempotent; a later `run` starts another."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    def _started(self) -> asyncio.AbstractEventLoop:
        """The loop. For whoever has the lock."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _stop_soon, self._loop).atexit = False
        if self._thread is threading.current_thread():
            raise RuntimeError("a plain call would wait for the loop that it runs on: await the coroutine instead")
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """The thread: it knows the loop alone, so that a client that is dropped can be collected."""
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
