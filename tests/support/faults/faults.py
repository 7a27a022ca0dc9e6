"""Catalogues of planted faults: a function for each fault of a structure, to check that tests find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


class Catalogue(list[Fault]):
    """The faults of one structure. The name of a fault says what goes wrong."""

    def register(self, plant: Fault) -> Fault:
        """A decorator: one fault more."""
        self.append(plant)
        return plant


def around(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))
