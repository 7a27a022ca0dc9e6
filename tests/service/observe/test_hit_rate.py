"""`hit_rate` counts each request once, however often a scheduler polls for slots or preempts the request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from raydix.actors import LocalPrefixCache, PrefixCacheClient, acquire_ranks
from raydix.schemas import CacheConfig, CacheReport, EvictionConfig, GhostConfig, PoolConfig, PoolExhausted

PAGE, SHARED, OWN, NUM_REQUESTS = 16, 64 * 16, 8 * 16, 64


def config(num_slots: int) -> CacheConfig:
    pool = PoolConfig(num_slots=num_slots, device="cpu")
    return CacheConfig(page_size=PAGE, pool=pool, ghost=GhostConfig(), eviction=EvictionConfig(high_watermark=1.0))


@dataclass
class Request:
    number: int
    prompt: list[int] = field(init=False)
    tokens: list[int] = field(init=False)
    lease: Any = None
    reused: int | None = None  # of its first lease

    def __post_init__(self) -> None:
        self.prompt = [*range(SHARED), *range(10_000 * (self.number + 1), 10_000 * (self.number + 1) + OWN)]
        self.tokens = list(self.prompt)


class Scheduler:
    """The batch loop of `examples/worker.md`: polls once a step, and preempts the youngest request."""

    def __init__(self, cache: LocalPrefixCache, num_new: int) -> None:
        self.cache = cache
        self.num_new = num_new
        self.queue = deque(Request(number) for number in range(NUM_REQUESTS))
        self.batch: list[Request] = []
        self.num_polls = self.num_resumed = 0
        self.reused = 0

    async def run(self) -> None:
        while self.queue or self.batch:
            await self._fill()
            for request in list(self.batch):
                while request in self.batch and len(request.lease) == len(request.tokens):
                    try:
                        await request.lease.extend(PAGE, timeout_s=0)
                    except PoolExhausted:
                        youngest = self.batch.pop()
                        await youngest.lease.preempt(youngest.tokens)
                        self.queue.appendleft(youngest)
            for request in list(self.batch):
                request.tokens.append(request.number)
                await request.lease.insert(request.tokens)
                if len(request.tokens) == len(request.prompt) + self.num_new:
                    await request.lease.release()
                    self.batch.remove(request)

    async def _fill(self) -> None:
        while self.queue:
            first = self.queue[0]
            self.num_polls += 1
            resumed = first.reused is not None
            try:
                first.lease = await self.cache.acquire(first.tokens, timeout_s=0, resumed=resumed)
            except PoolExhausted:
                return
            await first.lease.insert(first.tokens)
            self.num_resumed += resumed
            if not resumed:
                first.reused = first.lease.prefix_len
                self.reused += first.lease.prefix_len
            self.batch.append(self.queue.popleft())


@pytest.mark.parametrize("num_new", [1, 5, 50])
async def test_polling_and_preemption_leave_the_hit_rate_as_it_is(num_new: int) -> None:
    requested = NUM_REQUESTS * (SHARED + OWN)
    async with LocalPrefixCache(config(SHARED + 4 * (OWN + 2 * PAGE))) as cache:
        scheduler = Scheduler(cache, num_new)

        await scheduler.run()

        stats, report = await cache.stats(), cache.report()
        assert scheduler.reused == (NUM_REQUESTS - 1) * SHARED
        assert (stats.tokens_requested, stats.tokens_reused) == (requested, scheduler.reused)
        assert stats.hit_rate == scheduler.reused / requested
        assert (stats.acquires, stats.hits) == (NUM_REQUESTS, NUM_REQUESTS - 1)
        assert stats.resumed_acquires == scheduler.num_resumed
        assert scheduler.num_resumed > 0
        assert stats.resumed_tokens >= stats.resumed_tokens_reused
        assert stats.refusals["no_wait"] >= scheduler.num_polls - NUM_REQUESTS - scheduler.num_resumed > 0
        assert stats.ghost is not None
        assert stats.ghost.tokens_requested == requested
        check_report(report, requested, scheduler.reused, stats.tokens_refused)


def check_report(report: CacheReport, requested: int, reused: int, refused: int) -> None:
    """Check the counts of the only namespace, and of the last point of the history."""
    (namespace,) = report.namespaces
    assert (namespace.requests, namespace.tokens_requested, namespace.tokens_reused) == (
        NUM_REQUESTS,
        requested,
        reused,
    )
    assert namespace.tokens_refused == refused > 0
    assert (report.history[-1].tokens_requested, report.history[-1].tokens_reused) == (requested, reused)


async def test_all_ways_to_acquire_resume_requests() -> None:
    async with LocalPrefixCache(config(256)) as cache, PrefixCacheClient(cache) as client:
        for resume in (
            client.acquire([1] * 16, resumed=True),
            cache.acquire([1] * 16, resumed=True),
        ):
            async with resume:
                pass
        (lease,) = await acquire_ranks([client], [1] * 16, resumed=True)
        await lease.release()

        stats = await cache.stats()

    assert (stats.resumed_acquires, stats.resumed_tokens, stats.acquires) == (3, 48, 0)
