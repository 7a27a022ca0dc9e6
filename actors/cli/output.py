"""Output of the commands: a table or text, or one JSON document with `--json`; errors go to stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from raydix.actors.cli.failures import Failure
from raydix.schemas.shown import shown_text

_META = "raydix.json"
_PIPE_WIDTH = 160  # columns


def _note_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_META] = value  # the report of a failure reads it
    return value


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, and nothing else.", callback=_note_json, is_eager=True)
]


def show(value: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Print a result: `value` as JSON (also models and lists of models), or the table or text of `render`."""
    if as_json:
        print_json(value)
    elif isinstance(text := render(), str):
        typer.echo(shown_text(text))
    else:
        console().print(text, soft_wrap=True)  # a line to be copied must not be wrapped


def first_finding(findings: Sequence[str]) -> str:
    """Return the gravest finding, and the number of others, which `raydix doctor` prints; empty if there is none."""
    if not findings:
        return ""
    return findings[0] + (f" (and {len(findings) - 1} more: raydix doctor)" if len(findings) > 1 else "")


def table_of(*columns: str) -> Table:
    """Return an empty table. A column is aligned to the right if its name begins with `>`.

    If the terminal is too narrow, the other columns are wrapped, and the first one, which names the rows, is whole.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=side, no_wrap=number == 0)
    return table


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print one JSON document; on one line with `indent=None`."""
    typer.echo(json.dumps(value, indent=indent, default=_as_json))


def console(stderr: bool = False) -> Console:
    """Return a console on the current stdout or stderr. In a pipe it is wider than 80 columns."""
    made = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)  # names may hold brackets
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPE_WIDTH
    return made


def progress_bars() -> Progress:
    """Return bars on stderr, each with its description, counts and time."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console(stderr=True))


class _Console(Console):
    """A console that escapes control characters in names, which clients choose freely."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text with its control characters escaped."""
        return super().render_str(shown_text(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the output, with control codes of the console only."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown_text(segment.text))


def report_failure(ctx: typer.Context, failure: Failure) -> None:
    """Print a failure to stderr, and with `--json` also a document to stdout."""
    if ctx.meta.get(_META):
        error = {"type": failure.kind, "message": failure.message, "advice": failure.advice}
        print_json({"error": error})
    typer.echo(shown_text(f"error: {failure.message}"), err=True)
    if failure.advice:
        typer.echo(shown_text(f"  try: {failure.advice}"), err=True)


def _as_json(value: Any) -> Any:
    from pydantic import BaseModel  # imported already, if the value is one

    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")
