"""`GatedLoads`: a cache with a host tier of which a test lets the loads through, chunk by chunk."""

from __future__ import annotations

import asyncio
import threading
import time

from support.tiers.demotion import demote

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.job_threads import JobThreads
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies
from raydix.schemas import CacheConfig, EvictionConfig, HostConfig, LeaseConfig, PoolConfig

PAGE = 4


def host_config(num_slots: int = 64, **changed: object) -> CacheConfig:
    """A small pool with tensors, and a host tier to which all of it is written."""
    pool = PoolConfig.uniform(
        num_slots=num_slots, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"
    )
    fields = {
        "page_size": PAGE,
        "pool": pool,
        "host": HostConfig(num_slots=1024, reserve=0.99, load_timeout_s=60),
        "eviction": EvictionConfig(high_watermark=0.99, low_watermark=0.98),
        "leases": LeaseConfig(acquire_timeout_s=60),
        "validate": True,
    }
    return CacheConfig.model_validate(fields | changed)


class GatedLoads:
    """The gate of a cache's loads, made before the cache is opened. Each chunk has one page; writes are never held up.

    Attributes:
        num_begun: pages of which the load has begun.
        fails: loads that go through fail.
        late_s: seconds by which the copier's clock is ahead: a load ends behind its chunk once its time is over.
    """

    def __init__(self, cache: LocalPrefixCache) -> None:
        self.num_begun = 0
        self.fails = False
        self.late_s = 0.0
        self._may_pass = threading.Semaphore(0)
        tiers = cache.service.host
        assert tiers is not None
        assert tiers.copier is None, "the copier is made before the gate"
        tiers.make_copier = self._make_copier  # type: ignore[method-assign]

    def _make_copier(self, copies: PageCopies) -> Copier:
        load = copies.load

        def gated(plan: CopyPlan, start: int, stop: int) -> None:
            self.num_begun += 1
            assert self._may_pass.acquire(timeout=60), "the test lets no more chunks through"
            if self.fails:
                raise OSError("planted")
            load(plan, start, stop)

        copies.load = gated  # type: ignore[method-assign]
        self._threads = JobThreads("gated", 1)
        return Copier(copies, self._threads, chunk_bytes=1, clock=lambda: time.monotonic() + self.late_s)

    def pass_chunks(self, number: int = 10**6) -> None:
        """Let chunks through, also later ones."""
        self._may_pass.release(number)

    async def until_begun(self, number: int = 1) -> None:
        """Wait until the load of so many pages has begun."""
        async with asyncio.timeout(60):
            while self.num_begun < number:  # noqa: ASYNC110 -- a thread counts
                await asyncio.sleep(0.001)


async def publish_on_host(cache: LocalPrefixCache, *prompts: list[int]) -> None:
    """Publish prompts that are then on the host alone."""
    for prompt in prompts:
        async with cache.acquire(prompt) as lease:
            await lease.insert(prompt)
        await demote(cache)
