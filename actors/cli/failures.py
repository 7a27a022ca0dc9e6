"""Failures of a command: the message, the advice and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from raydix.actors.cluster.settings_file import SettingsError
from raydix.schemas.shown import fault_text

if TYPE_CHECKING:
    from pydantic import ValidationError

FAILED = 1  # the cache refused, or a check failed
USAGE = 2  # wrong options, files or configuration
UNREACHABLE = 3  # no Ray cluster, or no such cache on it

_ADVICE = {
    "CacheUnavailable": "list the caches that answer: raydix list",
    "ConfigMismatch": "choose another --name, or end the running cache: raydix stop NAME",
}


class CommandError(Exception):
    """A command cannot be executed; the message names the cause."""

    def __init__(self, message: str, advice: str = "", exit_code: int = FAILED) -> None:
        super().__init__(message, advice, exit_code)
        self.message = message
        self.advice = advice
        self.exit_code = exit_code


def wrong_option(error: ValidationError, command: str, options: Mapping[str, str]) -> CommandError:
    """Return the error of a wrong option that a model has found.

    Args:
        command: it has the option.
        options: the options by their fields of the model, where the names differ.
    """
    fault = error.errors(include_url=False)[0]
    field = str(fault["loc"][-1]) if fault["loc"] else ""
    option = options.get(field, f"--{field.replace('_', '-')}" if field else "")
    return CommandError(f"{option} {fault_text(fault)}".lstrip(), f"raydix {command} --help", USAGE)


def _bad_parameter(error: typer.BadParameter) -> Exception:
    """Return the error of an option with a value of a wrong kind or size, with that value."""
    if error.param is None or error.ctx is None:
        return error
    named = error.param.opts[-1] if error.param.param_type_name == "option" else (error.param.name or "").upper()
    faults = getattr(error.__cause__, "errors", None)  # a method of pydantic's errors; typer before 0.29 has none
    fault = f": {error.message.rstrip('.')}" if faults is None else f" {fault_text(faults(include_url=False)[0])}"
    _, *command = error.ctx.command_path.split()  # the first word depends on how it was started
    return CommandError(f"{named}{fault}", f"raydix {' '.join(command)} --help", USAGE)


@dataclass(frozen=True)
class Failure:
    """The output for an error."""

    kind: str  # the error's class
    message: str
    advice: str
    exit_code: int


def failure_of(error: Exception) -> Failure | None:
    """Return the output for an error that is meant for the user; None for a bug."""
    if type(error) is typer.BadParameter:  # a missing parameter is of a subclass
        error = _bad_parameter(error)
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:  # a task group wraps errors
        error = error.exceptions[0]
    kind = type(error).__name__
    if isinstance(error, CommandError):
        return Failure(kind, error.message, error.advice, error.exit_code)
    if isinstance(error, SettingsError):
        return Failure(kind, str(error), error.advice, USAGE)
    if "ray" in sys.modules and isinstance(error, sys.modules["ray"].exceptions.RayError):
        from raydix.actors.transport.ray_calls import from_ray

        error = from_ray(error)
        kind = type(error).__name__
    if "raydix.schemas.errors" in sys.modules and isinstance(error, sys.modules["raydix.schemas.errors"].CacheError):
        exit_code = UNREACHABLE if kind == "CacheUnavailable" else FAILED
        return Failure(kind, str(error), _ADVICE.get(kind, ""), exit_code)
    return None
