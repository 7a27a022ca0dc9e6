"""`ClientSession`: one session with a cache, on one event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Self

from raydix.schemas import (
    AbortRequest,
    CacheConfig,
    CacheError,
    CacheUnavailable,
    InvalidRequest,
    Message,
    OpenSession,
    StaleEpoch,
    WaitingResponse,
    WithdrawRequest,
)

if TYPE_CHECKING:
    from raydix.actors.transport import Transport

logger = logging.getLogger(__name__)


class ClientSession:
    """One session with a cache. The first verb, `open()` or `async with` opens it on the running loop."""

    def __init__(self, owner: str | None = None) -> None:
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}"
        self._session_id = uuid.uuid4().hex[:16]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._ready = self._closed = False
        self._transport: Transport
        self._epoch = ""
        self._config: CacheConfig
        self._compensations: set[asyncio.Future[Message]] = set()

    def _make_transport(self) -> Transport:
        raise TypeError(f"{type(self).__name__} does not say how to reach its cache")

    async def open(self) -> Self:
        """Open the session; no effect if it is open.

        Raises:
            CacheUnavailable: the cache cannot be reached.
            InvalidRequest: the session belongs to another event loop, or was closed.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise InvalidRequest("this client was closed: make a new one")
        if self._loop not in (None, loop):
            raise InvalidRequest("this client's session belongs to another event loop: make one client per loop")
        if not self._ready:
            if self._opening is None:
                self._loop = loop
                self._opening = loop.create_task(self._open())
            try:
                await asyncio.shield(self._opening)
            except CacheError:
                self._opening = None  # the next verb tries again
                raise
        return self

    async def _open(self) -> None:
        self._transport = self._make_transport()
        response = await self._transport.open(OpenSession(session_id=self._session_id, owner=self._owner))
        self._epoch, self._config = response.epoch, response.config
        self._ready = True

    async def close(self) -> None:
        """Close the session: every lease it still holds ends. Idempotent."""
        if self._closed:
            return
        if self._opening is None:
            self._closed = True
            return
        await self.open()  # on its own loop, and to its end if it is under way
        self._closed = True
        try:
            await self._transport.close(self._session_id)
        except (CacheUnavailable, StaleEpoch):
            logger.info("the cache was gone when session %s closed", self._session_id)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def config(self) -> CacheConfig:
        """The cache's configuration, known once the session is open."""
        if not self._ready:
            raise InvalidRequest("the session is not open yet: await open() first")
        return self._config

    async def _call(self, request: Message) -> Message:
        if not self._ready or self._closed or self._loop is not asyncio.get_running_loop():
            await self.open()
        return await self._transport.submit(request)

    async def _call_admission(self, request: Message) -> Message:
        """A request that may have to stand in line for room."""
        response = await self._call(request)
        return await self._transport.wait(response.ticket) if isinstance(response, WaitingResponse) else response

    def _compensate(self, request: AbortRequest | WithdrawRequest) -> None:
        """Undo what may have been granted to a caller who is gone."""
        if not self._ready:
            return
        future = self._transport.submit(request)
        self._compensations.add(future)
        future.add_done_callback(self._note_compensated)

    def _note_compensated(self, future: asyncio.Future[Message]) -> None:
        self._compensations.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.info("what was granted to a caller who is gone could not be undone: %s", error)
