"""How a client's requests reach the cache: the interface, and the way without Ray."""

from __future__ import annotations

import asyncio
from typing import Protocol

from raydix.actors.cache_host import CacheHost
from raydix.cache_core import KVPool
from raydix.schemas import (
    CacheError,
    CloseSession,
    KVEventBatch,
    KVResponse,
    Message,
    NextEvents,
    OpenSession,
    PoolHandle,
    ReadKV,
    SessionResponse,
    WaitRequest,
    WriteKV,
)


class Transport(Protocol):
    """Carries the requests of one session. Every failure is a `CacheError`."""

    async def open(self, request: OpenSession) -> SessionResponse:
        """Open the session."""

    def submit(self, request: Message) -> asyncio.Future[Message]:
        """Send a request after those submitted before it; the future brings the response or a `CacheError`."""

    async def wait(self, ticket: int) -> Message:
        """The outcome of a request that stands in line."""

    async def next_events(self, after_seq: int, timeout_s: float) -> KVEventBatch:
        """The events after number `after_seq`; waits for one up to `timeout_s`."""

    async def pool_handle(self) -> PoolHandle:
        """How to reach the pool."""

    def local_pool(self) -> KVPool | None:
        """The pool itself, if it lies in this process."""

    async def read_kv(self, request: ReadKV) -> KVResponse:
        """Copy KV out of the pool."""

    async def write_kv(self, request: WriteKV) -> None:
        """Copy KV into the pool."""

    async def close(self, session_id: str) -> None:
        """Close the session, after the requests submitted before."""


class LocalTransport:
    """Straight to a cache in this process, on its loop: no serialisation, no batches."""

    def __init__(self, host: CacheHost) -> None:
        self._host = host
        self._session_id = ""
        self._epoch = ""

    async def open(self, request: OpenSession) -> SessionResponse:
        response = self._host.service.open_session(request)
        self._session_id, self._epoch = request.session_id, response.epoch
        return response

    def submit(self, request: Message) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        (response,) = self._host.service.execute(self._session_id, self._epoch, (request,)).responses
        if isinstance(response, CacheError):
            future.set_exception(response)
        else:
            future.set_result(response)
        return future

    async def wait(self, ticket: int) -> Message:
        return await self._host.service.wait(WaitRequest(session_id=self._session_id, epoch=self._epoch, ticket=ticket))

    async def next_events(self, after_seq: int, timeout_s: float) -> KVEventBatch:
        request = NextEvents(session_id=self._session_id, epoch=self._epoch, after_seq=after_seq, timeout_s=timeout_s)
        return await self._host.service.next_events(request)

    async def pool_handle(self) -> PoolHandle:
        self._host.service.session(self._session_id, self._epoch)  # which may have been shut down
        return self._host.exported.handle

    def local_pool(self) -> KVPool | None:
        return self._host.exported.pool

    async def read_kv(self, request: ReadKV) -> KVResponse:
        return self._host.read_kv(request)

    async def write_kv(self, request: WriteKV) -> None:
        self._host.write_kv(request)

    async def close(self, session_id: str) -> None:
        self._host.service.close_session(CloseSession(session_id=session_id))
