"""`LoopTimer`: calls a method periodically, without keeping its object alive."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # pause after a failure


class LoopTimer:
    """Call `method` on the event loop, again after the number of seconds that it returns; None ends the timer.

    A method that raises is logged, and called again after a second. The timer has a weak reference to the method's
    object, and ends if the object is dropped without being closed.
    """

    def __init__(self, method: Callable[[], float | None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """Whether a call is scheduled."""
        return self._handle is not None

    def schedule(self, delay_s: float) -> None:
        """Schedule the next call in `delay_s`, on the running loop. This replaces a scheduled call."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._run)

    def stop(self) -> None:
        """Cancel the scheduled call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run(self) -> None:
        self._handle = None
        method = self._method()
        if method is None:
            return
        try:
            delay_s = method()
        except Exception:  # the timer must outlive a failing call
            logger.exception("%s failed", method.__qualname__)
            delay_s = _RETRY_S
        if delay_s is not None:
            self.schedule(delay_s)
