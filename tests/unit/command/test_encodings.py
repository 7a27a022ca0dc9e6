"""Commands where stdout and stderr are not Unicode."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

import pytest
import typer
from rich.text import Text

from raydix.actors.cli.app import COMMANDS, GROUPS, Commands, app
from raydix.actors.cli.output import console, table_of

ENCODINGS = pytest.mark.parametrize("encoding", ["ascii", "latin-1"])


@contextmanager
def streams(encoding: str) -> Iterator[list[io.BytesIO]]:
    """Give stdout and stderr an encoding, in which other characters are errors; yield the bytes of each."""
    written = [io.BytesIO(), io.BytesIO()]
    files = [io.TextIOWrapper(buffer, encoding=encoding, write_through=True) for buffer in written]
    with redirect_stdout(files[0]), redirect_stderr(files[1]):
        yield written


@ENCODINGS
def test_each_command_has_its_help(encoding: str) -> None:
    with streams(encoding) as (stdout, _):
        for name in [*COMMANDS, *GROUPS]:
            with pytest.raises(SystemExit) as end:
                app([name, "--help"])
            assert end.value.code == 0
        assert stdout.getvalue().count(b"Usage") == len(COMMANDS) + len(GROUPS)


@ENCODINGS
def test_tables_texts_and_errors_have_a_mark_for_a_character(encoding: str) -> None:
    command = typer.Typer(cls=Commands)

    @command.command()
    def names() -> None:
        for stderr in (False, True):
            table = table_of("name", ">tokens")
            table.add_row(Text("キャッシュ"), "1")
            console(stderr).print(table)
        typer.echo("\ud800 一")
        raise typer.BadParameter("一")

    command.callback()(lambda: None)
    with streams(encoding) as (stdout, stderr):
        with pytest.raises(SystemExit) as end:
            command(["names"])

        assert end.value.code == 2
        assert [stream.getvalue().count(b"?????") for stream in (stdout, stderr)] == [1, 1]
        assert b"\n? " in stdout.getvalue(), "it cannot be encoded at all"


@pytest.mark.parametrize("arguments", [["start", "--help"], ["stats", "--一"]])
def test_a_process_ends_without_a_traceback(arguments: list[str]) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "raydix.actors.cli", *arguments], env=environment, capture_output=True, check=False
    )

    assert b"Traceback" not in done.stderr and done.returncode == (0 if "--help" in arguments else 2)
