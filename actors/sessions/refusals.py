"""`Refusals`: makes and counts the errors of refused requests."""

from __future__ import annotations

from collections import Counter

from raydix.actors.sessions.lease_owners import LeaseOwners
from raydix.actors.transport.error_map import to_cache_error
from raydix.cache_core import LeasedCache, OutOfSlotsError, RadixKey
from raydix.schemas import (
    CacheBusy,
    CacheError,
    CacheUnavailable,
    ConfigMismatch,
    InvalidRequest,
    LeaseExpired,
    PoolExhausted,
    UnknownLease,
)

EXHAUSTED = ("deadlocked", "never_fits", "tenant_cap", "no_wait", "waited_too_long")  # the causes of a PoolExhausted
_CAUSES: dict[type[CacheError], str] = {
    CacheBusy: "queue_full",
    CacheUnavailable: "draining",
    ConfigMismatch: "model_mismatch",
    InvalidRequest: "invalid_request",
    LeaseExpired: "lease_expired",
    UnknownLease: "unknown_lease",
}
_NUM_OWNERS = 3  # owners that a refusal names


class Refusals:
    """The refused requests of one cache.

    Attributes:
        by_cause: cause -> number of refused requests; see `CacheStats.refusals`.

    Args:
        core: the cache.
        owners: the owners of leases, which refusals name.
    """

    def __init__(self, core: LeasedCache, owners: LeaseOwners) -> None:
        self.by_cause: Counter[str] = Counter()
        self._core = core
        self._owners = owners

    @property
    def num_exhausted(self) -> int:
        """The number of requests that were refused for lack of room."""
        return sum(self.by_cause[cause] for cause in EXHAUSTED)

    def exhausted(
        self,
        key: RadixKey | None,
        shortage: OutOfSlotsError,
        *,
        num_tokens: int | None = None,
        waited: bool = False,
        deadlocked: bool = False,
    ) -> PoolExhausted:
        """Count a request that finds no room, and return its refusal.

        O(owners); O(leases) if a lease has begun, ended or grown since the last refusal.

        Args:
            key: the request's key. The refusal has the room of its namespace; None: of no namespace.
            num_tokens: size of the lease that was to begin; None: a lease was to grow.
            waited: the request was queued until its time ran out.
            deadlocked: the request waited in a deadlock, which its refusal resolves.
        """
        if deadlocked:
            cause = "deadlocked"
        elif not shortage.can_ever_fit:
            cause = "never_fits"
        elif shortage.tenant is not None:
            cause = "tenant_cap"
        else:
            cause = "waited_too_long" if waited else "no_wait"
        self.by_cause[cause] += 1
        if key is not None and num_tokens is not None:
            self._core.count_refusal(key, num_tokens, shortage.can_ever_fit)
        return self._error(shortage, None if key is None else key.extra_key, deadlocked)

    def _error(self, shortage: OutOfSlotsError, extra_key: str | None, deadlocked: bool) -> PoolExhausted:
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

    def error_of(self, error: Exception) -> CacheError:
        """Count a request that failed, and return its caller's typed error."""
        if isinstance(error, OutOfSlotsError):
            return self.exhausted(None, error)
        return self.count(to_cache_error(error))

    def count(self, error: CacheError) -> CacheError:
        """Count a request that failed, unless `exhausted` has counted it, and return its error."""
        if not isinstance(error, PoolExhausted):
            self.by_cause[_CAUSES.get(type(error), "internal_error")] += 1
        return error
