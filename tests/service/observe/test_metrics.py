"""The metrics that Prometheus scrapes of a running cache are complete, and agree with `stats()`."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from support.processes.command_line import run, run_json
from support.shipped_metrics import GUIDE, guide_text
from support.shipped_metrics import dashboard_text as made_dashboard

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.actors.engines import transfer_counts
from raydix.actors.metrics.shipped import dashboard_text
from raydix.actors.metrics.table import METRICS
from raydix.schemas import (
    CacheConfig,
    CacheStats,
    CacheUnavailable,
    DiskPoolStats,
    DiskTierStats,
    EvictionTaskStats,
    GhostConfig,
    Histogram,
    LeaseConfig,
    MetricsConfig,
    PoolConfig,
    PoolExhausted,
    PoolStats,
    TierStats,
    TooLarge,
)

POOL = PoolConfig(num_slots=64, device="cpu")
Labels = frozenset[tuple[str, str]]
PASSING = {
    f"raydix_{name}"
    for name in (
        "uptime_seconds",
        "loop_lag_seconds",
        "oldest_lease_seconds",
        "silent_sessions",
        "batches_total",
        "requests_total",
    )
} | {f"raydix_batch_size_{part}" for part in ("bucket", "sum", "count")}


def expected(stats: CacheStats) -> dict[tuple[str, Labels], float]:
    """Return the metrics exported for a cache: all gauges, and the counters above 0."""
    return {
        (metric.exported_name, frozenset(labels)): value
        for metric in METRICS
        for labels, value in metric.read(stats)
        if metric.kind == "gauge" or value
    }


def scraped(cache: str) -> dict[tuple[str, Labels], float]:
    """Return the metrics that Prometheus would read of one cache, after a check of their types."""
    parser = importlib.import_module("prometheus_client.parser")
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=100) as page:
        families = list(parser.text_string_to_metric_families(page.read().decode()))
    kinds = {metric.exported_name.removesuffix("_total"): metric for metric in METRICS}
    found: dict[tuple[str, Labels], float] = {}
    for family in families:
        metric = kinds.get(family.name.removesuffix("_total"))
        for sample in family.samples if metric is not None else ():
            if metric is not None and sample.labels.get("cache") == cache:
                assert (family.type, family.documentation) == (metric.kind, metric.meaning)
                own = frozenset((name, sample.labels[name]) for name in metric.labels)
                assert (sample.name, own) not in found
                found[sample.name, own] = sample.value
    return found


@pytest.mark.ray
async def test_scraped_metrics_are_those_of_stats(ray_cluster: None) -> None:
    for module in ("opencensus", "opentelemetry.sdk", "prometheus_client"):
        pytest.importorskip(
            module, reason="needs Ray's metrics: .venv/bin/pip install -c constraints.txt -e '.[metrics]'"
        )
    config = CacheConfig(
        page_size=8,
        pool=POOL,
        ghost=GhostConfig(),
        metrics=MetricsConfig(interval_s=0.1),
        leases=LeaseConfig(session_ttl_s=600),
    )
    name = f"metered-{uuid4().hex[:8]}"
    cache = await start_cache_async(config, name=name)
    async with PrefixCacheClient(cache) as client:
        same = [await client.acquire([1] * 16) for _ in range(2)]
        for lease in same:
            await lease.insert([1] * 16, release=True)
        await client.match([1] * 16)
        held = await client.acquire([1] * 16, new_tokens=8)
        with pytest.raises(PoolExhausted):
            await client.acquire([2] * 56, timeout_s=0)
        await (await client.acquire([3] * 8)).insert([3] * 8, release=True)
        await client.evict(8)
        stats = await client.stats()

        wanted = expected(stats)
        settled = {key for key in wanted if key[0].removeprefix("ray_") not in PASSING}
        found: dict[tuple[str, Labels], float] = {}
        async with asyncio.timeout(300):  # Ray exports every few seconds
            while not all(found.get(key) == wanted[key] for key in settled):
                await asyncio.sleep(0.5)
                found = await asyncio.to_thread(scraped, name)

        assert found.keys() == wanted.keys()
        assert (stats.tokens_duplicate, stats.tokens_reused, stats.tokens_evicted, stats.exhausted) == (16, 16, 8, 1)
        assert found["ray_raydix_slots", frozenset({("pool", "kv"), ("use", "protected")})] == 16
        await held.release()
    await asyncio.to_thread(shutdown_cache, cache)


@pytest.mark.ray
async def test_without_rays_metrics_package_the_cache_names_the_package_to_install(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raydix.actors.metrics import publisher

    monkeypatch.setattr(publisher, "_NEEDED", ("json", "no_such_module", "no_such.module"))

    with pytest.raises(CacheUnavailable, match=r"without no_such_module, no_such\.module; install them on every"):
        publisher.MetricsPublisher(lambda: pytest.fail("nothing is published"), "kv-0", 1.0)


def test_the_guide_and_the_dashboard_are_those_of_the_table() -> None:
    assert GUIDE.read_text(encoding="utf-8") == guide_text(), "make metrics"
    assert dashboard_text() == made_dashboard(), "make metrics"


def test_every_metric_has_a_meaning() -> None:
    guide = GUIDE.read_text(encoding="utf-8")

    for metric in METRICS:
        assert "None" not in metric.meaning, f"the field of {metric.name} has no description"
        assert f"| `{metric.exported_name}` | {metric.kind} |" in guide


def test_every_count_of_stats_is_a_metric_or_is_left_out_for_a_reason() -> None:
    derived = {"num_slots", "tree_slots"}  # sums of others
    texts = {"epoch", "core", "last_restart_cause", "restart_causes", "findings", "model_fingerprint", "weights"}
    parts = {"swa", "state", "host", "disk", "ghost", "eviction_task", "owners", "tenants", "refusals", "too_large"}
    others = texts | parts | {"niceness"}  # a fact of the node, for findings
    histograms = {"acquire_latency", "lock_latency", "insert_latency", "wait_time", "batch_size"}
    read = {name for name in CacheStats.model_fields if name not in derived | others | histograms}
    values = {name: float(place + 1) for place, name in enumerate(sorted(read))}
    task = dict.fromkeys(("rounds", "slices", "tokens_evicted", "failures"), 0) | {"enabled": True, "started": True}
    stats = CacheStats.model_construct(
        **values,
        eviction_task=type("Task", (), {**task, "alive": True, "longest_slice_ms": 0.0}),
        swa=None,
        state=None,
        ghost=None,
        owners=(),
        tenants=(),
        too_large=TooLarge(),
        refusals={"no_wait": 4711},
        num_slots=0,
        **{
            name: Histogram(bounds=(0.5, 2.0), counts=(1, 2, 3), sum=1000.0 + place, count=6)
            for place, name in enumerate(sorted(histograms))
        },
    )

    seen = {value for metric in METRICS for _, value in metric.read(stats)}

    expected_values = {value / 1000 if name == "loop_lag_ms" else value for name, value in values.items()}
    assert expected_values | {4711} <= seen
    buckets = next(metric for metric in METRICS if metric.name == "raydix_wait_seconds_bucket")
    assert {labels[0][1]: value for labels, value in buckets.read(stats)} == {"0.5": 1, "2": 3, "+Inf": 6}
    assert {1000.0 + place for place in range(len(histograms))} | {6.0} <= seen


def test_every_count_of_the_host_tier_is_a_metric_and_a_cache_without_one_has_none_of_them() -> None:
    uses = ("free", "private", "evictable", "protected", "quarantined")
    sizes = {f"{use}_slots": 10**6 + place for place, use in enumerate(uses)}
    pools = {name: PoolStats(num_slots=0, tree_slots=0, **sizes, evicted=7) for name in ("slots", "swa", "states")}
    others = {"state", "pinned", "policy", *pools, "loads", "writes"}
    values = {name: place + 1 for place, name in enumerate(sorted(TierStats.model_fields.keys() - others))}
    ends = {"loads": {"whole": 4711, "late": 4712}, "writes": {"failed": 4713}}
    tier = TierStats(state="ready", pinned=True, policy="2q", **pools, **ends, **values)

    def read(**fields: object) -> dict[tuple[str, Labels], float]:
        stats = CacheStats.model_construct(**fields)
        of_host = [metric for metric in METRICS if metric.name.startswith("raydix_host_")]
        return {(metric.name, frozenset(labels)): value for metric in of_host for labels, value in metric.read(stats)}

    seen = read(host=tier)
    assert {value / 1000 if name == "longest_chunk_ms" else value for name, value in values.items()} <= set(
        seen.values()
    )
    assert {("4711", "whole"), ("4712", "late"), ("4713", "failed")} <= {
        (f"{value:g}", end) for (_, labels), value in seen.items() for _, end in labels
    }
    for pool in ("kv", "window", "state"):
        for use in uses:
            labels = frozenset({("pool", pool), ("use", use)})
            assert seen["raydix_host_slots", labels] == sizes[f"{use}_slots"]
        assert seen["raydix_host_evicted_slots_total", frozenset({("pool", pool)})] == 7
    assert (seen["raydix_host_ready", frozenset()], seen["raydix_host_pinned", frozenset()]) == (1, 1)
    reserving = tier.model_copy(update={"state": "reserving"})
    assert read(host=reserving)["raydix_host_ready", frozenset()] == 0
    assert read(host=None) == {}


def test_every_count_of_the_disk_is_a_metric_and_a_cache_without_one_has_none_of_them() -> None:
    uses = ("free", "private", "evictable", "protected", "quarantined", "unread", "dormant", "leaving")
    sizes = {f"{use}_slots": 10**6 + place for place, use in enumerate(uses)}
    pools = {name: DiskPoolStats(num_slots=0, tree_slots=0, **sizes, evicted=7) for name in ("slots", "swa", "states")}
    others = {"state", "admit", "last_error", "read_error_s", *pools, "writes", "prefixes_dropped"}
    values = {name: place + 1 for place, name in enumerate(sorted(DiskTierStats.model_fields.keys() - others))}
    by_label = {"writes": {"failed": 4711}, "prefixes_dropped": {"no_room": 4712}}
    disk = DiskTierStats(state="ready", admit="all", **pools, **by_label, **values)

    def read(**fields: object) -> dict[tuple[str, Labels], float]:
        stats = CacheStats.model_construct(**fields)
        of_disk = [metric for metric in METRICS if metric.name.startswith("raydix_disk_")]
        return {(metric.name, frozenset(labels)): value for metric in of_disk for labels, value in metric.read(stats)}

    seen = read(disk=disk)
    assert set(map(float, values.values())) <= set(seen.values())
    assert seen["raydix_disk_writes_total", frozenset({("end", "failed")})] == 4711
    assert seen["raydix_disk_dropped_prefixes_total", frozenset({("cause", "no_room")})] == 4712
    for pool in ("kv", "window", "state"):
        for use in uses:
            assert seen["raydix_disk_slots", frozenset({("pool", pool), ("use", use)})] == sizes[f"{use}_slots"]
        assert seen["raydix_disk_evicted_slots_total", frozenset({("pool", pool)})] == 7
    for state in ("ready", "stalled", "locked by pid 7", "failed: /nvme is no folder", "opening", "reading", "closed"):
        found = read(disk=disk.model_copy(update={"state": state}))
        named = {dict(labels)["state"] for (name, labels), value in found.items() if name.endswith("_state") and value}
        assert named == {state.split()[0].rstrip(":")}
    assert read(disk=None) == {}


@pytest.mark.parametrize(("started", "alive", "values"), [(False, False, []), (True, True, [1]), (True, False, [0])])
def test_an_eviction_task_that_has_not_started_is_not_one_that_has_ended(
    started: bool, alive: bool, values: list[float]
) -> None:
    metric = next(metric for metric in METRICS if metric.name == "raydix_eviction_task_alive")

    for enabled in (True, False):
        task = EvictionTaskStats.model_construct(enabled=enabled, started=started, alive=alive)
        read = [value for _, value in metric.read(CacheStats.model_construct(eviction_task=task))]

        assert read == (values if enabled else [])


def test_the_dashboard_asks_for_metrics_that_there_are_and_for_all_of_them() -> None:
    made = json.loads(dashboard_text())
    names = {metric.exported_name for metric in METRICS}
    queries = [target["expr"] for panel in made["panels"] for target in panel["targets"]]

    asked = {name for query in queries for name in re.findall(r"ray_raydix_\w+", query)}
    of_engines = {name for query in queries for name in re.findall(r"\|vllm:\)(raydix_\w+)", query)}

    assert asked == names
    assert of_engines == names_of_engines()
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]]
    assert len(set(places)) == len(places)
    assert all(query.count("(") == query.count(")") for query in queries)


def names_of_engines() -> set[str]:
    """Return the series that Prometheus gets of an engine, without the exporter's prefix."""
    counters = {f"{transfer_counts.metric_name(name)}_total" for name in transfer_counts.COUNTS}
    times = map(transfer_counts.metric_name, transfer_counts.SECONDS)
    parts = {f"{name}_{part}" for name in times for part in ("bucket", "sum", "count")}
    return {name.removeprefix("vllm:") for name in counters | parts}


def test_the_command_writes_the_dashboard(tmp_path: Path) -> None:
    out = tmp_path / "raydix.json"

    told = run_json("dashboard", "-o", out)

    assert told == {"path": str(out)}
    assert out.read_text(encoding="utf-8") == dashboard_text() == run("dashboard").stdout
