"""The errors of the core. If the caller made a mistake, they are raised before anything changes."""

from __future__ import annotations


class CoreError(Exception):
    """The base of all errors of the core."""


class InvalidKeyError(CoreError, ValueError):
    """The token ids cannot form a key, or the values do not fit their key."""


class StaleNodeError(CoreError):
    """The node is no longer in the tree."""


class LockError(CoreError):
    """The unlock has no matching lock."""


class SlotError(CoreError, ValueError):
    """The slots are out of range, not allocated, or given twice."""


class UnknownLeaseError(CoreError):
    """The session has no open lease with this id."""


class ExpiredLeaseError(UnknownLeaseError):
    """The lease expired: its owner sent no message for too long."""


class ContentError(CoreError):
    """A cached page has changed since it was published. Only debugging checks raise this error."""


class LeaseRangeError(CoreError, ValueError):
    """The tokens lie beyond the end of the lease, or differ from the tokens that it was acquired for."""


class OutOfSlotsError(CoreError):
    """The pool is too full for a request, even after all evictions that are allowed. Nothing was allocated.

    Attributes:
        needed, free, evictable: counts in the unit that `pool` names.
        capacity: the size of the pool, or the cap of the tenant.
        pool: "slots", "window slots" or "states".
        tenant: the tenant with a cap that is the limit; then all counts are its own. None: the pool is full.
    """

    def __init__(
        self, needed: int, free: int, evictable: int, capacity: int, pool: str = "slots", tenant: str | None = None
    ) -> None:
        super().__init__(needed, free, evictable, capacity, pool, tenant)
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.capacity = capacity
        self.pool = pool
        self.tenant = tenant

    def __str__(self) -> str:
        share = "" if self.tenant is None else f" of the share of tenant {self.tenant!r}"
        return (
            f"needs {self.needed} {self.pool}{share}, but {self.free} are free and {self.evictable} evictable, "
            f"of {self.capacity} in all"
        )

    @property
    def can_ever_fit(self) -> bool:
        """Whether an empty pool could serve the request."""
        return self.needed <= self.capacity
