"""`LoopTimer`: calls a method now and then, without keeping its object alive."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # after a failure


class LoopTimer:
    """Calls `method` on the event loop, again after as many seconds as it returns; None ends it.

    A method that raises is called again in a second: what fails once, as a look at the counts may, does not end it.
    It holds the method's object weakly: an object that is dropped without being closed takes its timer with it.
    """

    def __init__(self, method: Callable[[], float | None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """Whether a call is due some day."""
        return self._handle is not None

    def schedule(self, delay_s: float) -> None:
        """Call in `delay_s` from now, on the running loop, instead of when it was due."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(delay_s, self._run)

    def stop(self) -> None:
        """Call no more."""
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
