"""`LastDay`: a sum over the last 24 hours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

_STEP_S = 900.0
_STEPS = 96  # a day


class LastDay:
    """Sums numbers of the last 24 hours, in steps of a quarter of an hour. Each step takes about 100 bytes.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, int]] = deque()  # number and sum of each step that has one, the latest last

    def add(self, number: int) -> None:
        """Add a number now."""
        step = self._step()
        if self._steps and self._steps[-1][0] == step:
            number += self._steps.pop()[1]
        self._steps.append((step, number))

    @property
    def total(self) -> int:
        """The sum."""
        self._step()
        return sum(number for _, number in self._steps)

    def _step(self) -> int:
        """Forget the steps of more than a day ago; return the number of the current one."""
        now = int(self._clock() // _STEP_S)
        while self._steps and self._steps[0][0] <= now - _STEPS:
            self._steps.popleft()
        return now
