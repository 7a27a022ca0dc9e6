"""`raydix dashboard`: a Grafana dashboard of the metrics of all caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from raydix.actors.cli.failures import USAGE, CommandError
from raydix.actors.cli.output import AsJson, print_json, show


def dashboard(
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: stdout.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a Grafana dashboard of caches with `metrics`, as JSON to import or to provision.

    Ray's Grafana configuration looks in `/tmp/ray/session_latest/metrics/grafana/dashboards/`.
    """
    from raydix.actors.metrics.dashboard import dashboard as made

    if out is None:
        print_json(made())
        return
    try:
        out.write_text(json.dumps(made(), indent=2), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{out}: {error.strerror}", "--out raydix.json", USAGE) from None
    show({"path": str(out)}, as_json, lambda: str(out))
