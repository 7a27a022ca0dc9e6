"""`LocalTransport`: calls of a cache in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from raydix.actors.service.cache_host import CacheHost
from raydix.actors.transport.transport import OnOutcome, Outcome
from raydix.cache_core import KVPool, RecordPool
from raydix.schemas import (
    CacheError,
    CloseSession,
    InvalidRequest,
    KVResponse,
    LeaseExpired,
    Message,
    NextEvents,
    OpenSession,
    PackedEvents,
    PoolHandle,
    ReadKV,
    SessionResponse,
    StaleEpoch,
    WaitRequest,
    WriteKV,
)
from raydix.schemas.requests import DEVICE


class LocalTransport:
    """The requests of one session to a cache in this process, on its loop: no serialisation, no batches.

    A request is executed when it is submitted, and its future is settled then.
    """

    def __init__(self, host: CacheHost) -> None:
        self._host = host
        self.session_id = ""
        self.epoch = ""
        self.lost: StaleEpoch | LeaseExpired | None = None
        self.turns = host.service.turns

    async def open(self, request: OpenSession) -> SessionResponse:
        self._host.stay_on_loop()
        response = self._host.service.open_session(request)
        self.session_id, self.epoch = request.session_id, response.epoch
        return response

    async def beat(self, stay_s: float) -> None:
        try:
            self._check_open()
        except InvalidRequest as error:  # the cache no longer remembers that the session expired
            self.lost = LeaseExpired(str(error))
            raise

    def submit(self, request: Message, on_outcome: OnOutcome | None = None) -> asyncio.Future[Message]:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        response: Outcome
        try:
            (response,) = self._host.service.execute(self.session_id, self.epoch, (request,)).responses
        except CacheError as error:  # the session's error, not the request's
            if isinstance(error, (StaleEpoch, LeaseExpired)):
                self.lost = error
            response = error
        if on_outcome is not None:
            try:
                on_outcome(response)
            except CacheError as error:
                response = error
        if isinstance(response, CacheError):
            future.set_exception(response)
        else:
            future.set_result(response)
        return future

    def give_up(self, why: str) -> None:
        """Do nothing: a cache in this process always answers."""

    async def wait(self, ticket: int) -> Message:
        request = WaitRequest(session_id=self.session_id, epoch=self.epoch, ticket=ticket)
        with self._recording_loss():
            return await self._host.service.wait(request)

    async def next_events(self, after_seq: int, timeout_s: float, tier: str = DEVICE) -> PackedEvents:
        request = NextEvents(
            session_id=self.session_id, epoch=self.epoch, after_seq=after_seq, tier=tier, timeout_s=timeout_s
        )
        with self._recording_loss():
            return await self._host.service.next_events(request)

    async def pool_handle(self) -> PoolHandle:
        self._check_open()
        return self._host.exported.handle

    def local_pool(self) -> KVPool | RecordPool | None:
        return self._host.exported.pool

    async def read_kv(self, request: ReadKV) -> KVResponse:
        with self._recording_loss():
            return self._host.read_kv(request)

    async def write_kv(self, request: WriteKV) -> None:
        with self._recording_loss():
            self._host.write_kv(request)

    async def close(self) -> None:
        if self.turns is not None and self.turns.has_waiting:
            await self.turns.take()
        self._host.service.close_session(CloseSession(session_id=self.session_id))

    def _check_open(self) -> None:
        """Raise an error unless the session is open; if it is lost, set `lost`."""
        with self._recording_loss():
            self._host.service.session(self.session_id, self.epoch)

    @contextmanager
    def _recording_loss(self) -> Iterator[None]:
        """Set `lost` if the block raises the loss of the session."""
        try:
            yield
        except (StaleEpoch, LeaseExpired) as error:
            self.lost = error
            raise
