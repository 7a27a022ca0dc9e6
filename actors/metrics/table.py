"""The table of counters: each field of `CacheStats` that is a metric, with its kind, name, meaning, and panel.

Ray's metrics, the dashboard, `raydix stats` and the guide read it. The meaning of a metric is the description of its
field. `make metrics` writes the dashboard and the tables of the guide again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from raydix.actors.metrics.metric import Metric, Part, Sample, Spread, by_label
from raydix.schemas import (
    CacheStats,
    DiskPoolStats,
    DiskTierStats,
    EvictionTaskStats,
    LowerTierStats,
    PoolStats,
    TierStats,
)

_Aggregate = Literal["sum", "max", "min"]

_GHOST_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
_DISK_STATES = ("opening", "reading", "ready", "stalled", "locked", "failed", "closed")
_USES = ("free", "private", "evictable", "protected", "quarantined")
_DISK_USES = ("unread", "dormant", "leaving")


class Ratio(NamedTuple):
    """The rate of one counter as a share of the rate of another one."""

    part: Metric
    whole: Metric
    name: str = ""


class Panel(NamedTuple):
    """The lines that the dashboard draws in one panel.

    Attributes:
        unit: of the lines, in Grafana's words.
        aggregate: how the gauges of one cache become one.
        increase: draw the increase of counters within five minutes, not their rate.
    """

    title: str
    unit: str
    lines: tuple[Metric | Ratio | Spread, ...]
    aggregate: _Aggregate
    increase: bool
    is_stacked: bool


def _panel(
    title: str,
    unit: str,
    *lines: Metric | Ratio | Spread,
    aggregate: _Aggregate = "sum",
    increase: bool = False,
    is_stacked: bool = False,
) -> Panel:
    return Panel(title, unit, lines, aggregate, increase, is_stacked)


def _slots(stats: CacheStats) -> Iterator[Sample]:
    return _by_use(stats, stats.swa, stats.state)


def _tier_slots(tier: LowerTierStats) -> Iterator[Sample]:
    return _by_use(tier.slots, tier.swa, tier.states)


def _by_use(kv: CacheStats | PoolStats, window: PoolStats | None, state: PoolStats | None) -> Iterator[Sample]:
    for name, pool in (("kv", kv), ("window", window), ("state", state)):
        if pool is not None:
            for use in (*_USES, *_DISK_USES) if isinstance(pool, DiskPoolStats) else _USES:
                yield (("pool", name), ("use", use)), float(getattr(pool, f"{use}_slots"))


def _evicted(stats: CacheStats) -> Iterator[Sample]:
    yield from by_label("pool", [("kv", stats.tokens_evicted)])
    yield from _evicted_of(window=stats.swa, state=stats.state)


def _tier_evicted(tier: LowerTierStats) -> Iterator[Sample]:
    return _evicted_of(kv=tier.slots, window=tier.swa, state=tier.states)


def _evicted_of(**pools: PoolStats | None) -> Iterator[Sample]:
    return by_label("pool", ((name, pool.evicted) for name, pool in pools.items() if pool is not None))


def _disk_state(disk: DiskTierStats) -> Iterator[Sample]:
    found = disk.state.split()[0].rstrip(":")
    return by_label("state", ((state, state == found) for state in _DISK_STATES))


def _tenants(name: str) -> Callable[[CacheStats], Iterator[Sample]]:
    return lambda stats: by_label("tenant", ((share.name or "others", getattr(share, name)) for share in stats.tenants))


def _task_alive(task: EvictionTaskStats) -> bool | None:
    return task.alive if task.enabled and task.started else None


def _ghost(stats: CacheStats) -> Iterator[Sample]:
    if (ghost := stats.ghost) is None:
        return
    for factor in _GHOST_FACTORS:
        size = factor * stats.num_slots
        if ghost.num_slots[0] <= size <= ghost.num_slots[-1]:
            yield (("factor", f"{factor:g}"),), ghost.hit_rate_at(size)


_CACHE = Part("", "", "", CacheStats)
_TASK = Part("eviction_task", "eviction_", "background eviction: ", EvictionTaskStats)
_HOST = Part("host", "host_", "host tier: ", TierStats)
_DISK = Part("disk", "disk_", "disk: ", DiskTierStats)

_REQUESTED, _REUSED, _EVICTED = _CACHE.counters("tokens_requested", "tokens_reused", "tokens_evicted")


class _TierMetrics:
    """The metrics that host and disk share."""

    def __init__(self, part: Part, more_uses: str = "") -> None:
        uses = f"{part.subject}slots by pool and use, as `ray_raydix_slots`{more_uses}"
        evicted = f"{part.subject}slots evicted by pool, with their pages or alone"
        self.slots = part.computed("gauge", "slots", uses, _tier_slots, "pool", "use")
        self.evicted = part.computed("counter", "evicted_slots", evicted, _tier_evicted, "pool")
        self.loaded, self.dropped, *more = part.counters(
            "tokens_loaded", "tokens_dropped", "tokens_loaded_unused", "tokens_written", "tokens_failed"
        )
        self.tokens = (self.loaded, self.dropped, *more)
        self.loaded_share = Ratio(self.loaded, _REQUESTED, "loaded of requested")
        self.writes = part.counter("writes", label="end")
        self.writes_refused, self.states_not_published = part.counters("writes_refused", "states_not_published")
        self.loaded_bytes, self.written_bytes = part.counters("loaded_bytes", "written_bytes")
        self.load_speed = Ratio(self.loaded_bytes, part.counter("load_s"), "speed of loads")
        self.moves_in_flight, self.queued_bytes = part.gauges("moves_in_flight", "queued_bytes")


_OF_HOST = _TierMetrics(_HOST)
_OF_DISK = _TierMetrics(_DISK, ", and unread, dormant and leaving ones")

_CACHE_PANELS = (
    _panel(
        "Slots by use",
        "short",
        _CACHE.computed(
            "gauge",
            "slots",
            "slots by pool (kv, window, state) and use (free, private to leases, evictable, protected by leases, "
            "quarantined); the sum over uses is the pool's size",
            _slots,
            "pool",
            "use",
        ),
        is_stacked=True,
    ),
    _panel("Hit rate", "percentunit", Ratio(_REUSED, _REQUESTED)),
    _panel(
        "Hit rate of pools of other sizes",
        "percentunit",
        _CACHE.computed(
            "gauge",
            "ghost_hit_rate",
            "hit rate, 0 to 1, that a pool of `factor` times this size would have had since the start; with "
            "CacheConfig.ghost only",
            _ghost,
            "factor",
        ),
        aggregate="max",
    ),
    _panel(
        "Tokens per second",
        "short",
        _REQUESTED,
        _REUSED,
        _CACHE.counter("tokens_refused"),
        _CACHE.counter("resumed_tokens"),
        _CACHE.counter("resumed_tokens_reused", "resumed_reused_tokens"),
        *_CACHE.counters("tokens_inserted", "tokens_duplicate"),
        _EVICTED,
    ),
    _panel(
        "Slots evicted per second",
        "short",
        _CACHE.computed(
            "counter",
            "evicted_slots",
            "slots evicted by pool (kv, window, state), for any cause, with their pages or alone",
            _evicted,
            "pool",
        ),
        _OF_HOST.evicted,
        _OF_DISK.evicted,
    ),
    _panel(
        "Leases, sessions, models, waiters",
        "short",
        *_CACHE.gauges("open_leases", "open_sessions", "bindings", "waiters"),
    ),
    _panel("Uptime", "s", _CACHE.gauge("uptime_s"), aggregate="max"),
    _panel("Restarts", "short", _CACHE.gauge("restarts"), aggregate="max"),
    _panel("Oldest lease and waiter", "s", *_CACHE.gauges("oldest_lease_s", "oldest_waiter_s"), aggregate="max"),
    _panel(
        "Silent sessions and stale readers",
        "short",
        *_CACHE.gauges("silent_sessions", "stale_readers"),
        aggregate="max",
    ),
    _panel(
        "Tenants",
        "short",
        _CACHE.computed(
            "gauge", "tenant_slots", "slots of a tenant, cached or leased", _tenants("held_slots"), "tenant"
        ),
        _CACHE.computed(
            "counter", "tenant_evicted_tokens", "tokens evicted of a tenant", _tenants("tokens_evicted"), "tenant"
        ),
        increase=True,
    ),
    _panel(
        "Requests per second",
        "reqps",
        *_CACHE.counters("acquires", "hits", "probes", "requests", "batches", "waited", "exhausted", "deadlocks"),
        *_CACHE.counters("grants_expired", "boundary_states_refused"),
        _CACHE.counter("resumed_acquires", "resumed"),
        _CACHE.computed(
            "counter",
            "too_large",
            "acquires that can never fit, refused immediately",
            lambda stats: stats.too_large.requests,
        ),
    ),
    _panel("Refusals per second", "reqps", _CACHE.counter("refusals", label="cause")),
    _panel("Time to the response of an acquire", "s", _CACHE.spread("acquire_latency", "acquire_latency_seconds")),
    _panel("Time to the response of a lock", "s", _CACHE.spread("lock_latency", "lock_latency_seconds")),
    _panel("Time to the response of an insert", "s", _CACHE.spread("insert_latency", "insert_latency_seconds")),
    _panel("Time that requests waited for free slots", "s", _CACHE.spread("wait_time", "wait_seconds")),
    _panel("Batch size", "short", _CACHE.spread("batch_size", "batch_size")),
    _panel("Event loop", "s", _CACHE.gauge("loop_lag_ms"), _TASK.gauge("longest_slice_ms"), aggregate="max"),
    _panel(
        "Background eviction and lost sessions",
        "short",
        _TASK.computed(
            "gauge",
            "task_alive",
            "1 while the background eviction task runs, 0 once it has ended; no value where it is off, and before the "
            "first session starts it",
            _task_alive,
        ),
        *_TASK.counters("rounds", "failures"),
        _CACHE.computed(
            "counter",
            "sessions_lost",
            "sessions that were not closed before their owner ended, or was silent for too long",
            lambda stats: by_label("how", [("died", stats.dead_sessions), ("silent", stats.expired_sessions)]),
            "how",
        ),
        aggregate="min",
        increase=True,
    ),
)

_HOST_PANELS = (
    _panel("Host tier: slots by use", "short", _OF_HOST.slots, is_stacked=True),
    _panel(
        "Host tier: loaded part of the hit rate, dropped part of the evictions",
        "percentunit",
        _OF_HOST.loaded_share,
        Ratio(_OF_HOST.dropped, _EVICTED, "dropped of evicted"),
    ),
    _panel("Host tier: tokens per second", "short", *_OF_HOST.tokens),
    _panel(
        "Host tier: loads and writes by end, per second",
        "ops",
        _HOST.counter("loads", label="end"),
        _OF_HOST.writes,
        _OF_HOST.writes_refused,
        _OF_HOST.states_not_published,
    ),
    _panel(
        "Host tier: bytes per second of copying, and bytes to be copied",
        "bytes",
        _OF_HOST.load_speed,
        Ratio(_OF_HOST.written_bytes, _HOST.counter("write_s"), "speed of writes"),
        _OF_HOST.queued_bytes,
    ),
    _panel(
        "Host tier: state, copies in flight, requests that wait",
        "short",
        _HOST.computed(
            "gauge",
            "ready",
            "1 if the host tier works; 0 while its memory is being reserved, or if it could not be",
            lambda tier: tier.state == "ready",
        ),
        *_HOST.gauges("pinned", "loading_requests"),
        _OF_HOST.moves_in_flight,
        aggregate="max",
    ),
    _panel("Host tier: longest call of a copy", "s", _HOST.gauge("longest_chunk_ms"), aggregate="max"),
)

DISK_FAULTS = (
    _DISK.counter("loads_late", noun="late load"),
    _DISK.counter("stalls", noun="stall"),
    _DISK.counter("failed_reads", noun="failed read"),
    _DISK.counter("damaged_records", noun="damaged record"),
    _DISK.counter("bad_rows", noun="damaged row"),
)
_DISK_PANELS = (
    _panel("Disk: slots by use", "short", _OF_DISK.slots, is_stacked=True),
    _panel(
        "Disk: state",
        "short",
        _DISK.computed(
            "gauge",
            "state",
            f"1 for the state of the disk tier ({', '.join(_DISK_STATES)}), 0 for the others",
            _disk_state,
            "state",
        ),
        aggregate="max",
    ),
    _panel(
        "Disk: loaded part of the hit rate, first uses of all uses",
        "percentunit",
        _OF_DISK.loaded_share,
        Ratio(_DISK.counter("pages_refused"), _DISK.counter("pages_used"), "first uses"),
    ),
    _panel("Disk: tokens per second", "short", *_OF_DISK.tokens),
    _panel(
        "Disk: writes by end, and prefixes that were not written, per second",
        "ops",
        _OF_DISK.writes,
        _DISK.counter("prefixes_dropped", label="cause"),
        _OF_DISK.writes_refused,
    ),
    _panel(
        "Disk: late loads, stalls, damaged records, states without a slot",
        "short",
        *DISK_FAULTS,
        _OF_DISK.states_not_published,
        increase=True,
    ),
    _panel("Disk: bytes per second", "Bps", _OF_DISK.written_bytes, _OF_DISK.loaded_bytes, _OF_DISK.load_speed),
    _panel(
        "Disk: bytes written in the last 24 hours, and bytes to be loaded",
        "bytes",
        _DISK.gauge("written_bytes_day", "day_written_bytes"),
        _OF_DISK.queued_bytes,
    ),
    _panel(
        "Disk: prefixes that wait, moves in flight, spaces",
        "short",
        _OF_DISK.moves_in_flight,
        *_DISK.gauges("due_prefixes", "loads_in_flight", "unbound_namespaces"),
        _DISK.gauge("num_spaces", "spaces"),
        aggregate="max",
    ),
    _panel("Disk: time of a retirement that is not committed", "s", _DISK.gauge("uncommitted_s"), aggregate="max"),
)

PANELS = (*_CACHE_PANELS, *_HOST_PANELS, *_DISK_PANELS)


def _metrics_of(line: Metric | Ratio | Spread) -> tuple[Metric, ...]:
    if isinstance(line, Ratio):
        return line.whole, line.part
    return tuple(line) if isinstance(line, Spread) else (line,)


_LINES = (line for panel in PANELS for line in panel.lines)
METRICS = tuple({metric.name: metric for line in _LINES for metric in _metrics_of(line)}.values())
