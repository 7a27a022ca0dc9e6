"""The files for Grafana and Prometheus that the package ships."""

from __future__ import annotations

from importlib.resources import files


def dashboard_text() -> str:
    """Return a Grafana dashboard of all caches of a cluster, as JSON, for the data source that Ray provisions."""
    return _text("dashboard.json")


def alerts_text() -> str:
    """Return rules of alerts on the metrics of caches and engines, as YAML for Prometheus."""
    return _text("alerts.yml")


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
