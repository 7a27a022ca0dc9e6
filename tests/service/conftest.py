"""Caches for the service's tests, each reached in process, through a client in process, and through Ray."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cache_under_test import Access, CacheUnderTest, small_config

from raydix.schemas import CacheConfig


@asynccontextmanager
async def reached(request: pytest.FixtureRequest, access: Access, config: CacheConfig) -> AsyncIterator[CacheUnderTest]:
    running_cache = request.getfixturevalue("running_cache") if access == "ray" else None  # others need no Ray
    under_test = CacheUnderTest.reached(access, config, running_cache)
    yield under_test
    await under_test.close()


@pytest.fixture(params=["local", "client", pytest.param("ray", marks=pytest.mark.ray)])
def access(request: pytest.FixtureRequest) -> Access:
    """How the cache is reached."""
    return request.param


@pytest.fixture(params=[1, 16], ids=["page1", "page16"])
async def cache(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """An empty radix cache of eight pages."""
    async with reached(request, access, small_config(request.param)) as under_test:
        yield under_test


@pytest.fixture
async def cache1(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """The same with pages of one token, for what pages make no difference to."""
    async with reached(request, access, small_config(1)) as under_test:
        yield under_test


@pytest.fixture
async def cache16(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """The same with pages of 16 tokens, for what happens within a page."""
    async with reached(request, access, small_config(16)) as under_test:
        yield under_test


@pytest.fixture
async def chunk_cache(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[CacheUnderTest]:
    """The same with pages of 16 tokens, of the kind that shares nothing."""
    async with reached(request, access, small_config(16, "chunk")) as under_test:
        yield under_test
