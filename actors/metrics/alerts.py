"""Alerts on the metrics of caches and engines, as rules for Prometheus.

Ray exports a gauge for two of its report intervals, 20 s by default, after a process has last set it; releases before
2.60 leave gaps between two reports. So a rule reads the newest value of the last two minutes. A restart changes the
label `WorkerId`, so a rule aggregates over it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import yaml

_NEWEST_S, _RATE_S = 120.0, 300.0
_KNOWN_S = 900.0  # a cache that is gone is looked for so long, and a restart is reported so long
_QUARANTINE_S = 600.0
_DAMAGE_S = 3600.0  # damaged records are reported so long
_NORMAL_REFUSALS = "no_wait|draining"  # a router asks without waiting, and a cache that shuts down refuses
_HEAD = """\
# Alerts on Raydix caches and on engines that use them: raydix dashboard --alerts. Thresholds are for most workloads:
# change them where yours is different. Prometheus reads this file under `rule_files`.
"""


class Alert(NamedTuple):
    """One rule."""

    name: str
    expression: str  # PromQL
    for_s: float  # time for which it must hold
    severity: Literal["critical", "warning"]
    summary: str  # a template of Prometheus
    remedy: str


def _time(seconds: float) -> str:
    """Return a duration as PromQL has it."""
    if seconds and seconds % 60 == 0:
        return f"{seconds / 60:.0f}m"
    return f"{seconds:.0f}s" if seconds % 1 == 0 else f"{1000 * seconds:.0f}ms"


class _Queries:
    """Parts of expressions, with their windows scaled."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def window(self, seconds: float) -> str:
        """Return a window of a range."""
        return f"[{_time(self.scale * seconds)}]"

    def newest(self, name: str, aggregate: str = "max", seconds: float = _NEWEST_S) -> str:
        """Return the newest value of a gauge of each cache."""
        return f"{aggregate} by (cache) (last_over_time(ray_raydix_{name}{self.window(seconds)}))"

    def offset(self, seconds: float) -> str:
        """Return the offset of a query of earlier values."""
        return f"offset {_time(self.scale * seconds)}"

    def engine_rate(self, name: str) -> str:
        """Return the events a second of each model's engines, which export them by Ray or by themselves."""
        series = f'{{__name__=~"(ray_vllm_|vllm:)raydix_{name}_total"}}{self.window(_RATE_S)}'
        return f"sum by (model_name) (rate({series}))"


def _of_caches(query: _Queries) -> Iterator[Alert]:
    uptime, quarantined = "uptime_seconds", 'ray_raydix_slots{use="quarantined"}' + query.window(_QUARANTINE_S)
    refusals = f'ray_raydix_refusals_total{{cause!~"{_NORMAL_REFUSALS}"}}{query.window(_RATE_S)}'
    yield Alert(
        "RaydixCacheSilent",
        f"{query.newest(uptime, seconds=_KNOWN_S)} unless {query.newest(uptime)}",
        60,
        "critical",
        "Cache {{ $labels.cache }} has published no metrics for two minutes",
        "Run `raydix list`. `silent`: its process hangs or its node is lost; look there, or `raydix stop NAME` and "
        "start it again. `ended`: start it again. A cache that was stopped on purpose needs nothing.",
    )
    yield Alert(
        "RaydixEvictionTaskEnded",
        f"{query.newest('eviction_task_alive', 'min')} == 0",
        60,
        "critical",
        "The eviction task of cache {{ $labels.cache }} has ended, so requests evict",
        "It is a fault in Raydix. Keep the log, run `raydix check NAME`, start the cache again and report both.",
    )
    yield Alert(
        "RaydixCacheRestarted",
        f"{query.newest('restarts')} > 0 and {query.newest(uptime, 'min')} < {query.scale * _KNOWN_S:g}",
        0,
        "warning",
        "Ray has restarted cache {{ $labels.cache }}, empty, the last time less than 15 minutes ago",
        "`raydix doctor` and `raydix stats NAME` name the cause. If Ray's memory monitor has killed it: fewer slots, "
        "or fewer processes on its node.",
    )
    yield Alert(
        "RaydixOldestWaiter",
        f"{query.newest('oldest_waiter_seconds')} > 10",
        60,
        "warning",
        "A request waits for slots of cache {{ $labels.cache }} for {{ $value | humanizeDuration }}",
        "`raydix stats NAME` names the owners of the slots. Release leases sooner, enlarge the pool, or give tenants "
        "caps.",
    )
    yield Alert(
        "RaydixOldestLease",
        f"{query.newest('oldest_lease_seconds')} > 600",
        300,
        "warning",
        "A lease of cache {{ $labels.cache }} is open for {{ $value | humanizeDuration }}",
        "A request hangs, or its lease was never ended. `raydix stats NAME` names the owner. Where requests take that "
        "long, raise this threshold.",
    )
    yield Alert(
        "RaydixRefusals",
        f"sum by (cache, cause) (rate({refusals})) > 0.1",
        120,
        "warning",
        "Cache {{ $labels.cache }} refuses {{ printf `%.2g` $value }} requests a second: {{ $labels.cause }}",
        "Slots are missing: enlarge the pool, release leases sooner, or wait longer (`timeout_s`). never_fits, "
        "invalid_request, model_mismatch: the client's log names its mistake. internal_error: report it with the "
        "cache's log.",
    )
    yield Alert(
        "RaydixLoopLag",
        f"{query.newest('loop_lag_seconds')} > 0.1",
        300,
        "warning",
        "The event loop of cache {{ $labels.cache }} is late by {{ $value | humanizeDuration }}",
        "Its process does not get a core: start Ray with one CPU fewer on its node, set RAY_worker_niceness=0, and "
        "map the pool where workers can.",
    )
    yield Alert(
        "RaydixSilentSessions",
        f"{query.newest('silent_sessions')} > 0",
        60,
        "warning",
        "Clients of cache {{ $labels.cache }} have sent nothing for half of session_ttl_s or longer: {{ $value }}",
        "Their event loop is blocked: move forward passes to a thread. Or their process or node is lost: read its log.",
    )
    yield Alert(
        "RaydixQuarantine",
        f"max by (cache, pool) (min_over_time({quarantined})) > 0 and max by (cache, pool) (delta({quarantined})) >= 0",
        300,
        "warning",
        "Slots of cache {{ $labels.cache }}, pool {{ $labels.pool }}, stay in quarantine: {{ $value }}",
        "Clients vanish as fast as their slots return, or their processes stand still, and may yet write them: the "
        "cache's log names each process. End those. Slots of processes that it does not see return after "
        "quarantine_grace_s.",
    )
    yield Alert(
        "RaydixStaleReaders",
        f"{query.newest('stale_readers')} > 0",
        60,
        "warning",
        "Readers of the events of cache {{ $labels.cache }}, such as routers, are ten seconds behind: {{ $value }}",
        "A router that is behind sends requests to the wrong cache: look for a busy or blocked event loop in the "
        "processes of routers and of `raydix export-events`, and restart them.",
    )


def _of_host_tiers(query: _Queries) -> Iterator[Alert]:
    rate = query.window(_RATE_S)
    dropped, evicted = (
        f"sum by (cache) (rate(ray_raydix_{name}_tokens_total{rate}))" for name in ("host_dropped", "evicted")
    )
    loads, whole = (
        f"sum by (cache) (rate(ray_raydix_host_loads_total{ends}{rate}))" for ends in ('{end=~"late|failed"}', "")
    )
    yield Alert(
        "RaydixHostTierNotReady",
        f"{query.newest('host_ready', 'min')} == 0",
        300,
        "warning",
        "Cache {{ $labels.cache }} has served for five minutes without its host tier",
        "`raydix stats NAME` says why. `reserving` for minutes: the node is short of memory or of cores. Memory that "
        "could not be reserved: lower host.num_slots, or run fewer other processes on the node.",
    )
    yield Alert(
        "RaydixHostTierDrops",
        f"{dropped} / {evicted} > 0.2",
        600,
        "warning",
        "Of the tokens that cache {{ $labels.cache }} evicts, {{ $value | humanizePercentage }} were not written to "
        "its host tier before",
        "Requests take slots faster than the background task writes KV: raise host.reserve, lower "
        "eviction.low_watermark, raise or remove host.write_mib_s, or enlarge the pool.",
    )
    yield Alert(
        "RaydixHostTierLoads",
        f"{loads} / {whole} > 0.1",
        300,
        "warning",
        "Of the loads from the host tier of cache {{ $labels.cache }}, {{ $value | humanizePercentage }} are late or "
        "fail",
        "Their requests compute the KV. Late: raise host.load_timeout_s, or look for other work on the node's memory "
        "and cores. Failed: the cache's log has the cause.",
    )


def _of_disks(query: _Queries) -> Iterator[Alert]:
    state, rate, newest = "ray_raydix_disk_state", query.window(_RATE_S), query.window(_NEWEST_S)
    damaged = "ray_raydix_disk_damaged_records_total" + newest
    known = f"max by (cache) (last_over_time({damaged} {query.offset(_DAMAGE_S)}))"
    yield Alert(
        "RaydixDiskNotReady",
        f'max by (cache, state) (last_over_time({state}{{state=~"opening|locked|failed|closed"}}{newest})) == 1',
        300,
        "warning",
        "Cache {{ $labels.cache }} has served for five minutes without its disk: {{ $labels.state }}",
        "`raydix stats NAME` has the cause, and so does the cache's log. locked: end the process that it names, or "
        "give this cache another disk.path. failed: mend the disk or its path, and start the cache again.",
    )
    yield Alert(
        "RaydixDiskStalled",
        f'max by (cache) (max_over_time({state}{{state="stalled"}}{rate})) == 1',
        0,
        "warning",
        "The disk of cache {{ $labels.cache }} did not answer within the last five minutes",
        "Its requests compute the KV, and nothing is loaded for 30 s. Look for the disk in the kernel's log, and for "
        "other processes that use it.",
    )
    yield Alert(
        "RaydixDiskDrops",
        f"sum by (cache, cause) (rate(ray_raydix_disk_dropped_prefixes_total{rate})) > 0.1",
        600,
        "warning",
        "Cache {{ $labels.cache }} does not write {{ printf `%.2g` $value }} prefixes a second to its disk: "
        "{{ $labels.cause }}",
        "They are missing after a restart. queue_full, left_memory: the disk is written more slowly than prefixes "
        "come back: raise disk.write_mib_s, or enlarge the tier above. no_room: enlarge the disk.",
    )
    yield Alert(
        "RaydixDiskWritesFail",
        f'sum by (cache) (rate(ray_raydix_disk_writes_total{{end="failed"}}{rate})) > 0',
        60,
        "warning",
        "Cache {{ $labels.cache }} fails {{ printf `%.2g` $value }} writes a second to its disk",
        "`raydix stats NAME` has the last error. Free space on the disk, or replace it. The cache tries again.",
    )
    yield Alert(
        "RaydixDiskDamaged",
        f"max by (cache) (last_over_time({damaged})) > 0 unless max by (cache) (last_over_time({damaged})) <= {known}",
        0,
        "warning",
        "The disk of cache {{ $labels.cache }} has returned damaged records, {{ $value }} so far",
        "They were dropped, and nothing of them was used. A few come from a crash during a write. More of them: "
        "replace the disk.",
    )
    yield Alert(
        "RaydixDiskUncommitted",
        f"{query.newest('disk_uncommitted_seconds')} > 10",
        60,
        "critical",
        "The disk of cache {{ $labels.cache }} has not committed a retirement for {{ $value | humanizeDuration }}",
        "A restart now may bring retired KV back for sessions that bind equal fingerprints. The cache's log has the "
        "cause: mend the disk. Else clear it before you start the cache again (raydix disk clear PATH).",
    )


def _of_engines(query: _Queries) -> Iterator[Alert]:
    yield Alert(
        "RaydixLookupTimeouts",
        f"{query.engine_rate('lookup_timeouts')} > 0.1",
        300,
        "warning",
        "Engines of {{ $labels.model_name }} get no answer in time to {{ printf `%.2g` $value }} look-ups a second",
        "Each is a miss. If the cache's loop lags, mend that first; else raise lookup_timeout_ms of the connector.",
    )
    yield Alert(
        "RaydixLoadFailures",
        f"{query.engine_rate('load_failures')} > 0",
        60,
        "warning",
        "Engines of {{ $labels.model_name }} fail {{ printf `%.2g` $value }} loads a second and compute the KV again",
        "The engine's log has the cause: the cache was restarted, or its pool cannot be mapped any more.",
    )
    yield Alert(
        "RaydixDetachedEngines",
        f"{query.engine_rate('detached_requests')} > 0",
        120,
        "warning",
        "Engines of {{ $labels.model_name }} serve {{ printf `%.2g` $value }} requests a second without the cache",
        "They are detached, or behind the cache's weights: the engine's log says why. Give the engine the cache's "
        "weights, or name new ones: `raydix weights NAME LABEL`.",
    )


def alerts(scale: float = 1.0) -> tuple[Alert, ...]:
    """Return the rules.

    Args:
        scale: factor of all windows and of the times for which expressions must hold; tests wait for less than 1.
    """
    query = _Queries(scale)
    return (*_of_caches(query), *_of_host_tiers(query), *_of_disks(query), *_of_engines(query))


def rules(scale: float = 1.0) -> dict[str, Any]:
    """Return the rules as Prometheus reads them, in one group.

    Args:
        scale: as in `alerts`.
    """
    return {"groups": [{"name": "raydix", "rules": [_rule(alert, scale) for alert in alerts(scale)]}]}


def _rule(alert: Alert, scale: float) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression}
    if alert.for_s:
        rule["for"] = _time(scale * alert.for_s)
    return rule | {
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "description": alert.remedy},
    }


def rules_file(scale: float = 1.0) -> str:
    """Return the text of a file of rules.

    Args:
        scale: as in `alerts`.
    """
    return _HEAD + yaml.safe_dump(rules(scale), sort_keys=False, width=120)


def markdown() -> str:
    """Return the table of alerts in `examples/metrics.md`."""
    head = "| alert | severity | holds for | expression |\n|---|---|---|---|\n"
    rows = []
    for alert in alerts():
        expression = alert.expression.replace("|", "\\|")
        rows.append(f"| `{alert.name}` | {alert.severity} | {_time(alert.for_s)} | `{expression}` |")
    return head + "\n".join(rows) + "\n"
