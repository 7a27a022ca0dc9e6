"""`JobThreads`: threads that share the jobs of several queues, such as the loads, writes and index work of a disk."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any, Literal, NamedTuple, Protocol

Help = Callable[[Callable[[], Any]], Future[Any]]
End = Literal["whole", "cancelled", "late", "failed", "closed"]


class Ended(NamedTuple):
    """The end of a job.

    Attributes:
        num_pages: leading pages of a copy's plan that were copied, with their window halves and states.
        end: how a copy ended.
        error: of a job that failed; None: it has not failed.
        result: of work on an index. Of a write, the rows that the index has now: none if it was cancelled or has
            failed, or if their space was deleted.
    """

    num_pages: int = 0
    end: End = "whole"
    error: Exception | None = None
    result: Any = None


class JobQueue(Protocol):
    """The jobs of one kind. `JobThreads.changed` is held while a thread asks."""

    def take(self) -> Callable[[], object] | None:
        """Return a job that may begin now; None if there is none. A thread calls it without the lock."""

    def wait_s(self) -> float | None:
        """Return the seconds after which `take` may return a job though nothing was notified; None: it will not."""

    def stop(self) -> None:
        """Take no jobs that come later: the threads end behind those that there are."""


class JobThreads:
    """Threads that take jobs, those of the queue first that was added last.

    Args:
        name: of the threads.
        number: of the threads.

    Attributes:
        changed: the lock of all queues. Notify it when a job was added, or another one may begin.
        help: has another thread work for a job.
    """

    def __init__(self, name: str, number: int) -> None:
        # The threads know the queues alone, so that threads whose owner is dropped without being closed end.
        self._queues = _Queues()
        self.changed = self._queues.changed
        self.help: Help = self._queues.help
        self._threads = [
            threading.Thread(target=_run, args=(self._queues,), name=name, daemon=True) for _ in range(number)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._queues.close)

    def add(self, queue: JobQueue) -> None:
        """Take jobs of this queue, too, before those of all others."""
        with self.changed:
            self._queues.queues.appendleft(queue)
            self.changed.notify_all()

    def close(self, timeout_s: float | None = None) -> None:
        """End the threads when no queue has a job that may begin.

        Args:
            timeout_s: for which it waits; None: without a limit.
        """
        self._queues.close()
        ends_at = None if timeout_s is None else monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if ends_at is None else max(0.0, ends_at - monotonic()))


class _Queues:
    """What the threads know."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: deque[JobQueue] = deque()
        self.helps: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_closed = False

    def help(self, work: Callable[[], Any]) -> Future[Any]:
        """Have another thread work for a job, before all queues. Cancel the future if no thread has begun.

        Args:
            work: must not raise.
        """
        future: Future[Any] = Future()
        with self.changed:
            self.helps.append((future, work))
            self.changed.notify()
        return future

    def next(self) -> Callable[[], object] | None:
        """Wait for a job, and return it; None: the threads end."""
        with self.changed:
            while True:
                while self.helps:
                    future, work = self.helps.popleft()
                    if future.set_running_or_notify_cancel():
                        return partial(_help, future, work)
                for queue in self.queues:
                    if (job := queue.take()) is not None:
                        return job
                if self._is_closed:
                    return None
                waits = [wait_s for queue in self.queues if (wait_s := queue.wait_s()) is not None]
                self.changed.wait(min(waits, default=None))

    def close(self) -> None:
        """Let the threads end behind the jobs that there are."""
        with self.changed:
            self._is_closed = True
            for queue in self.queues:
                queue.stop()
            self.changed.notify_all()


def _help(future: Future[Any], work: Callable[[], Any]) -> None:
    future.set_result(work())


def _run(queues: _Queues) -> None:
    """Do jobs until the queues are closed."""
    while (job := queues.next()) is not None:
        job()
        del job  # the thread keeps no pool and no buffer while it waits
