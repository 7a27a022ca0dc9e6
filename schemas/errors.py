"""The closed set of errors that callers of a cache see, in one process or across Ray.

    CacheError
    ├── PoolExhausted      too few slots now, or ever
    ├── StaleEpoch         the cache restarted since the lease was made
    ├── LeaseExpired       the lease's time ran out
    ├── UnknownLease       released, aborted, forged, or another session's
    ├── CacheBusy          a queue is full; try again later
    ├── CacheUnavailable   the cache is dead, restarting, or silent for too long
    ├── ConfigMismatch     the cache runs with another configuration, or its pool does not fit a model
    └── InvalidRequest     the request can never be served as it is

Every constructor takes positional arguments only and keeps them in `args`: an exception with required keyword
arguments does not survive Ray's pickling.
"""

from __future__ import annotations

from raydix.schemas.leases import LeaseOwner
from raydix.schemas.shown import counted


class CacheError(Exception):
    """Base of every error a cache raises."""


_POOL_SIZES = {
    "slots": "PoolConfig.num_slots",
    "window slots": "PoolConfig.num_swa_slots",
    "states": "PoolConfig.num_state_slots",
}


class PoolExhausted(CacheError):
    """The pool has too few slots for a request, even after evicting all it may evict. Nothing was allocated.

    Attributes:
        needed, free, evictable: counts in the unit of `pool`, as all others.
        held_slots: held by `open_leases` leases, locked in the tree or privately. A slot that leases share is counted
            once, for the oldest of them.
        open_leases: leases that hold them.
        can_ever_fit: False: the request is larger than the pool, or than its tenant's share. Waiting cannot help.
        pool: "slots" of tokens, "window slots" or "states".
        owners: the owners of the leases that hold the most slots of tokens, the largest first.
        tenant: the tenant that has reached its cap; then all counts are of its share. None: the pool is full.
        kept_slots: held by no lease, but kept by the floors of other tenants.
        deadlocked: every lease that holds slots of the pool, or of the share, waits in `extend`, so none can come
            free. The cache raises this for the youngest of them: preempt its request, and the others continue.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        evictable: int,
        held_slots: int,
        open_leases: int,
        can_ever_fit: bool = True,
        pool: str = "slots",
        owners: tuple[LeaseOwner, ...] = (),
        tenant: str | None = None,
        kept_slots: int = 0,
        deadlocked: bool = False,
    ) -> None:
        super().__init__(
            needed, free, evictable, held_slots, open_leases, can_ever_fit, pool, owners, tenant, kept_slots, deadlocked
        )
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.held_slots = held_slots
        self.open_leases = open_leases
        self.can_ever_fit = can_ever_fit
        self.pool = pool
        self.owners = owners
        self.tenant = tenant
        self.kept_slots = kept_slots
        self.deadlocked = deadlocked

    def __str__(self) -> str:
        size = _POOL_SIZES.get(self.pool, "the pool") if self.tenant is None else "its cap_slots"
        if self.deadlocked:
            advice = "every lease that holds some waits for more: preempt this request, or release others"
        elif self.can_ever_fit:
            advice = f"release leases, raise timeout_s, or enlarge {size}"
        else:
            advice = f"it can never fit: shorten the request or enlarge {size}"
        share = "" if self.tenant is None else f" of the share of tenant {self.tenant!r}"
        kept = f"; {self.kept_slots:,} kept for other tenants" if self.kept_slots else ""
        how = ("" if self.pool == "slots" else ", in slots of tokens") + ", shared prefixes counted once"
        most = f"{how}: {', '.join(map(str, self.owners))}" if self.owners else ""
        return (
            f"needs {counted(self.needed, self.pool[:-1])}{share}, but {self.free:,} are free and "
            f"{self.evictable:,} evictable ({self.held_slots:,} held by {counted(self.open_leases, 'lease')}"
            f"{most}{kept}); {advice}"
        )


class StaleEpoch(CacheError):
    """The request belongs to an earlier life of the cache: its slots and leases are gone. Acquire again.

    Attributes:
        request_epoch: the life of the cache that the request belongs to.
        cache_epoch: its present life; empty if the cache has ended for good.
    """

    def __init__(self, request_epoch: str, cache_epoch: str) -> None:
        super().__init__(request_epoch, cache_epoch)
        self.request_epoch = request_epoch
        self.cache_epoch = cache_epoch

    def __str__(self) -> str:
        now = f"is in epoch {self.cache_epoch!r}" if self.cache_epoch else "has ended since"
        return f"the request is of epoch {self.request_epoch!r}, the cache {now}: drop its leases and acquire again"


class LeaseExpired(CacheError):
    """The session of the lease expired before the request arrived; the request had no effect."""


class UnknownLease(CacheError):
    """The lease was released or aborted, was never made, or belongs to another session; nothing changed."""


class CacheBusy(CacheError):
    """A bounded queue is full. Nothing was queued; try again later.

    Attributes:
        retry_after_s: seconds to wait before that.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.args[0]}; try again in {self.retry_after_s:g} s"


class CacheUnavailable(CacheError):
    """The cache is dead, restarting, shut down, or has not answered for a session's time to live.

    The request may have taken effect or not. A lease that the cache granted ends with the session, or sooner.
    """


class ConfigMismatch(CacheError):
    """A cache runs with another configuration than is asked for, or its pool does not fit a model."""


class InvalidRequest(CacheError):
    """The request can never be served as it is: the message says which argument is wrong and why. Nothing changed."""
