"""A host tier below a pool on the card: evicted KV comes back from registered memory, bit for bit."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.caches.cache_kinds import TIGHT_STATES, TIGHT_WINDOW, KindUnderTest, bigram, hybrid, mamba, radix, window
from support.caches.cache_under_test import CacheUnderTest
from support.processes.kv_workers import work
from support.processes.pool_workers import NUM_LAYERS, bits, config_of, random_kv

from raydix.actors import LocalPrefixCache
from raydix.schemas import EvictionConfig, HostConfig

pytestmark = pytest.mark.gpu
KINDS = [
    radix(1),
    radix(4, index_head_dim=3),
    window(2, 4),
    mamba(2),
    hybrid(4, 8),
    bigram(4),
    TIGHT_WINDOW,
    TIGHT_STATES,
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_every_hit_reads_the_kv_of_its_tokens_while_pages_move_between_the_tiers(kind: KindUnderTest) -> None:
    above_host = kind.with_host()
    config = above_host.cache_config()
    config = config.model_copy(update={"pool": config.pool.model_copy(update={"device": "cuda"})})
    cache = CacheUnderTest.reached("local", config, None, above_host)

    await work(cache, num_steps=60)

    stats = await cache.client.stats()
    assert stats.host is not None and stats.host.tokens_loaded > 0 and stats.host.pinned
    await cache.close()


async def num_written(cache: LocalPrefixCache) -> int:
    stats = await cache.stats()
    assert stats.host is not None
    return stats.host.tokens_written


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
async def test_a_long_prompt_comes_back_bit_for_bit(dtype: str) -> None:
    prompt, config = list(range(2048)), config_of(dtype, "cuda")
    pool_config = config.pool.model_copy(update={"num_slots": 4096})
    marks, host = EvictionConfig(high_watermark=0.95, low_watermark=0.9), HostConfig(num_slots=8192, reserve=0.99)
    config = config.model_copy(update={"pool": pool_config, "eviction": marks, "host": host})
    kv = random_kv(len(prompt), dtype, seed=3)
    async with LocalPrefixCache(config) as cache:
        pool = await cache.attach_pool()
        async with cache.acquire(prompt) as lease:
            await pool.write_kv(lease, lease.slots, *kv)
            await lease.insert(prompt)
        while await num_written(cache) < len(prompt):  # noqa: ASYNC110 -- a write has no event
            await asyncio.sleep(0.01)
        assert (await cache.evict(len(prompt))).num_evicted >= len(prompt)
        assert (await cache.match(prompt)).prefix_len == 0

        async with cache.acquire(prompt) as lease:
            assert lease.prefix_len == len(prompt)
            found = [
                torch.stack(rows)
                for rows in zip(*(pool.gather(at, lease.slots) for at in range(NUM_LAYERS)), strict=True)
            ]
            assert bits(*found) == bits(*kv)
