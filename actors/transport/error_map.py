"""What errors mean to callers: the core's in their terms, and what may have been done in spite of one."""

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
        case AssertionError():
            logger.error("a rule of the cache is broken", exc_info=error)
            return CacheError(f"a rule of the cache is broken: {error}")
    logger.error("an operation of the cache failed unexpectedly", exc_info=error)
    return CacheError(f"internal error of the cache: {type(error).__name__}: {error}")


def may_have_taken_effect(error: BaseException) -> bool:
    """Whether what failed so may have been done: nobody waits for the answer, or none came that could be read."""
    return isinstance(error, (asyncio.CancelledError, CacheUnavailable)) or type(error) is CacheError


def has_failed(task: asyncio.Task[Any]) -> bool:
    """Whether a task has ended without a result; its error, if any, counts as seen."""
    return task.done() and (task.cancelled() or task.exception() is not None)
