"""`demote`: KV leaves the pool for the host tier."""

from __future__ import annotations

import asyncio

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.tiers.host.host_tier import Progress

ALL = 10**9  # more tokens than any pool of a test


async def demote(cache: LocalPrefixCache, num_tokens: int = ALL) -> None:
    """Wait until the host tier has the KV that the pool evicts next, then evict so many tokens from the pool.

    `HostConfig.reserve` must be so large that all of them are written.
    """
    tiers = cache.service.host
    assert tiers is not None, "the cache has no host tier"
    await cache.open()
    async with asyncio.timeout(60):
        while not (tiers.state == "ready" and tiers.write_ahead() is Progress.AHEAD):  # noqa: ASYNC110 -- no event
            await asyncio.sleep(0.002)
    await cache.evict(num_tokens)


async def demote_first(client: PrefixCacheClient) -> None:
    """Wait until an empty host tier has all KV of the pool, then evict it from the pool; for a cache of an actor."""
    async with asyncio.timeout(60):
        while True:
            stats = await client.stats()
            assert stats.host is not None, "the cache has no host tier"
            if not stats.host.moves_in_flight and stats.host.slots.tree_slots >= stats.tree_slots:
                break
            await asyncio.sleep(0.005)
    await client.evict(ALL)
