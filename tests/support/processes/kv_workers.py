"""Workers on one cache that compute stamped KV, and check all KV that they hit or hold."""

from __future__ import annotations

from random import Random

from support.caches.cache_under_test import CacheUnderTest, check_sizes
from support.models.stamped_kv import check_kv, check_state, compute

from raydix.actors import AttachedPool, Lease, PrefixCacheClient
from raydix.schemas import PoolExhausted


class Worker:
    """A client with random requests: the KV of its hits and leases must be right at each step."""

    def __init__(self, cache: CacheUnderTest, client: PrefixCacheClient, pool: AttachedPool, rng: Random) -> None:
        self.cache = cache
        self.client = client
        self.pool = pool
        self.rng = rng
        self.held: list[tuple[Lease, list[int], str]] = []  # with its tokens and namespace

    async def step(self) -> int:
        """Serve one request, or give one up for want of room; returns the tokens that were hit."""
        tokens = self.cache.tokens(*(self.rng.randint(1, 2) for _ in range(self.rng.randint(1, 4))))
        tokens = tokens[: len(tokens) - self.rng.randrange(self.cache.page_size)]
        salt, limit = self.rng.choice(["", "x"]), len(tokens) - 1 or None
        await self.probe(tokens, salt)
        try:
            lease = await self.client.acquire(tokens, lora_id=salt or None, max_prefix_len=limit, timeout_s=0)
        except PoolExhausted:
            await self.end_one()
            return 0
        check_state(self.cache, self.pool, lease, tokens[: lease.prefix_len], salt)
        await check_kv(self.cache, self.pool, lease, tokens[: lease.prefix_len], salt)
        self.held.append((lease, tokens, salt))
        await self.serve(lease, tokens, salt)
        await self.check()
        if self.rng.random() < 0.7:
            await self.end_one()
        return lease.prefix_len

    async def probe(self, tokens: list[int], salt: str) -> None:
        """Check that a matched prefix can be locked and read."""
        found = await self.client.match(tokens, lora_id=salt or None)
        try:
            lease = await self.client.lock(tokens, lora_id=salt or None)
        except PoolExhausted:  # no row or state for one more
            return
        most = max(found.prefix_len, found.host_len)
        assert found.prefix_len <= lease.prefix_len <= most, "what was reported is not there"
        await check_kv(self.cache, self.pool, lease, tokens[: lease.prefix_len], salt)
        await lease.release()

    async def serve(self, lease: Lease, tokens: list[int], salt: str) -> None:
        """Compute up to the last whole page, publish, then the rest."""
        whole = len(tokens) - len(tokens) % self.cache.page_size
        if whole > lease.prefix_len:
            await compute(self.cache, self.pool, lease, tokens[:whole], lease.prefix_len, salt)
            try:
                await lease.insert(tokens[:whole], publish_state=self.cache.kind.publishes_states)
            except PoolExhausted:  # no room for the state: the lease goes on unpublished
                assert self.cache.kind.publishes_states and lease.published_len == lease.prefix_len
        if whole < len(tokens):
            await compute(self.cache, self.pool, lease, tokens, whole, salt)
            await lease.insert(tokens)
        if self.rng.random() < 0.3:
            await lease.release_window(self.rng.randint(0, len(tokens)))

    async def check(self) -> None:
        """Everything that is held reads as it was computed."""
        for lease, tokens, salt in self.held:
            await check_kv(self.cache, self.pool, lease, tokens, salt)
            check_state(self.cache, self.pool, lease, tokens, salt)

    async def end_one(self) -> None:
        """End any lease, in either way."""
        if self.held:
            lease, _, _ = self.held.pop(self.rng.randrange(len(self.held)))
            await self.rng.choice([lease.release, lease.abort])()


async def work(cache: CacheUnderTest, num_steps: int) -> int:
    """Let two workers at one cache, with evictions and resets in between; returns the tokens that were hit."""
    rng = Random(5)
    clients = [cache.another_client() for _ in range(2)]
    workers = [Worker(cache, client, await client.attach_pool(), rng) for client in clients]
    reused = 0
    for step in range(num_steps):
        reused += await rng.choice(workers).step()
        if step % 7 == 6:
            await cache.client.evict(rng.randint(1, 4 * cache.page_size))
        if step % 23 == 22:
            await cache.client.reset()
        check_sizes(await cache.client.stats())
        await cache.client.check_invariants()
    for worker in workers:
        await worker.check()
    return reused
