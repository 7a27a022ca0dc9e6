"""`BoundedLog`: warnings about the faults of others, which may come without end."""

from __future__ import annotations

import logging
import time

_EVERY_S = 60.0


class BoundedLog:
    """Logs at most one warning a minute. The next one has the number of warnings that were left out."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._next_at = 0.0
        self._num_left_out = 0

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        now = time.monotonic()
        if now < self._next_at:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message += f" ({self._num_left_out:,} warnings more since the last one)"
        self._next_at, self._num_left_out = now + _EVERY_S, 0
        self._logger.warning(message, *arguments)
