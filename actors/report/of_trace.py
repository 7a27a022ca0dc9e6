"""`report_of_trace`: the report of a cache that replays a trace, in the time of the trace."""

from __future__ import annotations

from collections.abc import Sequence

from raydix.actors.client.local_prefix_cache import LocalPrefixCache
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.observe.trace import TracedRequest
from raydix.actors.replay.trace_replay import replay_on
from raydix.actors.service.cache_service import CacheService
from raydix.schemas import CacheConfig, CacheReport


class _TraceClock:
    """The clock of a cache's report, set to the times of a trace. Sessions keep the time of this process."""

    def __init__(self, service: CacheService) -> None:
        self._now_s = 0.0
        self._service = service
        service.use_clock(lambda: self._now_s)

    def set_time(self, now_s: float) -> None:
        """Set the time, in seconds since the trace began."""
        self._now_s = now_s
        self._service.insight.history.note()


async def report_of_trace(trace: Sequence[TracedRequest], config: CacheConfig) -> CacheReport:
    """Replay a trace on a cache in this process, as `replay` does, and return the cache's report."""
    cache = LocalPrefixCache(config)
    clock = _TraceClock(cache.service)
    async with cache, PrefixCacheClient(cache) as client:
        await replay_on(client, trace, config, note_time=clock.set_time)
        return cache.report()
