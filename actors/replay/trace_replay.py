"""Replay a trace on index-only caches, to measure the prefill that a cache and its tiers save.

Requests run one at a time, in the order of the trace, and publish their whole prompt. Hits are whole pages: with pages
of 512 tokens the last, partial block of a prompt is never reused. Tiers below the cache have no KV either: see
`InstantTiers`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.observe.trace import BLOCK
from raydix.actors.replay.instant_tiers import InstantTiers, Moved, TierConfigs
from raydix.cache_core import KVCache, OutOfSlotsError, RadixKey
from raydix.schemas import CacheConfig, CacheStats, DiskConfig, EvictionConfig, PoolConfig, PoolExhausted

if TYPE_CHECKING:
    from raydix.actors.client.lease import Lease
    from raydix.actors.observe.trace import TracedRequest

_STEP = 64  # requests between two calls of `progress`
_NO_TIERS = TierConfigs()


@dataclass(frozen=True)
class Replay:
    """The replay of a trace on one cache."""

    config: CacheConfig
    reused: NDArray[np.int64]  # hit tokens of each request
    stats: CacheStats  # counts after the last request
    seconds: float
    tiers: TierConfigs = _NO_TIERS
    moved: Mapping[str, Moved] = field(default_factory=dict)  # by the tier's name

    def figures(self) -> dict[str, Any]:
        """Return the counts, and the hit rate: reused prompt tokens / prompt tokens of all requests.

        With tiers below the cache, reused tokens include those that were loaded from them.
        """
        stats, ghost = self.stats, self.stats.ghost
        figures: dict[str, Any] = {
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
        }
        if self.moved:
            loaded = sum(moved.loaded for moved in self.moved.values())
            figures["device_hit_rate_percent"] = self._percent(stats.tokens_reused - loaded)
        if (host := self.tiers.host) is not None:
            figures["host"] = {"capacity": host.num_slots, "policy": host.policy, **self._moved("host")}
        if (disk := self.tiers.disk) is not None:
            figures["disk"] = {"capacity": disk.num_slots, "admit": disk.admit, **self._moved("disk")}
        if ghost is not None:
            figures["ghost"] = ghost.model_dump(mode="json")
        return figures

    def _moved(self, tier: str) -> dict[str, Any]:
        """Return the tokens that were moved from and to a tier."""
        loaded, written, dropped = self.moved[tier]
        return {
            "loaded_percent": self._percent(loaded),
            "loaded_tokens": loaded,
            "written_tokens": written,
            "written_pages_per_request": written / self.config.page_size / len(self.reused),
            "dropped_tokens": dropped,
        }

    def _percent(self, num_tokens: int) -> float:
        """Return a part of the prompt tokens."""
        return 100 * num_tokens / max(1, self.stats.tokens_requested)


def series_of(config: CacheConfig, tiers: TierConfigs = _NO_TIERS) -> str:
    """Return policy, page size and lower tiers of a cache: "lru, pages of 512, host of 4,096,000 tokens, 2q"."""
    parts = [config.eviction.policy, f"pages of {config.page_size}"]
    if (host := tiers.host) is not None:
        parts += [f"host of {host.num_slots:,} tokens", host.policy]
    if (disk := tiers.disk) is not None:
        parts += [f"disk of {disk.num_slots or 0:,} tokens", disk.admit]
    return ", ".join(parts)


def index_disk(num_slots: int, admit: str = "second_use") -> DiskConfig:
    """Return the configuration of the disk tier of an index-only cache. It has no files, and no limit of writes.

    Raises:
        ValidationError: `admit` is unknown.
    """
    fields = {"path": "/", "num_slots": num_slots, "admit": admit, "write_mib_s": None}
    return DiskConfig.model_validate(fields)


def index_config(
    capacity: int,
    *,
    page_size: int = BLOCK,
    policy: str = "lru",
    high_watermark: float = 1.0,
) -> CacheConfig:
    """Return the configuration of an index-only cache. At a watermark of 1.0 only the shortfall is evicted.

    Raises:
        ValidationError: the capacity is not a multiple of the page size, or the policy is unknown.
    """
    eviction = EvictionConfig.model_validate(
        {"policy": policy, "high_watermark": high_watermark, "low_watermark": min(0.8, high_watermark * 0.9)}
    )
    return CacheConfig(
        page_size=page_size,
        pool=PoolConfig(num_slots=capacity, device="cpu"),
        eviction=eviction,
    )


async def replay(
    trace: Sequence[TracedRequest],
    config: CacheConfig,
    tiers: TierConfigs = _NO_TIERS,
    *,
    on_ray: bool = False,
    progress: Callable[[int], Any] = lambda done: None,
) -> Replay:
    """Replay the prompts of a trace, one after another, on a new cache that ends with the replay.

    Args:
        tiers: below the cache, which must be in this process.
        on_ray: use a cache actor and its client, like a scheduler; else a cache in this process.
        progress: called periodically with the number of finished requests.
    """
    if tiers != _NO_TIERS:
        assert not on_ray, "the tiers of a replay are in this process"
        return await _replay_above(tiers, trace, config, progress)
    async with _running_cache(config, on_ray) as client:
        return await replay_on(client, trace, config, progress)


async def replay_on(
    client: PrefixCacheClient,
    trace: Sequence[TracedRequest],
    config: CacheConfig,
    progress: Callable[[int], Any] = lambda done: None,
    note_time: Callable[[float], Any] | None = None,
) -> Replay:
    """Replay on the new cache of a client.

    The client sends the end of a request with the start of the next, and the cache executes it first. If `note_time`
    is given, it is called with the time of each request, in seconds, after the end of the previous request.
    """
    reused = np.zeros(len(trace), np.int64)
    publish: list[Coroutine[Any, Any, Any]] = []  # the insert of the previous request
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
            publish = [lease.insert(tokens, release=True)]  # a model would compute the other tokens before this
        if index % _STEP == 0:
            progress(index)
    await asyncio.gather(*publish)
    seconds = time.perf_counter() - started
    progress(len(trace))
    return Replay(config, reused, await client.stats(), seconds)


async def _replay_above(
    tiers: TierConfigs, trace: Sequence[TracedRequest], config: CacheConfig, progress: Callable[[int], Any]
) -> Replay:
    """Replay on a new cache with tiers below it."""
    from raydix.actors.client.local_prefix_cache import LocalPrefixCache

    reused = np.zeros(len(trace), np.int64)
    async with LocalPrefixCache(config) as cache:
        core = cache.service.core
        assert isinstance(core, KVCache)
        below = InstantTiers(core, tiers)
        started = time.perf_counter()
        for index, request in enumerate(trace):
            reused[index] = _request(core, below, str(index), RadixKey(request.tokens()))
            await asyncio.sleep(0)  # background eviction runs between two requests
            if index % _STEP == 0:
                progress(index)
        seconds = time.perf_counter() - started
        progress(len(trace))
        return Replay(config, reused, await cache.stats(), seconds, tiers, below.moved())


def _request(core: KVCache, below: InstantTiers, lease_id: str, key: RadixKey) -> int:
    """Publish a prompt; return the tokens that it reused: none if it is larger than the whole cache."""
    try:
        lease = below.acquire(lease_id, "replay", key)
    except OutOfSlotsError as error:
        if error.can_ever_fit:
            raise
        core.count_refusal(key, len(key), can_ever_fit=False)
        return 0
    prefix_len = lease.prefix_len
    core.insert(lease_id, "replay", len(key), key[:0])
    core.release(lease_id, "replay")
    return prefix_len


async def _acquire(client: PrefixCacheClient, tokens: NDArray[np.uint32]) -> Lease | None:
    """Return a lease for a prompt; None if the prompt is larger than the whole cache."""
    try:
        return await client.acquire(tokens)
    except PoolExhausted as error:
        if error.can_ever_fit:
            raise
        return None


@asynccontextmanager
async def _running_cache(config: CacheConfig, on_ray: bool) -> AsyncIterator[PrefixCacheClient]:
    """Yield a client of a new cache, and end both afterwards."""
    if on_ray:
        from raydix.actors.cluster.deploy import shutdown_cache, start_cache_async

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
