"""The core's errors in the callers' terms."""

from __future__ import annotations

import logging

from raydix.cache_core import (
    CoreError,
    ExpiredLeaseError,
    InvalidKeyError,
    LeaseRangeError,
    SlotError,
    UnknownLeaseError,
)
from raydix.schemas import CacheError, InvalidRequest, LeaseExpired, UnknownLease

logger = logging.getLogger(__name__)


def to_cache_error(error: Exception) -> CacheError:
    """What a caller is told of an error that an operation raised. One that nobody foresaw is logged with its trace."""
    match error:
        case CacheError():
            return error
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
