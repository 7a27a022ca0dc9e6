"""Whose KV a cache with a disk keeps: that of sessions that have bound their models, or of the base of all sessions."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from support.tiers.gated_loads import PAGE
from support.tiers.settled_disk import settled, tier_of

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.schemas import (
    CacheConfig,
    ConfigMismatch,
    DiskConfig,
    EvictionConfig,
    HostConfig,
    InsertResponse,
    ModelFingerprint,
    PoolConfig,
)

PROMPT = list(range(1, 8 * PAGE + 1))
ALL = len(PROMPT)
MODEL = ModelFingerprint(weights="step 0", fields={"name": "model"})
ADAPTER = ModelFingerprint(weights="french", fields={"rank": 8})


@asynccontextmanager
async def opened(path: Path, host: bool = False, fingerprint: str = "") -> AsyncIterator[LocalPrefixCache]:
    """A cache with its disk open, and its first session."""
    config = CacheConfig(
        page_size=PAGE,
        pool=PoolConfig.uniform(num_slots=128, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"),
        host=HostConfig(num_slots=1024, reserve=0.99) if host else None,
        disk=DiskConfig(path=str(path), num_slots=1024, direct_io="off", write_mib_s=None, load_timeout_s=60),
        eviction=EvictionConfig(high_watermark=0.99, low_watermark=0.98),
        fingerprint=fingerprint,
        validate=True,
    )
    async with LocalPrefixCache(config) as cache:
        await cache.stats()
        await settled(cache)
        yield cache
        await cache.check_invariants()


async def publish(client: PrefixCacheClient, mark: float = 1.0, lora_id: str | None = None) -> InsertResponse:
    """Compute the prompt with a mark of the model in its KV, and publish it."""
    pool = await client.attach_pool()
    async with client.acquire(PROMPT, lora_id=lora_id) as lease:
        rows = torch.full((ALL - lease.prefix_len, 1, 2), mark)
        pool.write(0, lease.slots[lease.prefix_len :], rows, rows)
        return await lease.insert(PROMPT)


async def find(client: PrefixCacheClient, mark: float = 1.0, lora_id: str | None = None) -> int:
    """Return the prefix that a lease gets, which must have the KV with that mark."""
    pool = await client.attach_pool()
    async with client.acquire(PROMPT, lora_id=lora_id) as lease:
        keys, _ = pool.gather(0, lease.slots[: lease.prefix_len])
        assert (keys == mark).all()
        return lease.prefix_len


async def keep(cache: LocalPrefixCache, client: PrefixCacheClient, lora_id: str | None = None) -> None:
    """Use the prompt twice, have it written if it is kept, and evict it from memory."""
    for _ in range(2):
        await publish(client, lora_id=lora_id)
    await settled(cache)
    await cache.evict(10**6)
    if cache.config.host is not None:
        await cache.evict(10**6, tier="host")


async def test_kv_of_sessions_that_bind_nothing_is_found_by_no_later_life(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.set_weights("step 1")
        await keep(cache, cache)
        stats = (await cache.stats()).disk
        assert stats is not None and stats.tokens_written == 0
    async with opened(tmp_path) as cache:
        assert await find(cache) == 0
        await cache.bind_model(MODEL)
        assert await find(cache) == 0


@pytest.mark.parametrize("host", [False, True])
async def test_a_model_finds_no_kv_that_was_published_before_its_first_bind(tmp_path: Path, host: bool) -> None:
    async with opened(tmp_path, host) as cache, PrefixCacheClient(cache) as stranger:
        await publish(stranger, mark=-1.0)
        assert await find(stranger, mark=-1.0) == ALL
        await cache.bind_model(MODEL)
        assert await find(cache) == 0
        await keep(cache, cache)
        assert await find(cache) == ALL
    async with opened(tmp_path, host) as cache:
        await cache.bind_model(MODEL)
        assert await find(cache) == ALL


async def test_the_first_bind_of_an_adapter_retires_its_namespaces_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache, PrefixCacheClient(cache) as stranger:
        await cache.bind_model(MODEL)
        await publish(cache)
        for lora_id in ("french", "german"):
            await publish(stranger, mark=-1.0, lora_id=lora_id)
        await cache.bind_model(ADAPTER, lora_id="french")
        assert await find(cache, lora_id="french") == 0
        assert await find(cache) == ALL and await find(stranger, mark=-1.0, lora_id="german") == ALL


async def test_leases_of_sessions_that_bind_nothing_leave_the_disk_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.bind_model(MODEL)
        await keep(cache, cache)
    async with opened(tmp_path) as cache, PrefixCacheClient(cache) as scheduler:
        assert (await publish(scheduler, mark=-1.0)).num_inserted == ALL
        await cache.bind_model(MODEL)
        assert await find(cache) == ALL


async def test_a_session_that_is_not_bound_publishes_nothing_beside_bound_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raydix")
    async with opened(tmp_path) as cache, PrefixCacheClient(cache) as stranger:
        await cache.bind_model(MODEL)
        for _ in range(2):
            assert await publish(stranger, mark=-1.0) == InsertResponse(0, 0, 0, True)
        (line,) = [text for text in caplog.messages if "is published" in text]
        assert line.endswith("it must call bind_model(fingerprint)")
        assert await find(cache) == 0
        # The session that inserts counts, so a scheduler need not bind.
        lease = await stranger.acquire(PROMPT)
        adopted = await cache.adopt(await lease.grant())
        assert (await adopted.insert(PROMPT)).num_inserted == ALL
        await adopted.release()


async def test_without_a_disk_sessions_that_bind_nothing_publish_as_others() -> None:
    config = CacheConfig(page_size=PAGE, pool=PoolConfig(num_slots=128))
    async with LocalPrefixCache(config) as cache, PrefixCacheClient(cache) as stranger:
        async with stranger.acquire(PROMPT) as lease:
            await lease.insert(PROMPT)
        await cache.bind_model(MODEL)
        assert (await cache.match(PROMPT)).prefix_len == ALL


async def test_a_configured_base_is_that_of_all_sessions(tmp_path: Path) -> None:
    async with opened(tmp_path, fingerprint=str(MODEL)) as cache:
        await keep(cache, cache)
        await keep(cache, cache, lora_id="french")
        assert await find(cache) == ALL
        assert await find(cache, lora_id="french") == 0, "its adapter is not bound"
        with pytest.raises(ConfigMismatch, match="is configured for the base model"):
            await cache.set_weights("step 1")
        with pytest.raises(ConfigMismatch, match="is configured for the base model"):
            await cache.bind_model(ADAPTER)
        assert (await cache.stats()).model_fingerprint == str(MODEL)
    async with opened(tmp_path, fingerprint=str(MODEL)) as cache, PrefixCacheClient(cache) as worker:
        await worker.bind_model(MODEL)
        assert await find(cache) == ALL and await find(worker) == ALL
        await worker.bind_model(ADAPTER, lora_id="french")
        await keep(cache, worker, lora_id="french")
        assert await find(worker, lora_id="french") == ALL
    async with opened(tmp_path, fingerprint="another") as cache:
        assert await find(cache) == 0


async def test_the_error_of_a_refused_bind_names_what_can_be_done(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.bind_model(MODEL)
        with pytest.raises(
            ConfigMismatch, match=r"call set_weights\(label\) or reset\(\); else use another cache, or another lora_id$"
        ):
            await cache.bind_model(ModelFingerprint(weights="step 0", fields={"name": "other"}))


async def test_a_damaged_namespace_keeps_no_adapter_from_being_retired(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.bind_model(MODEL)
        await cache.bind_model(ADAPTER, lora_id="french")
        await keep(cache, cache, lora_id="french")
    (file,) = tmp_path.glob("*/*/index.db")  # noqa: ASYNC240
    database = sqlite3.connect(file, isolation_level=None)
    # A part of another length than it says: `unframe_namespace` refuses it.
    values = "CAST('5:text6:french-' AS BLOB), base, adapter, label, arity, created"
    database.execute(
        f"INSERT INTO spaces (namespace, base, adapter, label, arity, created) SELECT {values} FROM spaces"
    )
    number = database.execute("SELECT max(number) FROM spaces").fetchone()[0]
    database.execute(
        "INSERT INTO rows SELECT kind, record + 100, ?, depth, digest, sum, parent, tokens, planes FROM rows", (number,)
    )
    database.close()

    async with opened(tmp_path) as cache:
        await cache.bind_model(MODEL)
        await cache.bind_model(ADAPTER, lora_id="french")
        await settled(cache)
        assert await find(cache, lora_id="french") == ALL
        await cache.retire(lora_id="french")
        await settled(cache)
        assert tier_of(cache).stats().num_spaces == 0
        await cache.bind_model(ADAPTER.model_copy(update={"weights": "other"}), lora_id="french")
        assert await find(cache, lora_id="french") == 0
