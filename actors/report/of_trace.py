"""The report of a cache that a trace is replayed on, in the time of the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raydix.actors.cache_service import CacheService
from raydix.actors.trace import TracedRequest
from raydix.cache_core import LeasedCache, OutOfSlotsError, RadixKey
from raydix.schemas import CacheConfig, CacheReport, TokenIds

_STEP = 64  # requests between two signs of progress


def report_of_trace(
    trace: Sequence[TracedRequest], config: CacheConfig, progress: Callable[[int], Any] = lambda done: None
) -> CacheReport:
    """Replay a trace on an index-only cache in this process, one prompt after the other; outputs are not cached.

    Nothing is evicted before there is need, whatever the watermarks. Prompts larger than the cache
    count as `stats.exhausted` and in `stats.refusals` alone.

    Args:
        progress: told now and then how many requests are done.
    """
    now_s, num_too_large = 0.0, 0
    service = CacheService(config, epoch="trace", clock=lambda: now_s)
    for place, request in enumerate(trace):
        now_s = request.timestamp / 1000
        service.insight.history.note()
        num_too_large += not _send(service.core, str(place), request)
        if place % _STEP == 0:
            progress(place)
    progress(len(trace))
    told = service.report()
    refused = {"exhausted": num_too_large, "refusals": {"never_fits": num_too_large} if num_too_large else {}}
    return told.model_copy(update={"stats": told.stats.model_copy(update=refused)})


def _send(core: LeasedCache, lease_id: str, request: TracedRequest) -> bool:
    """Whether the prompt found room."""
    packed = TokenIds.pack(request.tokens())
    key = RadixKey.from_packed(packed.data, packed.width)
    try:
        core.acquire(lease_id, "trace", key)
    except OutOfSlotsError as error:
        assert not error.can_ever_fit, "no lease is open, so all that is cached can be evicted"
        return False
    core.insert(lease_id, "trace", len(key), key[:0])
    core.release(lease_id, "trace")
    return True
