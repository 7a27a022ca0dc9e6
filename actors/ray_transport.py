"""Requests to a cache actor, in batches.

A Ray call costs a hundred times what the cache does for it, so a client's requests travel together: those of one tick
of its loop, and those that gather while a batch is on its way. At most one batch is in flight, which keeps the
client's order (async actors give none) and pushes back on its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, PendingCallsLimitExceeded, RayError

from raydix.cache_core import KVPool
from raydix.schemas import (
    AbortRequest,
    Batch,
    BatchResponse,
    CacheBusy,
    CacheError,
    CacheUnavailable,
    CloseSession,
    KVResponse,
    Message,
    OpenSession,
    PoolHandle,
    ReadKV,
    ReleaseRequest,
    SessionResponse,
    WaitRequest,
    WriteKV,
)

logger = logging.getLogger(__name__)

MAX_BATCH_REQUESTS = 512
MAX_BATCH_BYTES = 4 * 2**20  # of token ids
MAX_QUEUED_REQUESTS = 16_384
_RETRY_AFTER_S = 0.05

T = TypeVar("T")
Entry = tuple[Message, "asyncio.Future[Message]"]


class RayTransport:
    """The requests of one session to one actor."""

    def __init__(self, actor: ray.actor.ActorHandle[Any]) -> None:
        self._actor = actor
        self._session_id = ""
        self._epoch = ""
        self._queue: deque[Entry] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def open(self, request: OpenSession) -> SessionResponse:
        response: SessionResponse = await call(self._actor.open_session.remote(request))
        self._session_id, self._epoch = request.session_id, response.epoch
        return response

    def submit(self, request: Message) -> asyncio.Future[Message]:
        if len(self._queue) >= MAX_QUEUED_REQUESTS and not isinstance(request, (ReleaseRequest, AbortRequest)):
            raise CacheBusy(f"{len(self._queue)} requests of this client wait to be sent", _RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        self._queue.append((request, future))
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send_all(), name="raydix-sender")
        return future

    async def _send_all(self) -> None:
        await asyncio.sleep(0)  # whoever else runs in this tick joins the batch
        while entries := self._next_batch():
            batch = Batch.model_construct(
                session_id=self._session_id,
                epoch=self._epoch,
                requests=tuple(request for request, _ in entries),
            )
            try:
                response: BatchResponse = await call(self._actor.execute.remote(batch))
            except CacheError as error:
                _settle(entries, [error] * len(entries))
            else:
                _settle(entries, response.responses)

    def _next_batch(self) -> list[Entry]:
        """The next requests in order; those given up before they were sent are dropped."""
        entries: list[Entry] = []
        num_bytes = 0
        while self._queue and len(entries) < MAX_BATCH_REQUESTS and num_bytes < MAX_BATCH_BYTES:
            request, future = self._queue.popleft()
            if not future.cancelled():
                entries.append((request, future))
                tokens = getattr(request, "tokens", None) or getattr(request, "suffix", None)
                num_bytes += len(tokens.data) if tokens is not None else 0
        return entries

    async def wait(self, ticket: int) -> Message:
        request = WaitRequest(session_id=self._session_id, epoch=self._epoch, ticket=ticket)
        response: Message = await call(self._actor.wait.remote(request))
        return response

    async def pool_handle(self) -> PoolHandle:
        handle: PoolHandle = await call(self._actor.pool_handle.remote())
        return handle

    def local_pool(self) -> KVPool | None:
        return None

    async def read_kv(self, request: ReadKV) -> KVResponse:
        response: KVResponse = await call(self._actor.read_kv.remote(request))
        return response

    async def write_kv(self, request: WriteKV) -> None:
        await call(self._actor.write_kv.remote(request))

    async def close(self, session_id: str) -> None:
        if self._sender is not None:
            await self._sender
        await call(self._actor.close_session.remote(CloseSession(session_id=session_id)))


def _settle(entries: list[Entry], outcomes: Any) -> None:
    for (_, future), outcome in zip(entries, outcomes, strict=True):
        if future.done():
            continue  # its caller gave up
        if isinstance(outcome, CacheError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


async def call(reference: Awaitable[T]) -> T:
    """The result of an actor call; Ray's own errors become the cache's.

    Raises:
        CacheError: whatever went wrong.
    """
    try:
        return await reference
    except (RayError, CacheError) as error:
        raise from_ray(error) from None


def from_ray(error: BaseException) -> CacheError:
    """A Ray error in the cache's terms."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, CacheError):
        return cause
    if isinstance(error, PendingCallsLimitExceeded):
        return CacheBusy("too many calls are pending", _RETRY_AFTER_S)
    if isinstance(error, GetTimeoutError):
        return CacheUnavailable(f"the cache does not answer: {error}")
    if isinstance(error, CacheError):
        return error
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CacheUnavailable(f"the cache is dead, restarting, or cannot be reached: {first_line}")
