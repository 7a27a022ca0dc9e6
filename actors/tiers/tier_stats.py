"""The fields of statistics that tiers share: of their pools, and of the moves to and from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raydix.cache_core import LeasedCache
from raydix.cache_core.leases.results import PoolSizes
from raydix.schemas import DiskPoolStats, PoolStats

if TYPE_CHECKING:
    from raydix.cache_core.tiers.loads import Loads
    from raydix.cache_core.tiers.page_records import Kind
    from raydix.cache_core.tiers.record_keeper import RecordKeeper
    from raydix.cache_core.tiers.writes import Writes


def pool_stats(sizes: PoolSizes | None, evicted: int) -> PoolStats | None:
    """Return the statistics of a pool; None: there is none."""
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


def tier_pools(cache: LeasedCache) -> dict[str, Any]:
    """Return the statistics of the pools of a tier, by their field."""
    slots, counters = cache.sizes_of("slots"), cache.counters
    unlocked = slots.evictable + slots.kept  # no lease evicts slots with a keeper: the tier's own task does
    return {
        "slots": pool_stats(slots._replace(evictable=unlocked), counters.tokens_evicted),
        "swa": pool_stats(cache.swa_sizes(), counters.window_slots_evicted),
        "states": pool_stats(cache.state_sizes(), counters.states_evicted),
    }


def disk_pools(cache: LeasedCache, keepers: Mapping[Kind, RecordKeeper]) -> dict[str, Any]:
    """Return the statistics of the pools of a disk, by their field.

    Args:
        keepers: of the records, by their kind.
    """
    pools, page = tier_pools(cache), cache.page_size
    records: tuple[tuple[str, Kind, int], ...] = (("slots", "full", page), ("swa", "swa", page), ("states", "state", 1))
    return {
        field: _disk_pool(pools[field], keepers.get(kind), slots)
        for field, kind, slots in records
        if pools[field] is not None
    }


def _disk_pool(pool: PoolStats, keeper: RecordKeeper | None, slots_of_record: int) -> DiskPoolStats:
    """Return the statistics of the records of one kind; None: their pool has no keeper."""
    kept = (0, 0, 0) if keeper is None else (keeper.num_unread, keeper.num_dormant, keeper.num_leaving)
    unread, dormant, leaving = (number * slots_of_record for number in kept)
    fields = pool.model_dump()
    fields["private_slots"] -= unread + dormant + leaving
    return DiskPoolStats(**fields, unread_slots=unread, dormant_slots=dormant, leaving_slots=leaving)


def move_stats(loads: Loads, all_writes: Sequence[Writes]) -> dict[str, Any]:
    """Return the counts of the loads from a tier, and the sums of those of all writes to it, by their field."""
    loaded, written = loads.counts, [writes.counts for writes in all_writes]
    return {
        "tokens_written": sum(counts.written for counts in written),
        "tokens_loaded": loaded.loaded,
        "tokens_loaded_unused": loaded.loaded_unused,
        "tokens_dropped": sum(counts.dropped for counts in written),
        "tokens_failed": loaded.failed + sum(counts.failed for counts in written),
        "writes_refused": sum(counts.writes_refused for counts in written),
        "states_not_published": loaded.states_not_published,
        "moves_in_flight": len(loads.in_flight) + sum(len(writes.in_flight) for writes in all_writes),
    }


def without_zeros(counts: dict[str, int]) -> dict[str, int]:
    """Return the counts that are not 0."""
    return {name: count for name, count in counts.items() if count}
