"""`config_difference`: which fields of two configurations differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from raydix.schemas import CacheConfig
from raydix.schemas.shown import brief, counted

_MOST_FIELDS = 8  # fields that one message names


def config_difference(running: CacheConfig, wanted: CacheConfig) -> str:
    """Return the fields that differ, with both values, as text of bounded length; empty if none differs."""
    differing = _differing(running.model_dump(mode="json"), wanted.model_dump(mode="json"))
    named = "; ".join(islice(differing, _MOST_FIELDS))
    more = sum(1 for _ in differing)
    return named + (f"; and {counted(more, 'more field')}" if more else "")


def _differing(running: dict[str, Any], wanted: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, value in running.items():
        other = wanted[name]
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _differing(value, other, f"{above}{name}.")
        elif value != other:
            yield f"{above}{name} is {brief(value)}, not {brief(other)}"
