"""`SlotWait`: how long one request may still wait for slots, in all of its attempts together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SlotWait:
    """The time that a request may wait for slots. Only waits count, and not the passes between them.

    Args:
        timeout_s: seconds for all waits together.
    """

    def __init__(self, timeout_s: float) -> None:
        self.left_s = timeout_s

    @contextmanager
    def waiting(self) -> Iterator[float]:
        """Yield the seconds that are left, and subtract the time that the block takes."""
        began = time.monotonic()
        try:
            yield self.left_s
        finally:
            self.left_s = max(0.0, self.left_s - (time.monotonic() - began))
