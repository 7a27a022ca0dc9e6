"""`RunningRequests`: the running requests of a worker, which closes after all of them have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raydix.schemas import InvalidRequest

_CLOSED = "the worker was closed: make a new one"


class RunningRequests:
    """The running requests, each in the task of its caller."""

    def __init__(self) -> None:
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._left = asyncio.Event()  # set when a request ends

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count the block as a request of the running task.

        Raises:
            InvalidRequest: the worker was closed before or during the block, also if the caller was cancelled.
        """
        task = asyncio.current_task()
        assert task is not None, "a request runs in a task"
        if self._closed:
            raise InvalidRequest(_CLOSED)
        cancelled_before = task.cancelling()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._closed and task.cancelling() == cancelled_before + 1:  # `end` alone cancels the task
                raise InvalidRequest(_CLOSED) from None
            raise
        finally:
            if self._closed:
                task.uncancel()
            self._tasks.discard(task)
            self._left.set()

    async def end(self) -> None:
        """Refuse new requests, cancel the running ones, and wait for their end.

        Raises:
            InvalidRequest: requests run on another event loop.
        """
        loop = asyncio.get_running_loop()
        if any(task.get_loop() is not loop for task in self._tasks):
            raise InvalidRequest("this worker's requests run on another event loop: close it there")
        self._closed = True
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            self._left.clear()
            await self._left.wait()
