"""The core's errors in callers' terms, and which errors leave open whether the request took effect."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from raydix.cache_core import (
    CoreError,
    ExpiredLeaseError,
    InvalidKeyError,
    LeaseRangeError,
    SlotError,
    UnknownLeaseError,
)
from raydix.schemas import CacheError, CacheUnavailable, InvalidRequest, LeaseExpired, UnknownLease

logger = logging.getLogger(__name__)


def to_cache_error(error: Exception) -> CacheError:
    """Return the error that a caller gets for one that an operation raised. Unexpected ones are logged."""
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
        case AssertionError():
            logger.error("a rule of the cache is broken", exc_info=error)
            return CacheError(f"a rule of the cache is broken: {error}")
    logger.error("an operation of the cache failed unexpectedly", exc_info=error)
    return CacheError(f"internal error of the cache: {type(error).__name__}: {error}")


def may_have_taken_effect(error: BaseException) -> bool:
    """Return whether a request that failed so may have taken effect: its answer was lost, or not waited for."""
    return isinstance(error, (asyncio.CancelledError, CacheUnavailable)) or type(error) is CacheError


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Return whether a task has ended without a result; mark its error as seen."""
    return task.done() and (task.cancelled() or task.exception() is not None)
