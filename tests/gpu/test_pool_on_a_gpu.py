"""A pool on a GPU, in one process: hits, evictions, rows and copies have the KV of their tokens, bit for bit."""

from __future__ import annotations

import pytest
import torch
from benchmarks import bench_data_plane
from support.caches.cache_kinds import KINDS, TIGHT_STATES, TIGHT_WINDOW, KindUnderTest
from support.caches.cache_under_test import CacheUnderTest
from support.caches.pool_layers import layer_shapes
from support.processes.kv_workers import work
from support.processes.pool_workers import NUM_LAYERS, PROMPT, bits, config_of, random_kv

from raydix.actors import LocalPrefixCache
from raydix.schemas import CacheConfig, EvictionConfig, PoolConfig

pytestmark = pytest.mark.gpu


def on_gpu(config: CacheConfig) -> CacheConfig:
    return config.model_copy(update={"pool": config.pool.model_copy(update={"device": "cuda"})})


@pytest.mark.parametrize("kind", [*KINDS, TIGHT_WINDOW, TIGHT_STATES], ids=str)
async def test_every_hit_reads_the_kv_of_its_tokens_while_pages_are_evicted(kind: KindUnderTest) -> None:
    cache = CacheUnderTest.reached("local", on_gpu(kind.cache_config()), None, kind)
    pool = await cache.client.attach_pool()

    reused = await work(cache, num_steps=40)

    assert (reused > 0) == kind.shares
    assert pool.mapped
    if "full" in kind.layer_kinds:
        assert pool.k[kind.layer_kinds.index("full")].is_cuda
    await cache.close()


@pytest.mark.parametrize("index_dim", [0, 6], ids=["K and V", "index keys"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_plain_calls_and_copies_see_the_same_bits(dtype: str, index_dim: int) -> None:
    async with LocalPrefixCache(config_of(dtype, "cuda", index_head_dim=index_dim)) as cache:
        pool = await cache.attach_pool()
        lease = await cache.acquire(PROMPT)
        k, *others = arrays = random_kv(10, dtype, 9, index_dim)

        for layer in range(NUM_LAYERS):
            pool.write(layer, lease.slots, *(array[layer].cuda() for array in arrays))

        assert pool.k[0].is_cuda
        assert [index.is_cuda for index in pool.index if index.numel()] == [True] * (NUM_LAYERS if index_dim else 0)
        assert bits(*await pool.read_kv(lease, lease.slots)) == bits(*arrays)
        gathered = [pool.gather(layer, lease.slots) for layer in range(NUM_LAYERS)]
        assert bits(*(torch.stack(rows) for rows in zip(*gathered, strict=True))) == bits(*arrays)
        await pool.write_kv(lease, lease.slots, torch.zeros_like(k), *(array.cuda() for array in others))
        assert not pool.k[1][lease.slots.cuda()].any()
        assert bits(pool.v[1][lease.slots.cuda()]) == bits(others[0][1])
        if index_dim:
            assert bits(pool.index[1][lease.slots.cuda()]) == bits(others[1][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
async def test_a_prefix_is_copied_between_rows_to_the_bit(dtype: str) -> None:
    layers = layer_shapes(("full",) * NUM_LAYERS, 2, 8, 4)
    config = CacheConfig(
        kind="slots",
        max_seq_len=8,
        page_size=2,
        pool=PoolConfig(num_slots=24, dtype=dtype, device="cuda", layers=layers),
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
    )
    async with LocalPrefixCache(config) as cache:
        pool = await cache.attach_pool()
        kv = random_kv(6, dtype, seed=0)
        writer = await cache.acquire([1, 2, 3, 4, 5, 6])
        await pool.write_kv(writer, writer.slots, *kv)
        await writer.insert([1, 2, 3, 4, 5, 6])

        reader = await cache.acquire([1, 2, 3, 4, 9])

        assert int(reader.slots[0]) // 8 != int(writer.slots[0]) // 8
        assert bits(*await pool.read_kv(reader, reader.slots[:4])) == bits(*(each[:, :4] for each in kv))


def test_the_data_plane_is_measured() -> None:
    assert bench_data_plane.gpu_figures(2)
