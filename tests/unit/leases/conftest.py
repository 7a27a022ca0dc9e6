"""Small caches over a pool of few slots: sound at the end of every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.caches.invariant_fixtures import checked_after

from raydix.cache_core import KVCache, RadixCache, TokenToKVPoolAllocator


@pytest.fixture
def make() -> Iterator[Callable[..., KVCache]]:
    def make_cache(num_slots: int = 8, page_size: int = 2, **options: Any) -> KVCache:
        allocator = TokenToKVPoolAllocator(num_slots, page_size)
        tree = RadixCache(page_size, token_to_kv_pool_allocator=allocator)
        return KVCache(tree, allocator, **options)

    yield from checked_after(make_cache)


@pytest.fixture
def cache(make: Callable[..., KVCache]) -> KVCache:
    return make()
