"""A cache with a disk is killed with -9, and its successor of the same name has the KV."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from raydix.actors import PrefixCacheClient, start_cache
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig

pytestmark = pytest.mark.ray

PROMPT = list(range(1, 33))


def config_of(path: Path) -> CacheConfig:
    """A small pool above a disk."""
    return CacheConfig(
        page_size=4,
        pool=PoolConfig.uniform(num_slots=64, num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"),
        disk=DiskConfig(path=str(path), num_slots=1024, direct_io="off"),
        fingerprint="m",
        validate=True,
    )


def is_written(actor: Any) -> bool:
    """Whether the disk is open, and has all that is due. Runs in the cache's process."""
    disk = actor._host.service.disk
    return bool(disk.state == "ready" and disk.writes.is_idle and disk.tier.cache.total_size() >= 32)


async def until_written(cache: Any) -> None:
    async with asyncio.timeout(120):
        while not await cache.__ray_call__.remote(is_written):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.05)


def test_a_cache_without_any_eviction_hits_after_it_was_killed(ray_cluster: None, tmp_path: Path) -> None:
    async def fill(cache: Any) -> int:
        async with PrefixCacheClient(cache) as client:
            for _ in range(2):
                async with client.acquire(PROMPT) as lease:
                    await lease.insert(PROMPT)
            await until_written(cache)
        pid: int = await cache.__ray_call__.remote(lambda actor: __import__("os").getpid())
        return pid

    async def find(cache: Any) -> tuple[int, int]:
        async with PrefixCacheClient(cache) as client:
            await until_written(cache)
            async with client.acquire(PROMPT) as lease:
                return lease.prefix_len, (await client.stats()).tokens_reused

    name = f"disk-{os.getpid()}"
    first = start_cache(config_of(tmp_path), name=name)
    os.kill(asyncio.run(fill(first)), signal.SIGKILL)
    with suppress(ValueError, ray.exceptions.RayActorError):
        ray.kill(first)
    second = start_cache(config_of(tmp_path), name=name)
    try:
        assert asyncio.run(find(second)) == (32, 32)
    finally:
        ray.kill(second)
