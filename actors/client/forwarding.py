"""Signatures of functions that pass arguments on to a verb of a client or a lease: each argument stands there once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def forwarded_signature(function: Callable[..., Any], verb: Callable[..., Any]) -> Signature:
    """Return the signature of `function` with the arguments of the method `verb` in place of `*args` and `**kwargs`."""
    own = signature(function, follow_wrapped=False)
    named = {name: part for name, part in own.parameters.items() if part.kind is part.POSITIONAL_OR_KEYWORD}
    _, *given = signature(verb).parameters.values()
    return own.replace(parameters=[*named.values(), *(part for part in given if part.name not in named)])


def with_options_of(
    verb: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[Concatenate[T, ...], R]], Callable[Concatenate[T, P], R]]:
    """Return a decorator of functions with `**options`, which they pass on to the method `verb`.

    Their signatures show the options of `verb` with their defaults, and a call with another one raises TypeError.
    """

    def decorate(function: Callable[Concatenate[T, ...], R]) -> Callable[Concatenate[T, P], R]:
        shown = forwarded_signature(function, verb)
        names = shown.parameters.keys()

        @wraps(function)
        def call(*args: Any, **options: Any) -> R:
            if not options.keys() <= names:
                unknown = min(options.keys() - names)
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown!r}")
            return function(*args, **options)

        call.__signature__ = shown  # type: ignore[attr-defined]
        return call

    return decorate
