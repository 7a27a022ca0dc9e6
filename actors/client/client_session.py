"""`ClientSession`: a client's session with its cache, on one event loop, and the next session after each loss."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from raydix.actors.client.expired_writers import ExpiredWriters
from raydix.actors.loop.loop_timer import LoopTimer
from raydix.actors.sessions.bound_models import BoundModels
from raydix.actors.transport.error_map import has_failed, may_have_taken_effect
from raydix.actors.transport.validation import make_request
from raydix.schemas import (
    AbortRequest,
    CacheConfig,
    CacheError,
    CacheUnavailable,
    InvalidRequest,
    LeaseExpired,
    Message,
    OpenSession,
    PoolHandle,
    ReleaseRequest,
    StaleEpoch,
    TakeBackRequest,
    WaitingResponse,
    WithdrawRequest,
)
from raydix.schemas.requests import MAX_BOUND

if TYPE_CHECKING:
    from raydix.actors.client.connectors import Connector
    from raydix.actors.transport.transport import OnOutcome, Outcome, Transport

logger = logging.getLogger(__name__)

_BEATS_PER_TTL = 3
_MAX_BEAT_S = 3.0  # a graceful exit of this process waits for the calls that are in flight
_RETRY_BEAT_S = 0.25  # time between heartbeats while the cache does not answer
_OPENING_S = 30.0  # a closing client waits at most this long for an opening that is in flight
_SILENT_S = 5.0  # a cache is given up after this time without an answer, and at least the session's time to live

Undo = AbortRequest | TakeBackRequest | WithdrawRequest | ReleaseRequest


class ClientSession:
    """A client's session: opening, heartbeats, requests, undo requests, loss and closing.

    The first request opens the session on the running event loop, and the object stays on that loop. From then on
    heartbeats keep the session alive. If the cache restarts or hears no heartbeat in time, the session is lost and its
    leases have ended; the next request opens another session. If no request follows, the lost session is closed as
    soon as no lease of it can still be written. Until then the cache keeps its slots in quarantine.

    Args:
        connector: see below.
        owner: the name of this client in logs; None: host and process.

    Attributes:
        connector: the way to the cache.
        session_id: of the present session, or of the next one if there is none.
        ready: whether the session is open.
        closed: whether `close` was called.
        loop: the event loop of the first request; None before it.
        transport: of the present session, or of the last one; set by the first opening.
        config: the cache's configuration; set by the first opening, and so is the next.
        run_len: `CacheConfig.run_len`.
        writers: the leases and pools that may still be in use.
        bound: the models that the client has bound, in this session and in earlier ones.
    """

    transport: Transport
    config: CacheConfig
    run_len: int

    def __init__(self, connector: Connector, owner: str | None = None) -> None:
        self.connector = connector
        self._owner = owner or f"{os.fsencode(socket.gethostname())[:64].decode(errors='replace')}:{os.getpid()}"
        self.session_id = uuid.uuid4().hex[:16]
        self._past_ids: set[str] = set()
        self._offer_numbers = count(1)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.ready = self.closed = False
        self._opening: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._next: Transport | None = None  # transport of the session that is being opened
        self._lost: Transport | None = None  # transport of the lost session, until another is open
        self._timer = LoopTimer(self._beat)
        self._beating: asyncio.Task[None] | None = None
        self._answered_at = 0.0  # loop time of the last answered beat; moved by the time in which the loop stood still
        self._clock = LoopTimer(self._discount_stall)
        self._look_due = 0.0  # loop time
        self.writers = ExpiredWriters()
        self.bound = BoundModels()
        self._compensations: set[asyncio.Future[Message]] = set()
        self._undos: dict[str, Undo] = {}  # lease id -> undo request to send when the cache answers again

    # ---------------------------------------------------------------- life

    async def open(self) -> None:
        """Open the session, as `PrefixCacheClient.open` does; no effect if it is open."""
        self.check_usable()
        if not self.ready:
            if self._opening is None or has_failed(self._opening):
                self.loop = asyncio.get_running_loop()
                self._opening = self.loop.create_task(self._open())
            await asyncio.shield(self._opening)

    def check_usable(self) -> None:
        """Raise InvalidRequest if the session was closed, or if another event loop runs than the session's."""
        if self.closed:
            raise InvalidRequest("this client was closed: make a new one")
        if self.loop not in (None, asyncio.get_running_loop()):
            raise InvalidRequest("this client's session belongs to another event loop: make one client per loop")

    async def _open(self) -> None:
        transport, lost = self.connector.make_transport(), self._lost
        self._next = transport
        if lost is not None:
            self._renew_id()  # late messages of the lost session do not reach the new one
        replaced = lost if lost is not None and not self.writers.may_write_through(lost) else None
        bound, bound_more = self.bound.latest(MAX_BOUND)
        request = make_request(
            OpenSession,
            session_id=self.session_id,
            owner=self._owner,
            replaces=replaced.session_id if replaced is not None else None,
            liveness_path=self.connector.liveness_path,
            bound=bound,
            bound_more=bound_more,
        )
        try:
            response = await transport.open(request)
        except LeaseExpired:  # the answer to an earlier opening was lost, and that session has expired since
            self._renew_id()
            response = await transport.open(request.model_copy(update={"session_id": self.session_id}))
        if replaced is not None:
            self.writers.forget_session(replaced)
        self.transport, self.config = transport, response.config
        self.run_len = self.config.run_len
        self.ready, self._lost = True, None
        self._answered_at = now = asyncio.get_running_loop().time()
        self._look_due = now + self._beat_s
        self._clock.schedule(self._beat_s)
        self._timer.schedule(0.0)
        self.connector.on_open(self.config, response.sees_process)

    def _renew_id(self) -> None:
        self._past_ids.add(self.session_id)
        self.session_id = uuid.uuid4().hex[:16]

    def make_offer_id(self) -> str:
        """Return the id of a new offer of a lease."""
        return f"{self.session_id}-{next(self._offer_numbers)}"

    def has_used_id(self, session_id: str) -> bool:
        """Return whether this is the id of the present session or of one before it."""
        return session_id == self.session_id or session_id in self._past_ids

    async def close(self) -> None:
        """Close the session, which ends its leases. Idempotent; no error if the cache is gone.

        It is closed even if the caller is cancelled.
        """
        if self._closing is None:
            if not self.closed:
                self.check_usable()
            self.closed = True
            if self._opening is None and self._lost is None:
                return
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._opening is not None:
            await asyncio.wait((self._opening,), timeout=_OPENING_S)
            if self._next is not None and not self._opening.done():
                self._next.give_up(f"the cache has not answered for {_OPENING_S:g} s")
            await asyncio.gather(self._opening, return_exceptions=True)
        self._timer.stop()
        self._clock.stop()
        for transport in [*self.writers.take_sessions(), *([self.transport] if self.ready else [])]:
            try:
                await transport.close()
            except (CacheUnavailable, StaleEpoch):
                logger.info("the cache was gone when session %s closed", transport.session_id)

    # ---------------------------------------------------------------- heartbeats and loss

    @property
    def _beat_s(self) -> float:
        return min(_MAX_BEAT_S, self.config.leases.session_ttl_s / _BEATS_PER_TTL)

    def _beat(self) -> None:
        """Send a heartbeat. The cache answers it after `_beat_s`, when the next one is due."""
        if self.closed:
            return
        if not self.ready:  # the next session is not open yet
            self.writers.close_unused_sessions()
            if self.writers.has_sessions:
                self._timer.schedule(self._beat_s)
            return
        loop = asyncio.get_running_loop()
        next_at = loop.time() + self._beat_s
        self._beating = loop.create_task(self.transport.beat(self._beat_s))  # it does not keep this object alive
        self._beating.add_done_callback(partial(_on_beat, weakref.ref(self), self.transport, next_at))

    def _discount_stall(self) -> float | None:
        """Move `_answered_at` by the time in which this loop stood still. Return the seconds to the next call.

        A heartbeat that was in flight meanwhile times out in the same tick in which its answer is read.
        """
        if not self.ready:
            return None
        now = asyncio.get_running_loop().time()
        self._answered_at = min(now, self._answered_at + max(0.0, now - self._look_due))
        self._look_due = now + self._beat_s
        return self._beat_s

    def _on_beat(self, transport: Transport, next_at: float, error: BaseException | None) -> None:
        if transport is not self.transport or self.closed:
            return
        now = asyncio.get_running_loop().time()
        if error is None:
            self._answered_at = now
            self._send_undos()
            self.writers.close_unused_sessions()
            self._timer.schedule(max(0.0, next_at - now))
            return
        logger.debug("session %s: %s", transport.session_id, error)
        self.check_loss(transport)
        for pool in list(self.writers.pools):
            pool.drop_if_orphaned()
        if transport.lost is None:
            self._timer.schedule(min(_RETRY_BEAT_S, self._beat_s))
            silent_s = now - self._answered_at
            if isinstance(error, CacheUnavailable) and silent_s >= max(_SILENT_S, self.config.leases.session_ttl_s):
                transport.give_up(f"the cache has not answered for {silent_s:.0f} s")

    def check_loss(self, transport: Transport) -> None:
        """If the present session is lost, have the next request open another; drop the pools of a cache that is gone.

        Args:
            transport: of the session in which a request failed.
        """
        if transport.lost is None or transport is not self.transport or not self.ready:
            return
        about = {"session": transport.session_id, "epoch": transport.epoch}
        logger.warning("session %s is lost: %s", transport.session_id, transport.lost, extra=about)
        self.ready, self._opening, self._lost = False, None, transport
        self._undos.clear()
        if isinstance(transport.lost, LeaseExpired):
            self.writers.add_session(transport)
            self._timer.schedule(self._beat_s)
        else:
            self._timer.stop()
            for pool in [pool for pool in self.writers.pools if pool.epoch == transport.epoch]:
                pool.drop(transport.lost)

    # ---------------------------------------------------------------- requests

    async def ask(self, request: Message) -> tuple[Message, Transport]:
        """Return the response to a request that names no lease of this client, and the session's transport.

        If the present session turns out to be lost, the request is sent again in the next one.
        """
        if not self.ready or self.closed or self.loop is not asyncio.get_running_loop():
            await self.open()
        transport = self.transport
        if transport.turns is not None and transport.turns.is_due():
            await transport.turns.take()
        try:
            return await transport.submit(request), transport
        except (StaleEpoch, LeaseExpired):
            self.check_loss(transport)
            if transport.lost is None:  # the request's own error
                raise
        await self.open()
        transport = self.transport
        return await transport.submit(request), transport

    async def ask_for_pool(self) -> tuple[PoolHandle, Transport]:
        """Return the handle of the cache's pool, and the session's transport, as `ask` does."""
        await self.open()
        transport = self.transport
        try:
            return await transport.pool_handle(), transport
        except (StaleEpoch, LeaseExpired):
            self.check_loss(transport)
            if transport.lost is None:
                raise
        await self.open()
        transport = self.transport
        return await transport.pool_handle(), transport

    async def ask_for_lease(self, request: Message, on_outcome: OnOutcome | None = None) -> Message:
        """Return the response to a request that names a lease of the present session, after its wait in the queue.

        A request that ends a lease takes effect even if the caller is cancelled before it is executed: the client has
        no other way to end the lease.

        Args:
            on_outcome: called with the outcome of the request, even if the caller is cancelled meanwhile.
        """
        transport = self.transport
        if transport.turns is not None and transport.turns.is_due():
            try:
                await transport.turns.take()
            except asyncio.CancelledError:
                if isinstance(request, ReleaseRequest | AbortRequest):
                    self._undo(request)
                raise
        try:
            response = await transport.submit(request, on_outcome)
        except (StaleEpoch, LeaseExpired):
            self.check_loss(transport)
            raise
        return await self.wait(transport, response.ticket) if isinstance(response, WaitingResponse) else response

    async def wait(self, transport: Transport, ticket: int) -> Message:
        """Return the outcome of a request that waits for slots, or for a load.

        Args:
            transport: of the session in which it was sent.
        """
        try:
            return await transport.wait(ticket)
        except (StaleEpoch, LeaseExpired):
            self.check_loss(transport)
            raise

    # ---------------------------------------------------------------- undo requests

    @contextmanager
    def undo_on_failure(self, model: type[Undo], **fields: str) -> Iterator[None]:
        """Undo the block's request if the block fails in a way in which the cache may have executed it."""
        try:
            yield
        except (asyncio.CancelledError, CacheError) as error:
            self.undo_if_executed(error, model, **fields)
            raise

    def undo_if_executed(self, error: BaseException, model: type[Undo], **fields: str) -> None:
        """Send an undo request if the cache may have executed the request that failed with `error`."""
        if may_have_taken_effect(error):
            self._undo(model(**fields))

    def on_lease_end(self, request: ReleaseRequest | AbortRequest, outcome: Outcome) -> None:
        """Send the end of a lease again when the cache answers, if this request for it may have been lost."""
        if isinstance(outcome, CacheError) and may_have_taken_effect(outcome):
            self._queue_undo(request)

    def _undo(self, request: Undo) -> None:
        if self.ready:
            future = self.transport.submit(request)
            self._compensations.add(future)
            future.add_done_callback(partial(self._on_undo, request))

    def _on_undo(self, request: Undo, future: asyncio.Future[Message]) -> None:
        self._compensations.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.info("a request of a cancelled caller could not be undone: %s", error)
            if may_have_taken_effect(error):
                self._queue_undo(request)

    def _queue_undo(self, request: Undo) -> None:
        """Queue an undo request until the cache answers again.

        A withdrawal is not queued: it would withdraw a later extend of the lease. If an offer may stand, its lease is
        aborted here and at the cache: it would end with the offer.
        """
        if isinstance(request, WithdrawRequest):
            return
        if isinstance(request, TakeBackRequest):
            self.writers.end_lease(request.lease_id)
            request = AbortRequest(lease_id=request.lease_id)
        if self.ready and not self.closed:
            self._undos[request.lease_id] = request

    def _send_undos(self) -> None:
        """Send the queued undo requests, except for leases that this client has adopted since."""
        held = self.writers.held_lease_ids() if self._undos else set()
        while self._undos and self.ready and not self.closed:
            lease_id, request = self._undos.popitem()
            if lease_id not in held:
                self._undo(request)


def _on_beat(
    session: weakref.ref[ClientSession], transport: Transport, next_at: float, beat: asyncio.Task[Any]
) -> None:
    error = None if beat.cancelled() else beat.exception()
    if (live := session()) is not None and not beat.cancelled():
        live._on_beat(transport, next_at, error)
