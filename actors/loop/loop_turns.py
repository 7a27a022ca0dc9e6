"""`LoopTurns`: turns of the event loop for a cache's background work, before requests that would leave it none."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

_PAUSE_S = 0.001  # between two waits, and the longest wait for threads
_LOOK_S = 0.0001  # between two looks for work while there is none
_TURNS = 3  # of one wait: a copy has ended, the background task wakes, and plans what follows


class LoopTurns:
    """Makes requests wait while background work of their cache is due, about once a millisecond.

    A cache in this process executes a request in the step of its caller. So a program with one request after the other
    never gives the event loop a turn, and leaves the interpreter's lock to no thread that copies. Then no KV would be
    written to a tier below. So a request waits before it is executed, unless the loop has run by itself since the last
    one. It is executed and answered in one step. Requests that wait go on in the order in which they came.

    Args:
        has_work: returns whether background work is due.
        needs_threads: returns whether threads are at work for it. If so, a wait lasts until one has ended its work, for
            a millisecond at most.
    """

    def __init__(self, has_work: Callable[[], bool], needs_threads: Callable[[], bool]) -> None:
        self._has_work = has_work
        self._needs_threads = needs_threads
        self._next_at = 0.0  # by the loop's clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False  # the turns of the first one are not over
        self._has_run = True  # whether the loop has run since `_watch`
        self._timer: asyncio.TimerHandle | None = None  # ends the wait for threads

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait."""
        return len(self._waiting) > 0

    def is_due(self) -> bool:
        """Return whether a request must `take` a turn now: work is due, or other requests wait."""
        if self._waiting:
            return True
        now = asyncio.get_running_loop().time()
        if now < self._next_at:
            return False
        if not self._has_work():
            self._next_at = now + _LOOK_S
            return False
        self._next_at = now + _PAUSE_S
        if not self._has_run:
            return True
        self._watch()
        return False

    def _watch(self) -> None:
        """Find out whether the loop runs by itself from now on."""
        self._has_run = False
        asyncio.get_running_loop().call_soon(self._note_run)

    def _note_run(self) -> None:
        self._has_run = True

    async def take(self) -> None:
        """Return when the loop has run, and all requests that waited before have gone on."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting
        waiting.append(turn)
        if not self._is_turning and len(waiting) == 1:
            self._is_turning = True
            self._turn(_TURNS)
        try:
            await turn
        finally:  # also if the caller is cancelled: it executes nothing
            waiting.remove(turn)
            if self._has_run:
                self._watch()
            if not self._is_turning:
                self._wake_next()

    def change_loop(self) -> None:
        """Forget the requests of a loop that was closed."""
        self._waiting, self._is_turning, self._timer = deque(), False, None
        self._next_at, self._has_run = 0.0, True

    def note_progress(self) -> None:
        """End the wait for threads: one has ended its work."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._turn(_TURNS, may_wait=False)

    def _turn(self, left: int, may_wait: bool = True) -> None:
        loop = asyncio.get_running_loop()
        if left:
            loop.call_soon(self._turn, left - 1, may_wait)
        elif may_wait and self._needs_threads():
            self._timer = loop.call_later(_PAUSE_S, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._timer, self._is_turning = None, False
        self._wake_next()

    def _wake_next(self) -> None:
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)
