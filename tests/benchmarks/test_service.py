"""Whole requests are served faster than Ray makes calls that do nothing, as they are sent in batches."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from benchmarks.bench_service import CONFIG, TINY, figures, lines
from benchmarks.service_rates import ServiceBenchmark, median_of
from support.caches.cache_in_process import HandleInProcess

from raydix import actors, schemas
from raydix.actors import LocalPrefixCache, PrefixCacheClient

NUM_ROUNDS, NUM_CYCLES, NUM_NOOPS = 9, 768, 512
GOAL = 4.0
GATED = "RAYDIX_BENCH_GATE" in os.environ  # set by `make bench`: elsewhere the figures are printed, not judged
MAX_TRIES = 3 if GATED else 1  # the machine may be busy with other work
COUNTED = tuple(os.path.dirname(str(package.__file__)) for package in (actors, schemas))
MAX_CALLS = 79  # of functions of the client and the service, for a whole request; a few more than it is now


@pytest.fixture
def other_tests_garbage_set_aside() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.benchmark
async def test_64_coroutines_complete_four_whole_requests_in_the_time_of_one_call_that_does_nothing(
    running_cache: Callable[[Any], Any], other_tests_garbage_set_aside: None
) -> None:
    actor = running_cache(CONFIG)
    tries = 0
    ratio = 0.0
    async with PrefixCacheClient(actor) as client:
        before = await client.stats()
        benchmark = ServiceBenchmark(actor, client)
        while ratio < GOAL and tries < MAX_TRIES:
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
    assert ratio >= GOAL or not GATED


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.benchmark
def test_the_benchmark_gives_every_figure_and_prints_it(ray_cluster: None) -> None:
    measured = figures(TINY)

    print("\n" + "\n".join(lines(measured)))
    assert json.loads(json.dumps(measured)) == measured
    assert [row["coroutines"] for row in measured["throughput"]] == [1, 8]
    assert measured["throughput"][0]["batch"] == 1
    assert [row["processes"] for row in measured["processes"]] == [1, 2]
    assert [row["others"] for row in measured["latency"]] == [0, 16]
    assert measured["pressure"]["tokens_evicted"] > 0
    held = measured["stalls"]
    assert (held["eviction"]["nodes"], held["retirement"]["tokens"]) == (2_000, 20_480)
    assert held["eviction"]["turns"] > 1


def test_a_whole_request_makes_no_more_calls_than_it_did() -> None:
    calls = asyncio.run(count_calls(num_coroutines=32, num_cycles=256))

    print(f"\n{calls:.1f} calls a request")
    assert calls <= MAX_CALLS


async def count_calls(num_coroutines: int, num_cycles: int) -> float:
    """Count the calls of client and service functions for a whole request, without those of the core."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(COUNTED)

    async with LocalPrefixCache(CONFIG) as cache:
        handle = HandleInProcess(cache, Random(0))
        async with PrefixCacheClient(handle) as client:
            benchmark = ServiceBenchmark(handle, client)
            prompts = iter(benchmark.prompts(num_cycles))

            async def worker() -> None:
                for prompt in prompts:
                    await benchmark.cycle(prompt)

            sys.setprofile(count)
            await asyncio.gather(*(worker() for _ in range(num_coroutines)))
            sys.setprofile(None)
            assert (await client.stats()).acquires == num_cycles
    return calls / num_cycles
