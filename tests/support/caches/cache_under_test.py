"""A cache as the service's tests see it: of some kind, reached in one of three ways, small, and measured in pages."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from support.caches.cache_kinds import NUM_PAGES, Access, KindUnderTest, radix

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.schemas import CacheConfig, CacheStats, InsertResponse, PoolStats


class Pages(NamedTuple):
    """Where the pool's pages are, and how many leases are open."""

    free: int
    private: int = 0
    evictable: int = 0
    protected: int = 0
    leases: int = 0


def holding(private: int = 0, evictable: int = 0, protected: int = 0, leases: int = 0) -> Pages:
    """These pages, and all others free."""
    return Pages(NUM_PAGES - private - evictable - protected, private, evictable, protected, leases)


def small_config(page_size: int = 1) -> CacheConfig:
    """The configuration of kind "radix"."""
    return radix(page_size).cache_config()


def pools_of(stats: CacheStats) -> list[CacheStats | PoolStats]:
    """The counts of each pool that there is: KV, window slots, states."""
    return [pool for pool in (stats, stats.swa, stats.state) if pool is not None]


def check_sizes(stats: CacheStats) -> None:
    """In every pool each slot is counted once: free, private or in the tree."""
    for pool in pools_of(stats):
        counted = pool.free_slots + pool.private_slots + pool.tree_slots + pool.quarantined_slots
        assert counted == pool.num_slots, pool
        assert pool.tree_slots == pool.evictable_slots + pool.protected_slots, pool
        assert min(pool.free_slots, pool.private_slots, pool.evictable_slots, pool.protected_slots) >= 0, pool
        assert pool.quarantined_slots == 0, pool


class CacheUnderTest:
    """One cache and the clients that a test makes of it. `client` is the first of them."""

    def __init__(self, cache: Any, client: PrefixCacheClient, kind: KindUnderTest) -> None:
        self.cache = cache  # an actor's handle or a LocalPrefixCache, for clients
        self.client = client
        self.kind = kind
        self.page_size = kind.page_size
        self._clients: list[PrefixCacheClient] = [client]

    @classmethod
    def reached(
        cls,
        access: Access,
        config: CacheConfig,
        running_cache: Callable[[CacheConfig], Any] | None,
        kind: KindUnderTest | None = None,
    ) -> CacheUnderTest:
        """A cache of that configuration, a radix cache by default; on Ray, the one that all tests of it share."""
        cache = LocalPrefixCache(config) if running_cache is None else running_cache(config)
        client = cache if access == "local" else PrefixCacheClient(cache)
        return cls(cache, client, kind or radix(config.page_size))

    def another_client(self) -> PrefixCacheClient:
        """One more session with the same cache."""
        client = PrefixCacheClient(self.cache)
        self._clients.append(client)
        return client

    # ---------------------------------------------------------------- in pages

    def tokens(self, *pages: int) -> list[int]:
        """Whole pages of token ids; a page is named by the id that fills it."""
        return [token for token in pages for _ in range(self.page_size)]

    def reusable(self, num_pages: int) -> int:
        """How many pages can be hit of that many pages of tokens, once they are published."""
        return self.kind.reusable(num_pages * self.page_size)

    async def pages(self) -> Pages:
        """The sizes that `stats` reports, in pages."""
        stats = await self.client.stats()
        check_sizes(stats)
        sizes = (stats.free_slots, stats.private_slots, stats.evictable_slots, stats.protected_slots)
        assert not any(slots % self.page_size for slots in sizes)
        return Pages(*(slots // self.page_size for slots in sizes), stats.open_leases)

    async def is_empty(self) -> bool:
        """Whether every slot of every pool is free, without leases or waiting requests."""
        stats = await self.client.stats()
        check_sizes(stats)
        all_free = all(pool.free_slots == pool.num_slots for pool in pools_of(stats))
        return all_free and (stats.open_leases, stats.waiters) == (0, 0)

    async def insert(self, lease: Lease, *pages: int, release: bool = False) -> InsertResponse:
        """Publish these pages so that they can be hit: with the state after the last, where hits need one."""
        return await lease.insert(self.tokens(*pages), release=release, publish_state=self.kind.publishes_states)

    async def publish(self, *pages: int, client: PrefixCacheClient | None = None, **namespace: str | None) -> None:
        """Publish these pages and release them; each can be hit."""
        await self.hold(*pages, client=client, release=True, **namespace)

    async def hold(
        self, *pages: int, client: PrefixCacheClient | None = None, release: bool = False, **namespace: str | None
    ) -> Lease:
        """A lease of these pages, published so that each can be hit."""
        lease = await (client or self.client).acquire(self.tokens(*pages), **namespace)
        if self.kind.publishes_states:
            for stop in range(lease.prefix_len // self.page_size + 1, len(pages)):
                await self.insert(lease, *pages[:stop])
        await self.insert(lease, *pages, release=release)
        return lease

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

    # ---------------------------------------------------------------- waiting

    async def fill(self) -> list[Lease]:
        """Leases of a page each, until nothing is free; they hold nothing that could be evicted."""
        leases: list[Lease] = []
        while (await self.client.stats()).free_slots:
            leases.append(await self.client.acquire(self.tokens(1000 + len(leases)), timeout_s=0))
        return leases

    async def until(self, reached: Callable[[CacheStats], bool]) -> CacheStats:
        """Wait until the statistics say so. Looks again after each answer; there is no event to wait for."""
        async with asyncio.timeout(60):
            while not reached(stats := await self.client.stats()):  # noqa: ASYNC110 -- stats must be polled
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
                at_once = auditor.check_invariants(), auditor.stats(), auditor.reset(), auditor.stats()
                _, stats, _, emptied = await asyncio.gather(*at_once)  # one batch, executed in order
                assert all(pool.free_slots == pool.num_slots for pool in pools_of(emptied)), emptied
        assert (stats.open_leases, stats.waiters) == (0, 0)
        assert not any(pool.private_slots or pool.protected_slots for pool in pools_of(stats)), stats


def unchecked(kind: KindUnderTest) -> CacheUnderTest:
    """Make a cache in this process without `validate`, so that only the test can find a planted fault."""
    config = kind.cache_config().model_copy(update={"validate": False})
    return CacheUnderTest.reached("local", config, None, kind)


Reached = Callable[[KindUnderTest], AbstractAsyncContextManager[CacheUnderTest]]
