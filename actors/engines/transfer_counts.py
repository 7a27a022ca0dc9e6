"""`TransferCounts`: the counts and times of one side of a connector since they were last read; their metrics' names."""

from __future__ import annotations

import threading
from typing import Any

COUNTS = {
    "lookups": "look-ups answered",
    "lookup_timeouts": "look-ups without an answer in time, which count as misses",
    "tier_loads": "look-ups answered after a load from a tier below the pool",
    "tier_loads_late": "look-ups of which the load was late, so that the request computes",
    "hit_tokens": "tokens promised to requests from the cache",
    "loads": "loads that were carried out",
    "load_failures": "loads that failed; the engine has recomputed them",
    "loaded_bytes": "bytes copied from the pool",
    "saves": "saves that were published",
    "saves_refused": "saves without private slots, or cancelled",
    "saved_bytes": "bytes copied to the pool",
    "detached_requests": "requests served while the engine was detached or behind the cache's weights",
}
SECONDS = {
    "lookup_s": "time from a look-up's request to the answers of the caches of all ranks, without those that load",
    "tier_load_s": "time from the request of a look-up that loads from a tier below the pool to the answers",
    "load_s": "time of a load's copies, with the wait for the copy thread",
    "save_s": "time of a save's copies",
}
BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_SHORT = {"lookup_s": "look-up", "tier_load_s": "tier load", "load_s": "load", "save_s": "save"}  # names in log lines


class TransferCounts:
    """Counts and times; safe for threads. `take` returns and resets them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._seconds: dict[str, list[float]] = {}

    def add(self, name: str, number: int = 1) -> None:
        """Add to the count of that name, one of `COUNTS`."""
        assert name in COUNTS, name
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + number

    def observe(self, name: str, seconds: float) -> None:
        """Add a time to the times of that name, one of `SECONDS`."""
        assert name in SECONDS, name
        with self._lock:
            self._seconds.setdefault(name, []).append(seconds)

    def take(self) -> dict[str, Any]:
        """Return the counts and times since the last call: integers, and lists of seconds, by name; {}: none."""
        with self._lock:
            taken: dict[str, Any] = {**self._counts, **self._seconds}
            self._counts, self._seconds = {}, {}
        return taken


def merge_counts(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the sums of counts, and all times."""
    merged = dict(one)
    for name, value in other.items():
        merged[name] = merged[name] + value if name in merged else value
    return merged


def summarize_counts(data: dict[str, Any]) -> dict[str, int | float]:
    """Return the counts, and the mean of each time in milliseconds, for a log line."""
    summary: dict[str, int | float] = {name: data[name] for name in COUNTS if name in data}
    for name, label in _SHORT.items():
        if times := data.get(name):
            summary[f"mean {label} ms"] = round(1000 * sum(times) / len(times), 3)
    return summary


def metric_name(name: str) -> str:
    """Return the name of the metric of a count or time, as an engine registers it in Prometheus' client."""
    return f"vllm:raydix_{name}econds" if name in SECONDS else f"vllm:raydix_{name}"


def markdown() -> str:
    """Return the table of the engines' metrics in `examples/metrics.md`."""
    rows = [(f"{metric_name(name)}_total", "counter", meaning) for name, meaning in COUNTS.items()]
    rows += [(metric_name(name), "histogram", meaning) for name, meaning in SECONDS.items()]
    head = "| metric of `vllm serve` | exported by Ray as | kind | meaning |\n|---|---|---|---|\n"
    lines = [f"| `{name}` | `ray_{name.replace(':', '_')}` | {kind} | {meaning} |" for name, kind, meaning in rows]
    return head + "\n".join(lines) + "\n"
