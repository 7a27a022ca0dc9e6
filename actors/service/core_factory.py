"""`build_core`: the core that a configuration asks for; `build_host_cache`, `build_disk_cache`: the tiers below it."""

from __future__ import annotations

from collections.abc import Callable

from raydix.actors.service.eviction_task import PoolGauge
from raydix.cache_core import (
    BasePrefixCache,
    ChunkCache,
    KVCache,
    KVPool,
    LeasedCache,
    MambaPool,
    MambaRadixCache,
    RadixCache,
    RecordPool,
    RowCache,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.pool.content_check import ContentCheck
from raydix.cache_core.pool.pool_checks import PoolChecks
from raydix.cache_core.trie_prefix_cache import TriePrefixCache
from raydix.schemas import CacheConfig, EvictionConfig, HostConfig
from raydix.schemas.config import TierSizes


def build_core(
    config: CacheConfig, pool: KVPool | RecordPool | None, on_pressure: Callable[[], None]
) -> tuple[LeasedCache, list[PoolGauge]]:
    """Return the core of a cache, and a gauge for each of its pools, for the eviction task.

    Args:
        config: of the cache.
        pool: the tensors, of which the core copies states and rows; None: there are none.
        on_pressure: called when slots run short.
    """
    if config.max_seq_len is not None:
        assert not isinstance(pool, RecordPool), "the configuration refuses opaque pools of whole rows"
        return _build_rows(config, config.max_seq_len, pool, on_pressure)
    return _build_tree(config, pool, on_pressure)


def build_host_cache(config: CacheConfig, on_pressure: Callable[[], None]) -> KVCache:
    """Return the empty cache of a host tier.

    Args:
        config: of the cache; it has `host`.
        on_pressure: called when slots of the tier run short.
    """
    host, sizes = config.host, config.host_sizes
    assert host is not None, "the configuration has no host tier"
    floor = 0 if host.high_watermark == 1.0 else sizes.num_slots - int(host.high_watermark * sizes.num_slots)
    return _cache_below(config, sizes, host.policy, floor, on_pressure)


def build_disk_cache(config: CacheConfig, sizes: TierSizes) -> KVCache:
    """Return the empty cache of a disk tier.

    Args:
        config: of the cache; it has `disk`.
        sizes: of the tier.
    """
    return _cache_below(config, sizes, "lru")


def _cache_below(
    config: CacheConfig, sizes: TierSizes, policy: str, floor: int = 0, on_pressure: Callable[[], None] | None = None
) -> KVCache:
    allocator = _make_allocator(sizes, config.page_size, config.sliding_window_size)
    states = MambaPool(sizes.num_state_slots) if sizes.num_state_slots else None
    tree = _make_tree(config, policy, allocator, states)
    return KVCache(tree, allocator, floor, on_pressure, states=states, bigram=config.bigram)


def host_gauge(config: HostConfig, below: KVCache) -> PoolGauge:
    """Return the gauge of a host tier's cache, which the eviction task keeps below its high watermark."""
    marks = EvictionConfig(high_watermark=config.high_watermark, low_watermark=config.low_watermark)
    return PoolGauge(
        marks, below.num_slots, lambda: below.free_slots, lambda num: below.evict(num, "watermark"), "host slots"
    )


def _build_rows(
    config: CacheConfig, max_seq_len: int, pool: KVPool | None, on_pressure: Callable[[], None]
) -> tuple[RowCache, list[PoolGauge]]:
    num_slots, kv_cache = config.pool.num_slots, None if pool is None else pool.by_sequence()
    gauge = PoolGauge(config.eviction, num_slots, lambda: core.free_slots, lambda num: core.evict(num, "watermark"))
    core = RowCache(
        num_slots,
        max_seq_len,
        config.page_size,
        kv_cache,
        gauge.pressure_floor,
        on_pressure,
        config.leases.remembered_leases,
        ContentCheck(pool.checked_tensors("full"), config.page_size)
        if pool is not None and _checks(config, pool)
        else None,
    )
    return core, [gauge]


def _build_tree(
    config: CacheConfig, kv_pool: KVPool | RecordPool | None, on_pressure: Callable[[], None]
) -> tuple[KVCache, list[PoolGauge]]:
    pool, marks = config.pool, config.eviction
    sizes = TierSizes(pool.num_slots, pool.num_swa_slots or pool.num_slots, pool.num_state_slots)
    allocator = _make_allocator(sizes, config.page_size, config.sliding_window_size)
    states = _make_states(config, kv_pool)
    tree = _make_tree(config, marks.policy, allocator, states)
    reserve = 0.0 if config.host is None else config.host.reserve
    gauges = [PoolGauge(marks, pool.num_slots, allocator.available_size, lambda num: core.evict(num, "watermark"))]
    swa_floor = state_floor = 0
    if (swa := allocator.swa) is not None:
        window = PoolGauge(marks, swa.num_slots, swa.available_size, lambda num: core.evict_window(num), "window slots")
        gauges.append(window)
        swa_floor = max(window.pressure_floor, int(reserve * swa.num_slots))
    if states is not None:
        state = PoolGauge(marks, states.num_slots, states.available_size, lambda num: core.evict_states(num), "states")
        gauges.append(state)
        state_floor = max(state.pressure_floor, int(reserve * states.num_slots))
    tenants = (Tenant(tenant.name, tenant.namespace, tenant.floor_slots, tenant.cap_slots) for tenant in config.tenants)
    core = KVCache(
        tree,
        allocator,
        max(gauges[0].pressure_floor, int(reserve * pool.num_slots)),
        on_pressure,
        states=states,
        bigram=config.bigram,
        swa_pressure_floor=swa_floor,
        state_pressure_floor=state_floor,
        remembered_leases=config.leases.remembered_leases,
        checks=PoolChecks(kv_pool, allocator, states) if kv_pool is not None and _checks(config, kv_pool) else None,
        tenants=Tenants(tenants),
    )
    return core, gauges


def _checks(config: CacheConfig, pool: KVPool | RecordPool) -> bool:
    """Whether to check what the slots hold."""
    return config.validate and pool.storage.device.type == "cpu"


def _make_allocator(sizes: TierSizes, page_size: int, window: int | None) -> TokenToKVPoolAllocator:
    if window is None:
        return TokenToKVPoolAllocator(sizes.num_slots, page_size)
    return SWATokenToKVPoolAllocator(sizes.num_slots, sizes.num_swa_slots, page_size)


def _make_states(config: CacheConfig, kv_pool: KVPool | RecordPool | None) -> MambaPool | None:
    """The slots of the pool's recurrent states, if the kind has any."""
    if config.kind != "mamba":
        return None
    if kv_pool is None:
        return MambaPool(config.pool.num_state_slots)
    return MambaPool(config.pool.num_state_slots, layers=kv_pool.state_tensors(), rows=kv_pool.state_rows())


def _make_tree(
    config: CacheConfig, policy: str, allocator: TokenToKVPoolAllocator, states: MambaPool | None
) -> BasePrefixCache:
    if config.kind == "chunk":
        return ChunkCache(config.page_size)
    if config.kind == "trie":
        return TriePrefixCache(config.page_size, allocator)
    window = config.sliding_window_size
    if config.kind == "mamba":
        return MambaRadixCache(config.page_size, allocator, states, sliding_window_size=window, eviction_policy=policy)
    return RadixCache(config.page_size, window, allocator, eviction_policy=policy)
