"""Whole requests are served faster than Ray makes calls that do nothing, because they travel together."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from benchmarks.bench_service import CONFIG, ServiceBenchmark, median_of

from raydix.actors import PrefixCacheClient

NUM_ROUNDS, NUM_CYCLES, NUM_NOOPS = 9, 768, 512
GATED = "RAYDIX_BENCH_GATE" in os.environ  # set by `make bench`: elsewhere the figures are printed, not judged
MAX_TRIES = 3 if GATED else 1  # on a machine that does other things besides


@pytest.fixture
def other_tests_garbage_set_aside() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.ray
@pytest.mark.benchmark
async def test_64_coroutines_complete_two_whole_requests_in_the_time_of_one_call_that_does_nothing(
    running_cache: Callable[[Any], Any], other_tests_garbage_set_aside: None
) -> None:
    actor = running_cache(CONFIG)
    tries = 0
    ratio = 0.0
    async with PrefixCacheClient(actor) as client:
        before = await client.stats()
        benchmark = ServiceBenchmark(actor, client)
        while ratio < 2 and tries < MAX_TRIES:
            tries += 1
            rounds = await benchmark.rounds(NUM_ROUNDS, 64, NUM_CYCLES, NUM_NOOPS)
            rates = median_of(rounds)
            ratio = rates.cycles_per_noop
            print(f"\n64 coroutines, prompts of 1,024 fresh tokens, medians of {NUM_ROUNDS} rounds:")
            print(f"  {rates.noops:,.0f} no-op calls/s")
            print(f"  {rates.cycles:,.0f} whole requests/s (acquire, insert that releases): {ratio:.2f} per no-op")
            print(
                f"  {rates.apart:,.0f} whole requests/s with a release of its own: {rates.apart_per_noop:.2f} per no-op"
            )
            print("  each round:", " ".join(f"{each.cycles_per_noop:.2f}/{each.apart_per_noop:.2f}" for each in rounds))
        stats = await client.stats()
        await client.reset()

    assert stats.acquires - before.acquires == tries * (NUM_ROUNDS + 1) * 2 * NUM_CYCLES
    assert (stats.exhausted, stats.open_leases, stats.private_slots) == (0, 0, 0)
    assert ratio >= 2 or not GATED
