"""The defaults of the cache contract, for a cache without windows, states, tenants and events."""

from __future__ import annotations

import pytest

from raydix.cache_core import ChunkCache, InvalidKeyError
from raydix.cache_core.eviction.tenants import Tenants


def test_a_cache_without_windows_counts_none() -> None:
    cache = ChunkCache()

    assert (cache.swa_evictable_size(), cache.swa_protected_size()) == (0, 0)
    assert cache.window_start(None) is None


def test_a_cache_without_states_has_none_and_takes_none() -> None:
    cache = ChunkCache()

    assert (cache.mamba_evictable_size(), cache.mamba_protected_size()) == (0, 0)
    assert cache.state_at(None) is None
    assert cache.state_slots() == []
    assert cache.attach_state(None, None) is False
    with pytest.raises(InvalidKeyError, match="mamba_value must be None, not 3"):
        cache.attach_state(None, 3)


def test_a_cache_without_tenants_says_so() -> None:
    cache, tenants = ChunkCache(), Tenants()

    with pytest.raises(ValueError, match="a ChunkCache cannot be divided among tenants"):
        cache.divide(tenants)
    with pytest.raises(ValueError, match="a ChunkCache is not divided among tenants"):
        cache.evict_own(tenants.rest, 1)


def test_a_cache_without_pages_has_none_to_publish() -> None:
    cache = ChunkCache()

    assert list(cache.resident_pages()) == []
    assert cache.now == 0
    assert cache.sample(10).num_namespaces == 0
