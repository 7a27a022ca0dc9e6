"""The latency of an acquire: alone, among others, and while the pool is under pressure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from benchmarks.service_rates import ServiceBenchmark

from raydix.actors import PrefixCacheClient


async def _timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    """Return milliseconds, and the call's result."""
    started = time.perf_counter()
    result = await work()
    return 1e3 * (time.perf_counter() - started), result


def _percentiles(times: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(times, (50, 90, 99)).tolist()
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "max_ms": max(times)}


async def among(actor: Any, num_others: int, num_samples: int) -> dict[str, Any]:
    """Time one acquire and one no-op call in turns, while others send whole requests."""
    acquires: list[float] = []
    noops: list[float] = []
    async with PrefixCacheClient(actor) as client, PrefixCacheClient(actor) as other:
        mine, theirs = ServiceBenchmark(actor, client), ServiceBenchmark(actor, other, seed=1)
        crowd = [asyncio.create_task(_for_ever(theirs)) for _ in range(num_others)]
        for prompt in mine.prompts(num_samples):
            elapsed, lease = await _timed(lambda prompt=prompt: client.acquire(prompt))  # type: ignore[misc]
            acquires.append(elapsed)
            await lease.insert(prompt, release=True)
            noops.append((await _timed(mine.noop))[0])
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
    skipped = num_samples // 10  # to warm up
    acquire, noop = _percentiles(acquires[skipped:]), _percentiles(noops[skipped:])
    return {"others": num_others, "acquire": acquire, "noop": noop, "p50_per_noop": acquire["p50_ms"] / noop["p50_ms"]}


async def next_pages(actor: Any, lengths: tuple[int, int], num_samples: int) -> dict[str, Any]:
    """Time the publication of one more page of a short prompt and of a long one, in turns; the cache is reset first."""
    times: list[list[float]] = [[], []]
    async with PrefixCacheClient(actor) as client:
        await client.reset()
        page = client.config.page_size
        ids = np.random.default_rng(0).integers(0, 150_000, size=max(*lengths, page * num_samples))
        leases = []
        for place, length in enumerate(lengths):
            lease = await client.acquire(ids[:length] + place, new_tokens=page * num_samples)
            await lease.insert(ids[:length] + place)
            leases.append(lease)
        for number in range(num_samples):
            more = ids[page * number :][:page].tolist()
            for place, lease in enumerate(leases):
                insert = partial(lease.insert_next, lease.known_len + page, more)
                times[place].append((await _timed(insert))[0])
        for lease in leases:
            await lease.release()
        await client.reset()
    short, long = (_percentiles(each[num_samples // 10 :]) for each in times)
    return {"lengths": lengths, "short": short, "long": long, "ratio": long["p50_ms"] / short["p50_ms"]}


async def _for_ever(benchmark: ServiceBenchmark) -> None:
    while True:
        for prompt in benchmark.prompts(64):
            await benchmark.cycle(prompt)


async def under_pressure(
    calm: Any, pressed: Any, num_rounds: int, num_coroutines: int, num_cycles: int
) -> dict[str, Any]:
    """Return the p99 of acquire in a cache that always evicts in the background, and in one that never does.

    Both run in turns; the figures are medians of the rounds. `calm` is reset after each round, and large enough for
    one.
    """
    p99: dict[str, list[float]] = {"calm": [], "pressed": []}
    async with PrefixCacheClient(calm) as calm_client, PrefixCacheClient(pressed) as pressed_client:
        for number in range(num_rounds + 1):
            for name, actor, client in (("calm", calm, calm_client), ("pressed", pressed, pressed_client)):
                times = await _acquire_times(
                    ServiceBenchmark(actor, client, number), client, num_coroutines, num_cycles
                )
                if number:  # the first one warms up, and fills the pool
                    p99[name].append(float(np.percentile(times, 99)))
            before = await calm_client.stats()
            assert before.tokens_evicted == 0, "the calm cache must be large enough for a round"
            await calm_client.reset()
        stats = await pressed_client.stats()
    calm_p99, pressed_p99 = median(p99["calm"]), median(p99["pressed"])
    return {
        "calm_p99_ms": calm_p99,
        "pressed_p99_ms": pressed_p99,
        "ratio": median(pressed / calm for calm, pressed in zip(p99["calm"], p99["pressed"], strict=True)),
        "tokens_evicted": stats.eviction_task.tokens_evicted,
        "longest_slice_ms": stats.eviction_task.longest_slice_ms,
    }


async def _acquire_times(
    benchmark: ServiceBenchmark, client: PrefixCacheClient, num_coroutines: int, num_cycles: int
) -> list[float]:
    left = iter(benchmark.prompts(num_cycles))
    times: list[float] = []

    async def worker() -> None:
        for prompt in left:
            elapsed, lease = await _timed(lambda prompt=prompt: client.acquire(prompt))  # type: ignore[misc]
            times.append(elapsed)
            await lease.insert(prompt, release=True)

    await asyncio.gather(*(worker() for _ in range(num_coroutines)))
    return times
