"""`LoopLag`: the delay of an event loop, which is the time that a request may wait for its turn."""

from __future__ import annotations

import asyncio

from raydix.actors.loop.loop_timer import LoopTimer

_TICK_S = 0.1
_WINDOW_S = 5.0


class LoopLag:
    """The longest delay of the loop within the last five to ten seconds, measured by a timer on the loop.

    A delay counts while it lasts: a loop that does not run is late by the time since its timer was due.
    """

    def __init__(self) -> None:
        self._timer = LoopTimer(self._tick)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due_at = 0.0
        self._window_ends_at = 0.0
        self._worst_s = self._worst_before_s = 0.0  # this window's worst, and the previous one's

    def start(self) -> None:
        """Start the timer on the running loop, unless it runs already."""
        if not self._timer.is_set:
            self._loop = asyncio.get_running_loop()
            self._due_at = self._loop.time() + _TICK_S
            self._timer.schedule(_TICK_S)

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.stop()

    def _tick(self) -> float:
        self.note(asyncio.get_running_loop().time())
        return _TICK_S

    def note(self, now: float) -> None:
        """Count the delay of a tick at time `now` of the loop's clock."""
        if now >= self._window_ends_at:
            is_next = now < self._window_ends_at + _WINDOW_S
            self._worst_before_s = self._worst_s if is_next else 0.0
            self._worst_s, self._window_ends_at = 0.0, now + _WINDOW_S
        self._worst_s = max(self._worst_s, now - self._due_at)
        self._due_at = now + _TICK_S

    @property
    def longest_ms(self) -> float:
        """The longest recent delay, in ms; that of now included."""
        present_s = self._loop.time() - self._due_at if self._loop is not None and self._timer.is_set else 0.0
        return 1000 * max(self._worst_s, self._worst_before_s, present_s)
