"""Index keys of sparse attention are written, published and read with the K and V of their tokens, or refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.pool_layers import layer_shapes
from support.processes.pool_workers import K_DIM, NUM_HEADS, NUM_LAYERS, PAGE, PROMPT, V_DIM, bits, random_kv

from raydix.actors import AttachedPool, Lease, LocalPrefixCache
from raydix.actors.client import attached_pool
from raydix.actors.client.local_transport import LocalTransport
from raydix.schemas import CacheConfig, CacheError, EvictionConfig, InvalidRequest, PoolConfig, ReadKV, WriteKV

INDEX_DIM = 6
ALIKE: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"kinds": ("full", "swa", "full")},
    "states": {"kinds": ("state", "swa", "full")},
}
SOME: dict[str, Any] = {"kinds": ("full", "swa", "full"), "index_layers": (0,)}
DIFFERENCE = re.escape("a token has shapes ((2, 8), (2, 4), (6,)) in layer 0, but ((2, 8), (2, 4)) in layer 1")


def config_of(layers: dict[str, Any], index_head_dim: int = INDEX_DIM) -> CacheConfig:
    kinds = layers.get("kinds", ("full",) * NUM_LAYERS)
    has_states = "state" in kinds
    shapes = layer_shapes(kinds, NUM_HEADS, K_DIM, V_DIM, index_head_dim, layers.get("index_layers"))
    return CacheConfig(
        kind="mamba" if has_states else "radix",
        page_size=PAGE,
        sliding_window_size=16 if "swa" in kinds else None,
        pool=PoolConfig(num_slots=64, layers=shapes, num_state_slots=4 * has_states, device="cpu"),
        eviction=EvictionConfig(high_watermark=1.0),
        validate=True,
    )


def arrays_of(num_slots: int) -> tuple[torch.Tensor, ...]:
    """Random bits for K, V and index keys of all layers."""
    return random_kv(num_slots, "bfloat16", 0, INDEX_DIM)


def rows_of(lease: Lease, pool: AttachedPool, layer: int) -> torch.Tensor:
    """The lease's slots in a layer: window slots in a sliding-window layer."""
    kind = pool.layout.kind(layer)  # type: ignore[union-attr]
    return lease.swa_slots if kind == "swa" else lease.slots


def kv_layers(pool: AttachedPool) -> list[int]:
    return pool.layout.kv_layers  # type: ignore[union-attr]


# ---------------------------------------------------------------- written and read


@pytest.mark.parametrize("shapes", ALIKE.values(), ids=ALIKE)
async def test_plain_calls_and_copies_see_the_same_index_keys(shapes: dict[str, Any]) -> None:
    async with LocalPrefixCache(config_of(shapes)) as cache:
        mapped, copying = await cache.attach_pool(), await cache.attach_pool(mapped=False)
        first, second = await cache.acquire(PROMPT), await cache.acquire([9] * 10)
        arrays, layers = arrays_of(10), kv_layers(mapped)

        for layer in layers:
            mapped.write(layer, rows_of(first, mapped, layer), *(array[layer] for array in arrays))
        await copying.write_kv(second, second.slots, *arrays)

        for lease in (first, second):
            for layer in layers:
                found = mapped.gather(layer, rows_of(lease, mapped, layer))
                assert bits(*found) == bits(*(array[layer] for array in arrays))
                assert bits(mapped.index[layer][rows_of(lease, mapped, layer)]) == bits(arrays[2][layer])
            for pool in (mapped, copying):
                found = await pool.read_kv(lease, lease.slots)
                assert [bits(array[layer]) for array in found for layer in layers] == [
                    bits(array[layer]) for array in arrays for layer in layers
                ]


@pytest.mark.parametrize("shapes", ALIKE.values(), ids=ALIKE)
async def test_a_hit_reads_the_index_keys_of_its_tokens_until_they_are_evicted(shapes: dict[str, Any]) -> None:
    """Validation checks the index keys of a published page, and overwrites those of a freed one."""
    with_states = "state" in shapes.get("kinds", ())
    async with LocalPrefixCache(config_of(shapes)) as cache:
        pool, arrays, tokens = await cache.attach_pool(), arrays_of(8), PROMPT[:8]
        async with cache.acquire(tokens) as lease:
            await pool.write_kv(lease, lease.slots, *arrays)
            await lease.insert(tokens, publish_state=with_states)

        async with cache.acquire(PROMPT) as hit:
            assert hit.prefix_len == 8
            slots = {layer: rows_of(hit, pool, layer)[:8] for layer in kv_layers(pool)}
            for layer, rows in slots.items():
                assert bits(*pool.gather(layer, rows)) == bits(*(array[layer] for array in arrays))
        await cache.evict(8)

        poison = [bits(pool.index[layer][rows]) for layer, rows in slots.items()]
        assert poison == [[b"\xff" * (8 * INDEX_DIM * 2)]] * len(slots)
        await cache.check_invariants()


@pytest.mark.parametrize("layer", [0, 1])
async def test_a_write_to_published_index_keys_is_found(layer: int) -> None:
    async with LocalPrefixCache(config_of(ALIKE["windows"])) as cache:
        pool = await cache.attach_pool()
        async with cache.acquire(PROMPT[:8]) as lease:
            row = int(rows_of(lease, pool, layer)[5])
            await lease.insert(PROMPT[:8])
            pool.index[layer][row] = 3
            with pytest.raises(CacheError, match=f"index keys of layer {layer}, was overwritten"):
                await cache.acquire(PROMPT[:9])
            pool.index[layer].view(torch.uint8)[row] = 0xFF  # unchanged since it was published: poison


async def test_the_pieces_of_a_large_copy_have_room_for_index_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    row = NUM_LAYERS * (NUM_HEADS * (K_DIM + V_DIM) + INDEX_DIM) * 2
    monkeypatch.setattr(attached_pool, "_CHUNK_BYTES", 4 * row + row - 1)
    sizes: list[int] = []
    original = LocalTransport.write_kv

    async def counted(transport: LocalTransport, request: WriteKV) -> None:
        sizes.append(len(request.slots))
        await original(transport, request)

    monkeypatch.setattr(LocalTransport, "write_kv", counted)
    async with LocalPrefixCache(config_of({})) as cache:
        pool, lease, arrays = await cache.attach_pool(mapped=False), await cache.acquire(PROMPT), arrays_of(10)

        await pool.write_kv(lease, lease.slots, *arrays)

        assert sizes == [4, 4, 2]
        assert bits(*await pool.read_kv(lease, lease.slots)) == bits(*arrays)


async def test_layers_that_differ_in_having_index_keys_are_used_layer_by_layer() -> None:
    async with LocalPrefixCache(config_of(SOME)) as cache:
        pool, copying = await cache.attach_pool(), await cache.attach_pool(mapped=False)
        lease, arrays = await cache.acquire(PROMPT), arrays_of(10)
        for layer in range(NUM_LAYERS):
            given = [array[layer] for array in arrays][: 3 if layer == 0 else 2]
            rows = rows_of(lease, pool, layer)

            pool.write(layer, rows, *given)

            assert bits(*pool.gather(layer, rows)) == bits(*given)
        before = cache._host.exported.pool.storage.clone()
        for use in (
            lambda: pool.read_kv(lease, lease.slots),
            lambda: pool.write_kv(lease, lease.slots, *arrays),
            lambda: pool.write_kv(lease, lease.slots, *arrays[:2]),
        ):
            with pytest.raises(InvalidRequest, match=f"{DIFFERENCE}.*map the pool"):
                await use()
        with pytest.raises(InvalidRequest, match=f"{DIFFERENCE}.*map the pool"):
            copying.gather(0, lease.slots)
        assert torch.equal(cache._host.exported.pool.storage, before)


# ---------------------------------------------------------------- refused


WRONG: dict[str, tuple[Any, str]] = {
    "left out": (None, "index must be given"),
    "narrow": (torch.ones(NUM_LAYERS, 2, INDEX_DIM - 1), "need|must be of shape"),
    "wide": (torch.ones(NUM_LAYERS, 2, INDEX_DIM + 1), "need|must be of shape"),
    "of one token": (torch.ones(NUM_LAYERS, 1, INDEX_DIM), "need|must be of shape"),
    "with heads": (torch.ones(NUM_LAYERS, 2, 1, INDEX_DIM), "need|must be of shape"),
    "a list": ([[1.0] * INDEX_DIM] * 2, "index keys must be tensors, not a list"),
    "complex": (
        torch.ones(NUM_LAYERS, 2, INDEX_DIM, dtype=torch.complex64),
        "index keys must be tensors of real numbers",
    ),
    "meta": (torch.ones(NUM_LAYERS, 2, INDEX_DIM, device="meta"), "must be dense tensors"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_index_keys_that_do_not_fit_are_refused_before_anything_changes(name: str) -> None:
    index, reason = WRONG[name]
    async with LocalPrefixCache(config_of({})) as cache:
        pool, lease = await cache.attach_pool(), await cache.acquire(PROMPT)
        k, v, _ = arrays_of(2)
        before = cache._host.exported.pool.storage.clone()
        of_layer = index[0] if isinstance(index, torch.Tensor) else index

        with pytest.raises(InvalidRequest, match=reason):
            pool.write(0, lease.slots[:2], k[0], v[0], of_layer)
        with pytest.raises(InvalidRequest, match=reason):
            await pool.write_kv(lease, lease.slots[:2], k, v, index)

        assert torch.equal(cache._host.exported.pool.storage, before)


async def test_layers_without_index_keys_refuse_them_before_anything_changes() -> None:
    async with LocalPrefixCache(config_of({}, index_head_dim=0)) as cache:
        pool, lease, arrays = await cache.attach_pool(), await cache.acquire(PROMPT), arrays_of(10)
        before = cache._host.exported.pool.storage.clone()

        with pytest.raises(InvalidRequest, match="index must be left out"):
            pool.write(0, lease.slots, *(array[0] for array in arrays))
        with pytest.raises(InvalidRequest, match="index must be left out"):
            await pool.write_kv(lease, lease.slots, *arrays)
        with pytest.raises(InvalidRequest, match="out must be 2 tensors, of K, V, not 3"):
            pool.gather(0, lease.slots, [array[0] for array in arrays])

        assert torch.equal(cache._host.exported.pool.storage, before)
        assert [index.numel() for index in pool.index] == [0] * NUM_LAYERS


SIZES = NUM_HEADS * K_DIM, NUM_HEADS * V_DIM, INDEX_DIM
K, V, INDEX = (np.zeros(NUM_LAYERS * 2 * size * 2, np.uint8) for size in SIZES)  # of 2 tokens


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "index must be given"),
        ({"index": INDEX[2:]}, r"shape \(3, 2, 6\) in torch.bfloat16 needs 72 bytes, not 70"),
        ({"index": INDEX.astype(np.float32)}, "needs 72 bytes"),
    ],
    ids=["left out", "short", "float32"],
)
async def test_a_message_without_the_index_keys_is_refused_by_the_cache(fields: dict[str, Any], reason: str) -> None:
    """Another implementation of the client may send it."""
    async with LocalPrefixCache(config_of({})) as cache:
        lease, storage = await cache.acquire(PROMPT), cache._host.exported.pool.storage
        before = storage.clone()
        about = {
            "session_id": lease.transport.session_id,
            "epoch": lease.transport.epoch,
            "lease_id": lease.lease_id,
            "slots": lease.slots[:2].numpy(),
        }

        with pytest.raises(InvalidRequest, match=reason):
            cache._host.write_kv(WriteKV.model_construct(**about, k=K, v=V, **{"index": None} | fields))

        assert torch.equal(storage, before)
        cache._host.write_kv(WriteKV(**about, k=K, v=V, index=INDEX))
        response = cache._host.read_kv(ReadKV(**about))
        assert response.index is not None and not response.index.any()


def test_a_blocking_client_passes_index_keys_on() -> None:
    with LocalPrefixCache(config_of({})).sync as cache:
        pool, arrays = cache.attach_pool(), arrays_of(4)
        lease = cache.acquire(PROMPT)

        pool.write_kv(lease, lease.slots[:4], *arrays)
        assert bits(*pool.read_kv(lease, lease.slots[:4])) == bits(*arrays)
        pool.write(1, lease.slots[:4], *(array[0] for array in arrays))
        assert bits(*pool.gather(1, lease.slots[:4])) == bits(*(array[0] for array in arrays))
        lease.release()
