"""`Refusals`: what those are told who find no room."""

from __future__ import annotations

from raydix.actors.sessions.lease_owners import LeaseOwners
from raydix.cache_core import LeasedCache, OutOfSlotsError
from raydix.schemas import PoolExhausted

_NUM_OWNERS = 3  # named in a refusal


class Refusals:
    """Tells how the pool is now, and who has it.

    Args:
        core: the cache.
        owners: of its leases.
    """

    def __init__(self, core: LeasedCache, owners: LeaseOwners) -> None:
        self._core = core
        self._owners = owners

    def of(self, shortage: OutOfSlotsError, extra_key: str | None, deadlocked: bool = False) -> PoolExhausted:
        """The refusal of a request of that namespace that found, or still finds, too little room.

        O(owners), and at times O(leases) where one has come, gone or grown since the last refusal.
        """
        core, tenant = self._core, shortage.tenant
        sizes = core.sizes_of(shortage.pool, extra_key) if tenant is None else core.share_of(tenant)
        return PoolExhausted(
            shortage.needed,
            sizes.free,
            sizes.evictable,
            sizes.num_slots - sizes.free - sizes.evictable - sizes.kept,
            self._owners.num_leases(tenant),
            shortage.can_ever_fit,
            shortage.pool,
            self._owners.largest(_NUM_OWNERS, tenant),
            tenant,
            sizes.kept,
            deadlocked,
        )
