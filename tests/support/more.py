"""`more`: the parameters of a test that `make test-more` runs, and not `make test`."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

__all__ = ["more"]


def more(*values: Any) -> list[ParameterSet]:
    """Return parameters with the mark; a tuple has the values of one parameter set."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.more) for value in values
    ]
