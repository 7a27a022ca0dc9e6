"""Caches of which the tiers get all KV of the pool: `tensors`, `whole_host`, `NO_SPARE`, `tiers_settled`."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from support.waiting import wait_until

from raydix.actors import LocalPrefixCache
from raydix.actors.memory.pool_memory import ExportedPool
from raydix.actors.service.cache_service import CacheService
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.actors.tiers.host.host_tier import HostTier, Progress
from raydix.schemas import CacheConfig, DiskConfig, EvictionConfig, HostConfig, PoolConfig

NO_SPARE = EvictionConfig(high_watermark=0.999999, low_watermark=0.99999)  # a full pool evicts a page at a time


def tensors(num_slots: int, **fields: Any) -> PoolConfig:
    """Return a pool with a few bytes for each slot."""
    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32", "device": "cpu"}
    return PoolConfig.uniform(num_slots=num_slots, **shape | fields)


def whole_host(num_slots: int, **fields: Any) -> HostConfig:
    """Return a host tier to which all of the pool is written."""
    return HostConfig(**{"num_slots": num_slots, "reserve": 0.99999} | fields)


def quick_disk(path: Any, num_slots: int, **fields: Any) -> DiskConfig:
    """Return a disk without limits."""
    return DiskConfig(
        **{"path": str(path), "num_slots": num_slots, "direct_io": "off", "write_mib_s": None, "flush_s": 0} | fields
    )


def service_of(config: CacheConfig, **options: Any) -> CacheService:
    """Return a service with its pool, of which the host tier takes KV already."""
    pool = ExportedPool(config, torch.device("cpu"), "e", "node", share=False).pool
    service = CacheService(config, "e", pool, **options)
    wait_until(lambda: service.host is None or service.host.state == "ready")
    return service


async def tiers_settled(cache: LocalPrefixCache | CacheService) -> None:
    """Wait until the tiers have all KV that is due, and on the host all that the reserve asks for."""
    if isinstance(cache, LocalPrefixCache):
        await cache.open()
        cache = cache.service
    async with asyncio.timeout(60):
        while not (_rests(cache.host) and _disk_rests(cache.disk)):  # noqa: ASYNC110 -- threads change it
            await asyncio.sleep(0.002)


def _rests(host: HostTier | None) -> bool:
    if host is None:
        return True
    return host.state == "ready" and not host.locks_pool and host.write_ahead() is Progress.AHEAD


def _disk_rests(disk: DiskTier | None) -> bool:
    return disk is None or (disk.state == "ready" and disk.writes.is_idle and not disk.files.tasks)
