"""`ClientSession`: a client's session with a cache, on one event loop; a new one after each that is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from raydix.actors.client.expired_writers import ExpiredWriters
from raydix.actors.loop_timer import LoopTimer
from raydix.actors.sessions.bound_models import BoundModels
from raydix.actors.transport.error_map import has_failed, may_have_taken_effect
from raydix.actors.transport.process_liveness import own_liveness_path
from raydix.actors.transport.validation import make_request
from raydix.schemas import (
    AbortRequest,
    CacheConfig,
    CacheUnavailable,
    InvalidRequest,
    LeaseExpired,
    Message,
    OpenSession,
    ReleaseRequest,
    StaleEpoch,
    TakeBackRequest,
    WaitingResponse,
    WithdrawRequest,
)
from raydix.schemas.requests import MAX_BOUND

if TYPE_CHECKING:
    from raydix.actors.client.lease import Lease
    from raydix.actors.transport.transport import Transport

logger = logging.getLogger(__name__)

_BEATS_PER_TTL = 3
_MAX_BEAT_S = 3.0  # a graceful exit of this process waits for calls on their way
_RETRY_BEAT_S = 0.25  # while the cache does not answer
_OPENING_S = 30.0  # a client that closes waits no longer for its opening
_SILENT_S = 5.0  # at least, and a session's time to live: then nobody waits for it any more

T = TypeVar("T")
Undo = AbortRequest | TakeBackRequest | WithdrawRequest | ReleaseRequest


class ClientSession:
    """A session with a cache. The first verb, `open()` or `async with` opens it on the running loop.

    It beats from then on. Where it is lost, because the cache restarted or heard nothing for too long, its leases have
    ended, and the next verb opens another. If there is none, the cache is told all the same as soon as nobody writes
    through those leases any more: it withholds their slots until then.
    """

    def __init__(self, owner: str | None = None) -> None:
        self._owner = owner or f"{os.fsencode(socket.gethostname())[:64].decode(errors='replace')}:{os.getpid()}"
        self._session_ids = [uuid.uuid4().hex[:16]]  # the present one last, those that were lost before it
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._ready = self._closed = False
        self._transport: Transport
        self._next: Transport | None = None  # of the session that is being opened
        self._lost: Transport | None = None  # of the session before, until another is open
        self._config: CacheConfig
        self._timer = LoopTimer(self._beat)
        self._beating: asyncio.Task[None] | None = None
        self._answered_at = 0.0  # by the loop: the last beat, or the opening; later by what the loop has stood still
        self._clock = LoopTimer(self._look_at_clock)
        self._look_due = 0.0  # by the loop
        self._writers = ExpiredWriters()
        self._bound = BoundModels()  # in this session and those before
        self._compensations: set[asyncio.Future[Message]] = set()
        self._undos: dict[str, Undo] = {}  # by lease: what the cache could not be told, until it answers again

    def _make_transport(self) -> Transport:
        raise TypeError(f"{type(self).__name__} does not say how to reach its cache")

    def _own_life_path(self) -> str | None:
        return own_liveness_path()

    # ---------------------------------------------------------------- life

    async def open(self) -> Self:
        """Open the session; no effect if it is open.

        Raises:
            CacheUnavailable: the cache cannot be reached.
            InvalidRequest: the session belongs to another event loop, or was closed, or its owner's name cannot be
                shown or is too long.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise InvalidRequest("this client was closed: make a new one")
        if self._loop not in (None, loop):
            raise InvalidRequest("this client's session belongs to another event loop: make one client per loop")
        if not self._ready:
            if self._opening is None or has_failed(self._opening):
                self._loop = loop
                self._opening = loop.create_task(self._open())
            await asyncio.shield(self._opening)
        return self

    async def _open(self) -> None:
        transport, lost = self._make_transport(), self._lost
        self._next = transport
        if lost is not None:
            self._session_ids.append(uuid.uuid4().hex[:16])  # so that nothing that is late reaches the new session
        replaced = lost if lost is not None and not self._writers.any_of(lost) else None
        bound, bound_more = self._bound.latest(MAX_BOUND)
        request = make_request(
            OpenSession,
            session_id=self._session_id,
            owner=self._owner,
            replaces=replaced.session_id if replaced is not None else None,
            liveness_path=self._own_life_path(),
            bound=bound,
            bound_more=bound_more,
        )
        try:
            response = await transport.open(request)
        except LeaseExpired:  # an opening before was not answered, and nobody went on with that session
            self._session_ids.append(uuid.uuid4().hex[:16])
            response = await transport.open(request.model_copy(update={"session_id": self._session_id}))
        if replaced is not None:
            self._writers.forget(replaced)
        self._transport, self._config = transport, response.config
        self._ready, self._lost = True, None
        self._answered_at = now = asyncio.get_running_loop().time()
        self._look_due = now + self._beat_s
        self._clock.schedule(self._beat_s)
        self._timer.schedule(0.0)

    async def close(self) -> None:
        """Close the session: every lease it still holds ends. Idempotent, and no error where there is no cache left.

        It is closed even if the caller is cancelled.
        """
        if self._closing is None:
            if self._loop not in (None, asyncio.get_running_loop()):
                await self.open()  # which says why not
            self._closed = True
            if self._opening is None and self._lost is None:
                return
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            await asyncio.wait((self._opening,), timeout=_OPENING_S)  # to its end, if it is under way
            if self._next is not None and not self._opening.done():
                self._next.give_up(f"the cache has not answered for {_OPENING_S:g} s")
            await asyncio.gather(self._opening, return_exceptions=True)
        self._timer.stop()
        self._clock.stop()
        for each in [*self._writers.take_all(), *([self._transport] if self._ready else [])]:
            try:
                await each.close()
            except (CacheUnavailable, StaleEpoch):
                logger.info("the cache was gone when session %s closed", each.session_id)

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

    @property
    def _session_id(self) -> str:
        return self._session_ids[-1]

    @property
    def _epoch(self) -> str:
        return self._transport.epoch if self._ready else ""

    # ---------------------------------------------------------------- signs of life

    @property
    def _beat_s(self) -> float:
        return min(_MAX_BEAT_S, self._config.leases.session_ttl_s / _BEATS_PER_TTL)

    def _beat(self) -> None:
        """Say that this client lives. The cache keeps the message for a while, and then it is time for the next."""
        if self._closed:
            return
        if not self._ready:  # between two sessions
            self._writers.close_returned()
            if self._writers.any_late:
                self._timer.schedule(self._beat_s)
            return
        loop = asyncio.get_running_loop()
        next_at = loop.time() + self._beat_s
        self._beating = loop.create_task(self._transport.beat(self._beat_s))  # it does not keep this object alive
        self._beating.add_done_callback(partial(_note_beat, weakref.ref(self), self._transport, next_at))

    def _look_at_clock(self) -> float | None:
        """Do not count the time in which this loop stood still as silence of the cache. Return the seconds to wait.

        A beat that was on its way meanwhile runs out of time in the same tick in which its answer is read.
        """
        if not self._ready:
            return None
        now = asyncio.get_running_loop().time()
        self._answered_at = min(now, self._answered_at + max(0.0, now - self._look_due))
        self._look_due = now + self._beat_s
        return self._beat_s

    def _note_beat(self, transport: Transport, next_at: float, error: BaseException | None) -> None:
        if transport is not self._transport or self._closed:
            return
        now = asyncio.get_running_loop().time()
        if error is None:
            self._answered_at = now
            self._send_undos()
            self._writers.close_returned()
            self._timer.schedule(max(0.0, next_at - now))
            return
        logger.debug("session %s: %s", transport.session_id, error)
        self._note_loss(transport)
        for pool in list(self._writers.pools):
            pool.drop_if_orphaned()
        if transport.lost is None:
            self._timer.schedule(min(_RETRY_BEAT_S, self._beat_s))
            silent_s = now - self._answered_at
            if isinstance(error, CacheUnavailable) and silent_s >= max(_SILENT_S, self._config.leases.session_ttl_s):
                transport.give_up(f"the cache has not answered for {silent_s:.0f} s")

    def _note_loss(self, transport: Transport) -> None:
        """The session is over: the next verb opens another, and pools of another life of the cache are gone."""
        if transport.lost is None or transport is not self._transport or not self._ready:
            return
        about = {"session": transport.session_id, "epoch": transport.epoch}
        logger.warning("session %s is lost: %s", transport.session_id, transport.lost, extra=about)
        self._ready, self._opening, self._lost = False, None, transport
        self._undos.clear()
        if isinstance(transport.lost, LeaseExpired):
            self._writers.wait_for(transport)
            self._timer.schedule(self._beat_s)
        else:
            self._timer.stop()
            for pool in [pool for pool in self._writers.pools if pool.epoch == transport.epoch]:
                pool.drop(transport.lost)

    def note_granted(self, lease: Lease) -> None:
        """For the lease alone: it is there."""
        self._writers.add(lease)

    # ---------------------------------------------------------------- requests

    async def _call(self, request: Message) -> Message:
        """The response to a request that names no lease: if the session is lost, another brings it."""
        return (await self._call_anew(request))[0]

    def _call_anew(self, request: Message) -> Coroutine[Any, Any, tuple[Message, Transport]]:
        """The response to a request that names no lease of before, and the session that brought it."""
        return self._ask_anew(lambda transport: transport.submit(request))

    async def _ask_anew(self, ask: Callable[[Transport], Awaitable[T]]) -> tuple[T, Transport]:
        """What a session answers, and that session: another one if the present one turns out to be lost."""
        if not self._ready or self._closed or self._loop is not asyncio.get_running_loop():
            await self.open()
        transport = self._transport
        try:
            return await ask(transport), transport
        except (StaleEpoch, LeaseExpired):
            self._note_loss(transport)
            if transport.lost is None:  # the request's own error
                raise
        await self.open()
        transport = self._transport
        return await ask(transport), transport

    async def _call_of_lease(self, request: Message) -> Message:
        """The response to a request that names a lease of this session, which is open."""
        transport = self._transport
        try:
            return await self._admitted(await transport.submit(request), transport)
        except (StaleEpoch, LeaseExpired):
            self._note_loss(transport)
            raise

    async def _admitted(self, response: Message, transport: Transport) -> Message:
        """A response, or what becomes of the request if it has to stand in line for room."""
        return await transport.wait(response.ticket) if isinstance(response, WaitingResponse) else response

    def _compensate(self, request: Undo) -> None:
        """Undo what may have been granted to a caller who is gone."""
        if self._ready:
            future = self._transport.submit(request)
            self._compensations.add(future)
            future.add_done_callback(partial(self._note_compensated, request))

    def _note_compensated(self, request: Undo, future: asyncio.Future[Message]) -> None:
        self._compensations.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.info("what was granted to a caller who is gone could not be undone: %s", error)
            if may_have_taken_effect(error):
                self._queue_undo(request)

    def _queue_undo(self, request: Undo) -> None:
        """The cache may not have been told that a lease has ended: tell it when it answers again.

        A withdrawal is not owed: it would come between the lease and its next growth. An offer that may stand ends its
        lease when it expires, so the client gives that lease up.
        """
        if isinstance(request, WithdrawRequest):
            return
        if isinstance(request, TakeBackRequest):
            self._writers.give_up(request.lease_id)
            request = AbortRequest(lease_id=request.lease_id)
        if self._ready and not self._closed:
            self._undos[request.lease_id] = request

    def _send_undos(self) -> None:
        """Tell the cache what it could not be told. Of a lost adoption that was made anew since, nothing is undone."""
        held = self._writers.held() if self._undos else set()
        while self._undos and self._ready and not self._closed:
            lease_id, request = self._undos.popitem()
            if lease_id not in held:
                self._compensate(request)


def _note_beat(
    client: weakref.ref[ClientSession], transport: Transport, next_at: float, beat: asyncio.Task[None]
) -> None:
    error = None if beat.cancelled() else beat.exception()
    if (session := client()) is not None and not beat.cancelled():
        session._note_beat(transport, next_at, error)
