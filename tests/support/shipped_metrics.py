"""Write the dashboard that the package ships and the tables of `examples/metrics.md`: `make metrics`.

They are made from the table of counters, the engines' counts, and the file of alerts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from raydix.actors.engines import transfer_counts
from raydix.actors.metrics.distribution import ACQUIRE_S, BATCH_SIZES, WAIT_S
from raydix.actors.metrics.metric import EXPORTED_PREFIX
from raydix.actors.metrics.shipped import alerts_text
from raydix.actors.metrics.table import METRICS

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "examples" / "metrics.md"
PANELS = Path(__file__).with_name("dashboard_panels.yml")
DASHBOARD = ROOT / "actors" / "metrics" / "dashboard.json"

BUCKETS = {
    "raydix_acquire_latency_seconds": ACQUIRE_S,
    "raydix_lock_latency_seconds": ACQUIRE_S,
    "raydix_insert_latency_seconds": ACQUIRE_S,
    "raydix_wait_seconds": WAIT_S,
    "raydix_batch_size": BATCH_SIZES,
}

# ---------------------------------------------------------------- dashboard

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 12, 8  # size of a panel; Grafana's grid is 24 wide
CACHES = '{cache=~"$cache"}'
ENGINES = '{__name__=~"(ray_vllm_|vllm:)raydix_%s"}'  # Ray exports the series, or the engine does
ENGINE_RATES = {
    "Engines: look-ups, loads and saves per second": (
        "reqps",
        "lookups lookup_timeouts tier_loads tier_loads_late loads load_failures saves saves_refused detached_requests",
    ),
    "Engines: tokens hit in the cache per second": ("short", "hit_tokens"),
    "Engines: bytes copied per second": ("Bps", "loaded_bytes saved_bytes"),
}
ENGINE_TIMES = {
    "Engines: time of a look-up": "lookup_seconds",
    "Engines: time of a look-up that loads from a tier": "tier_load_seconds",
    "Engines: time of a load": "load_seconds",
    "Engines: time of a save": "save_seconds",
}
BY_NAME = {metric.name.removeprefix("raydix_").removesuffix("_total"): metric for metric in METRICS}
Queries = list[tuple[str, str]]  # PromQL, and the name of its lines


def rate(series: str, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) (rate({series}[$__rate_interval]))"


def spread(buckets: str, total: str, number: str, label: str) -> Queries:
    """Return the queries of a histogram: its median, its 99th percentile, and its mean."""
    per_bucket, of = rate(buckets, label, "le"), f"{{{{{label}}}}}"
    return [
        (f"histogram_quantile(0.5, {per_bucket})", f"{of} median"),
        (f"histogram_quantile(0.99, {per_bucket})", f"{of} 99 %"),
        (f"{rate(total, label)} / {rate(number, label)}", f"{of} mean"),
    ]


def series_of(name: str) -> str:
    """Return the series of a metric of the chosen caches."""
    return BY_NAME[name].exported_name + CACHES


def queries(line: str | dict[str, str], panel: dict[str, Any]) -> Queries:
    """Return the queries of a line of a panel: a metric, a share, or a histogram."""
    if isinstance(line, dict) and "spread" in line:
        return spread(*(series_of(f"{line['spread']}_{part}") for part in ("bucket", "sum", "count")), "cache")
    if isinstance(line, dict):
        part, whole = (rate(series_of(line[key]), "cache") for key in ("part", "whole"))
        return [(f"{part} / {whole}", f"{{{{cache}}}} {line.get('name', '')}".strip())]
    metric, series, name = BY_NAME[line], series_of(line), line
    labels = ("cache", *metric.labels)
    if metric.kind == "gauge":
        query = f"{panel.get('aggregate', 'sum')} by ({', '.join(labels)}) ({series})"
    elif panel.get("increase"):
        query = f"sum by ({', '.join(labels)}) (increase({series}[5m]))"
    else:
        query = rate(series, *labels)
    for title, prefix in (("Host tier: ", "host_"), ("Disk: ", "disk_")):
        name = name.removeprefix(prefix) if panel["title"].startswith(title) else name
    words = [name.removesuffix("_seconds").replace("_", " ")] if len(panel["lines"]) > 1 else []
    return [(query, " ".join(["{{cache}}", *words, *(f"{{{{{label}}}}}" for label in metric.labels)]))]


def drawn(place: int, title: str, unit: str, lines: Queries, is_stacked: bool = False) -> dict[str, Any]:
    """Return a panel as Grafana reads it."""
    custom: dict[str, Any] = {"fillOpacity": 10, "showPoints": "never"}
    if is_stacked:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": SOURCE,
        "gridPos": {"x": place % 2 * WIDTH, "y": place // 2 * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": query, "legendFormat": name}
            for number, (query, name) in enumerate(lines)
        ],
    }


def panels() -> list[dict[str, Any]]:
    """Return the panels of the caches, then those of the engines."""
    layout = yaml.safe_load(PANELS.read_text(encoding="utf-8"))
    made: list[tuple[str, str, Queries, bool]] = [
        (
            panel["title"],
            panel["unit"],
            [query for line in panel["lines"] for query in queries(line, panel)],
            panel.get("is_stacked", False),
        )
        for panel in layout
    ]
    text = " ".join(query for _, _, lines, _ in made for query, _ in lines)
    missing = [name for name in BY_NAME if series_of(name) not in text]
    assert not missing, f"{PANELS.name} must have each metric, but lacks {', '.join(missing)}"
    for title, (unit, names) in ENGINE_RATES.items():
        lines = [
            (rate(ENGINES % f"{name}_total", "model_name"), f"{{{{model_name}}}} {name.replace('_', ' ')}")
            for name in names.split()
        ]
        made.append((title, unit, lines, False))
    for title, name in ENGINE_TIMES.items():
        series = (ENGINES % f"{name}_{part}" for part in ("bucket", "sum", "count"))
        made.append((title, "s", spread(*series, "model_name"), False))
    return [drawn(place, *panel) for place, panel in enumerate(made)]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana reads it, with variables for the data source and the caches."""
    query = "label_values(ray_raydix_slots, cache)"
    caches = {
        "name": "cache",
        "label": "Cache",
        "type": "query",
        "datasource": SOURCE,
        "definition": query,
        "query": {"query": query, "refId": "cache"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Raydix caches",
        "uid": "raydix",
        "tags": ["ray", "raydix"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, caches]},
        "panels": panels(),
    }


def dashboard_text() -> str:
    """Return the file of the dashboard."""
    return json.dumps(dashboard(), indent=2) + "\n"


# ---------------------------------------------------------------- alerts


def rules(text: str = "") -> list[dict[str, Any]]:
    """Return the rules of a file of alerts, by default the one that the package ships."""
    (group,) = yaml.safe_load(text or alerts_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def scaled_alerts(scale: float) -> str:
    """Return the file of alerts with all windows, delays and ages of lives scaled, for a test that cannot wait."""

    def scaled(found: re.Match[str]) -> str:
        return f"{found[1]}{scale * int(found[2]) * {'s': 1, 'm': 60}[found[3]] * 1000:.0f}ms"

    text = re.sub(r"(\[|\boffset\s+|\bfor: )(\d+)([sm])\b", scaled, alerts_text())
    return re.sub(r"(?<=< )900\b", f"{scale * 900:g}", text)


# ---------------------------------------------------------------- tables of the guide


def metrics_table() -> str:
    rows = [
        f"| `{metric.exported_name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | "
        f"{metric.meaning} |"
        for metric in METRICS
    ]
    return "\n".join(["| metric | kind | labels besides `cache` | meaning |", "|---|---|---|---|", *rows, ""])


def bucket_table() -> str:
    rows = [
        f"| `{EXPORTED_PREFIX}{name}` | {', '.join(f'{bound:g}' for bound in bounds)}, +Inf |"
        for name, bounds in BUCKETS.items()
    ]
    return "\n".join(["| histogram | `le` |", "|---|---|", *rows, ""])


def alert_table() -> str:
    rows = []
    for rule in rules():
        expression = rule["expr"].replace("|", "\\|")
        rows.append(f"| `{rule['alert']}` | {rule['labels']['severity']} | {rule.get('for', '0s')} | `{expression}` |")
    return "\n".join(["| alert | severity | holds for | expression |", "|---|---|---|---|", *rows, ""])


def guide_text() -> str:
    """Return the guide with its tables."""
    text = GUIDE.read_text(encoding="utf-8")
    for table in (metrics_table(), bucket_table(), transfer_counts.markdown(), alert_table()):
        head = table.split("\n", 1)[0]
        before, after = re.split(rf"(?m)^{re.escape(head)}\n(?:\|.*\n)*", text)
        text = before + table + after
    return text


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard_text(), encoding="utf-8")
    GUIDE.write_text(guide_text(), encoding="utf-8")
