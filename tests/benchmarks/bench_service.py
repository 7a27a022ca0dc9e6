"""How fast a cache actor serves whole requests, against the fastest thing that Ray can do: a call that does nothing.

    python tests/benchmarks/bench_service.py

prints the rates by the number of coroutines that share one client. `raydix` must be installed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache
from raydix.schemas import CacheConfig, PoolConfig

PROMPT_LEN = 1024
CONFIG = CacheConfig(page_size=16, pool=PoolConfig(num_slots=2**19, device="cpu"))  # under pressure after 460 prompts


class Rates(NamedTuple):
    """What was done a second, in one round or in the median of several."""

    cycles: float  # acquire, and an insert that releases: two messages
    apart: float  # acquire, insert and release: three messages
    noops: float  # calls that do nothing
    cycles_per_noop: float
    apart_per_noop: float


class ServiceBenchmark:
    """One client in this process, and the actor it talks to."""

    def __init__(self, actor: Any, client: PrefixCacheClient) -> None:
        self._actor = actor
        self._client = client
        self._rng = np.random.default_rng(0)

    async def cycle(self, prompt: Any) -> None:
        """One request: acquire, insert what was computed, and release in the same message."""
        lease = await self._client.acquire(prompt)
        await lease.insert(prompt, release=True)

    async def cycle_apart(self, prompt: Any) -> None:
        """The same with a release of its own."""
        lease = await self._client.acquire(prompt)
        await lease.insert(prompt)
        await lease.release()

    async def noop(self, _: Any) -> None:
        """The floor."""
        await self._actor.noop.remote()

    async def round(self, num_coroutines: int, num_cycles: int, num_noops: int) -> Rates:
        """One measurement of each, `num_coroutines` at a time, of fresh prompts."""
        cycles = await _rate(self.cycle, self._prompts(num_cycles), num_coroutines)
        noops = await _rate(self.noop, range(num_noops), num_coroutines)
        apart = await _rate(self.cycle_apart, self._prompts(num_cycles), num_coroutines)
        return Rates(cycles, apart, noops, cycles / noops, apart / noops)

    async def rounds(self, num_rounds: int, num_coroutines: int, num_cycles: int, num_noops: int) -> list[Rates]:
        """Several rounds, the three in turns, after one that does not count."""
        await self.round(num_coroutines, num_cycles, num_noops)
        return [await self.round(num_coroutines, num_cycles, num_noops) for _ in range(num_rounds)]

    def _prompts(self, count: int) -> list[Any]:
        return list(self._rng.integers(0, 128_000, (count, PROMPT_LEN), np.int32))


async def _rate(work: Callable[[Any], Awaitable[None]], items: Any, num_coroutines: int) -> float:
    """Items worked off a second by so many coroutines."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(num_coroutines)))
    return len(items) / (time.perf_counter() - started)


def median_of(rounds: list[Rates]) -> Rates:
    """The median of each column."""
    return Rates(*map(median, zip(*rounds, strict=True)))


async def print_table(actor: Any) -> None:
    """The rates by concurrency."""
    print("prompts of 1,024 fresh tokens; a second, medians of 7 rounds; in brackets, in the time of one no-op call")
    print(f"{'coroutines':>10} {'no-op calls':>12} {'whole requests':>20} {'with its own release':>24}")
    async with PrefixCacheClient(actor) as client:
        benchmark = ServiceBenchmark(actor, client)
        for num_coroutines, num_cycles, num_noops in ((1, 150, 300), (8, 500, 500), (64, 1000, 600), (256, 1500, 800)):
            rates = median_of(await benchmark.rounds(7, num_coroutines, num_cycles, num_noops))
            whole = f"{rates.cycles:,.0f} ({rates.cycles_per_noop:.2f})"
            apart = f"{rates.apart:,.0f} ({rates.apart_per_noop:.2f})"
            print(f"{num_coroutines:>10} {rates.noops:>12,.0f} {whole:>20} {apart:>24}", flush=True)
        stats = await client.stats()
    print(f"{stats.tokens_evicted:,} tokens were evicted in the background, {stats.exhausted} requests refused")


def main() -> None:
    """Measure on a cluster of this machine."""
    import ray

    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    actor = start_cache(CONFIG)
    asyncio.run(print_table(actor))
    shutdown_cache(actor)
    ray.shutdown()


if __name__ == "__main__":
    main()
