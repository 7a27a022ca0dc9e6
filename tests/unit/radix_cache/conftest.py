"""Small caches, of one and of two tokens a page: sound at the end of every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.caches.invariant_fixtures import checked_after
from support.caches.small_radix import FreedSlots

from raydix.cache_core import RadixCache


@pytest.fixture
def pool() -> FreedSlots:
    return FreedSlots()


@pytest.fixture
def make_cache(pool: FreedSlots) -> Iterator[Callable[..., RadixCache]]:
    def make(page_size: int = 1, **options: Any) -> RadixCache:
        return RadixCache(page_size, token_to_kv_pool_allocator=pool, **options)

    yield from checked_after(make)


@pytest.fixture
def cache(make_cache: Callable[..., RadixCache]) -> RadixCache:
    return make_cache()


@pytest.fixture
def paged(make_cache: Callable[..., RadixCache]) -> RadixCache:
    """A cache with two tokens a page."""
    return make_cache(2)
