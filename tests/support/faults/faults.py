"""Catalogues of planted faults: a function for each fault of a structure, to check that tests find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


class Catalogue(list[Fault]):
    """The faults of one structure. The name of a fault says what goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self._late: set[Fault] = set()

    def register(self, plant: Fault) -> Fault:
        """Add a fault; a decorator."""
        self.append(plant)
        return plant

    def register_late(self, plant: Fault) -> Fault:
        """Add a fault that the first run of the traffic does not find, so that `make test-more` plants it."""
        self._late.add(plant)
        return self.register(plant)

    def cases(self) -> list[ParameterSet]:
        """Return a test's parameter for each fault."""
        marks = {plant: [pytest.mark.more] if plant in self._late else [] for plant in self}
        return [pytest.param(plant, marks=marks[plant], id=plant.__name__) for plant in self]


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
