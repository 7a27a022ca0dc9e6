"""The tables of `raydix fleet`: columns of the host tier are there where a cache has one."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from raydix.actors.cli import fleet_state
from raydix.schemas import FleetCacheStats, FleetStats, RouteCandidate, RouteExplanation

LOAD = dict.fromkeys(FleetCacheStats.model_fields, 7) | {"cache": "a", "epoch": "e", "silent_s": 0.0}


def printed(table: Any) -> list[list[str]]:
    """Return the cells of each line."""
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
    return [line.split("  ") for line in captured.get().splitlines() if line.strip()]


def words(lines: list[list[str]]) -> list[list[str]]:
    return [[cell.strip() for cell in line if cell.strip()] for line in lines]


@pytest.mark.parametrize(("host_pages", "cells"), [(0, ["7", "7"]), (5, ["7", "5", "7"])])
def test_the_pages_on_the_host_are_a_column_if_there_are_any(host_pages: int, cells: list[str]) -> None:
    load = FleetCacheStats(**LOAD | {"host_pages": host_pages})  # type: ignore[arg-type]
    stats = FleetStats(
        page_size=16,
        stride_tokens=32,
        caches=(load,),
        left_out={},
        routes=0,
        open_routes=0,
        indexed_pages=0,
        index_bytes=0,
    )

    head, _, row, _ = words(printed(fleet_state._loads(stats)))

    assert ("on host" in head) == bool(host_pages)
    assert len(head) == len(row)
    assert row[1 : 1 + len(cells)] == cells


@pytest.mark.parametrize("host_len", [0, 64])
def test_the_tokens_to_load_are_a_column_if_a_cache_has_a_host_tier(host_len: int) -> None:
    candidate = RouteCandidate(
        cache="a",
        prefix_len=0,
        promised_len=0,
        host_len=host_len,
        loading_tokens=host_len,
        uncached_tokens=100,
        pending_tokens=0,
        cost=319.2,
    )
    explained = RouteExplanation(num_tokens=164, stride_tokens=32, weight=3, candidates=(candidate,))
    answer = explained.model_dump(mode="json") | {"left_out": {}}

    head, _, row, note = words(printed(fleet_state._costs(answer)))

    assert ("to load" in head) == bool(host_len)
    assert len(head) == len(row)
    price = "(uncached + 0.1 * to load)" if host_len else "uncached"
    assert note == [f"164 tokens; cost = pending + 3 * {price}"]
