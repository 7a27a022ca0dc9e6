"""A cache as the service's tests see it: reached in one of three ways, small, and measured in pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.verbs import CacheVerbs
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig, LeaseConfig, PoolConfig

NUM_PAGES = 8
MAX_WAITERS = 3

Access = Literal["local", "client", "ray"]


class Pages(NamedTuple):
    """Where the pool's pages are, and how many leases are open."""

    free: int
    private: int = 0
    evictable: int = 0
    protected: int = 0
    leases: int = 0


def small_config(page_size: int = 1, kind: Literal["radix", "chunk"] = "radix") -> CacheConfig:
    """Eight pages, at most three waiters, no background eviction, every rule checked after every batch."""
    return CacheConfig(
        kind=kind,
        page_size=page_size,
        pool=PoolConfig(
            num_slots=NUM_PAGES * page_size,
            num_layers=2,
            num_kv_heads=1,
            head_dim=2,
            v_head_dim=1,
            dtype="float32",
            device="cpu",
        ),
        eviction=EvictionConfig(high_watermark=1.0),
        leases=LeaseConfig(max_waiters=MAX_WAITERS),
        validate=True,
    )


class CacheUnderTest:
    """One cache and the clients that a test makes of it. `client` is the first of them."""

    def __init__(self, cache: Any, client: CacheVerbs, page_size: int) -> None:
        self.cache = cache  # what a client is made of: an actor's handle, or a LocalPrefixCache
        self.client = client
        self.page_size = page_size
        self._clients: list[CacheVerbs] = [client]

    @classmethod
    def reached(
        cls, access: Access, config: CacheConfig, running_cache: Callable[[CacheConfig], Any] | None
    ) -> CacheUnderTest:
        """A cache of that configuration; on Ray, the one that all tests of that configuration share."""
        cache = LocalPrefixCache(config) if running_cache is None else running_cache(config)
        client = cache if access == "local" else PrefixCacheClient(cache)
        return cls(cache, client, config.page_size)

    def another_client(self) -> PrefixCacheClient:
        """One more session with the same cache."""
        client = PrefixCacheClient(self.cache)
        self._clients.append(client)
        return client

    def tokens(self, *pages: int) -> list[int]:
        """Whole pages of token ids; a page is named by the id that fills it."""
        return [token for token in pages for _ in range(self.page_size)]

    async def pages(self) -> Pages:
        """The sizes that `stats` reports, in pages."""
        stats = await self.client.stats()
        free, private, evictable, protected = (
            slots // self.page_size
            for slots in (stats.free_slots, stats.private_slots, stats.evictable_slots, stats.protected_slots)
        )
        assert (free + private + evictable + protected) * self.page_size == stats.num_slots
        assert stats.tree_slots == stats.evictable_slots + stats.protected_slots
        assert stats.quarantined_slots == 0
        return Pages(free, private, evictable, protected, stats.open_leases)

    async def publish(self, *pages: int, **namespace: str | None) -> None:
        """Have these pages in the tree, held by nobody."""
        lease = await self.client.acquire(self.tokens(*pages), **namespace)
        await lease.insert(self.tokens(*pages), release=True)

    async def matched(self, *pages: int, **namespace: str | None) -> int:
        """How many of these pages a probe finds."""
        prefix_len = (await self.client.match(self.tokens(*pages), **namespace)).prefix_len
        assert prefix_len % self.page_size == 0
        return prefix_len // self.page_size

    def page_ids(self, lease: Lease) -> list[int]:
        """The page of each token's slot, once a page; checks that slots lie in order within each."""
        slots = lease.slots.tolist()
        starts = slots[:: self.page_size]
        assert slots == [starts[i // self.page_size] + i % self.page_size for i in range(len(slots))]
        assert all(start % self.page_size == 0 for start in starts)
        return [start // self.page_size for start in starts]

    async def until(self, reached: Callable[[CacheStats], bool]) -> CacheStats:
        """Wait until the statistics say so. Looks again after each answer; there is no event to wait for."""
        async with asyncio.timeout(20):
            while not reached(stats := await self.client.stats()):  # noqa: ASYNC110 -- a cache tells of itself when asked
                await asyncio.sleep(0.001)
        return stats

    async def in_line(self, *waiting: Awaitable[Any]) -> list[asyncio.Task[Any]]:
        """Tasks of requests that find no room, in the order in which they stand in line."""
        tasks: list[asyncio.Task[Any]] = []
        before = (await self.client.stats()).waiters
        for place, request in enumerate(waiting, before + 1):
            tasks.append(asyncio.ensure_future(request))
            await self.until(lambda stats, place=place: stats.waiters == place)
        return tasks

    async def close(self) -> None:
        """End every session; nothing may be left of them. An actor stays, empty, for the next test."""
        for client in reversed(self._clients):
            if client is not self.cache:
                await client.close()
        if isinstance(self.cache, LocalPrefixCache):
            await self.cache.close()
            service = self.cache._host.service
            service.core.check_invariants()
            stats = service.stats()
            assert stats.open_sessions == 0
        else:
            async with PrefixCacheClient(self.cache) as auditor:
                await auditor.check_invariants()
                stats = await auditor.stats()
                await auditor.reset()
                assert (await auditor.stats()).free_slots == stats.num_slots
        assert (stats.open_leases, stats.private_slots, stats.protected_slots, stats.waiters) == (0, 0, 0, 0)
