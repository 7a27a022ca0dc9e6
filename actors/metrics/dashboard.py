"""A Grafana dashboard of all caches of a cluster, for the data source that Ray provisions."""

from __future__ import annotations

from typing import Any, NamedTuple

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT = 12, 8  # size of a panel; Grafana's grid is 24 wide
_PARTS = ("sum", "count")
_OF = '{cache=~"$cache"}'
_ENGINES = 'sum by (model_name) (rate({__name__=~"(ray_vllm_|vllm:)raydix_%s"}[$__rate_interval]))'


class _Panel(NamedTuple):
    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]  # PromQL, and the name of its lines
    stacked: bool = False


def _distribution(title: str, unit: str, name: str) -> _Panel:
    """Return a panel of a cache's histogram: median, 99th percentile and mean."""
    per_bucket = f"sum by (cache, le) (rate(ray_raydix_{name}_bucket{_OF}[$__rate_interval]))"
    of_all, number = (f"sum by (cache) (rate(ray_raydix_{name}_{part}{_OF}[$__rate_interval]))" for part in _PARTS)
    return _Panel(title, unit, _quantiles(per_bucket, of_all, number, "{{cache}}"))


def _engine_distribution(title: str, name: str) -> _Panel:
    """Return a panel of a histogram of the engines, which export it by Ray or by themselves."""
    per_bucket = (_ENGINES % f"{name}_bucket").replace("(model_name)", "(model_name, le)")
    of_all, number = (_ENGINES % f"{name}_{part}" for part in _PARTS)
    return _Panel(title, "s", _quantiles(per_bucket, of_all, number, "{{model_name}}"))


def _quantiles(per_bucket: str, of_all: str, number: str, of: str) -> tuple[tuple[str, str], ...]:
    return (
        (f"histogram_quantile(0.5, {per_bucket})", f"{of} median"),
        (f"histogram_quantile(0.99, {per_bucket})", f"{of} 99 %"),
        (f"{of_all} / {number}", f"{of} mean"),
    )


def _engine_rates(title: str, unit: str, *names: str) -> _Panel:
    """Return a panel of counters of the engines, which export them by Ray or by themselves."""
    lines = {name: f"{{{{model_name}}}} {name.replace('_', ' ')}" for name in names}
    return _Panel(title, unit, tuple((_ENGINES % f"{name}_total", line) for name, line in lines.items()))


_PANELS = (
    _Panel(
        "Slots by use",
        "short",
        ((f"sum by (cache, pool, use) (ray_raydix_slots{_OF})", "{{cache}} {{pool}} {{use}}"),),
        True,
    ),
    _Panel(
        "Hit rate",
        "percentunit",
        (
            (
                f"sum by (cache) (rate(ray_raydix_reused_tokens_total{_OF}[$__rate_interval])) / "
                f"sum by (cache) (rate(ray_raydix_requested_tokens_total{_OF}[$__rate_interval]))",
                "{{cache}}",
            ),
        ),
    ),
    _Panel(
        "Hit rate of pools of other sizes",
        "percentunit",
        ((f"max by (cache, factor) (ray_raydix_ghost_hit_rate{_OF})", "{{cache}} x{{factor}}"),),
    ),
    _Panel(
        "Tokens per second",
        "short",
        tuple(
            (f"sum by (cache) (rate(ray_raydix_{name}_tokens_total{_OF}[$__rate_interval]))", f"{{{{cache}}}} {name}")
            for name in (
                "requested",
                "reused",
                "refused",
                "resumed",
                "resumed_reused",
                "inserted",
                "duplicate",
                "evicted",
            )
        ),
    ),
    _Panel(
        "Slots evicted per second",
        "short",
        (
            (
                f"sum by (cache, pool) (rate(ray_raydix_evicted_slots_total{_OF}[$__rate_interval]))",
                "{{cache}} {{pool}}",
            ),
            (
                f"sum by (cache, pool) (rate(ray_raydix_host_evicted_slots_total{_OF}[$__rate_interval]))",
                "{{cache}} host tier, {{pool}}",
            ),
            (
                f"sum by (cache, pool) (rate(ray_raydix_disk_evicted_slots_total{_OF}[$__rate_interval]))",
                "{{cache}} disk, {{pool}}",
            ),
        ),
    ),
    _Panel(
        "Leases, sessions, models, waiters",
        "short",
        tuple(
            (f"sum by (cache) (ray_raydix_{name}{_OF})", f"{{{{cache}}}} {name.replace('_', ' ')}")
            for name in ("open_leases", "open_sessions", "bindings", "waiters")
        ),
    ),
    _Panel(
        "Uptime",
        "s",
        ((f"max by (cache) (ray_raydix_uptime_seconds{_OF})", "{{cache}}"),),
    ),
    _Panel("Restarts", "short", ((f"max by (cache) (ray_raydix_restarts{_OF})", "{{cache}}"),)),
    _Panel(
        "Oldest lease and waiter",
        "s",
        tuple(
            (f"max by (cache) (ray_raydix_oldest_{name}_seconds{_OF})", f"{{{{cache}}}} {name}")
            for name in ("lease", "waiter")
        ),
    ),
    _Panel(
        "Silent sessions and stale readers",
        "short",
        tuple(
            (f"max by (cache) (ray_raydix_{name}{_OF})", f"{{{{cache}}}} {name.replace('_', ' ')}")
            for name in ("silent_sessions", "stale_readers")
        ),
    ),
    _Panel(
        "Tenants",
        "short",
        (
            (f"sum by (cache, tenant) (ray_raydix_tenant_slots{_OF})", "{{cache}} {{tenant}} slots"),
            (
                f"sum by (cache, tenant) (increase(ray_raydix_tenant_evicted_tokens_total{_OF}[5m]))",
                "{{cache}} {{tenant}} evicted in 5 min",
            ),
        ),
    ),
    _Panel(
        "Requests per second",
        "reqps",
        tuple(
            (f"sum by (cache) (rate(ray_raydix_{name}_total{_OF}[$__rate_interval]))", f"{{{{cache}}}} {name}")
            for name in (
                "acquires",
                "hits",
                "resumed",
                "probes",
                "requests",
                "batches",
                "waited",
                "exhausted",
                "deadlocks",
                "grants_expired",
                "boundary_states_refused",
                "too_large",
            )
        ),
    ),
    _Panel(
        "Refusals per second",
        "reqps",
        (
            (
                f"sum by (cache, cause) (rate(ray_raydix_refusals_total{_OF}[$__rate_interval]))",
                "{{cache}} {{cause}}",
            ),
        ),
    ),
    _distribution("Time to the response of an acquire", "s", "acquire_latency_seconds"),
    _distribution("Time to the response of a lock", "s", "lock_latency_seconds"),
    _distribution("Time to the response of an insert", "s", "insert_latency_seconds"),
    _distribution("Time that requests waited for free slots", "s", "wait_seconds"),
    _distribution("Batch size", "short", "batch_size"),
    _Panel(
        "Event loop",
        "s",
        (
            (f"max by (cache) (ray_raydix_loop_lag_seconds{_OF})", "{{cache}} longest delay"),
            (f"max by (cache) (ray_raydix_eviction_longest_slice_seconds{_OF})", "{{cache}} longest eviction slice"),
        ),
    ),
    _Panel(
        "Background eviction and lost sessions",
        "short",
        (
            (f"min by (cache) (ray_raydix_eviction_task_alive{_OF})", "{{cache}} task alive"),
            (f"sum by (cache) (increase(ray_raydix_eviction_rounds_total{_OF}[5m]))", "{{cache}} rounds"),
            (f"sum by (cache) (increase(ray_raydix_eviction_failures_total{_OF}[5m]))", "{{cache}} failures"),
            (f"sum by (cache, how) (increase(ray_raydix_sessions_lost_total{_OF}[5m]))", "{{cache}} {{how}}"),
        ),
    ),
    _Panel(
        "Host tier: slots by use",
        "short",
        ((f"sum by (cache, pool, use) (ray_raydix_host_slots{_OF})", "{{cache}} {{pool}} {{use}}"),),
        True,
    ),
    _Panel(
        "Host tier: loaded part of the hit rate, dropped part of the evictions",
        "percentunit",
        tuple(
            (
                f"sum by (cache) (rate(ray_raydix_{part}_tokens_total{_OF}[$__rate_interval])) / "
                f"sum by (cache) (rate(ray_raydix_{whole}_tokens_total{_OF}[$__rate_interval]))",
                f"{{{{cache}}}} {line}",
            )
            for part, whole, line in (
                ("host_loaded", "requested", "loaded of requested"),
                ("host_dropped", "evicted", "dropped of evicted"),
            )
        ),
    ),
    _Panel(
        "Host tier: tokens per second",
        "short",
        tuple(
            (
                f"sum by (cache) (rate(ray_raydix_host_{name}_tokens_total{_OF}[$__rate_interval]))",
                f"{{{{cache}}}} {name.replace('_', ' ')}",
            )
            for name in ("loaded", "loaded_unused", "written", "dropped", "failed")
        ),
    ),
    _Panel(
        "Host tier: loads and writes by end, per second",
        "ops",
        (
            *(
                (
                    f"sum by (cache, end) (rate(ray_raydix_host_{name}_total{_OF}[$__rate_interval]))",
                    f"{{{{cache}}}} {name} {{{{end}}}}",
                )
                for name in ("loads", "writes")
            ),
            *(
                (
                    f"sum by (cache) (rate(ray_raydix_host_{name}_total{_OF}[$__rate_interval]))",
                    f"{{{{cache}}}} {name.replace('_', ' ')}",
                )
                for name in ("writes_refused", "states_not_published")
            ),
        ),
    ),
    _Panel(
        "Host tier: bytes per second of copying, and bytes to be copied",
        "bytes",
        (
            *(
                (
                    f"sum by (cache) (rate(ray_raydix_host_{done}_bytes_total{_OF}[$__rate_interval])) / "
                    f"sum by (cache) (rate(ray_raydix_host_{verb}_seconds_total{_OF}[$__rate_interval]))",
                    f"{{{{cache}}}} {done}",
                )
                for done, verb in (("loaded", "load"), ("written", "write"))
            ),
            (f"sum by (cache) (ray_raydix_host_queued_bytes{_OF})", "{{cache}} to be copied"),
        ),
    ),
    _Panel(
        "Host tier: state, copies in flight, requests that wait",
        "short",
        tuple(
            (f"max by (cache) (ray_raydix_host_{name}{_OF})", f"{{{{cache}}}} {name.replace('_', ' ')}")
            for name in ("ready", "pinned", "moves_in_flight", "loading_requests")
        ),
    ),
    _Panel(
        "Host tier: longest call of a copy",
        "s",
        ((f"max by (cache) (ray_raydix_host_longest_chunk_seconds{_OF})", "{{cache}}"),),
    ),
    _Panel(
        "Disk: slots by use",
        "short",
        ((f"sum by (cache, pool, use) (ray_raydix_disk_slots{_OF})", "{{cache}} {{pool}} {{use}}"),),
        True,
    ),
    _Panel(
        "Disk: state",
        "short",
        ((f"max by (cache, state) (ray_raydix_disk_state{_OF})", "{{cache}} {{state}}"),),
    ),
    _Panel(
        "Disk: loaded part of the hit rate, first uses of all uses",
        "percentunit",
        tuple(
            (
                f"sum by (cache) (rate(ray_raydix_{part}_total{_OF}[$__rate_interval])) / "
                f"sum by (cache) (rate(ray_raydix_{whole}_total{_OF}[$__rate_interval]))",
                f"{{{{cache}}}} {line}",
            )
            for part, whole, line in (
                ("disk_loaded_tokens", "requested_tokens", "loaded of requested"),
                ("disk_refused_pages", "disk_used_pages", "first uses"),
            )
        ),
    ),
    _Panel(
        "Disk: tokens per second",
        "short",
        tuple(
            (
                f"sum by (cache) (rate(ray_raydix_disk_{name}_tokens_total{_OF}[$__rate_interval]))",
                f"{{{{cache}}}} {name.replace('_', ' ')}",
            )
            for name in ("loaded", "loaded_unused", "written", "dropped", "failed")
        ),
    ),
    _Panel(
        "Disk: writes by end, and prefixes that were not written, per second",
        "ops",
        (
            (
                f"sum by (cache, end) (rate(ray_raydix_disk_writes_total{_OF}[$__rate_interval]))",
                "{{cache}} writes {{end}}",
            ),
            (
                f"sum by (cache, cause) (rate(ray_raydix_disk_dropped_prefixes_total{_OF}[$__rate_interval]))",
                "{{cache}} dropped {{cause}}",
            ),
            (
                f"sum by (cache) (rate(ray_raydix_disk_writes_refused_total{_OF}[$__rate_interval]))",
                "{{cache}} writes refused",
            ),
        ),
    ),
    _Panel(
        "Disk: late loads, stalls, damaged records, states without a slot",
        "short",
        tuple(
            (
                f"sum by (cache) (increase(ray_raydix_disk_{name}_total{_OF}[5m]))",
                f"{{{{cache}}}} {name.replace('_', ' ')}",
            )
            for name in ("loads_late", "stalls", "failed_reads", "damaged_records", "bad_rows", "states_not_published")
        ),
    ),
    _Panel(
        "Disk: bytes per second",
        "Bps",
        (
            (
                f"sum by (cache) (rate(ray_raydix_disk_written_bytes_total{_OF}[$__rate_interval]))",
                "{{cache}} written",
            ),
            (
                f"sum by (cache) (rate(ray_raydix_disk_loaded_bytes_total{_OF}[$__rate_interval]))",
                "{{cache}} loaded",
            ),
            (
                f"sum by (cache) (rate(ray_raydix_disk_loaded_bytes_total{_OF}[$__rate_interval])) / "
                f"sum by (cache) (rate(ray_raydix_disk_load_seconds_total{_OF}[$__rate_interval]))",
                "{{cache}} speed of loads",
            ),
        ),
    ),
    _Panel(
        "Disk: bytes written in the last 24 hours, and bytes to be loaded",
        "bytes",
        (
            (f"sum by (cache) (ray_raydix_disk_day_written_bytes{_OF})", "{{cache}} written in 24 hours"),
            (f"sum by (cache) (ray_raydix_disk_queued_bytes{_OF})", "{{cache}} to be loaded"),
        ),
    ),
    _Panel(
        "Disk: prefixes that wait, moves in flight, spaces",
        "short",
        tuple(
            (f"max by (cache) (ray_raydix_disk_{name}{_OF})", f"{{{{cache}}}} {name.replace('_', ' ')}")
            for name in ("due_prefixes", "moves_in_flight", "loads_in_flight", "spaces", "unbound_namespaces")
        ),
    ),
    _Panel(
        "Disk: time of a retirement that is not committed",
        "s",
        ((f"max by (cache) (ray_raydix_disk_uncommitted_seconds{_OF})", "{{cache}}"),),
    ),
    _engine_rates(
        "Engines: look-ups, loads and saves per second",
        "reqps",
        "lookups",
        "lookup_timeouts",
        "tier_loads",
        "tier_loads_late",
        "loads",
        "load_failures",
        "saves",
        "saves_refused",
        "detached_requests",
    ),
    _engine_rates("Engines: tokens hit in the cache per second", "short", "hit_tokens"),
    _engine_rates("Engines: bytes copied per second", "Bps", "loaded_bytes", "saved_bytes"),
    _engine_distribution("Engines: time of a look-up", "lookup_seconds"),
    _engine_distribution("Engines: time of a look-up that loads from a tier", "tier_load_seconds"),
    _engine_distribution("Engines: time of a load", "load_seconds"),
    _engine_distribution("Engines: time of a save", "save_seconds"),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON, with variables for the data source and the caches."""
    return {
        "title": "Raydix caches",
        "uid": "raydix",
        "tags": ["ray", "raydix"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_variable(), _cache_variable()]},
        "panels": [_panel(place, panel) for place, panel in enumerate(_PANELS)],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _cache_variable() -> dict[str, Any]:
    query = "label_values(ray_raydix_slots, cache)"
    return {
        "name": "cache",
        "label": "Cache",
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "cache"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _panel(place: int, panel: _Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": place % 2 * _WIDTH, "y": place // 2 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query, "legendFormat": name}
            for number, (query, name) in enumerate(panel.queries)
        ],
    }
