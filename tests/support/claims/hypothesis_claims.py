"""Claims about all inputs: upheld by searching for a counterexample, or refuted by finding one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Claim = Callable[..., None]
NOT_CHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large]


def uphold(claim: Claim, max_examples: int = 150, **inputs: st.SearchStrategy[Any]) -> None:
    """Fail with the smallest counterexample that is found."""
    settings(max_examples=max_examples, deadline=None, suppress_health_check=NOT_CHECKED)(given(**inputs)(claim))()


def refute(claim: Claim, max_examples: int = 2000, **inputs: st.SearchStrategy[Any]) -> None:
    """Fail unless a counterexample is found; which, does not matter, so none is made smaller."""
    search = settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=NOT_CHECKED,
    )
    with pytest.raises((AssertionError, KeyError, ValueError)):  # a wrong result, or an error
        search(given(**inputs)(claim))()
