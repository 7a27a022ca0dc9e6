"""`MetricsPublisher`: passes a cache's counts to Ray's metrics on a timer. Ray exports them to Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ray.util.metrics import Counter, Gauge

from raydix.actors.loop.loop_timer import LoopTimer
from raydix.actors.metrics.metric import Labels
from raydix.actors.metrics.table import METRICS
from raydix.schemas import CacheStats, CacheUnavailable
from raydix.schemas.version import how_to_install

_NEEDED = (
    "aiohttp",
    "opencensus",
    "opentelemetry.sdk",
    "prometheus_client",
)  # imported by Ray's agent
_CLASSES = {"gauge": Gauge, "counter": Counter}


class MetricsPublisher:
    """Publish the counts every `interval_s`, outside the requests.

    Args:
        stats: returns the current counts.
        cache: the name of the cache, for the label `cache`.
        interval_s: seconds between two publications.

    Raises:
        CacheUnavailable: a package that Ray needs to export metrics is not installed here.
    """

    def __init__(self, stats: Callable[[], CacheStats], cache: str, interval_s: float) -> None:
        if missing := [name for name in _NEEDED if not _is_installed(name)]:
            raise CacheUnavailable(
                f"CacheConfig.metrics is set, but Ray cannot export metrics without {', '.join(missing)}; "
                f"install them on every node, and restart Ray ({how_to_install('metrics')})"
            )
        self._stats = stats
        self._interval_s = interval_s
        self._cache = cache
        self._exported: dict[str, Any] = {
            metric.name: _CLASSES[metric.kind](metric.name, metric.meaning, ("cache", *metric.labels))
            for metric in METRICS
        }
        self._counted: dict[tuple[str, Labels], float] = {}
        self._timer = LoopTimer(self._tick)

    def start(self) -> None:
        """Start the timer on the running loop, unless it runs already."""
        if not self._timer.is_set:
            self._timer.schedule(self._tick())

    def stop(self) -> None:
        """Publish once more and stop the timer."""
        if self._timer.is_set:
            self.publish()
        self._timer.stop()

    def _tick(self) -> float:
        self.publish()
        return self._interval_s

    def publish(self) -> None:
        """Pass the current value of every metric to Ray. Takes about 100 us."""
        stats = self._stats()
        for metric in METRICS:
            for labels, value in metric.read(stats):
                exported, tags = self._exported[metric.name], {"cache": self._cache, **dict(labels)}
                if metric.kind == "gauge":
                    exported.set(value, tags)
                    continue
                rise = value - self._counted.get((metric.name, labels), 0.0)
                if rise > 0:  # Ray refuses 0
                    self._counted[metric.name, labels] = value
                    exported.inc(rise, tags)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False
