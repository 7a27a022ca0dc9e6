"""A cache actor's pool on a GPU, mapped by other processes through CUDA IPC; either side is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch
from support.processes.pool_workers import PROMPT, attached, bits, config_of, random_kv, worker_class
from support.waiting import wait_until

from raydix.actors import PrefixCacheClient, shutdown_cache, start_cache
from raydix.schemas import CacheConfig, LeaseConfig, PoolConfig

pytestmark = [pytest.mark.gpu, pytest.mark.ray]

GIB = 2**30
MIB = 2**20


def large_config() -> CacheConfig:
    """A pool of a little over 2 GiB, so that the card's memory shows whether it is there."""
    pool = PoolConfig.uniform(
        num_slots=16_384, num_layers=16, num_kv_heads=8, head_dim=256, dtype="bfloat16", device="cuda"
    )
    return CacheConfig(page_size=16, pool=pool, leases=LeaseConfig(session_ttl_s=2.0))


def used_bytes() -> int:
    """Memory in use on the first card, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]) * MIB


async def epoch_of(cache: Any) -> str | None:
    """The epoch of the life that answers; None while the cache restarts."""
    import ray

    try:
        return str((await cache.pool_handle.remote()).epoch)
    except ray.exceptions.RayError:
        return None


@pytest.fixture
async def make_worker(gpu_cluster: None) -> AsyncIterator[Callable[[], Any]]:
    """Starts workers. After the test they end, and the card's memory is as free as before."""
    import ray

    before = used_bytes()
    made: list[Any] = []

    def make() -> Any:
        made.append(ray.remote(worker_class()).options(num_cpus=0, num_gpus=0.2).remote())
        return made[-1]

    yield make
    for worker in made:
        ray.kill(worker)
    wait_until(lambda: used_bytes() < before + 100 * MIB)


async def test_workers_on_the_card_map_the_pool_and_see_each_others_writes(make_worker: Callable[[], Any]) -> None:
    k, v, index = arrays = random_kv(len(PROMPT), "bfloat16", 8, index_dim=6)
    cache = start_cache(config_of("bfloat16", "cuda", index_head_dim=6))
    handle = await cache.pool_handle.remote()
    assert (handle.device_type, handle.path) == ("cuda", None)
    assert handle.gpu_uuid is not None

    async with attached((make_worker(), make_worker()), cache) as (writer, reader):
        _, own = await writer.acquire.remote(PROMPT)
        await writer.write.remote(k, v, True, index)
        await writer.publish.remote(PROMPT)

        assert (await reader.acquire.remote(PROMPT))[0] == 8
        assert await reader.read.remote(8, True) == bits(*(array[:, :8] for array in arrays))
        assert await reader.read.remote(8, False) == bits(*(array[:, :8] for array in arrays))
        await writer.poke.remote(own[9], 5.0)
        assert await reader.peek.remote(own[9]) == 5.0  # the same memory, not a copy
    shutdown_cache(cache)


async def test_a_killed_worker_leaves_the_cache_as_it_was_and_no_memory(make_worker: Callable[[], Any]) -> None:
    cache = start_cache(large_config())
    survivor, victim = make_worker(), make_worker()
    await survivor.attach.remote(cache)
    before = used_bytes()
    assert await victim.attach.remote(cache) == (True, False)
    await victim.acquire.remote(PROMPT * 10)

    os.kill(await victim.pid.remote(), signal.SIGKILL)

    async with PrefixCacheClient(cache) as client:
        async with asyncio.timeout(60):
            while (await client.stats()).open_leases:  # noqa: ASYNC110 -- statistics must be polled
                await asyncio.sleep(0.05)
        await client.check_invariants()
    wait_until(lambda: used_bytes() < before + 100 * MIB)
    await survivor.acquire.remote(PROMPT * 10)
    k, v = torch.randn(2, 16, len(PROMPT) * 10, 8, 256, dtype=torch.bfloat16)
    await survivor.write.remote(k, v, True)
    assert await survivor.read.remote(100, True) == bits(k, v)
    await survivor.detach.remote()
    shutdown_cache(cache)


async def test_a_killed_cache_is_mapped_again_and_its_old_memory_is_free(make_worker: Callable[[], Any]) -> None:
    import ray

    before = used_bytes()
    cache = start_cache(large_config(), max_restarts=1)
    assert used_bytes() > before + 2 * GIB
    first = await cache.pool_handle.remote()
    workers = [make_worker(), make_worker()]
    for worker in workers:
        await worker.attach.remote(cache)
        await worker.acquire.remote(PROMPT)
    with_pool = used_bytes()

    epoch, path = first.epoch, first.liveness_path
    os.kill(int(path.split("/")[2]), signal.SIGKILL)
    async with asyncio.timeout(60):
        while await epoch_of(cache) in (None, epoch):  # noqa: ASYNC110 -- as above
            await asyncio.sleep(0.05)

    for worker in workers:
        wait_until(lambda worker=worker: ray.get(worker.is_lost.remote()))  # type: ignore[misc]
        await worker.attach.remote(cache)
    wait_until(lambda: used_bytes() < with_pool + 200 * MIB)  # one pool on the card, not two
    k, v = torch.randn(2, 16, len(PROMPT) * 2, 8, 256, dtype=torch.bfloat16)
    await workers[0].acquire.remote(PROMPT * 2)
    await workers[0].write.remote(k, v, True)
    await workers[0].publish.remote(PROMPT * 2)
    assert (await workers[1].acquire.remote(PROMPT * 2))[0] == 16
    assert await workers[1].read.remote(16, True) == bits(k[:, :16], v[:, :16])
    for worker in workers:
        await worker.detach.remote()
    shutdown_cache(cache)
