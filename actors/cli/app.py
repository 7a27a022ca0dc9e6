"""The `raydix` command line: the table of commands, and their errors as messages and exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from raydix.actors.cli import (
    caches,
    check,
    dashboard,
    demo,
    describe,
    disk,
    doctor,
    explain,
    export_events,
    fleet,
    record,
    replay,
    report,
    start,
    stats,
    stop,
    tree,
    weights,
)
from raydix.actors.cli.failures import failure_of
from raydix.actors.cli.output import report_failure
from raydix.actors.cli.version import version_line

COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo.demo,
    "start": start.start,
    "list": caches.list_caches,
    "stats": stats.stats,
    "describe": describe.describe,
    "tree": tree.tree,
    "explain": explain.explain,
    "dashboard": dashboard.dashboard,
    "doctor": doctor.doctor,
    "weights": weights.weights,
    "check": check.check,
    "stop": stop.stop,
    "record": record.record,
    "replay": replay.replay,
    "report": report.report,
    "export-events": export_events.export_events,
}


GROUPS: dict[str, typer.Typer] = {"fleet": fleet.app, "disk": disk.app}


class Commands(TyperGroup):
    """A group of commands. It turns an error into a message with advice, and an exit status."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line. A character that stdout or stderr cannot encode is printed as a question mark."""
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Errors meant for the user end it with an exit status; bugs are raised."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                raise
            report_failure(ctx, failure)
            raise typer.Exit(failure.exit_code) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Start, watch and explain prefix KV caches on a Ray cluster.",
    epilog="Every command takes `--json`: one JSON document on stdout, nothing else. "
    "Exit status: 0 done, 1 failed or refused, 2 wrong usage or configuration, 3 no cluster or no such cache.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Print version and core.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before a command."""


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)
