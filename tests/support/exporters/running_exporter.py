"""Caches, exporters and subscribers for tests: made together, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from support.exporters.vllm_subscriber import VllmSubscriber

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.connectors import LocalConnector
from raydix.actors.client.local_transport import LocalTransport
from raydix.actors.exporters.vllm_events import VllmEventExporter
from raydix.actors.service.cache_host import CacheHost, local_device
from raydix.schemas import CacheConfig, PoolConfig

PAGE = 16
FREE_PORT = "tcp://127.0.0.1:*"


def full(num_pages: int = 32, **fields: Any) -> CacheConfig:
    """Return the configuration of an index-only cache with full events."""
    given: dict[str, Any] = {"page_size": PAGE, "pool": PoolConfig(num_slots=num_pages * PAGE), "events": "full"}
    return CacheConfig(**given | fields)


def tokens(*pages: int) -> list[int]:
    """Return whole pages of token ids; a page is named by the id that fills it."""
    return [page for page in pages for _ in range(PAGE)]


async def publish(client: PrefixCacheClient, *pages: int, **namespace: str | None) -> None:
    """Publish these pages, and release them."""
    lease = await client.acquire(tokens(*pages), **namespace)
    await lease.insert(tokens(*pages), release=True)


@asynccontextmanager
async def exporting(cache: Any, endpoint: str = FREE_PORT, **options: Any) -> AsyncIterator[VllmEventExporter]:
    """Yield an exporter that runs; its errors are the test's."""
    async with VllmEventExporter(cache, endpoint, **{"heartbeat_s": 0.1} | options) as exporter:
        running = asyncio.create_task(exporter.run())
        yield exporter
        assert not running.done() or running.result() is None
    async with asyncio.timeout(60):
        await running


@asynccontextmanager
async def exported(
    config: CacheConfig | None = None, **options: Any
) -> AsyncIterator[tuple[LocalPrefixCache, VllmEventExporter, VllmSubscriber]]:
    """Yield a cache in this process, its exporter, and a subscriber with replays."""
    async with LocalPrefixCache(config or full()) as cache:
        async with exporting(cache, **{"replay_endpoint": FREE_PORT} | options) as exporter:
            async with VllmSubscriber(exporter.endpoint, exporter.replay_endpoint) as subscriber:
                yield cache, exporter, subscriber


def host_of(client: PrefixCacheClient) -> CacheHost:
    """Return the cache of a client in this process."""
    return cast("LocalConnector", client.session.connector).host


async def restart(cache: LocalPrefixCache, exporter: VllmEventExporter, config: CacheConfig | None = None) -> None:
    """Replace the cache by an empty one, as Ray does with a dead actor."""
    before = host_of(cache)
    await before.service.eviction_task.stop()
    config = config or before.service.config
    host = CacheHost(config, local_device(config), "", False)
    for client in (cache, exporter._client):
        cast("LocalTransport", client.session.transport)._host = host
        cast("LocalConnector", client.session.connector).host = host
    before.service.feeds.close()  # its readers come back
