"""Measure how long eviction of a tree, or retirement of a namespace, blocks the cache's event loop.

The cache runs in process, so that each turn of the loop can be timed. Times are CPU times of the thread, so that other
load counts little; wall times are reported besides.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from raydix.actors import LocalPrefixCache
from raydix.cache_core import LeasedCache, RadixKey
from raydix.schemas import CacheConfig, EvictionConfig, PoolConfig

PROMPT_LEN = 1024
ADAPTER = "adapter"


async def of_eviction(num_nodes: int) -> dict[str, Any]:
    """Evict this many nodes of one token each in the background."""
    pool = PoolConfig(num_slots=num_nodes, device="cpu")
    eviction = EvictionConfig(high_watermark=0.99, low_watermark=0.0)
    async with LocalPrefixCache(CacheConfig(pool=pool, eviction=eviction)) as cache:
        core = cache._host.service.core
        for number in range(num_nodes):
            _publish(cache, core, number, RadixKey([number]))
        assert core.total_size() == num_nodes, "all tokens must be in the tree"
        held = await _turns_until(lambda: core.total_size() == 0)
        assert core.free_slots == num_nodes
        return {"nodes": num_nodes, "longest_slice_ms": (await cache.stats()).eviction_task.longest_slice_ms} | held


async def of_retirement(num_tokens: int) -> dict[str, Any]:
    """Retire a namespace of this many tokens, as a client requests it."""
    pool = PoolConfig(num_slots=num_tokens, device="cpu")
    config = CacheConfig(page_size=16, pool=pool, eviction=EvictionConfig(high_watermark=1.0))
    async with LocalPrefixCache(config) as cache:
        core, rng = cache._host.service.core, np.random.default_rng(0)
        namespace = (await _namespace_of(cache)).extra_key
        for number in range(num_tokens // PROMPT_LEN):
            _publish(cache, core, number, RadixKey(rng.integers(0, 128_000, PROMPT_LEN, np.int32), namespace))
        held_tokens = core.total_size()
        retiring = asyncio.ensure_future(cache.retire(extra_key=ADAPTER))
        held = await _turns_until(lambda: core.total_size() == 0)
        assert (await retiring).num_namespaces == 1
        return {"tokens": held_tokens} | held


async def _namespace_of(cache: LocalPrefixCache) -> RadixKey:
    """Return the core's key for the adapter's namespace."""
    async with await cache.acquire([1], extra_key=ADAPTER) as lease:
        return cache._host.service.core.leases.get(lease.lease_id, cache.session.session_id).key


def _publish(cache: LocalPrefixCache, core: LeasedCache, number: int, key: RadixKey) -> None:
    lease_id = f"l{number}"
    core.acquire(lease_id, cache.session.session_id, key)
    core.insert(lease_id, cache.session.session_id, len(key), key[len(key) :])
    core.release(lease_id, cache.session.session_id)


async def _turns_until(done: Callable[[], bool]) -> dict[str, float]:
    """Measure how long other callbacks hold the loop between two turns of this coroutine."""
    gc.collect()
    held: list[tuple[float, float]] = []
    before = time.thread_time(), time.perf_counter()
    while not done():
        await asyncio.sleep(0)
        now = time.thread_time(), time.perf_counter()
        held.append((now[0] - before[0], now[1] - before[1]))
        before = now
    cpu, wall = 1e3 * np.array(held).T
    return {
        "turns": len(held),
        "p50_ms": float(np.percentile(cpu, 50)),
        "p99_ms": float(np.percentile(cpu, 99)),
        "max_ms": float(cpu.max()),
        "wall_p99_ms": float(np.percentile(wall, 99)),
        "wall_max_ms": float(wall.max()),
        "seconds": float(wall.sum() / 1e3),
    }
