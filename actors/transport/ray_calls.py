"""Calls of a cache actor, and what they fail with in the cache's own terms."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, PendingCallsLimitExceeded, RayError, RaySystemError, RayTaskError

from raydix.actors.transport.unix_socket import Answer, Tell
from raydix.schemas import CacheBusy, CacheError, CacheUnavailable
from raydix.schemas.shown import shown

RETRY_AFTER_S = 0.05  # what a client is told that has asked for too much at once
_OWN_REASON = re.compile(r"raydix\.schemas\.errors\.CacheUnavailable: (.+)")

Answering = Future[bytes] | asyncio.Future[bytes]
TellAs = Callable[[RayError | CacheError], CacheError]


async def call(method: Any, *arguments: Any, told_as: TellAs | None = None) -> Any:
    """The result of an actor call; Ray's own errors become the cache's, by `told_as` instead of `from_ray` if given.

    Raises:
        CacheError: whatever went wrong.
    """
    try:
        return await method.remote(*arguments)
    except (RayError, CacheError) as error:
        raise (told_as or from_ray)(error) from None


def when_answered(sent: Any, loop: asyncio.AbstractEventLoop, tell: Tell) -> None:
    """Call back on the loop when a call has its answer, in the tick in which that arrives.

    Awaiting a Ray call takes a task and two ticks more.
    """
    if isinstance(sent, ray.ObjectRef):
        sent.future().add_done_callback(partial(_hand_over, loop, tell))  # called in a thread of Ray's
    else:
        asyncio.ensure_future(sent).add_done_callback(partial(_tell_result, tell))


def _hand_over(loop: asyncio.AbstractEventLoop, tell: Tell, answer: Answering) -> None:
    if not loop.is_closed():  # nobody waits on one that is
        loop.call_soon_threadsafe(_tell_result, tell, answer)


def _tell_result(tell: Tell, answer: Answering) -> None:
    result: Answer
    try:
        result = answer.result()
    except (Exception, asyncio.CancelledError) as error:  # told as if it were the answer
        result = error
    tell(result)


def from_ray(error: BaseException) -> CacheError:
    """A Ray error in the cache's terms."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, CacheError):
        return cause
    if isinstance(error, PendingCallsLimitExceeded):
        return CacheBusy("too many calls are pending", RETRY_AFTER_S)
    if isinstance(error, GetTimeoutError):
        return CacheUnavailable(f"the cache does not answer: {error}")
    if isinstance(error, CacheError):
        return error
    if isinstance(error, RayTaskError) and (isinstance(cause, RaySystemError) or not isinstance(cause, RayError)):
        said = str(cause).strip() or type(cause).__name__
        return CacheError(f"the cache could not read the call, or failed at it: {shown(said.splitlines()[-1])}")
    text = str(error).strip() or type(error).__name__
    if (reason := _OWN_REASON.search(text)) is not None:  # it died of an error of its own
        return CacheUnavailable(shown(reason.group(1)))
    return CacheUnavailable(f"the cache is dead, restarting, or cannot be reached: {shown(text.splitlines()[0])}")
