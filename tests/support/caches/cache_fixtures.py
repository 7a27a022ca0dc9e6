"""Fixtures: caches for tests of the service and its promises, reached in process, through a client, and through Ray."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.caches.cache_kinds import Access, KindUnderTest, radix, reached_kinds
from support.caches.cache_under_test import CacheUnderTest, Reached
from support.caches.raw_calls import Scene, counts
from support.more import more

from raydix.actors.transport.unix_socket import SWITCH


@asynccontextmanager
async def under_test(
    request: pytest.FixtureRequest, kind: KindUnderTest, access: Access
) -> AsyncIterator[CacheUnderTest]:
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None  # others need no Ray
    cache = CacheUnderTest.reached(access, kind.cache_config(), running_cache, kind)
    yield cache
    await cache.close()


@pytest.fixture(params=reached_kinds())
async def cache(request: pytest.FixtureRequest) -> AsyncIterator[CacheUnderTest]:
    """An empty cache of eight pages, of each kind and reached in each way; `cache_kinds.only` selects kinds."""
    kind, access = request.param
    async with under_test(request, kind, access) as cache:
        yield cache


ON_RAY = [
    pytest.param("ray", marks=pytest.mark.ray),
    pytest.param("calls", marks=[pytest.mark.ray, pytest.mark.more]),  # Ray carries the same bytes
]


@pytest.fixture(params=["local", *more("client"), *ON_RAY])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Access:
    """How the cache is reached; on Ray, by a socket and by calls."""
    return over_calls(monkeypatch) if request.param == "calls" else request.param


def over_calls(monkeypatch: pytest.MonkeyPatch) -> Access:
    """Have clients on this machine call through Ray, as those on others do."""
    monkeypatch.setenv(SWITCH, "0")
    return "ray"


@pytest.fixture
def reached(request: pytest.FixtureRequest, access: Access) -> Reached:
    """Makes an empty cache of a kind, which must be left with nothing held."""
    return lambda kind: under_test(request, kind, access)


@pytest.fixture
async def cache1(reached: Reached) -> AsyncIterator[CacheUnderTest]:
    """A cache of kind "radix" with pages of one token, for tests that hold for every kind and page size."""
    async with reached(radix(1)) as cache:
        yield cache


@pytest.fixture
async def scene(cache1: CacheUnderTest) -> AsyncIterator[Scene]:
    """For mistakes: afterwards all is as it was before them, and the lease as good as ever."""
    await cache1.publish(5, 6)
    lease = await cache1.client.acquire([5, 6, 7])
    slots, before = lease.slots.tolist(), await counts(cache1.client)

    yield Scene(cache1, cache1.client, lease)

    assert await counts(cache1.client) == before
    await cache1.client.check_invariants()
    assert lease.slots.tolist() == slots
    assert (await lease.insert([5, 6, 7])).num_inserted == 1
