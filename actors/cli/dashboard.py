"""`raydix dashboard`: a Grafana dashboard of the metrics of all caches, or rules of alerts for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, print_json, show
from raydix.actors.metrics.shipped import alerts_text, dashboard_text


def dashboard(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: stdout.")] = None,
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Write rules of alerts for Prometheus instead, as YAML.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a Grafana dashboard of caches with `metrics`, as JSON to import or to provision.

    Ray's Grafana configuration looks in `/tmp/ray/session_latest/metrics/grafana/dashboards/`.

    With `--alerts`, write rules of alerts, each with its remedy. Name the file under `rule_files` of Prometheus.
    With `--json` and without `--out`, the rules are JSON, which Prometheus reads as well.
    """
    text = alerts_text() if alerts else dashboard_text()
    if out is None:
        if alerts and as_json:
            print_json(yaml.safe_load(text))
        else:
            typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        advice = f"--out {'alerts.yml' if alerts else 'raydix.json'}"
        raise CommandError(f"{out}: {error.strerror}", advice, USAGE) from None
    show({"path": str(out)}, as_json, lambda: str(out))
