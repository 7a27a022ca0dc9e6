"""`History`: the counts of a cache since its start, in a bounded number of points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from raydix.cache_core import LeasedCache
from raydix.schemas import HistoryPoint

_MAX_POINTS = 512


class History:
    """Points at equal intervals. When there are too many, every second one is dropped and the interval doubles.

    Args:
        core: the cache.
        clock: returns seconds, from any origin.
        interval_s: the first interval.
        tokens_loaded: returns how many of the reused tokens were loaded from tiers below the pool.
    """

    def __init__(
        self,
        core: LeasedCache,
        clock: Callable[[], float],
        interval_s: float = 1.0,
        tokens_loaded: Callable[[], int] = lambda: 0,
    ) -> None:
        self.interval_s = interval_s
        self.points: list[HistoryPoint] = []
        self._core = core
        self._tokens_loaded = tokens_loaded
        self._clock = clock
        self._began_at = clock()
        self._ticks: list[int] = []  # the cache's logical clock at each point

    @property
    def now_s(self) -> float:
        """Seconds since the history began."""
        return self._clock() - self._began_at

    def note(self) -> None:
        """Add a point if the last one is at least `interval_s` old."""
        now = self.now_s
        if self.points and now < self.points[-1].at_s + self.interval_s * 0.999:
            return
        if len(self.points) >= _MAX_POINTS:
            self.points, self._ticks = self.points[::2], self._ticks[::2]
            self.interval_s *= 2
        self.points.append(self.point())
        self._ticks.append(self._core.now)

    def point(self) -> HistoryPoint:
        """Return the current counts."""
        core, counters = self._core, self._core.counters
        return HistoryPoint(
            at_s=self.now_s,
            private_slots=core.private_slots,
            evictable_slots=core.evictable_size(),
            protected_slots=core.protected_size(),
            quarantined_slots=core.quarantined_slots,
            tokens_requested=counters.tokens_requested,
            tokens_reused=counters.tokens_reused,
            tokens_loaded=self._tokens_loaded(),
            tokens_evicted=counters.tokens_evicted,
        )

    def time_of(self, tick: int) -> float:
        """Return the time of a tick of the cache's logical clock, in seconds since the start."""
        place = bisect_left(self._ticks, tick)
        return self.points[place - 1].at_s if place else 0.0

    def time_at(self, at_s: float) -> float:
        """Convert a time of `clock` to seconds since the start."""
        return at_s - self._began_at
