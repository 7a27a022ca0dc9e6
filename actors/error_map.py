"""The core's errors in the callers' terms."""

from __future__ import annotations

import logging

from raydix.cache_core import (
    CoreError,
    ExpiredLeaseError,
    InvalidKeyError,
    LeasedCache,
    LeaseRangeError,
    OutOfSlotsError,
    SlotError,
    UnknownLeaseError,
)
from raydix.schemas import CacheError, InvalidRequest, LeaseExpired, PoolExhausted, UnknownLease

logger = logging.getLogger(__name__)


def to_cache_error(error: Exception, core: LeasedCache) -> CacheError:
    """What a caller is told of an error that an operation raised. One that nobody foresaw is logged with its trace."""
    match error:
        case CacheError():
            return error
        case OutOfSlotsError():
            return exhausted(core, error.needed, error.pool, error.can_ever_fit)
        case ExpiredLeaseError():
            return LeaseExpired(str(error))
        case UnknownLeaseError():
            return UnknownLease(str(error))
        case LeaseRangeError() | InvalidKeyError() | SlotError():
            return InvalidRequest(str(error))
        case CoreError():
            return CacheError(f"{type(error).__name__}: {error}")
    logger.error("an operation of the cache failed unexpectedly", exc_info=error)
    return CacheError(f"internal error of the cache: {type(error).__name__}: {error}")


def exhausted(core: LeasedCache, needed: int, pool: str, can_ever_fit: bool = True) -> PoolExhausted:
    """The refusal of a request for so much of a pool, with how that pool is now."""
    sizes = core.sizes_of(pool)
    held = sizes.num_slots - sizes.free - sizes.evictable
    return PoolExhausted(needed, sizes.free, sizes.evictable, held, len(core.leases), can_ever_fit, pool)
