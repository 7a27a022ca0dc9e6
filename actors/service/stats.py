"""The core's counts and the outline of its tree as messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raydix.actors.tiers.host.host_tier import HostTier
from raydix.actors.tiers.tier_stats import move_stats, pool_stats, tier_pools
from raydix.cache_core import LeasedCache
from raydix.cache_core.eviction.tenants import Tenant
from raydix.cache_core.kernels import CORE
from raydix.cache_core.outline import Outline
from raydix.schemas import (
    TenantStats,
    TierStats,
    TooLarge,
    TreeBranch,
    TreeResponse,
    unframe_namespace,
)


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
        "swa": pool_stats(core.swa_sizes(), counters.window_slots_evicted),
        "state": pool_stats(core.state_sizes(), counters.states_evicted),
        "tenants": tuple(map(_tenant_stats, core.configured_tenants())),
    }


def host_stats(host: HostTier, num_loading: int) -> TierStats:
    """Return the statistics of the tier in host memory.

    Args:
        num_loading: requests that wait for a load, or for the end of writes.
    """
    copier = host.copier
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
    return TierStats(
        state=host.state,
        pinned=host.memory.pinned,
        policy=host.config.policy,
        loading_requests=num_loading,
        **tier_pools(host.tier.cache),
        **move_stats(host.loads.moves, [host.writes]),
        **copies,
    )


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
