"""What a host tier costs requests that find nothing in it, and how soon a finished load is answered.

Each pool is in host memory. The p50 is of cache actors, as users see it; the other figures are of caches in this
process, so that a thread can copy there, and the loop's turns can be timed. Ratios are medians over rounds, in which
the caches take turns.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.figures import Figure
from benchmarks.local_ray import ray_started
from numpy.typing import NDArray

from raydix.actors import LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache
from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.job_threads import JobThreads
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies
from raydix.schemas import CacheConfig, EvictionConfig, HostConfig, PoolConfig

PAGE, PROMPT_LEN = 16, 512
NUM_PROMPTS = 32  # held by a pool
CHUNK = 8 * 2**20  # bytes that the thread copies in one piece, as a copier does
TOKEN_BYTES = 4096
INTERVAL_S = 0.005  # between two requests: at most 400 MiB are written a second
MAX_P50, P50_GATE = 1.05, 1.2
MAX_P99, P99_GATE = 1.5, 3.0
MAX_SLICE_MS, SLICE_GATE_MS, WRITTEN_MIB_S = 2.0, 4.0, 1024
MAX_ANSWER_MS, ANSWER_GATE_MS = 5.0, 20.0


def figures(quick: bool) -> list[Figure]:
    """Return the figures of latencies and of the loop."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num_rounds, num_requests = (3, 100) if quick else (7, 400)
        with ray_started():
            lone = asyncio.run(lone_misses(num_rounds, num_requests))
        return [
            lone,
            *asyncio.run(misses(num_rounds, num_requests)),
            *asyncio.run(slices(2.0 if quick else 10.0)),
            asyncio.run(answers(100 if quick else 1_000)),
        ]
    finally:
        torch.set_num_threads(num_threads)


def config_of(token_bytes: int, host: HostConfig | None) -> CacheConfig:
    """Return the configuration of a cache whose pool holds `NUM_PROMPTS` prompts."""
    num_layers, num_heads = 4, 4
    head_dim = token_bytes // num_layers // num_heads // 2 // torch.bfloat16.itemsize
    pool = PoolConfig.uniform(
        num_slots=NUM_PROMPTS * PROMPT_LEN,
        num_layers=num_layers,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype="bfloat16",
        device="cpu",
    )
    return CacheConfig(page_size=PAGE, pool=pool, host=host, eviction=EvictionConfig())


def host_of(num_pools: int, **options: Any) -> HostConfig:
    """Return a host tier of so many times the pool's slots."""
    return HostConfig(num_slots=num_pools * NUM_PROMPTS * PROMPT_LEN, **options)


@asynccontextmanager
async def running(config: CacheConfig) -> AsyncIterator[LocalPrefixCache]:
    """Yield a cache of which the host tier, if there is one, is ready."""
    async with LocalPrefixCache(config) as cache:
        await _until_ready(cache)
        yield cache


async def _until_ready(cache: PrefixCacheClient) -> None:
    while (host := (await cache.stats()).host) is not None and host.state != "ready":  # noqa: ASYNC110 -- once
        await asyncio.sleep(0.01)


class Prompts:
    """Prompts that are never repeated."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def next(self) -> NDArray[np.uint32]:
        """Return a prompt."""
        return self._rng.integers(0, 2**31, PROMPT_LEN, np.uint32)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from pausing requests."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


# ---------------------------------------------------------------- misses


async def lone_misses(num_rounds: int, num_requests: int) -> Figure:
    """Time acquires that miss, of an actor with a tier and of one without, in turns, while both evict."""
    actors = [start_cache(config_of(TOKEN_BYTES, host)) for host in (host_of(4), None)]
    ours, ratio = await misses_of(actors, num_rounds, num_requests, _until_ready)
    what = "p50 of a lone acquire that misses, while its cache evicts"
    return Figure("tiers", what, ours, "ms", ratio, "without a tier", at_most=MAX_P50, gate=P50_GATE)


async def misses_of(
    actors: Sequence[Any],
    num_rounds: int,
    num_requests: int,
    until_ready: Callable[[PrefixCacheClient], Awaitable[None]],
) -> tuple[float, float]:
    """Return the milliseconds of acquires that miss, and their ratio to those of the second actor; end both actors."""
    prompts, ratios, medians = Prompts(), list[float](), list[float]()
    try:
        async with PrefixCacheClient(actors[0]) as tiered, PrefixCacheClient(actors[1]) as plain:
            await until_ready(tiered)
            with no_collection():
                for number in range(num_rounds + 1):
                    times = np.zeros((num_requests, 2))
                    for request in range(num_requests):
                        for place, client in sorted(enumerate((tiered, plain)), reverse=bool(request % 2)):
                            times[request, place] = await _acquire_time(client, prompts.next())
                    ours, floor = np.median(times, axis=0).tolist()
                    if number:  # the first round fills the pools
                        ratios.append(ours / floor)
                        medians.append(ours)
    finally:
        for actor in actors:
            shutdown_cache(actor)
    return median(medians), median(ratios)


async def misses(num_rounds: int, num_requests: int, token_bytes: int = TOKEN_BYTES) -> list[Figure]:
    """Time acquires that miss: with a tier, without one, and without one beside a thread that copies as much."""
    times: dict[str, list[NDArray[np.float64]]] = {"tier": [], "plain": [], "beside": []}
    prompts = Prompts()
    configs = [config_of(token_bytes, host) for host in (host_of(4), None)]
    async with running(configs[0]) as tiered, running(configs[1]) as plain:
        with no_collection():
            for number in range(num_rounds + 1):
                before, started = await _written_bytes(tiered), time.perf_counter()
                of_round = {"tier": await _acquire_times(tiered, prompts, num_requests)}
                rate = (await _written_bytes(tiered) - before) / (time.perf_counter() - started)
                of_round["plain"] = await _acquire_times(plain, prompts, num_requests)
                with copying(rate):
                    of_round["beside"] = await _acquire_times(plain, prompts, num_requests)
                for name, found in of_round.items() if number else ():  # the first round fills the pools
                    times[name].append(found)
    written = f"{rate / 2**20:,.0f} MiB/s are written"
    return [
        _of_percentile(
            50, times["tier"], times["plain"], "without a tier", None, None, f"p50 of a miss while {written}"
        ),
        _of_percentile(
            99, times["tier"], times["beside"], "beside a copy", MAX_P99, P99_GATE, f"p99 of a miss while {written}"
        ),
    ]


async def _written_bytes(cache: LocalPrefixCache) -> int:
    host = (await cache.stats()).host
    assert host is not None
    return host.written_bytes


async def _acquire_times(cache: LocalPrefixCache, prompts: Prompts, num_requests: int) -> NDArray[np.float64]:
    """Return the milliseconds of acquires that miss, of prompts that are then published."""
    return np.array([await _acquire_time(cache, prompts.next()) for _ in range(num_requests)])


async def _acquire_time(cache: PrefixCacheClient, prompt: NDArray[np.uint32]) -> float:
    """Return the milliseconds of an acquire that misses; publish the prompt, and wait until the next one is due."""
    started = time.perf_counter()
    lease = await cache.acquire(prompt)
    took_ms = 1e3 * (time.perf_counter() - started)
    assert lease.prefix_len == 0
    await lease.insert(prompt, release=True)
    await asyncio.sleep(INTERVAL_S)
    return took_ms


@contextmanager
def copying(bytes_per_s: float) -> Iterator[None]:
    """Copy memory in a thread at a rate."""
    ours, ended = np.ones(CHUNK, np.uint8), threading.Event()
    theirs = np.ones_like(ours)

    def run() -> None:
        due = time.perf_counter()
        while not ended.is_set():
            np.copyto(theirs, ours)
            due += CHUNK / max(1.0, bytes_per_s)
            ended.wait(max(0.0, due - time.perf_counter()))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _of_percentile(
    percentile: int,
    times: list[NDArray[np.float64]],
    floors: list[NDArray[np.float64]],
    to: str,
    at_most: float | None,
    gate: float | None,
    what: str,
) -> Figure:
    ours, theirs = (np.array([np.percentile(found, percentile) for found in rounds]) for rounds in (times, floors))
    ratio = float(np.median(ours / theirs))
    return Figure("tiers", what, float(np.median(ours)), "ms", ratio, to, at_most=at_most, gate=gate)


# ---------------------------------------------------------------- the loop


async def slices(seconds: float) -> list[Figure]:
    """Measure the longest time that the loop is held, in CPU time, while 1 GiB/s is written."""
    prompts = Prompts()
    token_bytes = 16 * 1024
    host = host_of(2, write_mib_s=WRITTEN_MIB_S)
    async with running(config_of(token_bytes, host)) as cache:
        with no_collection():
            ended = asyncio.Event()
            load = asyncio.ensure_future(
                publish_until(ended, cache, prompts, 1.5 * WRITTEN_MIB_S * 2**20 / token_bytes)
            )
            await asyncio.sleep(0.5)
            before, started = await _written_bytes(cache), time.perf_counter()
            longest_ms = await longest_turn_ms(seconds)
            rate = (await _written_bytes(cache) - before) / (time.perf_counter() - started)
            ended.set()
            await load
        stats = await cache.stats()
    longest = {"turn of the loop": longest_ms, "slice of the task": stats.eviction_task.longest_slice_ms}
    return [
        Figure(
            "tiers",
            f"longest {what} while {rate / 2**20:,.0f} MiB/s are written",
            found_ms,
            "ms",
            at_most=MAX_SLICE_MS,
            gate=SLICE_GATE_MS,
        )
        for what, found_ms in longest.items()
    ]


async def publish_until(ended: asyncio.Event, cache: LocalPrefixCache, prompts: Prompts, tokens_per_s: float) -> None:
    due = time.perf_counter()
    while not ended.is_set():
        prompt = prompts.next()
        lease = await cache.acquire(prompt)
        await lease.insert(prompt, release=True)
        due += PROMPT_LEN / tokens_per_s
        await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def longest_turn_ms(seconds: float) -> float:
    """Return the most CPU time of this thread between two turns of this coroutine."""
    longest, ends_at = 0.0, time.perf_counter() + seconds
    before = time.thread_time()
    while time.perf_counter() < ends_at:
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return 1e3 * longest


# ---------------------------------------------------------------- answers


class NotedCopies:
    """Copies that note when a load has been copied."""

    def __init__(self, copies: PageCopies) -> None:
        self._copies = copies
        self.loaded_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copies, name)

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy, and note the time."""
        self._copies.load(plan, start, stop)
        self.loaded_at = time.perf_counter()


async def answers(num_loads: int) -> Figure:
    """Time from the end of a load's copy to the answer of its acquire, on an idle cache."""
    prompts = Prompts()
    noted: list[NotedCopies] = []
    times: list[float] = []
    async with LocalPrefixCache(config_of(TOKEN_BYTES, host_of(8))) as cache:
        tiers = cache.service.host
        assert tiers is not None

        threads = JobThreads("copier", 1)

        def make_copier(copies: PageCopies) -> Copier:
            noted.append(NotedCopies(copies))
            return Copier(noted[0], threads)  # type: ignore[arg-type]  # it has the same methods

        tiers.make_copier = make_copier  # type: ignore[method-assign]
        await _until_ready(cache)
        cached = [prompts.next() for _ in range(4 * NUM_PROMPTS)]
        for prompt in cached:
            lease = await cache.acquire(prompt)
            await lease.insert(prompt, release=True)
            await asyncio.sleep(0.02)
        with no_collection():
            while len(times) < num_loads:
                for prompt in cached:
                    asked_at = time.perf_counter()
                    lease = await cache.acquire(prompt)
                    answered_at = time.perf_counter()
                    if noted[0].loaded_at > asked_at:
                        times.append(1e3 * (answered_at - noted[0].loaded_at))
                    await lease.insert(prompt, release=True)
                    await asyncio.sleep(0.02)  # writes end meanwhile
    p99 = float(np.percentile(times, 99))
    what = f"p99 of the answer after a load of {PROMPT_LEN} tokens was copied"
    return Figure("tiers", what, p99, "ms", at_most=MAX_ANSWER_MS, gate=ANSWER_GATE_MS)
