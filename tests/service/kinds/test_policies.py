"""Eviction policies and priorities: configured by name, with priorities in requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.caches.cache_under_test import Access, CacheUnderTest, small_config

from raydix.schemas import EvictionConfig, InvalidRequest


@asynccontextmanager
async def evicting_by(policy: str, request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """An empty radix cache of eight pages, without a background task."""
    config = small_config(16).model_copy(update={"eviction": EvictionConfig(policy=policy, high_watermark=1.0)})
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None
    under_test = CacheUnderTest.reached(access, config, running_cache)
    yield under_test
    await under_test.close()


@pytest.fixture
async def by_priority(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """A cache that evicts the lowest priority first."""
    async with evicting_by("priority", request, access) as under_test:
        yield under_test


async def publish(cache: CacheUnderTest, page: int, priority: int) -> None:
    lease = await cache.client.acquire(cache.tokens(page), priority=priority)
    await lease.insert(cache.tokens(page), release=True)


async def test_published_pages_have_the_priority_of_their_lease(by_priority: CacheUnderTest) -> None:
    for page, priority in ((1, 5), (2, 0), (3, -1), (4, 5)):
        await publish(by_priority, page, priority)

    await by_priority.client.evict(2 * by_priority.page_size)

    assert [await by_priority.matched(page) for page in (1, 2, 3, 4)] == [1, 0, 0, 1]


async def test_a_hit_and_a_lock_raise_the_priority_of_their_pages(by_priority: CacheUnderTest) -> None:
    for page in (1, 2, 3):
        await publish(by_priority, page, 0)
    await (await by_priority.client.acquire(by_priority.tokens(1), priority=2)).release()
    await (await by_priority.client.lock(by_priority.tokens(2), priority=1)).release()

    for left in ([1, 1, 0], [1, 0, 0]):
        await by_priority.client.evict(1)
        assert [await by_priority.matched(page) for page in (1, 2, 3)] == left


async def test_a_lower_priority_lowers_nothing(by_priority: CacheUnderTest) -> None:
    await publish(by_priority, 1, 3)
    await publish(by_priority, 2, 2)
    await publish(by_priority, 1, -7)

    await by_priority.client.evict(1)

    assert [await by_priority.matched(page) for page in (1, 2)] == [1, 0]


@pytest.mark.parametrize("priority", [1.5, "1", None, 2**31, -(2**31) - 1, True])
async def test_a_priority_is_an_integer_of_32_bits(by_priority: CacheUnderTest, priority: object) -> None:
    with pytest.raises(InvalidRequest, match="priority"):
        await by_priority.client.acquire(by_priority.tokens(1), priority=priority)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="priority"):
        await by_priority.client.lock(by_priority.tokens(1), priority=priority)  # type: ignore[arg-type]


async def test_a_scan_passes_a_segmented_cache(request: pytest.FixtureRequest, access: Access) -> None:
    async with evicting_by("slru", request, access) as cache:
        await cache.publish(1)
        for _ in range(2):
            await (await cache.client.acquire(cache.tokens(1))).release()
        for page in range(2, 20):  # more than twice the pool
            await cache.publish(page)

        assert await cache.matched(1) == 1


async def test_a_prefix_that_came_back_outlives_a_scan(request: pytest.FixtureRequest, access: Access) -> None:
    async with evicting_by("2q", request, access) as cache:
        await cache.publish(1)
        await cache.client.evict(1)
        assert await cache.matched(1) == 0
        await cache.publish(1)
        for page in range(2, 20):  # more than twice the pool
            await cache.publish(page)

        assert await cache.matched(1) == 1
