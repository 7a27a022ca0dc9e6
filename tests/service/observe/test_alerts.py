"""The rules of alerts ask for metrics that there are, have a remedy each, and stand in the guide."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from support.processes.command_line import run, run_json

from raydix.actors.cli.app import COMMANDS
from raydix.actors.engines import transfer_counts
from raydix.actors.metrics.alerts import Alert, alerts, markdown, rules, rules_file
from raydix.actors.metrics.table import METRICS

DOCUMENT = Path(__file__).parents[3] / "examples" / "metrics.md"
each_alert = pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)


def labels_of(expression: str) -> set[str]:
    """Return the labels that the results of an expression have: those of its aggregations."""
    (labels,) = set(re.findall(r"\bby \(([\w, ]+)\)", expression))
    return set(labels.split(", "))


@each_alert
def test_an_alert_asks_for_metrics_of_the_table_and_by_labels_that_they_have(alert: Alert) -> None:
    of_caches = {metric.exported_name: {"cache", *metric.labels} for metric in METRICS}
    of_engines = {f"raydix_{name}_total" for name in transfer_counts.COUNTS}
    asked = set(re.findall(r"ray_raydix_\w+", alert.expression))
    asked_of_engines = set(re.findall(r"\|vllm:\)(raydix_\w+)", alert.expression))

    assert asked or asked_of_engines
    assert asked <= of_caches.keys()
    assert asked_of_engines <= of_engines
    for name in asked:
        assert labels_of(alert.expression) <= of_caches[name]
    if asked_of_engines:
        assert labels_of(alert.expression) == {"model_name"}


@each_alert
def test_a_text_names_labels_of_the_alert_and_commands_that_there_are(alert: Alert) -> None:
    named = set(re.findall(r"\$labels\.(\w+)", alert.summary))

    assert named == labels_of(alert.expression)
    assert "$" not in alert.remedy
    assert set(re.findall(r"`raydix ([a-z-]+)", alert.remedy)) <= COMMANDS.keys()


def test_there_is_an_alert_for_each_metric_that_was_made_for_one() -> None:
    asked = {name for alert in alerts() for name in re.findall(r"raydix_(\w+)", alert.expression)}

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
    whole, small = alerts(), alerts(0.01)

    for alert, scaled in zip(whole, small, strict=True):
        times, fewer = (re.findall(r"(?:\[|offset )(\w+)", each.expression) for each in (alert, scaled))
        assert [seconds(time) for time in fewer] == [pytest.approx(seconds(time) / 100) for time in times]
    delays, shorter = ([rule.get("for", "0s") for rule in rules(scale)["groups"][0]["rules"]] for scale in (1.0, 0.01))
    assert [seconds(time) for time in shorter] == [pytest.approx(seconds(time) / 100) for time in delays]


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"ms": 0.001, "s": 1.0, "m": 60.0}[unit]


def test_the_guide_has_every_alert() -> None:
    assert markdown() in DOCUMENT.read_text(encoding="utf-8")


def test_the_command_writes_the_rules_as_yaml_and_as_json(tmp_path: Path) -> None:
    out = tmp_path / "alerts.yml"

    assert run_json("dashboard", "--alerts", "-o", out) == {"path": str(out)}
    assert out.read_text(encoding="utf-8") == rules_file() == run("dashboard", "--alerts").stdout
    assert yaml.safe_load(rules_file()) == rules() == run_json("dashboard", "--alerts")
    refused = run_json("dashboard", "--alerts", "-o", tmp_path, exit_code=2)["error"]
    assert "alerts.yml" in refused["advice"]
