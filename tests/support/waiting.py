"""`wait_until`: polls until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    """Poll until a condition holds.

    Raises:
        AssertionError: it does not, after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
