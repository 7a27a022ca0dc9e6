"""The core's counts and the outline of its tree as messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raydix.actors.tiers.host_tier import HostTier
from raydix.cache_core import LeasedCache
from raydix.cache_core.eviction.tenants import Tenant
from raydix.cache_core.kernels import CORE
from raydix.cache_core.leases.results import PoolSizes
from raydix.cache_core.outline import Outline
from raydix.schemas import (
    DiskPoolStats,
    DiskTierStats,
    PoolStats,
    TenantStats,
    TierStats,
    TooLarge,
    TreeBranch,
    TreeResponse,
    unframe_namespace,
)

if TYPE_CHECKING:
    from raydix.actors.tiers.disk_tier import DiskTier
    from raydix.cache_core.tiers.record_keeper import RecordKeeper


def core_stats(core: LeasedCache) -> dict[str, Any]:
    """Return the fields of `CacheStats` that the core alone knows."""
    counters = core.counters
    return {
        "core": CORE,
        "num_slots": core.num_slots,
        "free_slots": core.free_slots,
        "private_slots": core.private_slots,
        "tree_slots": core.total_size(),
        "quarantined_slots": core.quarantined_slots,
        "evictable_slots": core.evictable_size(),
        "protected_slots": core.protected_size(),
        "open_leases": core.leases.num_of_clients,
        "oldest_lease_s": 0.0 if (since := core.leases.oldest_since) is None else time.monotonic() - since,
        "acquires": counters.acquires,
        "hits": counters.hits,
        "tokens_requested": counters.tokens_requested,
        "tokens_refused": counters.tokens_refused,
        "tokens_reused": counters.tokens_reused,
        "resumed_acquires": counters.num_resumed,
        "resumed_tokens": counters.tokens_resumed,
        "resumed_tokens_reused": counters.tokens_reused_resumed,
        "boundary_states_refused": counters.boundary_states_refused,
        "tokens_inserted": counters.tokens_inserted,
        "tokens_duplicate": counters.tokens_duplicate,
        "tokens_evicted": counters.tokens_evicted,
        "probes": counters.probes,
        "too_large": TooLarge(
            requests=counters.num_too_large,
            tokens=counters.tokens_too_large,
            largest_slots=counters.largest_too_large,
        ),
        "swa": _pool_stats(core.swa_sizes(), counters.window_slots_evicted),
        "state": _pool_stats(core.state_sizes(), counters.states_evicted),
        "tenants": tuple(map(_tenant_stats, core.configured_tenants())),
    }


def tier_stats(host: HostTier, num_loading: int) -> TierStats:
    """Return the statistics of the tier below the pool.

    Args:
        num_loading: requests that wait for a load, or for the end of writes.
    """
    below, copier, loads_of, writes_of = host.tier.cache, host.copier, host.loads.moves.counts, host.writes.counts
    copies: dict[str, Any] = {}
    if copier is not None:
        loads, writes = copier.counts(loads=True), copier.counts(loads=False)
        copies = {
            "loads": dict(loads.ends),
            "writes": dict(writes.ends),
            "loaded_bytes": loads.num_bytes,
            "load_s": loads.seconds,
            "written_bytes": writes.num_bytes,
            "write_s": writes.seconds,
            "queued_bytes": copier.queued_bytes(loads=True) + copier.queued_bytes(loads=False),
            "longest_chunk_ms": 1000 * max(loads.longest_s, writes.longest_s),
        }
    slots = _pool_stats(below.sizes_of("slots"), below.counters.tokens_evicted)
    assert slots is not None
    return TierStats(
        state=host.state,
        pinned=host.pinned,
        policy=host.config.policy,
        slots=slots,
        swa=_pool_stats(below.swa_sizes(), below.counters.window_slots_evicted),
        states=_pool_stats(below.state_sizes(), below.counters.states_evicted),
        tokens_written=writes_of.written,
        tokens_loaded=loads_of.loaded,
        tokens_loaded_unused=loads_of.loaded_unused,
        tokens_dropped=writes_of.dropped,
        tokens_failed=loads_of.failed + writes_of.failed,
        writes_refused=writes_of.writes_refused,
        states_not_published=loads_of.states_not_published,
        moves_in_flight=len(host.loads.moves.in_flight) + len(host.writes.in_flight),
        loading_requests=num_loading,
        **copies,
    )


def disk_stats(disk: DiskTier, num_unbound: int) -> DiskTierStats:
    """Return the statistics of the disk tier.

    Args:
        num_unbound: namespaces without models in which pages were published.
    """
    cache, counts, keepers = disk.tier.cache, disk.stats(), disk.keepers
    sizes = cache.sizes_of("slots")  # Those with a keeper are evicted for no lease, but by the disk's own task.
    slots = _pool_stats(sizes._replace(evictable=sizes.evictable + sizes.kept), cache.counters.tokens_evicted)
    windows = _pool_stats(cache.swa_sizes(), cache.counters.window_slots_evicted)
    states = _pool_stats(cache.state_sizes(), cache.counters.states_evicted)
    assert slots is not None
    loads_of, writes = disk.loads.moves, counts.writes
    num_writes = sum(len(some.in_flight) for some in disk.all_writes)
    dropped = {"queue_full": writes.due_dropped, "left_memory": writes.due_gone, "no_room": writes.no_room}
    return DiskTierStats(
        state=counts.state,
        admit=disk.config.admit,
        slots=_disk_pool_stats(slots, keepers.get("full"), cache.page_size),
        swa=None if windows is None else _disk_pool_stats(windows, keepers.get("swa"), cache.page_size),
        states=None if states is None else _disk_pool_stats(states, keepers.get("state"), 1),
        num_spaces=counts.num_spaces,
        unbound_namespaces=num_unbound,
        due_prefixes=counts.num_due,
        pages_used=counts.num_uses,
        pages_refused=counts.num_first_uses,
        tokens_written=sum(some.counts.written for some in disk.all_writes),
        tokens_loaded=loads_of.counts.loaded,
        tokens_loaded_unused=loads_of.counts.loaded_unused,
        tokens_dropped=sum(some.counts.dropped for some in disk.all_writes),
        tokens_failed=loads_of.counts.failed + sum(some.counts.failed for some in disk.all_writes),
        writes_refused=sum(some.counts.writes_refused for some in disk.all_writes),
        states_not_published=loads_of.counts.states_not_published,
        writes=_without_zeros({"committed": writes.num_writes, "failed": writes.num_failed}),
        prefixes_dropped=_without_zeros(dropped),
        last_error=counts.last_error or None,
        written_bytes=writes.num_bytes,
        written_bytes_day=counts.day_bytes,
        moves_in_flight=len(loads_of.in_flight) + num_writes,
        loads_in_flight=len(loads_of.in_flight),
        loaded_bytes=counts.loaded_bytes,
        load_s=counts.load_s,
        queued_bytes=counts.queued_bytes,
        loads_late=counts.num_late,
        stalls=counts.num_stalls,
        damaged_records=counts.num_damaged,
        failed_reads=counts.num_failed,
        read_error_s=counts.error_s,
        bad_rows=counts.bad_rows,
        uncommitted_s=counts.uncommitted_s,
    )


def _disk_pool_stats(pool: PoolStats, keeper: RecordKeeper | None, slots_of_record: int) -> DiskPoolStats:
    """Return the statistics of the records of one kind; None: their pool has no keeper."""
    kept = (0, 0, 0) if keeper is None else (keeper.num_unread, keeper.num_dormant, keeper.num_leaving)
    unread, dormant, leaving = (number * slots_of_record for number in kept)
    fields = pool.model_dump()
    fields["private_slots"] -= unread + dormant + leaving
    return DiskPoolStats(**fields, unread_slots=unread, dormant_slots=dormant, leaving_slots=leaving)


def _without_zeros(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def tree_response(outline: Outline, unused_s: Callable[[int], float | None]) -> TreeResponse:
    """Return an outline of the tree as its message: namespaces as their three fields, parents as indices.

    Args:
        unused_s: returns the seconds since a tick of the cache's clock, if it has one.
    """
    places = {node: place for place, node in enumerate(outline.nodes)}
    branches = []
    for node in outline.nodes:
        extra_key, lora_id, cache_salt = unframe_namespace(node.extra_key) if node.extra_key else (None, None, None)
        branch = TreeBranch(
            parent=None if node.parent is None else places[node.parent],
            extra_key=extra_key,
            lora_id=lora_id,
            cache_salt=cache_salt,
            tokens=tuple(node.tokens),
            num_tokens=node.own_tokens,
            num_tokens_below=node.tokens_below,
            num_nodes=node.num_nodes,
            num_children=node.num_children,
            is_whole=node.is_whole,
            num_locks=node.num_locks,
            num_hits=node.hits,
            age=max(0, outline.now - node.last_used),
            unused_s=unused_s(node.last_used),
        )
        branches.append(branch)
    return TreeResponse(branches=tuple(branches), num_namespaces=outline.num_namespaces)


def _tenant_stats(tenant: Tenant) -> TenantStats:
    return TenantStats(
        name=tenant.name,
        held_slots=tenant.held,
        evictable_slots=tenant.evictable,
        floor_slots=tenant.floor,
        cap_slots=tenant.cap,
        tokens_evicted=tenant.evicted,
    )


def _pool_stats(sizes: PoolSizes | None, evicted: int) -> PoolStats | None:
    if sizes is None:
        return None
    tree = sizes.evictable + sizes.protected
    return PoolStats(
        num_slots=sizes.num_slots,
        free_slots=sizes.free,
        private_slots=sizes.num_slots - sizes.free - tree - sizes.quarantined,
        tree_slots=tree,
        quarantined_slots=sizes.quarantined,
        evictable_slots=sizes.evictable,
        protected_slots=sizes.protected,
        evicted=evicted,
    )
