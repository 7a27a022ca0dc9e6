"""The rate of whole requests of a cache actor: of one client by its coroutines, and of several processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray

from raydix.actors import PrefixCacheClient

PROMPT_LEN = 1024
_HEAD_START_S = 0.2  # for all processes to make their prompts


class Rates(NamedTuple):
    """Operations a second, in one round or in the median of several."""

    cycles: float  # acquire, and an insert that releases: two messages
    apart: float  # acquire, insert and release: three messages
    noops: float  # calls that do nothing
    cycles_per_noop: float
    apart_per_noop: float
    batch: float  # mean number of requests sent together


class ServiceBenchmark:
    """One client in this process, and its cache actor."""

    def __init__(self, actor: Any, client: PrefixCacheClient, seed: int = 0) -> None:
        self._actor = actor
        self._client = client
        self._rng = np.random.default_rng(seed)

    async def cycle(self, prompt: Any) -> None:
        """Do one request: acquire, insert the computed tokens, and release in the same message."""
        lease = await self._client.acquire(prompt)
        await lease.insert(prompt, release=True)

    async def cycle_apart(self, prompt: Any) -> None:
        """Do the same with a separate release."""
        lease = await self._client.acquire(prompt)
        await lease.insert(prompt)
        await lease.release()

    async def noop(self, _: Any = None) -> None:
        """Make the call that does nothing."""
        await self._actor.noop.remote()

    async def round(self, num_coroutines: int, num_cycles: int, num_noops: int) -> Rates:
        """Measure each once, `num_coroutines` at a time, with new prompts."""
        before = await self._client.stats()
        cycles = await rate_of(self.cycle, self.prompts(num_cycles), num_coroutines)
        after = await self._client.stats()
        noops = await rate_of(self.noop, range(num_noops), num_coroutines)
        apart = await rate_of(self.cycle_apart, self.prompts(num_cycles), num_coroutines)
        batch = (after.requests - before.requests) / (after.batches - before.batches)
        return Rates(cycles, apart, noops, cycles / noops, apart / noops, batch)

    async def rounds(self, num_rounds: int, num_coroutines: int, num_cycles: int, num_noops: int) -> list[Rates]:
        """Run several rounds, the three in turns, after an uncounted one."""
        await self.round(num_coroutines, num_cycles, num_noops)
        return [await self.round(num_coroutines, num_cycles, num_noops) for _ in range(num_rounds)]

    def prompts(self, count: int) -> list[Any]:
        """Return new prompts."""
        return list(self._rng.integers(0, 128_000, (count, PROMPT_LEN), np.int32))


async def rate_of(work: Callable[[Any], Awaitable[None]], items: Any, num_coroutines: int) -> float:
    """Return the items processed a second by this many coroutines."""
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(num_coroutines)))
    return len(items) / (time.perf_counter() - started)


def median_of(rounds: list[Rates]) -> Rates:
    """Return the median of each column."""
    return Rates(*map(median, zip(*rounds, strict=True)))


async def by_concurrency(
    actor: Any, concurrencies: list[int], num_rounds: int, num_cycles: int
) -> list[dict[str, Any]]:
    """Return the rates of one client, by the number of coroutines that share it."""
    rows: list[dict[str, Any]] = []
    async with PrefixCacheClient(actor) as client:
        benchmark = ServiceBenchmark(actor, client)
        for num_coroutines in concurrencies:
            num = min(num_cycles, 20 * num_coroutines + num_cycles // 10)
            rounds = await benchmark.rounds(num_rounds, num_coroutines, num, num)
            rows.append({"coroutines": num_coroutines} | median_of(rounds)._asdict())
    return rows


# ---------------------------------------------------------------- processes


def _client_class() -> Any:
    """Return a local class: it is pickled by value, as Ray's processes cannot import this file."""

    class Client:
        """A process with one client, which sends as fast as it can."""

        async def open(self, actor: Any, seed: int) -> None:
            from raydix.actors import PrefixCacheClient

            self._client = PrefixCacheClient(actor)
            self._rng = np.random.default_rng(seed)
            await self._client.open()

        async def work(self, num_coroutines: int, num_cycles: int, starts_at: float) -> float:
            """Send this many whole requests from a time that all processes share; return the time of completion."""
            prompts = iter(self._rng.integers(0, 128_000, (num_cycles, PROMPT_LEN), np.int32))

            async def worker() -> None:
                for prompt in prompts:
                    lease = await self._client.acquire(prompt)
                    await lease.insert(prompt, release=True)

            await asyncio.sleep(starts_at - time.time())
            await asyncio.gather(*(worker() for _ in range(num_coroutines)))
            return time.time()

        async def close(self) -> None:
            await self._client.close()

    return Client


def by_processes(
    actor: Any, counts: Sequence[int], num_rounds: int, num_cycles: int, num_coroutines: int = 64
) -> list[dict[str, Any]]:
    """Return the total rate of clients in this many processes, in turns, and its ratio to the rate of one.

    Each sends `num_cycles` requests a round. One process is the first of `counts`.
    """
    clients = [ray.remote(_client_class()).options(num_cpus=0).remote() for _ in range(max(counts))]
    ray.get([client.open.remote(actor, seed) for seed, client in enumerate(clients)])
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for number in range(num_rounds + 1):
        for count in counts:
            starts_at = time.time() + _HEAD_START_S
            ends_at = ray.get([each.work.remote(num_coroutines, num_cycles, starts_at) for each in clients[:count]])
            if number:  # the first one warms up
                rates[count].append(count * num_cycles / (max(ends_at) - starts_at))
    ray.get([client.close.remote() for client in clients])
    for client in clients:
        ray.kill(client)
    ones = rates[counts[0]]
    return [
        {
            "processes": count,
            "cycles": median(each),
            "per_one": median([rate / one for rate, one in zip(each, ones, strict=True)]),  # of the same round
        }
        for count, each in rates.items()
    ]
