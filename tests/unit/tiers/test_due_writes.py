"""`DueWrites` in its service: a host tier that takes pages at their second use alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiers.tiered_service import TieredService, tiered_config

from raydix.actors.tiers.job_threads import End
from raydix.cache_core import RadixKey
from raydix.schemas import LeaseResponse, ResetRequest

A, B = tuple(range(1, 9)), tuple(range(11, 19))


def scene(**config: Any) -> TieredService:
    return TieredService(tiered_config(host={"admit": "second_use"}, **config))


def on_host(cache: TieredService) -> int:
    return cache.tiers.moves.lower.cache.total_size()


async def write_due(cache: TieredService) -> None:
    """End all writes that begin by themselves."""
    for _ in range(20):
        await cache.turn()
        for copy in cache.writes:
            cache.copier.finish(copy)


async def test_a_page_is_written_at_its_second_use_and_loaded_when_it_has_left_the_pool() -> None:
    cache = scene(device_pages=32)
    cache.publish(A)
    cache.publish(B)
    await write_due(cache)
    assert on_host(cache) == 0

    cache.publish((*A[:6], 30))
    await write_due(cache)
    assert on_host(cache) == 6, "its other pages were used once"
    cache.publish(B)
    await write_due(cache)
    assert on_host(cache) == 6 + 8

    cache.service.core.evict(100)
    waiting = cache.acquire(A)
    cache.copier.finish(cache.loads[0])
    lease = await cache.outcome(waiting)
    assert isinstance(lease, LeaseResponse) and lease.prefix_len == 6
    cache.check_prefix(cache.record(lease.lease_id), A)
    cache.release(lease.lease_id)
    assert (cache.tiers.moves.counts.written, cache.tiers.moves.counts.dropped) == (14, 0)
    await cache.close()


async def test_a_page_that_was_evicted_is_written_when_it_is_computed_again() -> None:
    cache = scene()
    cache.publish(A)
    cache.service.core.evict(100)
    assert cache.tiers.moves.counts.dropped == 0, "nothing was to be written"

    cache.publish(A)
    await write_due(cache)

    assert on_host(cache) == 8
    await cache.close()


async def test_a_long_prefix_is_written_in_parts() -> None:
    cache = scene()
    assert cache.tiers.moves.batch_pages == 1
    for _ in range(2):
        cache.publish(A)
    await write_due(cache)

    assert on_host(cache) == 8
    await cache.close()


@pytest.mark.parametrize(("end", "num_written"), [("cancelled", 8), ("failed", 3)])
async def test_a_cancelled_write_is_tried_again_and_a_failed_one_at_the_next_use(end: End, num_written: int) -> None:
    cache = scene()
    cache.tiers.moves.batch_pages = 8
    for _ in range(2):
        cache.publish(A)
    await cache.turn()
    (write,) = cache.writes

    cache.copier.finish(write, end, 3)
    await write_due(cache)
    assert on_host(cache) == num_written
    cache.publish(A)
    await write_due(cache)

    assert on_host(cache) == 8
    await cache.close()


async def test_a_request_short_of_slots_ends_a_write_that_is_tried_again() -> None:
    cache = scene(device_pages=8)
    cache.tiers.moves.batch_pages = 8
    for _ in range(2):
        cache.publish(A)
    await cache.turn()
    assert cache.writes

    lease = cache.acquire(B)
    assert isinstance(lease, LeaseResponse)
    await write_due(cache)
    assert (on_host(cache), cache.tiers.moves.counts.dropped) == (0, 8), "the request has evicted its pages"
    cache.release(lease.lease_id)
    await cache.close()


async def test_what_is_due_is_forgotten_with_its_namespace_and_begins_anew() -> None:
    cache = scene()
    for _ in range(2):
        cache.publish(A)
    cache.ask(ResetRequest())
    await write_due(cache)
    assert (on_host(cache), cache.tiers.moves.counts.dropped) == (0, 0)

    cache.publish(A)
    await write_due(cache)
    assert on_host(cache) == 0
    cache.publish(A)
    await write_due(cache)
    assert on_host(cache) == 8
    await cache.close()


async def test_a_full_host_evicts_for_what_is_due() -> None:
    cache = scene(host_pages=8)
    for tokens in (A, B):
        for _ in range(2):
            cache.publish(tokens)
        await write_due(cache)

    assert on_host(cache) == 8
    assert cache.tiers.moves.lower.cache.radix.cached_lens(RadixKey(B))[0] == 8
    await cache.close()


async def test_the_task_evicts_what_was_used_once_without_a_write() -> None:
    cache = scene(device_pages=20, eviction={"high_watermark": 0.9, "low_watermark": 0.2})
    for first in range(10, 200, 10):
        cache.publish([first])
    await write_due(cache)

    assert cache.service.core.free_slots == 16
    assert (on_host(cache), cache.tiers.moves.counts.dropped) == (0, 0)
    await cache.close()
