"""The rules of alerts ask for metrics that there are, have a remedy each, and stand in the guide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes.command_line import run, run_json
from support.shipped_metrics import rules, scaled_alerts

from raydix.actors.cli.app import COMMANDS
from raydix.actors.engines import transfer_counts
from raydix.actors.metrics.shipped import alerts_text
from raydix.actors.metrics.table import METRICS

Rule = dict[str, Any]
each_rule = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])


def labels_of(expression: str) -> set[str]:
    """Return the labels that the results of an expression have: those of its aggregations."""
    (labels,) = set(re.findall(r"\bby \(([\w, ]+)\)", expression))
    return set(labels.split(", "))


@each_rule
def test_an_alert_asks_for_metrics_of_the_table_and_by_labels_that_they_have(rule: Rule) -> None:
    of_caches = {metric.exported_name: {"cache", *metric.labels} for metric in METRICS}
    of_engines = {f"raydix_{name}_total" for name in transfer_counts.COUNTS}
    asked = set(re.findall(r"ray_raydix_\w+", rule["expr"]))
    asked_of_engines = set(re.findall(r"\|vllm:\)(raydix_\w+)", rule["expr"]))

    assert asked or asked_of_engines
    assert asked <= of_caches.keys()
    assert asked_of_engines <= of_engines
    for name in asked:
        assert labels_of(rule["expr"]) <= of_caches[name]
    if asked_of_engines:
        assert labels_of(rule["expr"]) == {"model_name"}


@each_rule
def test_a_text_names_labels_of_the_alert_and_commands_that_there_are(rule: Rule) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))

    assert named == labels_of(rule["expr"])
    assert "$" not in rule["annotations"]["description"]
    assert set(re.findall(r"`raydix ([a-z-]+)", rule["annotations"]["description"])) <= COMMANDS.keys()


def test_there_is_an_alert_for_each_metric_that_was_made_for_one() -> None:
    asked = {name for rule in rules() for name in re.findall(r"raydix_(\w+)", rule["expr"])}

    assert {
        "eviction_task_alive",
        "restarts",
        "oldest_waiter_seconds",
        "oldest_lease_seconds",
        "refusals_total",
        "loop_lag_seconds",
        "silent_sessions",
        "slots",
        "stale_readers",
        "host_ready",
        "host_dropped_tokens_total",
        "host_loads_total",
        "disk_state",
        "disk_dropped_prefixes_total",
        "disk_writes_total",
        "disk_damaged_records_total",
        "disk_uncommitted_seconds",
        "lookup_timeouts_total",
        "load_failures_total",
        "detached_requests_total",
    } <= asked


def test_every_window_and_delay_is_scaled() -> None:
    def times(text: str) -> list[float]:
        delays = [rule.get("for", "0s") for rule in rules(text)]
        windows = [time for rule in rules(text) for time in re.findall(r"(?:\[|offset )(\w+)", rule["expr"])]
        return [seconds(time) for time in (*delays, *windows)]

    whole, small = times(alerts_text()), times(scaled_alerts(0.01))

    assert len(whole) > 40
    assert small == [pytest.approx(time / 100) for time in whole]
    (restarted,) = (rule["expr"] for rule in rules(scaled_alerts(0.01)) if rule["alert"] == "RaydixCacheRestarted")
    assert restarted.endswith(" < 9")


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"ms": 0.001, "s": 1.0, "m": 60.0}[unit]


def test_the_command_writes_the_rules_as_yaml_and_as_json(tmp_path: Path) -> None:
    out = tmp_path / "alerts.yml"

    assert run_json("dashboard", "--alerts", "-o", out) == {"path": str(out)}
    assert out.read_text(encoding="utf-8") == alerts_text() == run("dashboard", "--alerts").stdout
    assert yaml.safe_load(alerts_text()) == run_json("dashboard", "--alerts")
    refused = run_json("dashboard", "--alerts", "-o", tmp_path, exit_code=2)["error"]
    assert "alerts.yml" in refused["advice"]
