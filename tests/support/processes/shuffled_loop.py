"""An event loop that runs what is ready in any order, and coroutines that are cancelled at any of their awaits."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Coroutine, Generator
from random import Random
from typing import Any


class ShuffledLoop(asyncio.SelectorEventLoop):
    """Picks the next callback at random, by seed. Its time passes immediately, while no callback is ready.

    Attributes:
        complaints: messages for the log: unretrieved exceptions, failed callbacks.
    """

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.complaints: list[str] = []
        super().__init__(_Selector(self))
        self._ready = _ShuffledQueue(Random(seed))
        self.set_exception_handler(lambda loop, context: self.complaints.append(repr(context)))

    def time(self) -> float:
        return self.now


class _ShuffledQueue(deque[asyncio.Handle]):
    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng

    def popleft(self) -> asyncio.Handle:
        self.rotate(-self._rng.randrange(len(self)))
        return super().popleft()


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: ShuffledLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "nothing is ready and nothing is due: somebody waits for ever"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class CancelledAt:
    """Awaits a coroutine and has the running task cancelled at its k-th suspension; 0: at none.

    Attributes:
        num_awaits: how often it was suspended.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, later: bool = False) -> None:
        self.num_awaits = 0
        self._coroutine = coroutine
        self._at = at
        self._later = later  # its result may be ready when the cancellation comes

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        step: Any = self._coroutine.send
        value: Any = None
        while True:
            try:
                awaited = step(value)
            except StopIteration as end:
                return end.value
            self.num_awaits += 1
            if self.num_awaits == self._at:
                if self._later:
                    task.get_loop().call_soon(task.cancel)
                else:
                    task.cancel()
            try:
                value, step = (yield awaited), self._coroutine.send
            except BaseException as error:  # for the coroutine
                value, step = error, self._coroutine.throw
