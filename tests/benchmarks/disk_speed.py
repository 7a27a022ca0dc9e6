"""The cost of a disk tier to requests that find nothing in it, its slices of the loop, and the time until it is warm.

The p50 is of cache actors, as users see it; the other figures are of caches in this process, so that the loop's turns
can be timed. The files lie in the temporary folder.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.figures import Figure
from benchmarks.local_ray import ray_started
from benchmarks.tier_speed import (
    MAX_P50,
    MAX_SLICE_MS,
    NUM_PROMPTS,
    P50_GATE,
    PROMPT_LEN,
    SLICE_GATE_MS,
    TOKEN_BYTES,
    Prompts,
    config_of,
    longest_turn_ms,
    misses_of,
    no_collection,
    publish_until,
)
from support.tiers.large_disk import Prompt, disk_of, fill, prompts_of
from support.tiers.large_disk import config_of as large_config

from raydix.actors import LocalPrefixCache, PrefixCacheClient, start_cache
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.schemas import CacheConfig, DiskConfig

WRITTEN_MIB_S = 1024  # of KV that is computed
MAX_HIT_S, HIT_GATE_S = 5.0, 20.0
MAX_INDEX_BYTES, INDEX_GATE_BYTES = 500, 600  # of a page


def figures(quick: bool) -> list[Figure]:
    """Return the figures of latencies, of the loop and of restarts."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        num_rounds, num_requests = (3, 100) if quick else (7, 400)
        with ray_started(), folder() as path:
            lone = asyncio.run(lone_misses(path, num_rounds, num_requests))
        with folder() as path:
            held = asyncio.run(slices(path, 2.0 if quick else 10.0))
        return [lone, *held, *restarts(10_000 if quick else 100_000)]
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def folder() -> Iterator[Path]:
    """Yield a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="raydix-disk-") as path:
        yield Path(path)


def with_disk(config: CacheConfig, path: Path) -> CacheConfig:
    """Return the configuration with a disk of four times the pool, written at the first use and without a limit."""
    num_slots = 4 * NUM_PROMPTS * PROMPT_LEN
    disk = DiskConfig(path=str(path), num_slots=num_slots, admit="all", write_mib_s=None)
    return config.model_copy(update={"disk": disk, "fingerprint": "m"})


# ---------------------------------------------------------------- misses


async def lone_misses(path: Path, num_rounds: int, num_requests: int) -> Figure:
    """Time acquires that miss, of an actor with a disk and of one without, in turns, while both evict."""
    plain = config_of(TOKEN_BYTES, None)
    actors = [start_cache(with_disk(plain, path), name="disk-speed"), start_cache(plain)]

    async def until_ready(client: PrefixCacheClient) -> None:
        await client.stats()
        while not await actors[0].__ray_call__.remote(is_ready):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.05)

    ours, ratio = await misses_of(actors, num_rounds, num_requests, until_ready)
    what = "p50 of a lone acquire that misses, while its cache writes"
    return Figure("disk", what, ours, "ms", ratio, "without a disk", at_most=MAX_P50, gate=P50_GATE)


def is_ready(actor: Any) -> bool:
    """Return whether the disk is open. Runs in the cache's process."""
    return bool(actor._host.service.disk.state == "ready")


# ---------------------------------------------------------------- the loop


async def slices(path: Path, seconds: float) -> list[Figure]:
    """Measure the longest time that the loop is held, in CPU time, while the disk is written without a limit."""
    token_bytes = 16 * 1024
    async with LocalPrefixCache(with_disk(config_of(token_bytes, None), path)) as cache:
        disk, longest = await ready(cache), [0.0]
        disk.work.run_slice = timed(disk.work.run_slice, longest)  # type: ignore[method-assign]
        with no_collection():
            ended = asyncio.Event()
            load = asyncio.ensure_future(publish_until(ended, cache, Prompts(), WRITTEN_MIB_S * 2**20 / token_bytes))
            await asyncio.sleep(0.5)
            longest[0] = 0.0
            before, started = disk.writes.counts.num_bytes, time.perf_counter()
            turn_ms = await longest_turn_ms(seconds)
            rate = (disk.writes.counts.num_bytes - before) / (time.perf_counter() - started) / 2**20
            ended.set()
            await load
    found = {"turn of the loop": turn_ms, "slice of the disk's task": 1e3 * longest[0]}
    return [
        Figure(
            "disk",
            f"longest {what} while {rate:,.0f} MiB/s are written",
            found_ms,
            "ms",
            at_most=MAX_SLICE_MS,
            gate=SLICE_GATE_MS,
        )
        for what, found_ms in found.items()
    ]


def timed(work: Callable[..., None], longest: list[float]) -> Callable[..., None]:
    """Return the work, which notes the most CPU time of its calls."""

    def run(*arguments: Any) -> None:
        started = time.thread_time()
        work(*arguments)
        longest[0] = max(longest[0], time.thread_time() - started)

    return run


async def ready(cache: LocalPrefixCache) -> DiskTier:
    """Return the disk of a cache, which is open then."""
    await cache.stats()
    disk = disk_of(cache)
    while disk.state != "ready":  # noqa: ASYNC110 -- there is no event for it
        await asyncio.sleep(0.002)
    return disk


# ---------------------------------------------------------------- restarts


def restarts(num_pages: int) -> list[Figure]:
    """Kill a cache with so many pages on its disk, and measure the next one until all pages can be hit."""
    with folder() as path:
        fill(path, num_pages, "on")
        found = asyncio.run(restart(path, num_pages))
        index = sum(file.stat().st_size for file in path.rglob("index.db"))
    hit_s, built_s, turn_ms = found
    of_pages = f"of {num_pages:,} pages after a kill"
    return [
        Figure("disk", f"first hit {of_pages}", hit_s, "s", at_most=MAX_HIT_S, gate=HIT_GATE_S),
        Figure("disk", f"all {of_pages} can be hit", built_s, "s"),
        Figure("disk", "longest turn of the loop until then", turn_ms, "ms", at_most=MAX_SLICE_MS, gate=SLICE_GATE_MS),
        Figure("disk", "index, for a page", index / num_pages, "B", at_most=MAX_INDEX_BYTES, gate=INDEX_GATE_BYTES),
    ]


async def restart(path: Path, num_pages: int) -> tuple[float, float, float]:
    """Return the seconds until the first hit, and until all pages are there; and the ms of the longest turn."""
    prompts = prompts_of(num_pages)
    started = time.perf_counter()
    async with LocalPrefixCache(large_config(path, num_pages, "on")) as cache:
        await cache.stats()  # opens the session and the disk
        hit = asyncio.ensure_future(first_hit(cache, prompts))
        disk, longest_ms = disk_of(cache), 0.0
        with no_collection():
            while disk.tier.cache.total_size() < num_pages * cache.config.page_size:
                longest_ms = max(longest_ms, await longest_turn_ms(0.01))
        built_s = time.perf_counter() - started
        return await hit - started, built_s, longest_ms


async def first_hit(cache: LocalPrefixCache, prompts: list[Prompt]) -> float:
    """Return the time when an acquire has loaded something."""
    await ready(cache)
    while True:
        for prompt in prompts:
            async with cache.acquire(prompt) as lease:
                if lease.prefix_len:
                    return time.perf_counter()
            await asyncio.sleep(0.01)
