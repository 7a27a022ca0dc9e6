"""The `raydix` command, run in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from raydix.actors.cli.app import app


def run(*arguments: object, stdin: str | None = None, exit_code: int = 0) -> Result:
    """Run a command and return its output; it must end with `exit_code`."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


def run_json(*arguments: object, stdin: str | None = None, exit_code: int = 0) -> Any:
    """The one JSON document that a command prints with `--json`."""
    return json.loads(run(*arguments, "--json", stdin=stdin, exit_code=exit_code).stdout)
