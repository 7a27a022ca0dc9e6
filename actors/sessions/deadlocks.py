"""`Deadlocks`: leases that wait for each other's slots. The cache finds them and refuses the youngest.

lease 1 [ 6 pages ]  extend(1 page) waits
lease 2 [ 5 pages ]  extend(1 page) waits     no page is free or evictable, and no lease is about to end
lease 3 [ 5 pages ]  extend(1 page) waits  -> PoolExhausted(deadlocked=True); once it is preempted, 1 and 2 go on
"""

from __future__ import annotations

from collections.abc import Mapping

from raydix.actors.sessions.refusals import Refusals
from raydix.actors.sessions.wait_queue import Waiter, WaitQueue
from raydix.cache_core import LeasedCache
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord

_RECLAIMED_TOKENS = 4096  # tokens of retired namespaces, freed before a deadlock is declared


class Deadlocks:
    """Finds and resolves the deadlocks of one cache.

    A pool, or a tenant's share of it, is deadlocked if every open lease that holds any of its slots waits in `extend`,
    and none of its slots is in quarantine, offered to another session, held by a move between tiers, or retired and not
    reclaimed yet. Leases made by `lock` and never extended do not count.

    Attributes:
        num_broken: deadlocks in which a lease was refused.

    Args:
        core: the cache.
        wait_queue: the requests that wait for room.
        refusals: makes and counts the errors.
    """

    def __init__(self, core: LeasedCache, wait_queue: WaitQueue, refusals: Refusals) -> None:
        self.num_broken = 0
        self._core = core
        self._wait_queue = wait_queue
        self._refusals = refusals

    def resolve(self) -> None:
        """Refuse the youngest lease of each deadlock; the others go on waiting, for its slots.

        Call it after the queue was served. O(1) while no lease waits in `extend`, else O(leases) at most.
        """
        while (growing := self._wait_queue.growing()) and (found := self._find(growing)) is not None:
            if self._core.reclaim(_RECLAIMED_TOKENS):
                self._wait_queue.serve()
                continue
            waiter, lease = found
            self.num_broken += 1
            self._wait_queue.settle(waiter, self._refusals.exhausted(lease.key, waiter.shortage, deadlocked=True))

    def _find(self, growing: list[Waiter]) -> tuple[Waiter, LeaseRecord] | None:
        by_lease = {waiter.lease_id: waiter for waiter in growing}
        for pool, tenant in dict.fromkeys((waiter.shortage.pool, waiter.shortage.tenant) for waiter in growing):
            lease = self._youngest_of(pool, tenant, by_lease)
            if lease is not None:
                return by_lease[lease.lease_id], lease
        return None

    def _youngest_of(self, pool: str, tenant: str | None, waiting: Mapping[str, Waiter]) -> LeaseRecord | None:
        """Return the youngest lease of a deadlocked pool, or share; None unless all its leases wait."""
        youngest = None
        for lease in self._core.leases:  # the oldest comes first
            if self._is_of(lease, tenant) and self._core.holds(lease, pool):
                if lease.lease_id in waiting:
                    youngest = lease
                elif lease.offer_id or not lease.only_locks or lease.session_id == TIERS:
                    return None
        if youngest is None or any(self._is_of(lease, tenant) for lease in self._core.quarantine):
            return None
        return youngest

    def _is_of(self, lease: LeaseRecord, tenant: str | None) -> bool:
        return tenant is None or self._core.tenant_of(lease.key.extra_key) == tenant
