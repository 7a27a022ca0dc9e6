"""The table of counters: each field of `CacheStats` that is a metric, with its kind, name and meaning.

Ray's metrics, the dashboard, `raydix stats` and the guide read it. The meaning of a metric is the description of its
field. `make metrics` writes the dashboard and the tables of the guide again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raydix.actors.metrics.metric import Metric, Part, Sample, by_label
from raydix.schemas import (
    CacheStats,
    DiskPoolStats,
    DiskTierStats,
    EvictionTaskStats,
    LowerTierStats,
    PoolStats,
    TierStats,
)

_GHOST_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
_DISK_STATES = ("opening", "reading", "ready", "stalled", "locked", "failed", "closed")
_USES = ("free", "private", "evictable", "protected", "quarantined")
_DISK_USES = ("unread", "dormant", "leaving")


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


def _of_tier(part: Part, more_uses: str = "") -> tuple[Metric, ...]:
    """Return the metrics that host and disk share."""
    uses = f"{part.subject}slots by pool and use, as `ray_raydix_slots`{more_uses}"
    evicted = f"{part.subject}slots evicted by pool, with their pages or alone"
    return (
        part.computed("gauge", "slots", uses, _tier_slots, "pool", "use"),
        part.computed("counter", "evicted_slots", evicted, _tier_evicted, "pool"),
        *part.counters("tokens_loaded", "tokens_dropped", "tokens_loaded_unused", "tokens_written", "tokens_failed"),
        part.counter("writes", label="end"),
        *part.counters("writes_refused", "states_not_published", "loaded_bytes", "load_s", "written_bytes"),
        *part.gauges("moves_in_flight", "queued_bytes"),
    )


_OF_CACHE = (
    _CACHE.computed(
        "gauge",
        "slots",
        "slots by pool (kv, window, state) and use (free, private to leases, evictable, protected by leases, "
        "quarantined); the sum over uses is the pool's size",
        _slots,
        "pool",
        "use",
    ),
    *_CACHE.counters("tokens_requested", "tokens_reused"),
    _CACHE.computed(
        "gauge",
        "ghost_hit_rate",
        "hit rate, 0 to 1, that a pool of `factor` times this size would have had since the start; with "
        "CacheConfig.ghost only",
        _ghost,
        "factor",
    ),
    *_CACHE.counters("tokens_refused", "resumed_tokens"),
    _CACHE.counter("resumed_tokens_reused", "resumed_reused_tokens"),
    *_CACHE.counters("tokens_inserted", "tokens_duplicate", "tokens_evicted"),
    _CACHE.computed(
        "counter",
        "evicted_slots",
        "slots evicted by pool (kv, window, state), for any cause, with their pages or alone",
        _evicted,
        "pool",
    ),
    *_CACHE.gauges("open_leases", "open_sessions", "bindings", "waiters", "uptime_s", "restarts"),
    *_CACHE.gauges("oldest_lease_s", "oldest_waiter_s", "silent_sessions", "stale_readers"),
    _CACHE.computed("gauge", "tenant_slots", "slots of a tenant, cached or leased", _tenants("held_slots"), "tenant"),
    _CACHE.computed(
        "counter", "tenant_evicted_tokens", "tokens evicted of a tenant", _tenants("tokens_evicted"), "tenant"
    ),
    *_CACHE.counters("acquires", "hits", "probes", "requests", "batches", "waited", "exhausted", "deadlocks"),
    *_CACHE.counters("grants_expired", "boundary_states_refused"),
    _CACHE.counter("resumed_acquires", "resumed"),
    _CACHE.computed(
        "counter",
        "too_large",
        "acquires that can never fit, refused immediately",
        lambda stats: stats.too_large.requests,
    ),
    _CACHE.counter("refusals", label="cause"),
    *_CACHE.spread("acquire_latency", "acquire_latency_seconds"),
    *_CACHE.spread("lock_latency", "lock_latency_seconds"),
    *_CACHE.spread("insert_latency", "insert_latency_seconds"),
    *_CACHE.spread("wait_time", "wait_seconds"),
    *_CACHE.spread("batch_size", "batch_size"),
    _CACHE.gauge("loop_lag_ms"),
    _TASK.gauge("longest_slice_ms"),
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
)

_OF_HOST = (
    *_of_tier(_HOST),
    _HOST.counter("loads", label="end"),
    _HOST.counter("write_s"),
    _HOST.computed(
        "gauge",
        "ready",
        "1 if the host tier works; 0 while its memory is being reserved, or if it could not be",
        lambda tier: tier.state == "ready",
    ),
    *_HOST.gauges("pinned", "loading_requests", "longest_chunk_ms"),
)

DISK_FAULTS = (
    _DISK.counter("loads_late", noun="late load"),
    _DISK.counter("stalls", noun="stall"),
    _DISK.counter("failed_reads", noun="failed read"),
    _DISK.counter("damaged_records", noun="damaged record"),
    _DISK.counter("bad_rows", noun="damaged row"),
)
_OF_DISK = (
    *_of_tier(_DISK, ", and unread, dormant and leaving ones"),
    _DISK.computed(
        "gauge",
        "state",
        f"1 for the state of the disk tier ({', '.join(_DISK_STATES)}), 0 for the others",
        _disk_state,
        "state",
    ),
    *_DISK.counters("pages_used", "pages_refused"),
    _DISK.counter("prefixes_dropped", label="cause"),
    *DISK_FAULTS,
    _DISK.gauge("written_bytes_day", "day_written_bytes"),
    *_DISK.gauges("due_prefixes", "loads_in_flight", "unbound_namespaces"),
    _DISK.gauge("num_spaces", "spaces"),
    _DISK.gauge("uncommitted_s"),
)

METRICS = (*_OF_CACHE, *_OF_HOST, *_OF_DISK)
