"""Calls of a cache actor, and Ray's errors in the cache's terms."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, PendingCallsLimitExceeded, RayError, RaySystemError, RayTaskError

from raydix.actors.transport.unix_socket import Answer, OnAnswer
from raydix.schemas import CacheBusy, CacheError, CacheUnavailable
from raydix.schemas.shown import cut, shown

if TYPE_CHECKING:
    from ray import ActorID
    from ray.actor import ActorHandle

RETRY_AFTER_S = 0.05  # advice of a `CacheBusy` for a client that has too many requests
_OWN_REASON = re.compile(r"raydix\.schemas\.errors\.CacheUnavailable: (.+)")

Answering = Future[bytes] | asyncio.Future[bytes]
AsCacheError = Callable[[RayError | CacheError], CacheError]


async def call(method: Any, *arguments: Any, as_cache_error: AsCacheError | None = None) -> Any:
    """Return the result of an actor call; `as_cache_error`, by default `from_ray`, turns its errors into the cache's.

    Raises:
        CacheError: whatever went wrong.
    """
    try:
        return await method.remote(*arguments)
    except (RayError, CacheError) as error:
        raise (as_cache_error or from_ray)(error) from None


def when_answered(sent: Any, loop: asyncio.AbstractEventLoop, on_answer: OnAnswer) -> None:
    """Call `on_answer` on the loop when a call has its answer, in the tick in which that arrives.

    Awaiting a Ray call takes a task and two ticks more.
    """
    if isinstance(sent, ray.ObjectRef):
        sent.future().add_done_callback(partial(_pass_to_loop, loop, on_answer))  # called in a thread of Ray's
    else:
        asyncio.ensure_future(sent).add_done_callback(partial(_pass_result, on_answer))


def _pass_to_loop(loop: asyncio.AbstractEventLoop, on_answer: OnAnswer, answer: Answering) -> None:
    if not loop.is_closed():  # no caller waits on a closed loop
        loop.call_soon_threadsafe(_pass_result, on_answer, answer)


def _pass_result(on_answer: OnAnswer, answer: Answering) -> None:
    result: Answer
    try:
        result = answer.result()
    except (Exception, asyncio.CancelledError) as error:  # the error takes the place of the answer
        result = error
    on_answer(result)


def actor_id_of(actor: ActorHandle[Any]) -> ActorID:
    """Return the id of an actor, for Ray's tables and as a key."""
    actor_id: ActorID = actor._actor_id
    return actor_id


_VERSIONS = re.compile(r"Ray: (\S+)\s+Python: (\S+)")


def why_not_joined(error: BaseException) -> str:
    """Return the cause, in one line, for which `ray.init` did not connect this process to a cluster."""
    if "Version mismatch" in str(error) and len(versions := _VERSIONS.findall(str(error))) == 2:
        theirs, ours = (f"Ray {ray_version} on Python {python}" for ray_version, python in versions)
        return f"it runs {theirs}, and this process {ours}: they must be the same"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return cut(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def from_ray(error: BaseException) -> CacheError:
    """Return a Ray error in the cache's terms."""
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
