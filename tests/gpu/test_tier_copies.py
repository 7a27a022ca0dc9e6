"""A pool on a GPU, and the records below it in host memory, registered with CUDA or not. These tests never ran."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.tiers.pool_pages import (
    DTYPES,
    LAYOUTS,
    check_random_plans,
    contents,
    copied,
    layout_of,
    random_plan,
    random_pool,
)
from support.waiting import wait_until

from raydix.actors.memory import pinned_memory
from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.host.host_memory import HostMemory
from raydix.actors.tiers.job_threads import Ended, JobThreads
from raydix.cache_core import RecordLayout, RecordPool
from raydix.cache_core.pool import record_copies
from raydix.cache_core.tiers import page_records
from raydix.cache_core.tiers.page_records import PageCopies, PageRecords

pytestmark = pytest.mark.gpu

_LONG = 400_000_000  # cycles of a GPU: a fifth of a second


@pytest.mark.parametrize("staging", [200, 8 * 2**20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_plans_move_their_records_and_no_others(
    name: str, dtype: torch.dtype, staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_records, "CHUNK_BYTES", staging)
    check_random_plans(random_pool(LAYOUTS[name], dtype, device="cuda"), 6)


@pytest.fixture(params=[2**30, 4096], ids=["one piece", "small pieces"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostMemory]:
    for module in (pinned_memory, record_copies):
        monkeypatch.setattr(module, "PIECE_BYTES", request.param)
    pool = random_pool(LAYOUTS["mixed"], torch.bfloat16, device="cuda")
    made = HostMemory(layout_of(PageRecords(pool), 4096, 64, 8), "e" * 32, pin=True)
    wait_until(lambda: made.pinned)
    yield made
    made.close()


async def test_a_copier_writes_to_registered_memory_and_loads_from_it(memory: HostMemory) -> None:
    below = memory.pool
    assert below is not None and below.pages.is_pinned()
    pool, rng = random_pool(LAYOUTS["mixed"], torch.bfloat16, device="cuda"), random.Random(0)
    threads = JobThreads("copier", 1)
    copier = Copier(PageCopies(pool, below), threads, chunk_bytes=500)
    for number in range(20):
        plan, down = random_plan(rng, pool, below), number % 2 == 0
        source, target = (pool, below) if down else (below, pool)
        wanted = copied(plan, contents(source), contents(target), down=down)
        ended = asyncio.get_running_loop().create_future()

        (copier.write if down else copier.load)(plan, ended.set_result)

        assert await ended == Ended(len(plan), "whole")
        assert contents(target) == wanted
    copier.close()


@pytest.mark.parametrize("waits", [True, False])
async def test_a_load_is_reported_when_every_stream_sees_it(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> record_copies.Runs:
        """Delay the stream of the copies. The numbers of rows are on the card by then; that transfer waits."""
        torch.cuda._sleep(_LONG)
        return find_runs(*arguments)

    pool = random_pool(LAYOUTS["attention"], torch.bfloat16, device="cuda")
    layout = layout_of(PageRecords(pool), 48)
    storage = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)  # others' transfers may wait
    below = random_pool(layout, storage=storage)
    assert isinstance(below, RecordPool)
    copies, plan = PageCopies(pool, below), random_plan(random.Random(0), pool, below, 6)
    copies.write(plan, 0, 6)
    copies.load(plan, 0, 6)  # both are equal, and every kernel is loaded
    pool.storage.zero_()
    torch.cuda.synchronize()
    find_runs = record_copies.find_runs
    monkeypatch.setattr(record_copies, "find_runs", slow)
    if not waits:
        monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda stream: None)
    threads = JobThreads("copier", 1)
    copier, ended = Copier(copies, threads), asyncio.get_running_loop().create_future()

    copier.load(plan, ended.set_result)
    await ended
    seen = pool.storage.clone()

    monkeypatch.undo()
    torch.cuda.synchronize()
    assert bool(seen.any()) == waits, "the test would not have seen a load that is reported too early"
    assert copies.first_difference(plan) is None
    copier.close()


def test_records_in_a_pool_on_the_card_are_those_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_copies, "_MANY_RUNS", 1)
    check_random_plans(random_pool(RecordLayout(48, 4, 24, 20, 7, 5, 33), device="cuda"), 10)
