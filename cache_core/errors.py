"""The core's own errors: a caller's mistake raises one of these before anything has changed."""

from __future__ import annotations


class CoreError(Exception):
    """Base of the core's errors."""


class InvalidKeyError(CoreError, ValueError):
    """Token ids that no key can hold, or values that do not fit their key."""


class StaleNodeError(CoreError):
    """A node that is no longer in the tree was handed in."""


class LockError(CoreError):
    """An unlock without a lock."""


class SlotError(CoreError, ValueError):
    """Slots that are out of range, not handed out, or named twice."""


class UnknownLeaseError(CoreError):
    """No open lease of that session has this id."""


class ExpiredLeaseError(UnknownLeaseError):
    """The lease ended because its owner was silent for too long."""


class ContentError(CoreError):
    """What is cached is no longer what was published: somebody wrote to it. Found by debugging checks alone."""


class LeaseRangeError(CoreError, ValueError):
    """Tokens beyond what the lease covers, or other than those it was acquired for."""


class OutOfSlotsError(CoreError):
    """The pool cannot serve a request, even after evicting all it may evict. Nothing was taken.

    Counts are in what `pool` holds: "slots", "window slots" or "states". `capacity` is the whole pool. Where it is the
    cap of a tenant that leaves no room, they are of its share: `capacity` is the cap, and `evictable` its own.
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
        """Whether an empty pool could serve it."""
        return self.needed <= self.capacity
