"""Opaque pools: records of pages, window halves and states are shared like KV, and cannot be addressed by slot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydix.actors import AttachedPool, Lease, LocalPrefixCache, PrefixCacheClient, start_cache
from raydix.actors.cluster.placement import alive_nodes, free_memory, on_node
from raydix.cache_core import RecordLayout
from raydix.schemas import CacheConfig, CacheUnavailable, EvictionConfig, InvalidRequest, PoolConfig, ReadKV, WriteKV

PAGE, NUM_SLOTS = 4, 64
FIELDS: dict[str, dict[str, Any]] = {
    "pages": {"pool": {}},
    "windows": {"pool": {"swa_slot_bytes": 3, "num_swa_slots": 32}, "sliding_window_size": 6},
    "states": {"pool": {"state_bytes": 10, "num_state_slots": 6}, "kind": "mamba"},
    "chunk": {"pool": {}, "kind": "chunk"},
    "trie": {"pool": {}, "kind": "trie"},
}


def config_of(name: str) -> CacheConfig:
    fields = FIELDS[name]
    pool = PoolConfig(num_slots=NUM_SLOTS, format="opaque", slot_bytes=5, device="cpu", **fields["pool"])
    rest = {key: value for key, value in fields.items() if key != "pool"}
    return CacheConfig(page_size=PAGE, pool=pool, eviction=EvictionConfig(high_watermark=1.0), validate=True, **rest)


def record_of(token: int, num_bytes: int) -> torch.Tensor:
    """The record of the page, or of the state, that begins with this token."""
    return torch.from_numpy(np.random.default_rng(token).integers(0, 255, num_bytes, np.uint8))


def window_records(lease: Lease, num_tokens: int) -> dict[int, int]:
    """The record of the window half of each page, by the page's number in the lease; only those that it holds."""
    slots = lease.swa_slots[:num_tokens:PAGE].tolist()
    return {page: slot // PAGE for page, slot in enumerate(slots) if slot}


def fill(pool: AttachedPool, lease: Lease, tokens: list[int], first: int) -> None:
    """Write the records of the pages from `first` on."""
    for at, page in enumerate(lease.pages[first : len(tokens) // PAGE].tolist(), first):
        pool.pages[page] = record_of(tokens[at * PAGE], pool.pages.shape[1])
    if pool.windows.numel():
        for at, record in window_records(lease, len(tokens)).items():
            if at >= first:
                pool.windows[record] = record_of(-tokens[at * PAGE] + 2**20, pool.windows.shape[1])
    if pool.states.numel():
        pool.states[lease.state_slot] = record_of(tokens[-1] + 2**21, pool.states.shape[1])


def check(pool: AttachedPool, lease: Lease, tokens: list[int]) -> None:
    """Check the records of a prefix that hit."""
    for at, page in enumerate(lease.pages[: len(tokens) // PAGE].tolist()):
        assert torch.equal(pool.pages[page], record_of(tokens[at * PAGE], pool.pages.shape[1]))
    if pool.windows.numel():
        held = window_records(lease, len(tokens))
        assert max(held) == len(tokens) // PAGE - 1
        for at, record in held.items():
            assert torch.equal(pool.windows[record], record_of(-tokens[at * PAGE] + 2**20, pool.windows.shape[1]))
    if pool.states.numel():
        assert torch.equal(pool.states[lease.state_slot], record_of(tokens[-1] + 2**21, pool.states.shape[1]))


@pytest.mark.parametrize("name", FIELDS)
async def test_records_are_shared_bit_for_bit(name: str) -> None:
    tokens = list(range(1, 5 * PAGE + 1))
    publishing = {"publish_state": True} if name == "states" else {}
    async with LocalPrefixCache(config_of(name)) as cache, PrefixCacheClient(cache) as other:
        pool, again = await cache.attach_pool(), await other.attach_pool(mapped=True)
        async with cache.acquire(tokens) as lease:
            assert lease.prefix_len == 0
            fill(pool, lease, tokens, 0)
            await lease.insert(tokens, release=True, **publishing)

        async with other.acquire([*tokens, 7, 8, 9]) as lease:
            assert lease.prefix_len == (0 if name == "chunk" else len(tokens))
            if lease.prefix_len:
                check(again, lease, tokens)
        await cache.check_invariants()


async def test_slots_of_records_cannot_be_addressed() -> None:
    slots, values = torch.tensor([4, 5]), torch.zeros(2, 1, 5)
    async with LocalPrefixCache(config_of("pages")) as cache, cache.acquire([1] * 8) as lease:
        for pool in (await cache.attach_pool(), await cache.attach_pool(mapped=False)):
            assert isinstance(pool.layout, RecordLayout)
            uses: list[Callable[[], Any]] = [
                lambda pool=pool: pool.k,
                lambda pool=pool: pool.v,
                lambda pool=pool: pool.by_sequence(),
                lambda pool=pool: pool.state(0),
                lambda pool=pool: pool.write(0, slots, values, values),
                lambda pool=pool: pool.gather(0, slots),
            ]
            for use in uses:
                with pytest.raises(InvalidRequest, match="keeps opaque records"):
                    use()
            copies: list[Callable[[], Awaitable[Any]]] = [
                lambda pool=pool: pool.read_kv(lease, slots),
                lambda pool=pool: pool.write_kv(lease, slots, values, values),
            ]
            for copy in copies:
                with pytest.raises(InvalidRequest, match="keeps opaque records"):
                    await copy()
        with pytest.raises(InvalidRequest, match="keeps opaque records"):
            (await cache.attach_pool(mapped=False)).pages  # noqa: B018 -- it raises

        transport = lease.transport
        about = {"session_id": transport.session_id, "epoch": transport.epoch, "lease_id": lease.lease_id}
        about["slots"] = slots.numpy()
        data = np.zeros(10, np.uint8)
        with pytest.raises(InvalidRequest, match="keeps opaque records"):
            await transport.read_kv(ReadKV(**about))
        with pytest.raises(InvalidRequest, match="keeps opaque records"):
            await transport.write_kv(WriteKV(**about, k=data, v=data))


async def test_a_pool_with_layers_has_no_records() -> None:
    layers = PoolConfig.uniform(num_slots=8, num_layers=1, num_kv_heads=1, head_dim=2, device="cpu")
    async with LocalPrefixCache(CacheConfig(pool=layers)) as cache:
        pool = await cache.attach_pool()
        for name in ("pages", "windows", "states"):
            with pytest.raises(InvalidRequest, match="has layers, and no opaque records"):
                getattr(pool, name)


@pytest.mark.ray
async def test_a_cache_lies_on_the_node_that_is_asked_for(ray_cluster: None) -> None:
    (node_id,) = alive_nodes()
    assert free_memory(node_id) > 0

    cache = start_cache(config_of("pages"), scheduling_strategy=on_node(node_id))

    async with PrefixCacheClient(cache) as client, client.acquire([1] * 8) as lease:
        pool = await client.attach_pool(mapped=True)
        fill(pool, lease, [1] * 8, 0)
        assert pool.pages.shape == (NUM_SLOTS // PAGE + 1, PAGE * 5)
    with pytest.raises(CacheUnavailable):
        start_cache(config_of("pages"), scheduling_strategy=on_node("ab" * 28), timeout_s=3)
