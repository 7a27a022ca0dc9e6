"""The core that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from raydix.actors.eviction_task import PoolGauge
from raydix.cache_core import (
    BasePrefixCache,
    ChunkCache,
    KVCache,
    MambaPool,
    MambaRadixCache,
    RadixCache,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.trie_prefix_cache import TriePrefixCache
from raydix.schemas import CacheConfig


def build_core(
    config: CacheConfig, states: MambaPool | None, on_pressure: Callable[[], None]
) -> tuple[KVCache, list[PoolGauge]]:
    """The core of a cache, and a gauge for each of its pools, for the eviction task."""
    pool, marks = config.pool, config.eviction
    allocator = _make_allocator(config)
    if config.kind == "mamba" and states is None:
        states = MambaPool(pool.num_state_slots)
    tree = _make_tree(config, allocator, states)
    gauges = [PoolGauge(marks, pool.num_slots, allocator.available_size, lambda num: core.evict(num))]
    swa_floor = state_floor = 0
    if isinstance(allocator, SWATokenToKVPoolAllocator):
        window = PoolGauge(marks, allocator.num_swa_slots, allocator.swa_available_size, lambda n: core.evict_window(n))
        gauges.append(window)
        swa_floor = window.pressure_floor
    if states is not None:
        state = PoolGauge(marks, states.num_slots, states.available_size, lambda num: core.evict_states(num))
        gauges.append(state)
        state_floor = state.pressure_floor
    core = KVCache(
        tree,
        allocator,
        gauges[0].pressure_floor,
        on_pressure,
        states=states,
        bigram=config.bigram,
        swa_pressure_floor=swa_floor,
        state_pressure_floor=state_floor,
        remembered_leases=config.leases.remembered_leases,
    )
    return core, gauges


def _make_allocator(config: CacheConfig) -> TokenToKVPoolAllocator:
    num_slots, page_size = config.pool.num_slots, config.page_size
    if config.sliding_window_size is None:
        return TokenToKVPoolAllocator(num_slots, page_size)
    return SWATokenToKVPoolAllocator(num_slots, config.pool.num_swa_slots or num_slots, page_size)


def _make_tree(config: CacheConfig, allocator: TokenToKVPoolAllocator, states: MambaPool | None) -> BasePrefixCache:
    if config.kind == "chunk":
        return ChunkCache(config.page_size)
    if config.kind == "trie":
        return TriePrefixCache(config.page_size, allocator)
    if config.kind == "mamba":
        return MambaRadixCache(config.page_size, allocator, states)
    return RadixCache(config.page_size, config.sliding_window_size, allocator)
