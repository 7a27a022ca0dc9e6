"""A cache with a disk tier: leases are filled from the host and the disk, also after a restart; retirements wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers.demotion import demote
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.gated_loads import PAGE

from raydix.actors import Lease, LocalPrefixCache
from raydix.actors.tiers import tier_loads
from raydix.actors.tiers.disk_tier import DiskTier
from raydix.cache_core.tiers.page_records import PageRecords
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    DiskConfig,
    EvictionConfig,
    HostConfig,
    LeaseConfig,
    ModelFingerprint,
    PoolConfig,
)

PROMPT = list(range(1, 8 * PAGE + 1))
ALL = len(PROMPT)


def disk_config(path: Path, host: bool = False, num_slots: int = 64, **disk: Any) -> CacheConfig:
    """A small pool with tensors, perhaps a host tier, and a disk."""
    pool = PoolConfig(num_slots=num_slots, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu")
    fields = {"num_slots": 1024, "direct_io": "off", "write_mib_s": None, "load_timeout_s": 60, "fingerprint": "m"}
    return CacheConfig(
        page_size=PAGE,
        pool=pool,
        host=HostConfig(num_slots=1024, reserve=0.99, load_timeout_s=60) if host else None,
        disk=DiskConfig(path=str(path), **fields | disk),
        eviction=EvictionConfig(high_watermark=0.99, low_watermark=0.98),
        leases=LeaseConfig(acquire_timeout_s=60),
        validate=True,
    )


def tier_of(cache: LocalPrefixCache) -> DiskTier:
    disk = cache.service.disk
    assert disk is not None
    return disk


async def settled(cache: LocalPrefixCache) -> None:
    """Wait until the disk is open and has nothing to do."""
    disk = tier_of(cache)
    async with asyncio.timeout(60):
        while disk.state != "ready" or not disk.writes.is_idle or disk._tasks:  # noqa: ASYNC110 -- threads change it
            await asyncio.sleep(0.002)


@asynccontextmanager
async def opened(config: CacheConfig, calls: FaultyFileCalls | None = None) -> AsyncIterator[LocalPrefixCache]:
    """A cache with its disk open."""
    cache = LocalPrefixCache(config)
    tier_of(cache)._calls = calls
    async with cache:
        await cache.stats()
        await settled(cache)
        yield cache


def records_of(cache: LocalPrefixCache) -> PageRecords:
    pool = cache.service.disk._sources[0].pool()  # type: ignore[union-attr]
    assert pool is not None
    return PageRecords(pool)


def kv_of(prompt: list[int], num_pages: int) -> torch.Tensor:
    """The KV of the first pages of a prompt."""
    rows = [np.random.default_rng(prompt[: (page + 1) * PAGE]).bytes(PAGE * 16) for page in range(num_pages)]
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).reshape(num_pages, -1)


def starts_of(cache: LocalPrefixCache, lease: Lease, num_pages: int) -> np.ndarray:
    return cache.service.core.leases.get(lease.lease_id, cache.session.session_id).starts[:num_pages]  # type: ignore[no-any-return]


async def compute(cache: LocalPrefixCache, prompt: list[int]) -> None:
    """Compute and publish a prompt."""
    async with cache.acquire(prompt) as lease:
        num_pages, known = len(prompt) // PAGE, lease.prefix_len // PAGE
        starts = starts_of(cache, lease, num_pages)
        records_of(cache).scatter(starts[known:], kv_of(prompt, num_pages)[known:])
        await lease.insert(prompt)


async def twice(cache: LocalPrefixCache, *prompts: list[int]) -> None:
    """Use prompts for the second time, and wait until they are on the disk."""
    for _ in range(2):
        for prompt in prompts:
            await compute(cache, prompt)
    await settled(cache)


async def found(cache: LocalPrefixCache, prompt: list[int], **options: Any) -> int:
    """The prefix of a lease, of which the KV is right."""
    async with cache.acquire(prompt, **options) as lease:
        num_pages = lease.prefix_len // PAGE
        if num_pages:
            out = torch.empty(num_pages, PAGE * 16, dtype=torch.uint8)
            records_of(cache).gather(starts_of(cache, lease, num_pages), out)
            assert torch.equal(out, kv_of(prompt, num_pages)), "a lease has wrong KV"
        return lease.prefix_len


async def test_a_prompt_is_loaded_from_the_disk_and_found_after_a_restart(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path)) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        assert await found(cache, PROMPT) == ALL
        await cache.check_invariants()
    async with opened(disk_config(tmp_path)) as cache:
        assert await found(cache, PROMPT) == ALL
        assert (await cache.stats()).tokens_reused == ALL


async def test_one_lease_is_filled_from_the_host_and_then_from_the_disk(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, host=True)) as cache:
        await twice(cache, PROMPT)
        await demote(cache)
        await cache.evict(10**6, tier="host")
        assert (await cache.match(PROMPT)).host_len == 0
        await compute(cache, PROMPT[: 3 * PAGE])
        await demote(cache)
        assert (await cache.match(PROMPT)).host_len == 3 * PAGE
        assert cache.service.tiers is not None
        before = cache.service.tiers.moves.counts.loaded, tier_of(cache).all_moves[0].counts.loaded

        assert await found(cache, PROMPT) == ALL

        after = cache.service.tiers.moves.counts.loaded, tier_of(cache).all_moves[0].counts.loaded
        assert (after[0] - before[0], after[1] - before[1]) == (3 * PAGE, 5 * PAGE)
        await cache.check_invariants()


async def test_a_prefetch_goes_on_with_the_disk_when_the_part_of_the_host_is_there(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, host=True, num_slots=256)) as cache:
        await twice(cache, PROMPT)
        await demote(cache)
        await cache.evict(10**6, tier="host")
        await compute(cache, PROMPT[: 3 * PAGE])
        await demote(cache)

        assert await cache.prefetch(PROMPT) == 3 * PAGE
        async with asyncio.timeout(60):
            while (await cache.match(PROMPT)).prefix_len < ALL:  # noqa: ASYNC110 -- threads load
                await asyncio.sleep(0.002)
        assert tier_of(cache).all_moves[0].counts.loaded_unused == 5 * PAGE


async def test_many_requests_with_one_prompt_load_it_once(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, num_slots=512)) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)

        assert await asyncio.gather(*(found(cache, PROMPT) for _ in range(12))) == [ALL] * 12
        assert tier_of(cache).all_moves[0].counts.loaded == ALL


async def test_a_lock_and_a_prefetch_load_from_the_disk(tmp_path: Path) -> None:
    async with opened(disk_config(tmp_path, num_slots=256)) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        assert await cache.prefetch(PROMPT) == ALL
        async with asyncio.timeout(60):
            while (await cache.match(PROMPT)).prefix_len < ALL:  # noqa: ASYNC110 -- a thread loads it
                await asyncio.sleep(0.002)
        await cache.evict(10**6)
        async with cache.lock(PROMPT) as lease:
            assert lease.prefix_len == ALL
        await cache.check_invariants()


async def test_a_prompt_is_found_after_a_restart_by_equal_models_alone(tmp_path: Path) -> None:
    model, other = (ModelFingerprint(weights=label, fields={"name": "model"}) for label in ("1", "2"))
    config = disk_config(tmp_path, fingerprint="")
    async with opened(config) as cache:
        await cache.bind_model(model)
        await twice(cache, PROMPT)
    async with opened(config) as cache:
        assert await found(cache, PROMPT) == 0, "no model is bound"
    async with opened(config) as cache:
        await cache.bind_model(other)
        await settled(cache)
        assert await found(cache, PROMPT) == 0
    async with opened(config) as cache:
        await cache.bind_model(model)
        await settled(cache)
        assert await found(cache, PROMPT) == ALL


async def test_a_retirement_is_answered_when_the_disk_has_committed_it(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        retiring = asyncio.ensure_future(cache.reset())
        await asyncio.sleep(0.05)
        assert not retiring.done()
        assert await found(cache, PROMPT) == 0, "it cannot be found any more"
        go_on()
        await retiring
        assert (await cache.retire(extra_key="nothing")).num_namespaces == 0
    async with opened(disk_config(tmp_path)) as cache:
        assert await found(cache, PROMPT) == 0


async def test_a_retirement_that_the_disk_does_not_confirm_in_time_says_so(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path, load_timeout_s=0.05), calls) as cache:
        await twice(cache, PROMPT)
        go_on = calls.stall("DELETE")
        with pytest.raises(CacheUnavailable, match="the disk has not confirmed"):
            await cache.reset()
        with pytest.raises(CacheUnavailable, match="the disk has not confirmed"):
            await cache.set_weights("new")
        go_on()
        async with asyncio.timeout(60):
            while tier_of(cache).deletion() is not None:  # noqa: ASYNC110 -- a thread deletes
                await asyncio.sleep(0.002)
        await cache.set_weights("new")
        await cache.reset()


async def test_a_request_goes_on_without_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "GRACE_S", 0.01)
    calls = FaultyFileCalls()
    async with opened(disk_config(tmp_path, load_timeout_s=0.05), calls) as cache:
        await twice(cache, PROMPT)
        await cache.evict(10**6)
        go_on = calls.stall("preadv")
        try:
            assert await found(cache, PROMPT[: 4 * PAGE]) == 0
            assert tier_of(cache).state == "stalled"
            await cache.check_invariants()
        finally:
            go_on()


async def test_a_cache_whose_disk_cannot_be_opened_serves(tmp_path: Path) -> None:
    cache = LocalPrefixCache(disk_config(tmp_path / "nothing"))
    async with cache:
        await compute(cache, PROMPT)
        assert await found(cache, PROMPT) == ALL
        async with asyncio.timeout(60):
            while not tier_of(cache).state.startswith("failed"):  # noqa: ASYNC110 -- a thread opens it
                await asyncio.sleep(0.002)


def test_a_size_without_room_for_a_page_is_refused(tmp_path: Path) -> None:
    pool = PoolConfig(num_slots=64, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu")
    small = CacheConfig(page_size=PAGE, pool=pool, disk=DiskConfig(path=str(tmp_path), size=100))

    with pytest.raises(CacheUnavailable, match=r"disk\.size must have room for a record of each kind"):
        LocalPrefixCache(small)
