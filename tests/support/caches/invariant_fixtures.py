"""Fixtures that make caches as a test asks for them, and hold each of these to its invariants when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ParamSpec, Protocol, TypeVar


class Checked(Protocol):
    """An object that can check its invariants."""

    def check_invariants(self) -> None: ...


P = ParamSpec("P")
C = TypeVar("C", bound=Checked)


def checked_after(make: Callable[P, C]) -> Iterator[Callable[P, C]]:
    """For a fixture to `yield from`: `make`, and then the checks of all that it made."""
    made: list[C] = []

    def make_one(*args: P.args, **kwargs: P.kwargs) -> C:
        made.append(make(*args, **kwargs))
        return made[-1]

    yield make_one
    for each in made:
        each.check_invariants()
