"""Processes are killed in the middle of copies between the tiers: a worker while its lease is filled, and the cache.

Copies wait in the cache's process for a file of the test.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from support.processes.client_processes import start_client

from raydix.actors import PrefixCacheClient, start_cache
from raydix.schemas import CacheConfig, CacheError, CacheStats, EvictionConfig, HostConfig, LeaseConfig, PoolConfig

pytestmark = pytest.mark.ray

NUM_SLOTS = 16
PROMPT = list(range(1, 9))
CONFIG = CacheConfig(
    pool=PoolConfig.uniform(
        num_slots=NUM_SLOTS, num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"
    ),
    host=HostConfig(num_slots=32, reserve=0.95, policy="lru"),
    eviction=EvictionConfig(high_watermark=0.9, low_watermark=0.5),
    leases=LeaseConfig(session_ttl_s=300, quarantine_grace_s=300),  # only deaths free slots
    validate=True,
)


@pytest.fixture
def cache(ray_cluster: None) -> Any:
    cache = start_cache(CONFIG)
    yield cache
    ray.kill(cache)


async def until(client: PrefixCacheClient, reached: Callable[[CacheStats], object]) -> CacheStats:
    """The first statistics of which something is true; each time every slot of both tiers is counted once."""
    async with asyncio.timeout(300):
        while not reached(stats := await client.stats()):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.02)
    assert stats.host is not None
    for pool in (stats, stats.host.slots):
        slots = pool.free_slots + pool.private_slots + pool.tree_slots + pool.quarantined_slots
        assert slots == pool.num_slots
    return stats


def host(stats: CacheStats) -> Any:
    return stats.host


async def hold_copies(cache: Any, kind: str, gate: Path) -> None:
    """Have loads or writes wait for a file before each chunk."""

    def hold(actor: Any, kind: str, gate: str) -> None:
        import os
        import time

        tiers = actor._host.service.host
        assert tiers._is_ready()
        copy = getattr(tiers._copies, kind)

        def slow(*arguments: Any) -> None:
            while not os.path.exists(gate):
                time.sleep(0.01)
            copy(*arguments)

        setattr(tiers._copies, kind, slow)

    await cache.__ray_call__.remote(hold, kind, str(gate))


async def publish(client: PrefixCacheClient, tokens: list[int]) -> None:
    """Publish a prompt with the KV `token` for each token."""
    pool = await client.attach_pool(mapped=False)
    lease = await client.acquire(tokens)
    row = torch.tensor(tokens, dtype=torch.float32)[None, :, None, None].expand(2, -1, 1, 2)
    await pool.write_kv(lease, lease.slots, row, row)
    await lease.insert(tokens)
    await lease.release()


async def put_below(client: PrefixCacheClient) -> None:
    """Have the prompt on the host alone."""
    await until(client, lambda stats: host(stats).state == "ready")
    await publish(client, PROMPT)
    await until(client, lambda stats: host(stats).slots.tree_slots >= len(PROMPT))
    await client.evict(NUM_SLOTS)
    assert (await client.match(PROMPT)).prefix_len == 0


async def test_the_load_of_a_killed_worker_serves_others_and_frees_its_slots(cache: Any, tmp_path: Path) -> None:
    async with PrefixCacheClient(cache) as client:
        await put_below(client)
        await hold_copies(cache, "load", tmp_path / "gate")
        worker = start_client(watched=True)
        pid = await worker.open.remote(cache)
        filled = worker.acquire.remote([*PROMPT, 9])
        await until(client, lambda stats: host(stats).moves_in_flight == 1)
        behind = asyncio.create_task(client.acquire(PROMPT))
        await until(client, lambda stats: host(stats).loading_requests == 2)

        os.kill(pid, signal.SIGKILL)
        stats = await until(client, lambda stats: stats.dead_sessions == 1)
        assert stats.private_slots == 9, "nothing is freed under the copy"
        (tmp_path / "gate").touch()

        lease = await behind
        assert (lease.prefix_len, len(lease)) == (8, 8)
        k, _ = await (await client.attach_pool(mapped=False)).read_kv(lease, lease.slots)
        assert k[0, :, 0, 0].tolist() == PROMPT
        stats = await until(client, lambda stats: stats.private_slots == 0)
        assert (stats.open_leases, stats.quarantined_slots, host(stats).tokens_loaded_unused) == (1, 0, 8)
        await client.check_invariants()
        with pytest.raises(ray.exceptions.RayError):
            await filled
        ray.kill(worker)


@pytest.mark.parametrize("kind", ["load", pytest.param("write", marks=pytest.mark.more)])
async def test_a_cache_that_is_killed_in_the_middle_of_a_copy_begins_empty(
    cache: Any, kind: str, tmp_path: Path
) -> None:
    async with PrefixCacheClient(cache) as client:
        path = (await cache.pool_handle.remote()).path
        await put_below(client)
        await hold_copies(cache, kind, tmp_path / "gate")
        filled = asyncio.create_task(client.acquire(PROMPT if kind == "load" else [40]))
        if kind == "write":
            await publish(client, [30, 31])
        before = await until(client, lambda stats: host(stats).moves_in_flight > 0)

        os.kill(int(path.split("/")[2]), signal.SIGKILL)

        async with asyncio.timeout(300):
            while True:
                try:
                    if (await client.stats()).epoch != before.epoch:
                        break
                except CacheError:
                    await asyncio.sleep(0.05)
        lease = (await asyncio.gather(filled, return_exceptions=True))[0]
        assert isinstance(lease, CacheError) or lease.prefix_len == 0, "it had what was not there"
        if not isinstance(lease, CacheError) and lease.epoch != before.epoch:
            await lease.release()
        assert (await client.match(PROMPT)).prefix_len == (await client.match(PROMPT)).host_len == 0
        await put_below(client)
        again = await client.acquire(PROMPT)
        assert again.prefix_len == len(PROMPT)
        await client.check_invariants()
