"""The rules of alerts in a real Prometheus: valid, evaluated on series, and on the metrics of a real cache."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ray
import yaml
from support.processes.prometheus import Prometheus, promtool, running_prometheus
from support.shipped_metrics import dashboard, rules, scaled_alerts
from support.waiting import wait_until

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache
from raydix.actors.metrics.shipped import alerts_text
from raydix.actors.metrics.table import METRICS
from raydix.schemas import CacheConfig, LeaseConfig, MetricsConfig, PoolConfig, PoolExhausted

pytestmark = pytest.mark.prometheus

# ---------------------------------------------------------------- on series

ENGINE = 'model_name="llama"'


class Case(NamedTuple):
    """Series with a sample a minute, and the times at which the alert fires and does not."""

    series: dict[str, str]  # series -> values, as promtool reads them
    fires_at: int  # minute
    ended_at: tuple[int, ...]  # minutes
    labels: dict[str, str]
    summary: str  # at `fires_at`


def of_cache(name: str, values: str, fires_at: int, ended_at: tuple[int, ...], summary: str) -> Case:
    return Case({f'ray_raydix_{name}{{cache="kv-0"}}': values}, fires_at, ended_at, {"cache": "kv-0"}, summary)


def of_engines(name: str, fires_at: int, summary: str) -> Case:
    """Two engines, one of which Ray exports, count one event a second each for 20 minutes."""
    series = {
        f'vllm:raydix_{name}_total{{{ENGINE},engine="0"}}': "0x2 0+60x20 1200x20",
        f'ray_vllm_raydix_{name}_total{{{ENGINE},ReplicaId="a"}}': "0x2 0+60x20 1200x20",
    }
    return Case(series, fires_at, (2, 40), {"model_name": "llama"}, summary)


CASES = {
    "RaydixCacheSilent": of_cache(
        "uptime_seconds",
        "0+60x10 _x9 0+60x20 _x20",  # silent from minute 11 to 19, and for good after minute 40
        15,
        (10, 21, 39, 56),
        "Cache kv-0 has published no metrics for two minutes",
    ),
    "RaydixEvictionTaskEnded": of_cache(
        "eviction_task_alive",
        "1x5 0x10 1x5",
        8,
        (5, 18),
        "The eviction task of cache kv-0 has ended, so requests evict",
    ),
    "RaydixCacheRestarted": Case(
        {
            'ray_raydix_restarts{cache="kv-0",WorkerId="a"}': "0x10",
            'ray_raydix_uptime_seconds{cache="kv-0",WorkerId="a"}': "0+60x10",
            'ray_raydix_restarts{cache="kv-0",WorkerId="b"}': "_x11 1x30",
            'ray_raydix_uptime_seconds{cache="kv-0",WorkerId="b"}': "_x11 0+60x30",
        },
        12,
        (10, 26),
        {"cache": "kv-0"},
        "Ray has restarted cache kv-0, empty, the last time less than 15 minutes ago",
    ),
    "RaydixOldestWaiter": of_cache(
        "oldest_waiter_seconds", "0x5 15x5 0x5", 8, (5, 13), "A request waits for slots of cache kv-0 for 15s"
    ),
    "RaydixOldestLease": of_cache(
        "oldest_lease_seconds", "0+60x20 0x5", 16, (15, 23), "A lease of cache kv-0 is open for 16m 0s"
    ),
    "RaydixRefusals": Case(
        {
            'ray_raydix_refusals_total{cache="kv-0",cause="waited_too_long"}': "0+30x20 600x20",
            'ray_raydix_refusals_total{cache="kv-0",cause="no_wait"}': "0+6000x60",
            'ray_raydix_refusals_total{cache="kv-0",cause="lease_expired"}': "0+2x60",
        },
        10,
        (1, 30),
        {"cache": "kv-0", "cause": "waited_too_long"},
        "Cache kv-0 refuses 0.5 requests a second: waited_too_long",
    ),
    "RaydixLoopLag": of_cache(
        "loop_lag_seconds", "0.01x5 0.3x10 0.01x10", 12, (10, 18), "The event loop of cache kv-0 is late by 300ms"
    ),
    "RaydixSilentSessions": of_cache(
        "silent_sessions",
        "0x3 2x5 0x5",
        6,
        (3, 11),
        "Clients of cache kv-0 have sent nothing for half of session_ttl_s or longer: 2",
    ),
    "RaydixQuarantine": Case(
        {
            'ray_raydix_slots{cache="kv-0",pool="kv",use="quarantined"}': "0x2 8x30 0x5",
            'ray_raydix_slots{cache="kv-1",pool="kv",use="quarantined"}': "100-2x40",
            'ray_raydix_slots{cache="kv-0",pool="kv",use="free"}': "100x40",
        },
        20,
        (12, 36),
        {"cache": "kv-0", "pool": "kv"},
        "Slots of cache kv-0, pool kv, stay in quarantine: 8",
    ),
    "RaydixStaleReaders": of_cache(
        "stale_readers",
        "0x3 1x5 0x5",
        6,
        (3, 11),
        "Readers of the events of cache kv-0, such as routers, are ten seconds behind: 1",
    ),
    "RaydixHostTierNotReady": of_cache(
        "host_ready", "1x3 0x15 1x5", 12, (6, 22), "Cache kv-0 has served for five minutes without its host tier"
    ),
    "RaydixHostTierDrops": Case(
        {
            'ray_raydix_evicted_tokens_total{cache="kv-0"}': "0+600x60",
            'ray_raydix_host_dropped_tokens_total{cache="kv-0"}': "0x5 0+300x20 6000x30",
            'ray_raydix_evicted_tokens_total{cache="kv-1"}': "0+600x60",
            'ray_raydix_host_dropped_tokens_total{cache="kv-1"}': "0+60x60",
        },
        22,
        (12, 36),
        {"cache": "kv-0"},
        "Of the tokens that cache kv-0 evicts, 50% were not written to its host tier before",
    ),
    "RaydixHostTierLoads": Case(
        {
            'ray_raydix_host_loads_total{cache="kv-0",end="whole"}': "0+60x60",
            'ray_raydix_host_loads_total{cache="kv-0",end="late"}': "0x5 0+10x20 200x30",
            'ray_raydix_host_loads_total{cache="kv-0",end="failed"}': "0x5 0+10x20 200x30",
            'ray_raydix_host_loads_total{cache="kv-0",end="cancelled"}': "0+0x60",
        },
        20,
        (8, 36),
        {"cache": "kv-0"},
        "Of the loads from the host tier of cache kv-0, 25% are late or fail",
    ),
    "RaydixDiskNotReady": Case(
        {
            'ray_raydix_disk_state{cache="kv-0",state="ready"}': "1x3 0x15 1x5",
            'ray_raydix_disk_state{cache="kv-0",state="locked"}': "0x3 1x15 0x5",
            'ray_raydix_disk_state{cache="kv-0",state="failed"}': "0x25",
            'ray_raydix_disk_state{cache="kv-1",state="stalled"}': "1x25",
        },
        12,
        (6, 22),
        {"cache": "kv-0", "state": "locked"},
        "Cache kv-0 has served for five minutes without its disk: locked",
    ),
    "RaydixDiskStalled": Case(
        {
            'ray_raydix_disk_state{cache="kv-0",state="stalled"}': "0x5 1 0x15",
            'ray_raydix_disk_state{cache="kv-0",state="ready"}': "1x5 0 1x15",
        },
        10,
        (5, 13),
        {"cache": "kv-0"},
        "The disk of cache kv-0 did not answer within the last five minutes",
    ),
    "RaydixDiskDrops": Case(
        {
            'ray_raydix_disk_dropped_prefixes_total{cache="kv-0",cause="left_memory"}': "0x5 0+60x20 1200x30",
            'ray_raydix_disk_dropped_prefixes_total{cache="kv-0",cause="no_room"}': "0+3x60",
        },
        22,
        (12, 40),
        {"cache": "kv-0", "cause": "left_memory"},
        "Cache kv-0 does not write 1 prefixes a second to its disk: left_memory",
    ),
    "RaydixDiskWritesFail": Case(
        {
            'ray_raydix_disk_writes_total{cache="kv-0",end="committed"}': "0+60x40",
            'ray_raydix_disk_writes_total{cache="kv-0",end="failed"}': "0x5 0+60x10 600x30",
        },
        14,
        (5, 26),
        {"cache": "kv-0"},
        "Cache kv-0 fails 1 writes a second to its disk",
    ),
    "RaydixDiskDamaged": Case(
        {
            'ray_raydix_disk_damaged_records_total{cache="kv-0"}': "_x5 2x120 3x100",
            'ray_raydix_disk_damaged_records_total{cache="kv-1"}': "0x300",
        },
        140,
        (4, 100, 200),
        {"cache": "kv-0"},
        "The disk of cache kv-0 has returned damaged records, 3 so far",
    ),
    "RaydixDiskUncommitted": of_cache(
        "disk_uncommitted_seconds",
        "0x3 20+60x10 0x5",
        6,
        (4, 17),
        "The disk of cache kv-0 has not committed a retirement for 2m 20s",
    ),
    "RaydixLookupTimeouts": of_engines(
        "lookup_timeouts", 15, "Engines of llama get no answer in time to 2 look-ups a second"
    ),
    "RaydixLoadFailures": of_engines(
        "load_failures", 10, "Engines of llama fail 2 loads a second and compute the KV again"
    ),
    "RaydixDetachedEngines": of_engines(
        "detached_requests", 10, "Engines of llama serve 2 requests a second without the cache"
    ),
}


def unit_test(name: str, case: Case) -> dict[str, Any]:
    """Return a test of promtool."""
    (rule,) = (rule for rule in rules() if rule["alert"] == name)
    fired = {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {"summary": case.summary, "description": rule["annotations"]["description"]},
    }
    times = {case.fires_at: [fired], **{minute: [] for minute in case.ended_at}}
    return {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": expected} for minute, expected in times.items()
        ],
    }


def test_the_rules_are_valid(tmp_path: Path) -> None:
    for scale in (1.0, 0.1):
        (tmp_path / "rules.yml").write_text(scaled_alerts(scale))
        assert f"SUCCESS: {len(rules())} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


@pytest.mark.parametrize("name", [rule["alert"] for rule in rules()])
def test_an_alert_fires_on_its_series_and_ends(name: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(alerts_text())
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [unit_test(name, CASES[name])]}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))

    assert "SUCCESS" in promtool("test", "rules", tmp_path / "tests.yml")


def dashboard_queries() -> list[str]:
    """Return the queries of the dashboard, with Grafana's variables filled in."""
    targets = [target for panel in dashboard()["panels"] for target in panel["targets"]]
    return [target["expr"].replace("$__rate_interval", "1m").replace("$cache", ".*") for target in targets]


def test_the_queries_of_the_dashboard_are_valid(tmp_path: Path) -> None:
    records = [{"record": f"query_{place}", "expr": query} for place, query in enumerate(dashboard_queries())]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": records}]}))

    assert f"SUCCESS: {len(records)} rules found" in promtool("check", "rules", tmp_path / "rules.yml")


# ---------------------------------------------------------------- on a real cache

SCALE = 0.1  # windows of 12 s, 30 s and 90 s
CACHE = "kv-0"
WAIT_S = 300.0  # the machine has other work, too
POLL_S = 0.25


class Scene(NamedTuple):
    """A cache of 64 slots, and the Prometheus that watches it."""

    cache: Any
    prometheus: Prometheus

    @property
    def pid(self) -> int:
        """The process of the cache."""
        path = ray.get(self.cache.pool_handle.remote()).liveness_path
        return int(re.findall(r"/proc/(\d+)/", path)[0])

    def until(self, is_so: Callable[[dict[str, dict[str, str]]], bool]) -> dict[str, dict[str, str]]:
        """Wait for a condition of the alerts that fire, and return these."""
        seen: list[dict[str, dict[str, str]]] = []

        def is_so_now() -> bool:
            time.sleep(POLL_S)
            seen[:] = [self.prometheus.firing()]
            return is_so(seen[0])

        wait_until(is_so_now, WAIT_S)
        return seen[0]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    pytest.importorskip(
        "prometheus_client", reason="needs Ray's metrics: .venv/bin/pip install -c constraints.txt -e '.[metrics]'"
    )
    if ray.is_initialized():
        pytest.skip("another test's cluster runs in this process: make test-prometheus")
    ray.init(
        "local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
        configure_logging=False,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    config = CacheConfig(
        page_size=8,
        pool=PoolConfig(num_slots=64, device="cpu"),
        metrics=MetricsConfig(interval_s=0.5),
        leases=LeaseConfig(session_ttl_s=600),
    )
    cache = start_cache(config, name=CACHE, timeout_s=WAIT_S)
    (node,) = ray.nodes()
    target = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), target, scaled_alerts(SCALE)) as prometheus:
        yield Scene(cache, prometheus)
    shutdown_cache(cache)
    ray.shutdown()


@pytest.mark.ray
def test_a_scrape_has_the_metrics_of_the_table_and_their_values(scene: Scene) -> None:
    with PrefixCacheClient(scene.cache).sync as client:
        for _ in range(2):
            with client.acquire([1] * 16) as lease:
                lease.insert([1] * 16)
        stats = client.stats()
    wanted = {
        metric.exported_name
        for metric in METRICS
        if not metric.exported_name.startswith(("ray_raydix_host_", "ray_raydix_disk_"))  # this cache has no tier
        and (metric.kind == "gauge" or any(value for _, value in metric.read(stats)))
    } - {"ray_raydix_ghost_hit_rate", "ray_raydix_tenant_slots"}

    def scraped() -> set[str]:
        rows = scene.prometheus.values(f'group by (__name__) ({{__name__=~"ray_raydix_.+", cache="{CACHE}"}})')
        return {dict(labels)["__name__"] for labels in rows}

    wait_until(lambda: wanted <= scraped(), WAIT_S)
    assert scraped() == wanted
    for query in dashboard_queries():  # an answer with an error raises
        lines = scene.prometheus.values(query)
        is_there = wanted.issuperset(re.findall(r"ray_raydix_\w+", query)) and "rate(" not in query
        assert lines or not is_there or "{__name__" in query, query
    reused = scene.prometheus.values(f'sum(ray_raydix_reused_tokens_total{{cache="{CACHE}"}})')
    assert list(reused.values()) == [stats.tokens_reused] == [16]


@pytest.mark.ray
def test_a_stopped_cache_is_silent_until_it_goes_on(scene: Scene) -> None:
    pid = scene.pid
    scene.until(lambda firing: "RaydixCacheSilent" not in firing)

    os.kill(pid, signal.SIGSTOP)
    try:
        firing = scene.until(lambda firing: "RaydixCacheSilent" in firing)
    finally:
        os.kill(pid, signal.SIGCONT)

    assert firing["RaydixCacheSilent"]["summary"] == f"Cache {CACHE} has published no metrics for two minutes"
    assert "RaydixRefusals" not in firing
    scene.until(lambda firing: "RaydixCacheSilent" not in firing)


@pytest.mark.ray
def test_refused_requests_raise_an_alert_until_they_end(scene: Scene) -> None:
    scene.until(lambda firing: "RaydixRefusals" not in firing)

    with PrefixCacheClient(scene.cache).sync as client:

        def is_refused(firing: dict[str, dict[str, str]]) -> bool:
            with pytest.raises(PoolExhausted):
                client.acquire([1] * 640)
            return "RaydixRefusals" in firing

        firing = scene.until(is_refused)

    assert re.fullmatch(
        rf"Cache {CACHE} refuses \S+ requests a second: never_fits", firing["RaydixRefusals"]["summary"]
    )
    scene.until(lambda firing: "RaydixRefusals" not in firing)


@pytest.mark.ray
def test_a_restarted_cache_without_clients_publishes_again_and_raises_an_alert_for_a_while(scene: Scene) -> None:
    """No client calls after the restart: the cache begins to publish by itself."""
    scene.until(lambda firing: "RaydixCacheRestarted" not in firing)

    os.kill(scene.pid, signal.SIGKILL)

    firing = scene.until(lambda firing: "RaydixCacheRestarted" in firing)
    assert firing["RaydixCacheRestarted"]["summary"].startswith(f"Ray has restarted cache {CACHE}, empty")
    scene.until(lambda firing: not firing.keys() & {"RaydixCacheRestarted", "RaydixCacheSilent"})
