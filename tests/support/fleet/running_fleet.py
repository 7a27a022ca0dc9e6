"""Caches of a fleet in this process, and waits for what their routers learn of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from raydix.actors import Fleet, LocalPrefixCache, PrefixCacheClient, connect_fleet
from raydix.cache_core.kernels import END
from raydix.schemas import CacheConfig, PoolConfig, SlimEventSnapshot

PAGE, STRIDE = 16, 32
PATIENCE_S = 60.0  # to wait for a condition


def slim(num_slots: int = 4096, **fields: Any) -> CacheConfig:
    """Return the configuration of an index-only cache with slim events."""
    given = {"page_size": PAGE, "events": "slim", "events_stride_tokens": STRIDE} | fields
    return CacheConfig(**{"pool": PoolConfig(num_slots=num_slots)} | given)


def prompt(first: int, num_strides: int, more: int = 0) -> list[int]:
    """Return the tokens of a prompt: whole strides, and some tokens more. Others of the same `first` share them."""
    return [first * 1000 + number for number in range(num_strides * STRIDE + more)]


async def until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.005)


async def publish(cache: Any, *prompts: Iterable[int]) -> None:
    """Publish prompts at one cache, without a router."""
    async with PrefixCacheClient(cache) as client:
        for tokens in prompts:
            ids = list(tokens)
            async with client.acquire(ids) as lease:
                await lease.insert(ids)


async def caught_up(fleet: Fleet, caches: dict[str, Any]) -> dict[str, dict[str, SlimEventSnapshot]]:
    """Wait until a router has all events of these caches, or of clients of them, until now.

    Return the snapshots, by the names of the caches and of their tiers.
    """
    return {name: await _caught_up(fleet, name, cache) for name, cache in caches.items()}


async def _caught_up(fleet: Fleet, name: str, cache: Any) -> dict[str, SlimEventSnapshot]:
    if not isinstance(cache, PrefixCacheClient):
        async with PrefixCacheClient(cache) as client:
            return await _caught_up(fleet, name, client)
    await cache.open()
    snapshots: dict[str, SlimEventSnapshot] = {}
    for tier in ("device", *(cache.config.tiers_below.keys() - {"disk"})):
        snapshot = await cache.event_snapshot(tier=tier)
        assert isinstance(snapshot, SlimEventSnapshot)
        snapshots[tier] = snapshot

    def has_all() -> bool:
        columns = columns_of(fleet, name)
        if columns.keys() != snapshots.keys():
            return False
        positions = {tier: fleet.index.position(column) for tier, column in columns.items()}
        return all(
            positions[tier][0] == snapshot.epoch and positions[tier][1] >= snapshot.seq
            for tier, snapshot in snapshots.items()
        )

    await until(has_all)
    return snapshots


def columns_of(fleet: Fleet, name: str) -> dict[str, int]:
    """Return the columns of a cache in a router's index, by tier; empty: it gets no requests."""
    column = fleet.columns().get(name)
    if column is None:
        return {}
    hosts = fleet.members.hosts
    return {"device": column} | ({"host": hosts[column]} if column in hosts else {})


async def check_index(fleet: Fleet, caches: dict[str, Any]) -> None:
    """Assert that a router gets to have exactly the pages of the caches' snapshots. No request may run."""
    await until(lambda: set(fleet.columns()) == set(caches))
    for name, cache in caches.items():
        while True:  # the cache itself may evict meanwhile
            snapshots = (await caught_up(fleet, {name: cache}))[name]
            columns = columns_of(fleet, name)
            positions = {tier: fleet.index.position(column) for tier, column in columns.items()}
            if positions == {tier: (snapshot.epoch, snapshot.seq) for tier, snapshot in snapshots.items()}:
                break
        for tier, snapshot in snapshots.items():
            stored, pending, _ = fleet.index.pages(columns[tier])
            ends = [] if snapshot.end_hashes is None else snapshot.end_hashes.tolist()
            assert stored == set(snapshot.stored_hashes.tolist()) | {page ^ END for page in ends}, (name, tier)
            assert pending == set(snapshot.pending_hashes.tolist()), (name, tier)
    fleet.index.check_invariants()
    assert set(fleet.columns()) == set(caches)
    all_columns = [column for name in caches for column in columns_of(fleet, name).values()]
    assert fleet.index.num_pages() == sum(map(fleet.index.num_pages, all_columns)), "of caches that are gone"
    assert fleet.index.num_columns == len(all_columns)


@asynccontextmanager
async def local_fleet(
    configs: dict[str, CacheConfig], **options: Any
) -> AsyncIterator[tuple[Fleet, dict[str, LocalPrefixCache]]]:
    """Yield a router and its caches in this process, by name; close them all, also those that the test adds."""
    caches = {name: LocalPrefixCache(config) for name, config in configs.items()}
    try:
        async with await connect_fleet(caches, **{"timeout_s": 10, **options}) as fleet:
            yield fleet, caches
    finally:
        for cache in caches.values():
            await cache.close()
