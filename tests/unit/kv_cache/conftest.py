"""Small caches over a pool of few slots: sound at the end of every test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raydix.cache_core import KVCache, RadixCache, TokenToKVPoolAllocator


@pytest.fixture
def make() -> Iterator[Callable[..., KVCache]]:
    caches: list[KVCache] = []

    def make_cache(num_slots: int = 8, page_size: int = 2, **options: Any) -> KVCache:
        allocator = TokenToKVPoolAllocator(num_slots, page_size)
        tree = RadixCache(page_size, token_to_kv_pool_allocator=allocator)
        caches.append(KVCache(tree, allocator, **options))
        return caches[-1]

    yield make_cache
    for cache in caches:
        cache.check_invariants()


@pytest.fixture
def cache(make: Callable[..., KVCache]) -> KVCache:
    return make()
