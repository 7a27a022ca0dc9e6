"""Whole requests are served faster than Ray makes calls that do nothing, because they travel together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.bench_service import CONFIG, ServiceBenchmark, median_of

from raydix.actors import PrefixCacheClient


@pytest.mark.ray
@pytest.mark.benchmark
async def test_64_coroutines_complete_two_whole_requests_in_the_time_of_one_call_that_does_nothing(
    running_cache: Callable[[Any], Any],
) -> None:
    actor = running_cache(CONFIG)
    async with PrefixCacheClient(actor) as client:
        rounds = await ServiceBenchmark(actor, client).rounds(9, num_coroutines=64, num_cycles=768, num_noops=512)
        stats = await client.stats()
        await client.reset()

    rates = median_of(rounds)
    print("\n64 coroutines, prompts of 1,024 fresh tokens, medians of 9 rounds:")
    print(f"  {rates.noops:,.0f} no-op calls/s")
    print(
        f"  {rates.cycles:,.0f} whole requests/s (acquire, insert that releases): {rates.cycles_per_noop:.2f} per no-op"
    )
    print(f"  {rates.apart:,.0f} whole requests/s with a release of its own: {rates.apart_per_noop:.2f} per no-op")
    print("  each round:", " ".join(f"{each.cycles_per_noop:.2f}/{each.apart_per_noop:.2f}" for each in rounds))
    assert stats.acquires == 10 * 2 * 768
    assert (stats.exhausted, stats.open_leases, stats.private_slots) == (0, 0, 0)
    assert rates.cycles_per_noop >= 2
