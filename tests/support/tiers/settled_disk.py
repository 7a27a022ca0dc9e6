"""`settled`: a disk tier is open and has nothing to do."""

from __future__ import annotations

import asyncio

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.disk.disk_tier import DiskTier


def tier_of(cache: LocalPrefixCache) -> DiskTier:
    disk = cache.service.disk
    assert disk is not None, "the cache has no disk tier"
    return disk


async def settled(cache: LocalPrefixCache) -> None:
    """Wait until the disk is open, all KV that is due is written, and all that is to be found again is."""
    disk = tier_of(cache)
    async with asyncio.timeout(60):
        while disk.state != "ready" or not disk.writes.is_idle or disk.files.tasks:  # noqa: ASYNC110 -- threads change it
            await asyncio.sleep(0.002)
