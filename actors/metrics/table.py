"""The metrics of a cache: name, meaning, and the field of `CacheStats` that each one reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from raydix.actors.metrics.distribution import ACQUIRE_S, BATCH_SIZES, WAIT_S
from raydix.schemas import CacheStats, DiskPoolStats, DiskTierStats, Histogram, PoolStats, TierStats

Labels = tuple[tuple[str, str], ...]
Sample = tuple[Labels, float]
_Tier = Literal["host", "disk"]

GHOST_FACTORS = (0.5, 1.0, 2.0, 4.0, 8.0)
EXPORTED_PREFIX = "ray_"  # Ray prefixes every name with it
BUCKETS = {
    "raydix_acquire_latency_seconds": ACQUIRE_S,
    "raydix_lock_latency_seconds": ACQUIRE_S,
    "raydix_insert_latency_seconds": ACQUIRE_S,
    "raydix_wait_seconds": WAIT_S,
    "raydix_batch_size": BATCH_SIZES,
}
_USES = ("free", "private", "evictable", "protected", "quarantined")
_DISK_USES = ("unread", "dormant", "leaving")
DISK_STATES = ("opening", "reading", "ready", "stalled", "locked", "failed", "closed")


class Metric(NamedTuple):
    """One metric: a gauge has the current value, a counter rises from the start of the cache."""

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    read: Callable[[CacheStats], Iterator[Sample]]
    labels: tuple[str, ...] = ()  # all labels but `cache`

    @property
    def exported_name(self) -> str:
        """The name in Prometheus."""
        return EXPORTED_PREFIX + self.name


def _field(name: str) -> Callable[[CacheStats], Iterator[Sample]]:
    def read(stats: CacheStats) -> Iterator[Sample]:
        yield (), float(getattr(stats, name))

    return read


def _of_task(name: str, scale: float = 1.0) -> Callable[[CacheStats], Iterator[Sample]]:
    def read(stats: CacheStats) -> Iterator[Sample]:
        yield (), scale * float(getattr(stats.eviction_task, name))

    return read


def _slots(stats: CacheStats) -> Iterator[Sample]:
    yield from _by_use(stats, stats.swa, stats.state)


def _by_use(kv: CacheStats | PoolStats, window: PoolStats | None, state: PoolStats | None) -> Iterator[Sample]:
    for name, pool in (("kv", kv), ("window", window), ("state", state)):
        if pool is not None:
            for use in (*_USES, *_DISK_USES) if isinstance(pool, DiskPoolStats) else _USES:
                yield (("pool", name), ("use", use)), float(getattr(pool, f"{use}_slots"))


def _evicted(stats: CacheStats) -> Iterator[Sample]:
    yield (("pool", "kv"),), float(stats.tokens_evicted)
    yield from _evicted_of(("window", stats.swa), ("state", stats.state))


def _evicted_of(*pools: tuple[str, PoolStats | None]) -> Iterator[Sample]:
    for name, pool in pools:
        if pool is not None:
            yield (("pool", name),), float(pool.evicted)


def _of_tier(tier: _Tier, read: Callable[[Any], Iterator[Sample]]) -> Callable[[CacheStats], Iterator[Sample]]:
    """Return what `read` yields of a tier below the pool; nothing for a cache without it."""

    def of_cache(stats: CacheStats) -> Iterator[Sample]:
        if (part := getattr(stats, tier)) is not None:
            yield from read(part)

    return of_cache


def _tier_field(tier: _Tier, name: str, scale: float = 1.0) -> Callable[[CacheStats], Iterator[Sample]]:
    def read(part: TierStats | DiskTierStats) -> Iterator[Sample]:
        yield (), scale * float(getattr(part, name))

    return _of_tier(tier, read)


def _tier_slots(tier: _Tier) -> Callable[[CacheStats], Iterator[Sample]]:
    def read(part: TierStats | DiskTierStats) -> Iterator[Sample]:
        yield from _by_use(part.slots, part.swa, part.states)

    return _of_tier(tier, read)


def _tier_evicted(tier: _Tier) -> Callable[[CacheStats], Iterator[Sample]]:
    def read(part: TierStats | DiskTierStats) -> Iterator[Sample]:
        yield from _evicted_of(("kv", part.slots), ("window", part.swa), ("state", part.states))

    return _of_tier(tier, read)


def _tier_counts(tier: _Tier, field: str, label: str) -> Callable[[CacheStats], Iterator[Sample]]:
    """Return the metric of a dictionary of counts, by the label."""

    def read(part: TierStats | DiskTierStats) -> Iterator[Sample]:
        for name, number in getattr(part, field).items():
            yield ((label, name),), float(number)

    return _of_tier(tier, read)


def _host_ready(tier: TierStats) -> Iterator[Sample]:
    yield (), float(tier.state == "ready")


def _disk_state(disk: DiskTierStats) -> Iterator[Sample]:
    found = disk.state.split()[0].rstrip(":")
    for state in DISK_STATES:
        yield (("state", state),), float(state == found)


def _host_metrics() -> tuple[Metric, ...]:
    """Return the metrics of the tier in host memory. A cache without one has no values of them."""
    gauges = (
        ("pinned", "1 if the memory of the host tier is registered with CUDA", "pinned", 1.0),
        ("loading_requests", "requests that wait for a load from the host tier", "loading_requests", 1.0),
        ("moves_in_flight", "copies between the pool and the host tier that have not ended", "moves_in_flight", 1.0),
        ("queued_bytes", "bytes that these copies have still to copy", "queued_bytes", 1.0),
        ("longest_chunk_seconds", "longest time of one call of a copy", "longest_chunk_ms", 0.001),
    )
    counters = (
        ("loaded_tokens", "of the reused tokens, those that were loaded from the host tier", "tokens_loaded"),
        (
            "loaded_unused_tokens",
            "tokens that were loaded for no lease: prefetched, or too late",
            "tokens_loaded_unused",
        ),
        ("written_tokens", "tokens that were written to the host tier, and were not there before", "tokens_written"),
        ("dropped_tokens", "tokens evicted from the pool before they were written to the host tier", "tokens_dropped"),
        ("failed_tokens", "tokens of copies that failed, were late, or were cancelled", "tokens_failed"),
        ("writes_refused", "writes for which the host tier had no room", "writes_refused"),
        ("states_not_published", "loaded states for which the pool had no second slot", "states_not_published"),
        ("loaded_bytes", "bytes copied from the host tier", "loaded_bytes"),
        ("written_bytes", "bytes copied to the host tier", "written_bytes"),
        ("load_seconds", "time of copies from the host tier", "load_s"),
        ("write_seconds", "time of copies to the host tier", "write_s"),
    )
    return (
        Metric(
            "raydix_host_slots",
            "gauge",
            "slots of the host tier by pool and use, as `ray_raydix_slots`; as all metrics of the host tier, of caches "
            "with CacheConfig.host alone",
            _tier_slots("host"),
            ("pool", "use"),
        ),
        Metric(
            "raydix_host_ready",
            "gauge",
            "1 if the host tier works; 0 while its memory is being reserved, or if it could not be",
            _of_tier("host", _host_ready),
        ),
        *(
            Metric(f"raydix_host_{name}", "gauge", meaning, _tier_field("host", field, scale))
            for name, meaning, field, scale in gauges
        ),
        Metric(
            "raydix_host_evicted_slots_total",
            "counter",
            "slots evicted from the host tier by pool, with their pages or alone",
            _tier_evicted("host"),
            ("pool",),
        ),
        Metric(
            "raydix_host_loads_total",
            "counter",
            "loads from the host tier by end (whole, cancelled, late, failed, closed)",
            _tier_counts("host", "loads", "end"),
            ("end",),
        ),
        Metric(
            "raydix_host_writes_total",
            "counter",
            "batches of writes to the host tier by end, as loads",
            _tier_counts("host", "writes", "end"),
            ("end",),
        ),
        *(
            Metric(f"raydix_host_{name}_total", "counter", meaning, _tier_field("host", field))
            for name, meaning, field in counters
        ),
    )


def _disk_metrics() -> tuple[Metric, ...]:
    """Return the metrics of the tier on a local disk. A cache without one has no values of them."""
    gauges = (
        ("spaces", "namespaces on the disk, each with the models that computed its KV", "num_spaces"),
        (
            "unbound_namespaces",
            "of the last 64 namespaces in which KV was published, those without a bound model: nothing is kept of them",
            "unbound_namespaces",
        ),
        ("due_prefixes", "prefixes that wait to be written to the disk", "due_prefixes"),
        ("moves_in_flight", "writes to the disk and loads from it that have not ended", "moves_in_flight"),
        ("loads_in_flight", "of these, the loads", "loads_in_flight"),
        ("queued_bytes", "bytes that loads have still to read", "queued_bytes"),
        ("day_written_bytes", "bytes of records written in the last 24 hours", "written_bytes_day"),
        (
            "uncommitted_seconds",
            "time since a retirement began that the disk has not committed yet; 0: there is none",
            "uncommitted_s",
        ),
    )
    counters = (
        ("used_pages", "uses of pages by requests, in whatever tier they lay", "pages_used"),
        ("refused_pages", "of these, the first uses, after which a page is not written", "pages_refused"),
        ("loaded_tokens", "of the reused tokens, those that were loaded from the disk", "tokens_loaded"),
        ("loaded_unused_tokens", "tokens loaded for no lease: prefetched, or too late", "tokens_loaded_unused"),
        ("written_tokens", "tokens that were written to the disk, and were not there before", "tokens_written"),
        ("dropped_tokens", "tokens evicted from memory unwritten, with admit=all", "tokens_dropped"),
        ("failed_tokens", "tokens of writes and loads that failed, were late, or were cancelled", "tokens_failed"),
        ("writes_refused", "writes for which the disk had no free records", "writes_refused"),
        ("states_not_published", "loaded states for which the pool had no second slot", "states_not_published"),
        ("loaded_bytes", "bytes read from the disk", "loaded_bytes"),
        ("written_bytes", "bytes of records written to the disk, with their padding", "written_bytes"),
        ("load_seconds", "time of reads from the disk", "load_s"),
        ("loads_late", "loads that took longer than their time limit", "loads_late"),
        ("stalls", "times that nothing was loaded for 30 s: a read did not return in time, or all failed", "stalls"),
        ("failed_reads", "reads of records that failed", "failed_reads"),
        ("bad_rows", "damaged rows of the index, which were dropped", "bad_rows"),
        ("damaged_records", "records that had not the sum of their page, and were dropped", "damaged_records"),
    )
    return (
        Metric(
            "raydix_disk_slots",
            "gauge",
            "slots of the disk by pool and use, as `ray_raydix_slots`, and unread, dormant and leaving ones; as all "
            "metrics of the disk, of caches with CacheConfig.disk alone",
            _tier_slots("disk"),
            ("pool", "use"),
        ),
        Metric(
            "raydix_disk_state",
            "gauge",
            f"1 for the state of the disk tier ({', '.join(DISK_STATES)}), 0 for the others",
            _of_tier("disk", _disk_state),
            ("state",),
        ),
        *(
            Metric(f"raydix_disk_{name}", "gauge", meaning, _tier_field("disk", field))
            for name, meaning, field in gauges
        ),
        Metric(
            "raydix_disk_evicted_slots_total",
            "counter",
            "slots evicted from the disk by pool, with their pages or alone",
            _tier_evicted("disk"),
            ("pool",),
        ),
        Metric(
            "raydix_disk_writes_total",
            "counter",
            "batches of writes to the disk by end (committed, failed)",
            _tier_counts("disk", "writes", "end"),
            ("end",),
        ),
        Metric(
            "raydix_disk_dropped_prefixes_total",
            "counter",
            "prefixes that were due and were not written, by cause (queue_full: too many waited; left_memory: they "
            "were evicted before their turn; no_room: the disk had no free records)",
            _tier_counts("disk", "prefixes_dropped", "cause"),
            ("cause",),
        ),
        *(
            Metric(f"raydix_disk_{name}_total", "counter", meaning, _tier_field("disk", field))
            for name, meaning, field in counters
        ),
    )


def _histogram(name: str, field: str, meaning: str) -> tuple[Metric, ...]:
    """Return the three series of a Prometheus histogram, as gauges.

    Ray's histograms take one value at a time and export sums of bucket middles. Gauges can be set to existing counts.
    Unlike Ray's counters, they also export empty buckets.
    """

    def buckets(stats: CacheStats) -> Iterator[Sample]:
        histogram: Histogram = getattr(stats, field)
        bounds = (*(f"{bound:g}" for bound in histogram.bounds), "+Inf")
        for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
            yield (("le", bound),), float(count)

    def part(of: str) -> Callable[[CacheStats], Iterator[Sample]]:
        def read(stats: CacheStats) -> Iterator[Sample]:
            yield (), float(getattr(getattr(stats, field), of))

        return read

    return (
        Metric(f"{name}_bucket", "gauge", f"{meaning}: how many were at most `le`", buckets, ("le",)),
        Metric(f"{name}_sum", "gauge", f"{meaning}: their sum", part("sum")),
        Metric(f"{name}_count", "gauge", f"{meaning}: how many there were", part("count")),
    )


def _sessions_lost(stats: CacheStats) -> Iterator[Sample]:
    yield (("how", "died"),), float(stats.dead_sessions)
    yield (("how", "silent"),), float(stats.expired_sessions)


def _loop_lag(stats: CacheStats) -> Iterator[Sample]:
    yield (), stats.loop_lag_ms / 1000


def _too_large(stats: CacheStats) -> Iterator[Sample]:
    yield (), float(stats.too_large.requests)


def _tenants(name: str) -> Callable[[CacheStats], Iterator[Sample]]:
    def read(stats: CacheStats) -> Iterator[Sample]:
        for tenant in stats.tenants:
            yield (("tenant", tenant.name or "others"),), float(getattr(tenant, name))

    return read


def _refusals(stats: CacheStats) -> Iterator[Sample]:
    for cause, number in stats.refusals.items():
        yield (("cause", cause),), float(number)


def _task_alive(stats: CacheStats) -> Iterator[Sample]:
    if stats.eviction_task.enabled and stats.eviction_task.started:
        yield (), float(stats.eviction_task.alive)


def _ghost(stats: CacheStats) -> Iterator[Sample]:
    if (ghost := stats.ghost) is None:
        return
    for factor in GHOST_FACTORS:
        size = factor * stats.num_slots
        if ghost.num_slots[0] <= size <= ghost.num_slots[-1]:
            yield (("factor", f"{factor:g}"),), ghost.hit_rate_at(size)


METRICS = (
    Metric(
        "raydix_slots",
        "gauge",
        "slots by pool (kv, window, state) and use (free, private to leases, evictable, protected by leases, "
        "quarantined); the sum over uses is the pool's size",
        _slots,
        ("pool", "use"),
    ),
    Metric("raydix_uptime_seconds", "gauge", "time since the cache's process began", _field("uptime_s")),
    Metric("raydix_restarts", "gauge", "times that Ray restarted the cache, empty", _field("restarts")),
    Metric("raydix_open_leases", "gauge", "leases that are open", _field("open_leases")),
    Metric(
        "raydix_oldest_lease_seconds",
        "gauge",
        "age of the oldest open lease; 0 without leases",
        _field("oldest_lease_s"),
    ),
    Metric(
        "raydix_tenant_slots",
        "gauge",
        "slots that a tenant holds, cached or leased",
        _tenants("held_slots"),
        ("tenant",),
    ),
    Metric("raydix_open_sessions", "gauge", "clients with an open session", _field("open_sessions")),
    Metric(
        "raydix_silent_sessions",
        "gauge",
        "clients that sent nothing for more than half of `session_ttl_s`, until they come back or no longer withhold "
        "slots",
        _field("silent_sessions"),
    ),
    Metric(
        "raydix_bindings",
        "gauge",
        "`lora_id`s, the base model included, with a model bound to them",
        _field("bindings"),
    ),
    Metric("raydix_waiters", "gauge", "acquires and extends that wait for free slots", _field("waiters")),
    Metric(
        "raydix_oldest_waiter_seconds",
        "gauge",
        "time that the longest of them has waited so far; 0 without waiters",
        _field("oldest_waiter_s"),
    ),
    Metric(
        "raydix_stale_readers",
        "gauge",
        "readers of events, such as routers, that lack events of more than ten seconds ago; a reader that has not "
        "asked for ten minutes has stopped, and is not counted",
        _field("stale_readers"),
    ),
    Metric("raydix_loop_lag_seconds", "gauge", "longest delay of the event loop within the last 5 to 10 s", _loop_lag),
    Metric(
        "raydix_eviction_task_alive",
        "gauge",
        "1 while the background eviction task runs, 0 once it has ended; no value where it is off, and before the "
        "first session starts it",
        _task_alive,
    ),
    Metric(
        "raydix_eviction_longest_slice_seconds",
        "gauge",
        "most of the processor's time that background eviction took while it held the event loop",
        _of_task("longest_slice_ms", 0.001),
    ),
    Metric(
        "raydix_ghost_hit_rate",
        "gauge",
        "hit rate, 0 to 1, that a pool of `factor` times this size would have had since the start; with "
        "CacheConfig.ghost only",
        _ghost,
        ("factor",),
    ),
    *_histogram(
        "raydix_acquire_latency_seconds",
        "acquire_latency",
        "time from the arrival of an `acquire` at the cache to its answer, granted or refused, waits included",
    ),
    *_histogram(
        "raydix_lock_latency_seconds",
        "lock_latency",
        "time from the arrival of a `lock`, an engine's look-up, at the cache to its answer, granted or refused",
    ),
    *_histogram(
        "raydix_insert_latency_seconds",
        "insert_latency",
        "time from the arrival of an `insert` at the cache to its answer, published or refused",
    ),
    *_histogram(
        "raydix_wait_seconds", "wait_time", "time that an acquire or extend waited for free slots, granted or refused"
    ),
    *_histogram("raydix_batch_size", "batch_size", "messages of a batch"),
    Metric(
        "raydix_waited_total",
        "counter",
        "acquires and extends that found too few free slots, and waited",
        _field("waited"),
    ),
    Metric("raydix_acquires_total", "counter", "requests granted by acquire or lock, a lease each", _field("acquires")),
    Metric("raydix_hits_total", "counter", "of those, the ones that found a prefix", _field("hits")),
    Metric(
        "raydix_requested_tokens_total",
        "counter",
        "prompt tokens of granted requests",
        _field("tokens_requested"),
    ),
    Metric("raydix_reused_tokens_total", "counter", "of those, the tokens with cached KV", _field("tokens_reused")),
    Metric(
        "raydix_resumed_total",
        "counter",
        "leases granted to requests that had been preempted",
        _field("resumed_acquires"),
    ),
    Metric("raydix_resumed_tokens_total", "counter", "tokens of these requests", _field("resumed_tokens")),
    Metric(
        "raydix_resumed_reused_tokens_total",
        "counter",
        "of those, the tokens with cached KV",
        _field("resumed_tokens_reused"),
    ),
    Metric(
        "raydix_boundary_states_refused_total",
        "counter",
        "leases that were to have a second state slot, and were granted without",
        _field("boundary_states_refused"),
    ),
    Metric("raydix_inserted_tokens_total", "counter", "tokens published", _field("tokens_inserted")),
    Metric("raydix_duplicate_tokens_total", "counter", "tokens computed twice", _field("tokens_duplicate")),
    Metric("raydix_evicted_tokens_total", "counter", "tokens evicted, for any cause", _field("tokens_evicted")),
    Metric(
        "raydix_evicted_slots_total",
        "counter",
        "slots evicted by pool (kv, window, state), for any cause, with their pages or alone",
        _evicted,
        ("pool",),
    ),
    Metric(
        "raydix_tenant_evicted_tokens_total",
        "counter",
        "tokens evicted of a tenant",
        _tenants("tokens_evicted"),
        ("tenant",),
    ),
    Metric(
        "raydix_refusals_total",
        "counter",
        "refused requests by cause, the causes of `CacheStats.refusals`",
        _refusals,
        ("cause",),
    ),
    Metric("raydix_exhausted_total", "counter", "acquires and extends refused for lack of slots", _field("exhausted")),
    Metric("raydix_refused_tokens_total", "counter", "prompt tokens of refused acquires", _field("tokens_refused")),
    Metric("raydix_too_large_total", "counter", "acquires that can never fit, refused immediately", _too_large),
    Metric(
        "raydix_deadlocks_total",
        "counter",
        "extends refused because all leases of the pool, or of a share, wait in extend",
        _field("deadlocks"),
    ),
    Metric(
        "raydix_grants_expired_total",
        "counter",
        "granted leases that ended because they were not adopted in time",
        _field("grants_expired"),
    ),
    Metric("raydix_probes_total", "counter", "match calls", _field("probes")),
    Metric("raydix_batches_total", "counter", "batches of messages executed", _field("batches")),
    Metric(
        "raydix_requests_total",
        "counter",
        "messages in those batches",
        _field("requests"),
    ),
    Metric(
        "raydix_sessions_lost_total",
        "counter",
        "sessions that were not closed before their owner ended, or was silent for too long",
        _sessions_lost,
        ("how",),
    ),
    Metric("raydix_eviction_rounds_total", "counter", "rounds of background eviction", _of_task("rounds")),
    Metric("raydix_eviction_failures_total", "counter", "rounds that failed; the task went on", _of_task("failures")),
    *_host_metrics(),
    *_disk_metrics(),
)


def markdown() -> str:
    """Return the table of metrics in `examples/metrics.md`."""
    head = "| metric | kind | labels besides `cache` | meaning |\n|---|---|---|---|\n"
    rows = []
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.exported_name}` | {metric.kind} | {labels} | {metric.meaning} |")
    return head + "\n".join(rows) + "\n" + _bucket_table()


def _bucket_table() -> str:
    rows = "\n".join(
        f"| `{EXPORTED_PREFIX}{name}` | {', '.join(f'{bound:g}' for bound in bounds)}, +Inf |"
        for name, bounds in BUCKETS.items()
    )
    return f"\n| histogram | `le` |\n|---|---|\n{rows}\n"
