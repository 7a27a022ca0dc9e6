"""How much prefill would a cache have saved? Replays a trace against index-only caches (`num_layers=0`).

Requests run one at a time, in the order of the trace, and publish their whole prompt. A hit counts whole pages: with
pages of 512 tokens the last, partial block of a prompt is never reused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.trace import BLOCK
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig, PoolConfig, PoolExhausted

if TYPE_CHECKING:
    from raydix.actors.client.lease import Lease
    from raydix.actors.trace import TracedRequest

_STEP = 64  # requests between two signs of progress


@dataclass(frozen=True)
class Replay:
    """The replay of a trace on one cache."""

    config: CacheConfig
    reused: NDArray[np.int64]  # prompt tokens found in the cache, per request
    stats: CacheStats  # of the cache, after the last request
    seconds: float

    def figures(self) -> dict[str, Any]:
        """The counts, and the hit rate: reused prompt tokens / prompt tokens of all requests."""
        stats, ghost = self.stats, self.stats.ghost
        return {
            "capacity": self.config.pool.num_slots,
            "policy": self.config.eviction.policy,
            "page_size": self.config.page_size,
            "requests": len(self.reused),
            "too_large": stats.too_large.requests,
            "prompt_tokens": stats.tokens_requested,
            "reused_tokens": stats.tokens_reused,
            "hit_rate_percent": 100 * stats.hit_rate,
            "evicted_tokens": stats.tokens_evicted,
            "seconds": self.seconds,
            "requests_per_s": len(self.reused) / self.seconds,
        } | ({"ghost": ghost.model_dump(mode="json")} if ghost is not None else {})


def index_config(
    capacity: int, *, page_size: int = BLOCK, policy: str = "lru", high_watermark: float = 1.0
) -> CacheConfig:
    """An index-only cache of so many tokens. At a watermark of 1.0 nothing is evicted before there is need.

    Raises:
        ValidationError: the capacity is no multiple of the page, or no such policy is known.
    """
    eviction = EvictionConfig.model_validate(
        {"policy": policy, "high_watermark": high_watermark, "low_watermark": min(0.8, high_watermark * 0.9)}
    )
    return CacheConfig(
        page_size=page_size, pool=PoolConfig(num_slots=capacity, num_layers=0, device="cpu"), eviction=eviction
    )


async def replay(
    trace: Sequence[TracedRequest],
    config: CacheConfig,
    *,
    on_ray: bool = False,
    progress: Callable[[int], Any] = lambda done: None,
) -> Replay:
    """Send one prompt of the trace after the other through a fresh cache, which ends with the replay.

    Args:
        on_ray: a cache actor and its client, as a scheduler would use them; else a cache in this process.
        progress: called now and then with the number of requests that are done.
    """
    async with _running_cache(config, on_ray) as client:
        return await replay_on(client, trace, config, progress)


async def replay_on(
    client: PrefixCacheClient,
    trace: Sequence[TracedRequest],
    config: CacheConfig,
    progress: Callable[[int], Any] = lambda done: None,
    note_time: Callable[[float], Any] | None = None,
) -> Replay:
    """Replay on the fresh cache of a client.

    The end of a request is sent in one message with the start of the next, and the cache executes it first. With
    `note_time`, which is called with the time of each request, in seconds, it is sent before that time.
    """
    reused = np.zeros(len(trace), np.int64)
    publish: list[Coroutine[Any, Any, Any]] = []  # what is left to do for the request before
    started = time.perf_counter()
    for index, request in enumerate(trace):
        tokens = request.tokens()
        if note_time is not None:
            await asyncio.gather(*publish)
            publish = []
            note_time(request.timestamp / 1000)
        *_, lease = await asyncio.gather(*publish, _acquire(client, tokens))
        publish = []
        if lease is not None:
            reused[index] = lease.prefix_len
            publish = [lease.insert(tokens, release=True)]  # here a model would have computed the rest
        if index % _STEP == 0:
            progress(index)
    await asyncio.gather(*publish)
    seconds = time.perf_counter() - started
    progress(len(trace))
    return Replay(config, reused, await client.stats(), seconds)


async def _acquire(client: PrefixCacheClient, tokens: NDArray[np.uint32]) -> Lease | None:
    """A lease for a prompt; None if it is larger than the whole cache."""
    try:
        return await client.acquire(tokens)
    except PoolExhausted as error:
        if error.can_ever_fit:
            raise
        return None


@asynccontextmanager
async def _running_cache(config: CacheConfig, on_ray: bool) -> AsyncIterator[PrefixCacheClient]:
    """A client of a fresh cache, which ends with it."""
    if on_ray:
        from raydix.actors.deploy import shutdown_cache, start_cache_async

        actor = await start_cache_async(config)
        try:
            async with PrefixCacheClient(actor, owner="replay") as client:
                yield client
        finally:
            await asyncio.to_thread(shutdown_cache, actor)
        return
    from raydix.actors.client.local_prefix_cache import LocalPrefixCache

    async with LocalPrefixCache(config) as cache, PrefixCacheClient(cache) as client:
        yield client
