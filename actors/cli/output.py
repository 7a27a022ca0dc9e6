"""What commands print: a table or text for people, or with `--json` one JSON document; errors go to stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from raydix.actors.cli.failures import Failure
from raydix.schemas.shown import shown_text

_META = "raydix.json"
_PIPE_WIDTH = 160  # columns


def _note_json(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_META] = value  # for the report of a failure
    return value


AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, and nothing else.", callback=_note_json, is_eager=True)
]


def show(value: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Print a result: `value` as JSON (models and lists of them, too), or what `render` makes of it for people."""
    if as_json:
        print_json(value)
    elif isinstance(text := render(), str):
        typer.echo(shown_text(text))
    else:
        console().print(text, soft_wrap=True)  # what is to be copied stays on its line


def table_of(*columns: str) -> Table:
    """Return an empty table. A column whose name begins with `>` is aligned to the right.

    If the terminal is too narrow, the other columns are wrapped, and the first one, which names the rows, is whole.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=side, no_wrap=number == 0)
    return table


def share(part: float, whole: float) -> str:
    """A share in percent; "-" where there is nothing that it could be of."""
    return f"{part / whole:.1%}" if whole else "-"


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print one JSON document; on one line with `indent=None`."""
    typer.echo(json.dumps(value, indent=indent, default=_as_json))


def console(stderr: bool = False) -> Console:
    """Where people read. Made anew, as stdout may be another one by now; in a pipe nothing is cut to 80 columns."""
    made = _Console(stderr=stderr, highlight=False, markup=False, emoji=False)  # names may hold brackets
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _PIPE_WIDTH
    return made


class _Console(Console):
    """A console on which a name that a cache's client has chosen is text alone."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Return a text to be laid out, with what a terminal would obey escaped."""
        return super().render_str(shown_text(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed, the console's own control codes as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown_text(segment.text))


def report_failure(ctx: typer.Context, failure: Failure) -> None:
    """Tell of a failure on stderr, and with `--json` as a document on stdout, too."""
    if ctx.meta.get(_META):
        error = {"type": failure.kind, "message": failure.message, "advice": failure.advice}
        print_json({"error": error})
    typer.echo(shown_text(f"error: {failure.message}"), err=True)
    if failure.advice:
        typer.echo(shown_text(f"  try: {failure.advice}"), err=True)


def _as_json(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} has no JSON form")
