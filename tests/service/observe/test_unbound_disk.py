"""A disk of which the workers bind no model keeps nothing: counts, findings, commands and the report name it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from support.processes.command_line import run, run_json
from support.tiers.settled_tiers import quick_disk, tensors

from raydix.actors import LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache_async
from raydix.actors.report.page import render
from raydix.schemas import CacheConfig, ModelFingerprint

PROMPT = list(range(16))
MODEL = ModelFingerprint(fields={"model": "m"}, weights="1")
REMEDIES = ("bind_model", 'CacheConfig(fingerprint="...")')


def config_of(path: Path) -> CacheConfig:
    return CacheConfig(page_size=8, pool=tensors(64), disk=quick_disk(path, 1024))


async def publish(client: PrefixCacheClient, **namespace: str) -> None:
    async with client.acquire(PROMPT, **namespace) as lease:
        await lease.insert(PROMPT)


async def test_it_is_counted_while_no_model_is_bound_to_a_namespace_in_use(tmp_path: Path) -> None:
    async with LocalPrefixCache(config_of(tmp_path)) as cache, PrefixCacheClient(cache) as client:

        async def unbound() -> int:
            stats = await client.stats()
            assert stats.disk is not None
            assert bool(stats.findings) == bool(stats.disk.unbound_namespaces)
            return stats.disk.unbound_namespaces

        async with client.acquire(PROMPT):
            assert await unbound() == 0  # nothing is published
        await publish(client)
        await publish(client, lora_id="a")
        assert await unbound() == 2
        (finding,) = (await client.stats()).findings
        assert finding.startswith("the disk keeps nothing of 2 namespaces in use, as no model is bound: ")
        assert [remedy for remedy in REMEDIES if remedy not in finding] == []

        await client.bind_model(MODEL)
        assert await unbound() == 0  # the first bind retires all that was published before it
        await publish(client, lora_id="a")
        assert await unbound() == 1
        await client.bind_model(MODEL, lora_id="a")
        assert await unbound() == 0
        await publish(client, lora_id="b")
        assert await unbound() == 1
        await client.retire(lora_id="b")
        assert await unbound() == 0


async def test_of_many_namespaces_the_last_64_are_counted(tmp_path: Path) -> None:
    async with LocalPrefixCache(config_of(tmp_path)) as cache:
        for number in range(70):
            await publish(cache, cache_salt=f"{number}")

        disk = (await cache.stats()).disk

    assert disk is not None and disk.unbound_namespaces == 64


async def test_the_report_names_it_with_the_remedies(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    async with LocalPrefixCache(config) as cache:
        before = render(cache.report(), config, "kv-0")
        await publish(cache)
        page = render(cache.report(), config, "kv-0")

    sentence = "The disk keeps nothing of 1 namespace in use, as no model is bound: call bind_model in each worker"
    assert sentence in page and sentence not in before


@pytest.fixture
async def unbound(ray_cluster: None, tmp_path: Path) -> AsyncIterator[list[str]]:
    """Return the options that name a cache with a disk, used by a worker that has bound nothing."""
    namespace = f"unbound-{uuid4().hex[:8]}"
    cache = await start_cache_async(config_of(tmp_path), name="kv-0", namespace=namespace)
    async with PrefixCacheClient(cache) as client:
        await publish(client)
        yield ["kv-0", "--namespace", namespace]
    await asyncio.to_thread(shutdown_cache, cache)


@pytest.mark.ray
async def test_commands_name_it_with_the_remedies(unbound: list[str], tmp_path: Path) -> None:
    name, *where = unbound
    outputs = {
        command: (await asyncio.to_thread(run, *arguments)).stdout
        for command, arguments in {
            "stats": ["stats", name, *where],
            "list": ["list", *where],
            "doctor": ["doctor", *where],
        }.items()
    }
    stats = await asyncio.to_thread(run_json, "stats", name, *where)

    sentence = "the disk keeps nothing of 1 namespace in use, as no model is bound: "
    assert [command for command, text in outputs.items() if sentence not in text or REMEDIES[1] not in text] == []
    assert stats["disk"]["unbound_namespaces"] == 1


@pytest.mark.ray
def test_start_says_which_models_a_disk_keeps(ray_cluster: None, tmp_path: Path) -> None:
    where = ["--namespace", f"unbound-{uuid4().hex[:8]}"]
    pool = ("num_slots=64", "layers=[{num_kv_heads: 1, head_dim: 2}]", "device=cpu")
    sizes = [*(part for field in pool for part in ("--set", f"pool.{field}")), "--disk", f"{tmp_path}:8x"]
    try:
        unnamed = run("start", *sizes, *where).stdout
        named = run("start", "--name", "named", *sizes, "--set", "fingerprint=m", *where).stdout
    finally:
        run("stop", "--all", *where)

    sentence = "disk:     keeps KV of bound models alone: call bind_model in each worker, or set CacheConfig("
    assert sentence in unnamed and sentence not in named
