"""How a client's requests reach the cache: the interface, and the way without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from raydix.actors.service.cache_host import CacheHost
from raydix.cache_core import KVPool
from raydix.schemas import (
    CacheError,
    CloseSession,
    InvalidRequest,
    KVEventBatch,
    KVResponse,
    LeaseExpired,
    Message,
    NextEvents,
    OpenSession,
    PoolHandle,
    ReadKV,
    SessionResponse,
    StaleEpoch,
    WaitRequest,
    WriteKV,
)

Outcome = Message | CacheError
Note = Callable[[Outcome], None]


class Transport(Protocol):
    """Carries the requests of one session. Every failure is a `CacheError`.

    Attributes:
        session_id: the session's, once it is open.
        epoch: the life of the cache in which it was opened.
        lost: why the session is over, once the cache has said so; None: as far as known it is open.
    """

    session_id: str
    epoch: str
    lost: StaleEpoch | LeaseExpired | None

    async def open(self, request: OpenSession) -> SessionResponse:
        """Open the session."""

    async def beat(self, stay_s: float) -> None:
        """Say that the client lives. Takes up to `stay_s`, and ends at once if the session does, or the cache."""

    def submit(self, request: Message, note: Note | None = None) -> asyncio.Future[Message]:
        """Send a request after those submitted before it; the future brings the response or a `CacheError`.

        A request whose future was cancelled before it went is not sent, unless there is a `note`: that is told of
        whatever becomes of the request, before the future is.
        """

    def give_up(self, why: str) -> None:
        """The cache is silent: `CacheUnavailable` for all who wait for it. What it may answer yet is dropped."""

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

    async def close(self) -> None:
        """Close the session, after the requests submitted before."""


class LocalTransport:
    """Straight to a cache in this process, on its loop: no serialisation, no batches."""

    def __init__(self, host: CacheHost) -> None:
        self._host = host
        self.session_id = ""
        self.epoch = ""
        self.lost: StaleEpoch | LeaseExpired | None = None

    async def open(self, request: OpenSession) -> SessionResponse:
        self._host.stay_on_loop()
        response = self._host.service.open_session(request)
        self.session_id, self.epoch = request.session_id, response.epoch
        return response

    async def beat(self, stay_s: float) -> None:
        try:
            self._check_open()
        except InvalidRequest as error:  # the cache has even forgotten that the session expired
            self.lost = LeaseExpired(str(error))
            raise

    def submit(self, request: Message, note: Note | None = None) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        response: Outcome
        try:
            (response,) = self._host.service.execute(self.session_id, self.epoch, (request,)).responses
        except CacheError as error:  # of the session, not of the request
            if isinstance(error, (StaleEpoch, LeaseExpired)):
                self.lost = error
            response = error
        settle(future, note, response)
        return future

    def give_up(self, why: str) -> None:
        """Nobody waits: a cache in this process answers at once, or ends what it has to put off."""

    async def wait(self, ticket: int) -> Message:
        request = WaitRequest(session_id=self.session_id, epoch=self.epoch, ticket=ticket)
        with self._noting_loss():
            return await self._host.service.wait(request)

    async def next_events(self, after_seq: int, timeout_s: float) -> KVEventBatch:
        request = NextEvents(session_id=self.session_id, epoch=self.epoch, after_seq=after_seq, timeout_s=timeout_s)
        with self._noting_loss():
            return await self._host.service.next_events(request)

    async def pool_handle(self) -> PoolHandle:
        self._check_open()
        return self._host.exported.handle

    def local_pool(self) -> KVPool | None:
        return self._host.exported.pool

    async def read_kv(self, request: ReadKV) -> KVResponse:
        with self._noting_loss():
            return self._host.read_kv(request)

    async def write_kv(self, request: WriteKV) -> None:
        with self._noting_loss():
            self._host.write_kv(request)

    async def close(self) -> None:
        self._host.service.close_session(CloseSession(session_id=self.session_id))

    def _check_open(self) -> None:
        """Raise whatever keeps the session from being used; if it is over, note so."""
        with self._noting_loss():
            self._host.service.session(self.session_id, self.epoch)

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Around what names the session: if that is over, note so."""
        try:
            yield
        except (StaleEpoch, LeaseExpired) as error:
            self.lost = error
            raise


def settle(future: asyncio.Future[Message], note: Note | None, outcome: Outcome) -> None:
    """Tell of what has become of a request. If its caller gave up, the note alone is told."""
    if note is not None:
        try:
            note(outcome)
        except CacheError as error:
            outcome = error
    if future.done():
        return
    if isinstance(outcome, CacheError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
