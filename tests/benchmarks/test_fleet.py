"""The fleet's benchmark runs whole, in small, and an indexed page takes few bytes. `make bench` judges the times."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from benchmarks import bench_fleet
from benchmarks.bench_fleet import MAX_PAGE_BYTES, STORED, Staleness, large_fleet, some_pages

from raydix.cache_core import PageIndex

pytestmark = pytest.mark.benchmark


async def test_routes_and_batches_of_a_fleet_are_measured() -> None:
    found = await bench_fleet.router_figures(20, 20_000, num_routes=30, num_batches=60)

    assert all(each.value > 0 for each in found)
    assert [each.at_most or each.at_least for each in found] == [100, 1000, None, None, 1e6, 2]


async def test_routes_go_to_the_cache_that_holds_the_prompt() -> None:
    async with large_fleet(20, 20_000) as large:
        for prompt in large.prompts(40, some_pages(large.rng, 0)):
            held = {column: stored for column, stored, _ in large.fleet.index.prefix_runs(prompt.hashes)}
            route = large.fleet.chooser.send(prompt)
            assert route.prefix_len == 512 * max(held.values(), default=0)
            route.cancel()


def test_an_indexed_page_takes_a_few_bytes() -> None:
    assert 12 <= bench_fleet.page_bytes(100, 100_000) <= MAX_PAGE_BYTES


def test_the_hashes_of_a_prompt_are_measured_against_hashlib() -> None:
    assert [each.value > 0 and each.ratio is not None for each in bench_fleet.hashing_figures(1_024)] == [True]


def test_only_stored_pages_end_a_delay() -> None:
    index, last = PageIndex(), 9
    staleness, column = Staleness(index), index.add_column()
    staleness.sends(last)

    for seq, kind in ((1, 3), (2, STORED)):  # pending first
        index.apply(column, "e", seq, bytes((kind,)), np.array([2], np.int32), np.array([8, last]))
        assert len(staleness.delays_ms) == seq - 1
    assert index.pages(column)[0] == {8, 9}


@pytest.mark.long
@pytest.mark.ray
def test_the_delay_of_events_is_measured_at_every_feed(ray_cluster: None) -> None:
    delays = asyncio.run(bench_fleet.staleness_ms(num_feeds=3, num_actors=2, seconds=0.2))

    assert len(delays) == 3 * 4
    assert min(delays) > 0
