"""Pools of layers with different shapes: used layer by layer, refused for messages with all layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.pool_layers import layer_shapes

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.attached_pool import AttachedPool
from raydix.schemas import (
    CacheConfig,
    CacheError,
    CacheUnavailable,
    EvictionConfig,
    InvalidRequest,
    PoolConfig,
    PoolHandle,
    ReadKV,
    WriteKV,
)

PROMPT = list(range(1, 33))  # whole pages of 1, 4 and 16
KINDS = ("swa", "full", "state", "swa", "full")
SHAPES = ((4, 8, 8), (1, 16, 16), (0, 0, 0), (4, 8, 8), (2, 16, 4))
DIFFERENCE = re.escape("shapes ((4, 8), (4, 8)) in layer 0, but ((1, 16), (1, 16)) in layer 1")


def config_of(page_size: int = 4, with_states: bool = True, **fields: Any) -> CacheConfig:
    """Return five layers of three kinds, each kind of its own shape; without states four layers."""
    layers = [layer for layer, kind in enumerate(KINDS) if with_states or kind != "state"]
    pool: dict[str, Any] = {
        "num_slots": 128,
        "layers": [shape for layer in layers for shape in layer_shapes((KINDS[layer],), *SHAPES[layer])],
        "num_swa_slots": 96,
        "dtype": "bfloat16",
        "device": "cpu",
    }
    if with_states:
        pool |= {"num_state_slots": 4}
    return CacheConfig(
        kind="mamba" if with_states else "radix",
        page_size=page_size,
        sliding_window_size=8,
        pool=PoolConfig.model_validate(pool),
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
        **fields,
    )


def random_kv(layer: int, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random bits in the shape of one of the five layers."""
    generator, (heads, head_dim, v_head_dim) = np.random.default_rng(layer), SHAPES[layer]
    parts = (generator.integers(0, 256, (num_slots, heads, 2 * dim), np.uint8) for dim in (head_dim, v_head_dim))
    k, v = (torch.from_numpy(part).view(torch.bfloat16) for part in parts)
    return k, v


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def rows_of(lease: Any, layer: int, num_tokens: int) -> torch.Tensor:
    """Return the lease's slots in one of the five layers: window slots in a sliding-window layer."""
    slots: torch.Tensor = lease.swa_slots if KINDS[layer] == "swa" else lease.slots
    return slots[:num_tokens]


# ---------------------------------------------------------------- layer by layer


@pytest.mark.parametrize("page_size", [1, 4, 16])
async def test_kv_written_layer_by_layer_is_found_by_the_next_request(page_size: int) -> None:
    """Validation is on, which checks the pages of each layer in its own shape."""
    async with LocalPrefixCache(config_of(page_size)) as cache:
        pool = await cache.attach_pool()
        async with cache.acquire(PROMPT) as first:
            for layer in (0, 1, 3, 4):
                pool.write(layer, rows_of(first, layer, len(PROMPT)), *random_kv(layer, len(PROMPT)))
            for number, tensor in enumerate(pool.state(2), 1):
                tensor[first.state_slot] = number
            await first.insert(PROMPT, publish_state=True)

        async with cache.acquire([*PROMPT, 99]) as second:
            assert second.prefix_len == len(PROMPT)
            for layer in (0, 1, 3, 4):
                rows = rows_of(second, layer, len(PROMPT))
                live = rows != 0  # tokens before the window have no slot
                assert live[-8:].all()
                wanted = (each[live] for each in random_kv(layer, len(PROMPT)))
                assert bits(*pool.gather(layer, rows[live])) == bits(*wanted), layer
            assert [tensor[second.state_slot].unique().tolist() for tensor in pool.state(2)] == [[1], [2]]
        await cache.check_invariants()


@pytest.mark.parametrize("layer", [0, 1, 3, 4])
async def test_a_write_to_a_published_page_is_found_in_the_layer_it_went_to(layer: int) -> None:
    async with LocalPrefixCache(config_of()) as cache:
        pool = await cache.attach_pool()
        async with cache.acquire(PROMPT[:8]) as lease:
            row = int(rows_of(lease, layer, 8)[5])
            await lease.insert(PROMPT[:8], publish_state=True)
            pool.v[layer][row] = 3
            with pytest.raises(CacheError, match=f"V of layer {layer}"):
                await cache.acquire(PROMPT[:9])
            pool.v[layer].view(torch.uint8)[row] = 0xFF  # unchanged since it was published: poison


async def test_a_layer_refuses_kv_of_another_ones_shape() -> None:
    async with LocalPrefixCache(config_of()) as cache:
        pool = await cache.attach_pool()
        async with cache.acquire(PROMPT) as lease:
            before = cache._host.exported.pool.storage.clone()
            for layer, other in ((0, 1), (1, 4), (4, 3)):
                rows = rows_of(lease, layer, 3)
                with pytest.raises(InvalidRequest, match="3 slots need"):
                    pool.write(layer, rows, *random_kv(other, 3))
                with pytest.raises(InvalidRequest, match="3 slots need"):
                    pool.gather(layer, rows, random_kv(other, 3))
            assert torch.equal(cache._host.exported.pool.storage, before)


# ---------------------------------------------------------------- messages with all layers


@pytest.mark.parametrize("mapped", [True, False])
async def test_kv_of_all_layers_at_once_is_refused_before_anything_changes(mapped: bool) -> None:
    async with LocalPrefixCache(config_of()) as cache:
        pool = await cache.attach_pool(mapped=mapped)
        async with cache.acquire(PROMPT) as lease:
            storage = cache._host.exported.pool.storage
            before, way = storage.clone(), r"map the pool .* layer by layer"
            with pytest.raises(InvalidRequest, match=f"{DIFFERENCE}.*{way}"):
                await pool.read_kv(lease, lease.slots)
            with pytest.raises(InvalidRequest, match=f"{DIFFERENCE}.*{way}"):
                await pool.write_kv(lease, lease.slots, torch.ones(5, 32, 4, 8), torch.ones(5, 32, 4, 8))
            assert torch.equal(storage, before)


async def test_a_message_that_asks_for_all_layers_at_once_is_refused_by_the_cache() -> None:
    """Another implementation of the client may send it."""
    async with LocalPrefixCache(config_of()) as cache, cache.acquire(PROMPT) as lease:
        storage = cache._host.exported.pool.storage
        before, nothing = storage.clone(), np.zeros(0, np.uint8)
        fields: dict[str, Any] = {"session_id": lease.transport.session_id, "epoch": lease.transport.epoch}
        fields |= {"lease_id": lease.lease_id, "slots": lease.slots.numpy()}

        with pytest.raises(InvalidRequest, match=DIFFERENCE):
            cache._host.read_kv(ReadKV(**fields))
        with pytest.raises(InvalidRequest, match=DIFFERENCE):
            cache._host.write_kv(WriteKV(**fields, k=nothing, v=nothing))

        assert torch.equal(storage, before)


async def test_a_pool_that_was_declined_names_no_copies_that_it_would_refuse() -> None:
    async with LocalPrefixCache(config_of()) as cache:
        pool = await cache.attach_pool(mapped=False)

        with pytest.raises(InvalidRequest, match=f"{DIFFERENCE}.*map the pool"):
            pool.gather(0, torch.tensor([4]))


class FarTransport:
    """A transport to a cache on another node: its pool cannot be mapped."""

    async def pool_handle(self) -> PoolHandle:
        return PoolHandle(epoch="e", config=config_of(), device_type="cpu", node_id="elsewhere", num_bytes=1)

    def local_pool(self) -> None:
        return None


@pytest.mark.parametrize("mapped", [None, True])
def test_where_it_cannot_be_mapped_the_client_learns_it_at_once(
    mapped: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handle: PoolHandle) -> None:
        raise OSError(f"it lies on node {handle.node_id}")

    monkeypatch.setattr("raydix.actors.client.attached_pool.map_pool", fails)
    client = LocalPrefixCache(config_of())
    handle = PoolHandle(epoch="e", config=config_of(), device_type="cpu", node_id="elsewhere", num_bytes=1)

    with pytest.raises(CacheUnavailable, match="cannot be mapped from here: it lies on node elsewhere"):
        AttachedPool.attach(client, handle, None, mapped)
    assert not AttachedPool.attach(client, handle, None, False).mapped


# ---------------------------------------------------------------- mapped by another process


def worker_class() -> Any:
    """Return a local class: it is pickled by value, as Ray's processes cannot import this file."""

    class Worker:
        """A process that maps a cache's pool."""

        async def shapes(self, cache: Any) -> list[tuple[int, ...]]:
            self._client = PrefixCacheClient(cache)
            self._pool = await self._client.attach_pool(mapped=True)
            return [tuple(each.shape) for kv in zip(self._pool.k, self._pool.v, strict=True) for each in kv]

        async def publish(
            self, tokens: list[int], kv: list[tuple[torch.Tensor, torch.Tensor]], kinds: list[str]
        ) -> int:
            async with self._client.acquire(tokens) as lease:
                for layer, (k, v) in enumerate(kv):
                    self._pool.write(layer, lease.swa_slots if kinds[layer] == "swa" else lease.slots, k, v)
                return (await lease.insert(tokens)).num_inserted

        async def close(self) -> None:
            await self._client.close()

    return Worker


@pytest.mark.more
@pytest.mark.ray
async def test_kv_that_one_process_writes_to_unlike_layers_is_read_by_another(
    running_cache: Callable[[CacheConfig], Any],
) -> None:
    import ray

    layers, cache = [0, 1, 3, 4], running_cache(config_of(with_states=False))
    kv, kinds = [random_kv(layer, 8) for layer in layers], [KINDS[layer] for layer in layers]
    worker = ray.remote(worker_class()).options(num_cpus=0).remote()
    rows = {"swa": 96 + 4, "full": 128 + 4}
    assert await worker.shapes.remote(cache) == [
        (rows[KINDS[layer]], SHAPES[layer][0], dim) for layer in layers for dim in SHAPES[layer][1:]
    ]
    assert await worker.publish.remote(PROMPT[:8], kv, kinds) == 8
    await worker.close.remote()
    ray.kill(worker)

    async with PrefixCacheClient(cache) as client:
        pool = await client.attach_pool(mapped=True)
        async with client.acquire(PROMPT[:9]) as lease:
            assert lease.prefix_len == 8
            for number, layer in enumerate(layers):
                assert bits(*pool.gather(number, rows_of(lease, layer, 8))) == bits(*kv[number]), layer
        with pytest.raises(InvalidRequest, match="map the pool"):
            async with client.acquire(PROMPT[:9]) as lease:
                await (await client.attach_pool(mapped=False)).read_kv(lease, lease.slots)
        await client.check_invariants()
        await client.reset()
