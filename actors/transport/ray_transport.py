"""Requests to a cache actor, in batches.

A Ray call costs a hundred times what the cache does for it, so a client's requests travel together: the requests of one
tick of its loop, and later ones that gather while others are on their way. At most two batches are in flight, one
travelling while the other is executed: that pushes back on its own. They are numbered, because async actors start calls
in any order. If client and cache share a machine, all batches of a session go through a `UnixSocketClient` instead, and
the session ends if its connection breaks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from raydix.actors.loop.loop_turns import LoopTurns
from raydix.actors.transport import batch_codec
from raydix.actors.transport.ray_calls import RETRY_AFTER_S, call, from_ray, when_answered
from raydix.actors.transport.transport import OnOutcome, Outcome
from raydix.actors.transport.unix_socket import MAX_FRAME_BYTES, Answer, UnixSocketClient
from raydix.actors.transport.validation import checked_response
from raydix.cache_core import KVPool, RecordPool
from raydix.schemas import (
    Batch,
    BatchResponse,
    CacheBusy,
    CacheError,
    CacheUnavailable,
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
    SessionRef,
    SessionResponse,
    StaleEpoch,
    WaitRequest,
    WriteKV,
)
from raydix.schemas.protocol import check_handshake, handshake
from raydix.schemas.requests import DEVICE

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 2  # batches
MAX_BATCH_REQUESTS = 512  # half of the most that a cache takes, so that it serves others between
# A batch is full with the request that exceeds so many bytes of token ids: more would only take more memory.
MAX_BATCH_BYTES = 2**20
MIN_SHARED_REQUESTS = 16  # a shorter queue travels in one batch
MAX_QUEUED_REQUESTS = 16_384
_ANSWER_S = 5.0  # a heartbeat is given up after so long
_CLOSE_S = 30.0  # the end of a session is given up after so long

T = TypeVar("T")
Entry = tuple[Message, "asyncio.Future[Message]", OnOutcome | None]


class RayTransport:
    """The requests of one session to one actor.

    Args:
        actor: the cache.
        owner: the handle of an actor; its death ends the session. None: there is no such actor.
        by_name: whether the actor was found by a name, which may lead to another once it has died for good: then that
            is `StaleEpoch`, as a restart is, and not `CacheUnavailable`.
    """

    def __init__(
        self,
        actor: ray.actor.ActorHandle[Any],
        owner: ray.actor.ActorHandle[Any] | None = None,
        *,
        by_name: bool = False,
    ) -> None:
        self._actor = actor
        self._owner = owner
        self._by_name = by_name
        self.session_id = ""
        self.epoch = ""
        self.lost: StaleEpoch | LeaseExpired | None = None
        self.turns: LoopTurns | None = None  # the cache has a loop of its own
        self._queue: deque[Entry] = deque()
        self._pump_scheduled = False
        self._last_seq = 0
        self._in_flight: dict[int, list[Entry]] = {}  # seq -> requests of the batch
        self._landed = asyncio.Event()  # set whenever a batch has been answered, or the queue failed
        self._silence: asyncio.Future[str] | None = None  # its result: the reason why the cache is given up
        self._socket: UnixSocketClient | None = None
        self._asking_why: asyncio.Task[None] | None = None  # the socket broke

    async def open(self, request: OpenSession) -> SessionResponse:
        check_handshake(await self._unless_given_up(self._handshake()), "cache")
        response: SessionResponse = await self._call(self._actor.open_session, request, self._owner, handshake())
        self.session_id, self.epoch = request.session_id, response.epoch
        self._socket = await self._unless_given_up(UnixSocketClient.open(response.socket_address, self))
        return response

    async def _handshake(self) -> object:
        """Return the cache's handshake; None: the cache has none, so it is of protocol 0."""
        try:
            return await self._actor.handshake.remote(handshake())
        except AttributeError:  # the handle has no such method
            return None
        except (RayError, CacheError) as error:
            if isinstance(getattr(error, "cause", None), AttributeError):  # the actor has none
                return None
            raise self._error_of(error) from None

    async def beat(self, stay_s: float) -> None:
        request = SessionRef(session_id=self.session_id, epoch=self.epoch)
        try:
            async with asyncio.timeout(stay_s + _ANSWER_S):
                await self._setting_lost(self._answer_to(self._actor.heartbeat, request, stay_s))
            if self._socket is not None and not self._socket.is_open:
                self.lost = LeaseExpired("the connection to the cache broke, and its session ended with it")
                raise self.lost
        except InvalidRequest as error:  # the cache has even forgotten that the session expired
            self.lost = LeaseExpired(str(error))
            raise
        except TimeoutError:
            raise CacheUnavailable(f"the cache has not answered a heartbeat for {_ANSWER_S:g} s") from None

    async def _call(self, method: Any, *arguments: Any) -> Any:
        """Return the result of an actor call, unless the cache is given up meanwhile."""
        return await self._unless_given_up(self._answer_to(method, *arguments))

    async def _unless_given_up(self, answering: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine; raise CacheUnavailable if the cache is given up meanwhile."""
        loop = asyncio.get_running_loop()
        silence = self._silence = self._silence or loop.create_future()
        answer = loop.create_task(answering)
        try:
            await asyncio.wait((answer, silence), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise CacheUnavailable(silence.result())
            return answer.result()
        finally:
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # raised here, or too late

    async def _answer_to(self, method: Any, *arguments: Any) -> Any:
        return await call(method, *arguments, as_cache_error=self._error_of)

    def give_up(self, why: str) -> None:
        given_up = [entry for entries in (*self._in_flight.values(), self._queue) for entry in entries]
        self._in_flight = {seq: [] for seq in self._in_flight}  # they will land, or break
        self._queue.clear()
        silence, self._silence = self._silence, None
        if silence is not None:
            silence.set_result(why)
        for _, future, on_outcome in given_up:
            settle(future, on_outcome, CacheUnavailable(why))

    def _error_of(self, error: RayError | CacheError) -> CacheError:
        """Return the error of a call in the cache's terms. If Ray finds the actor dead, close the socket, too."""
        if isinstance(error, RayActorError) and self._socket is not None:
            self._socket.abort()
        if isinstance(error, ActorDiedError) and self._by_name and self.epoch:  # not one that restarts
            self.lost = StaleEpoch(self.epoch, "")
            return self.lost
        return from_ray(error)

    async def _setting_lost(self, answer: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a call that names the session; if the session is over, set `lost`."""
        try:
            return await answer
        except (StaleEpoch, LeaseExpired) as error:
            self.lost = error
            raise

    def _set_lost(self, error: CacheError) -> CacheError:
        """Return the error of a call that names the session; if the session is over, set `lost`."""
        if isinstance(error, (StaleEpoch, LeaseExpired)):
            self.lost = error
        return error

    def submit(self, request: Message, on_outcome: OnOutcome | None = None) -> asyncio.Future[Message]:
        if len(self._queue) >= MAX_QUEUED_REQUESTS and not request.is_always_queued:
            raise CacheBusy(f"{len(self._queue)} requests of this client wait to be sent", RETRY_AFTER_S)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Message] = loop.create_future()
        self._queue.append((request, future, on_outcome))
        if not self._pump_scheduled and len(self._in_flight) < MAX_IN_FLIGHT:
            self._schedule_pump(loop)
        return future

    def _schedule_pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send at the end of this tick of the loop: other requests of the tick join the batch."""
        self._pump_scheduled = True
        loop.call_soon(self._pump, loop)

    def _pump(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what is queued, as far as the bound on batches in flight allows.

        A long queue is shared between the free places, so that one batch is on its way while the other is executed.
        """
        self._pump_scheduled = False
        if self._socket is not None and not self._socket.is_open:
            if self._queue and self._asking_why is None:
                self._asking_why = loop.create_task(self._fail_queue())
            return
        while self._queue and (places := MAX_IN_FLIGHT - len(self._in_flight)) > 0:
            share = -(-len(self._queue) // places) if len(self._queue) >= MIN_SHARED_REQUESTS else len(self._queue)
            entries = self._next_entries(min(share, MAX_BATCH_REQUESTS))
            if entries:
                self._send(entries, loop)

    async def _fail_queue(self) -> None:
        """The socket broke, so the session is over: ask the cache through Ray why, and fail the queued requests."""
        error: CacheError
        try:
            await self.beat(0.0)
            error = CacheError("internal error of the client: a session goes on without its socket")
        except CacheError as why:
            error = self.lost or why
        self._asking_why = None
        while self._queue:
            _, future, on_outcome = self._queue.popleft()
            settle(future, on_outcome, error)
        self._landed.set()

    def _send(self, entries: list[Entry], loop: asyncio.AbstractEventLoop) -> None:
        """Send a batch here and now."""
        after, self._last_seq = max(self._in_flight, default=0), self._last_seq + 1
        seq = self._last_seq
        self._in_flight[seq] = entries
        requests = tuple([request for request, _, _ in entries])
        batch = Batch(self.session_id, self.epoch, requests, seq, after)
        on_answer = partial(self._land, seq)
        try:
            packed = batch_codec.pack(batch)
            if self._socket is None:
                when_answered(self._actor.execute.remote(*batch_codec.in_parts(packed)), loop, on_answer)
            elif len(packed) <= MAX_FRAME_BYTES:
                self._socket.ask(seq, packed, on_answer)
            else:
                raise InvalidRequest(f"a request of {len(packed):,} bytes: at most {MAX_FRAME_BYTES:,} can be sent")
        except Exception as error:  # the requests fail with it
            loop.call_soon(on_answer, error)

    def _land(self, seq: int, answer: Answer) -> None:
        """Settle the requests of a batch with their responses, or with the error of the batch."""
        entries = self._in_flight[seq]
        outcomes: Sequence[Any]
        try:
            if isinstance(answer, BaseException):
                raise answer
            outcomes = _responses(batch_codec.unpack(answer, torn=CacheError)) if entries else ()
            assert len(outcomes) == len(entries), f"{len(outcomes)} answers to {len(entries)} requests"
        except (RayError, CacheError) as error:
            outcomes = [self._set_lost(self._error_of(error))] * len(entries)
        except (asyncio.CancelledError, CancelledError):
            outcomes = [CacheUnavailable("the request was given up on its way")] * len(entries)
        except Exception as error:  # a fault of this package: no caller may wait for ever
            logger.exception("a batch of requests could not be sent")
            outcomes = [CacheError(f"internal error of the client: {type(error).__name__}: {error}")] * len(entries)
        del self._in_flight[seq]
        for (_, future, on_outcome), outcome in zip(entries, outcomes, strict=True):
            settle(future, on_outcome, outcome)
        if not self._pump_scheduled:
            # The callers go on first: their next requests join the batch.
            self._schedule_pump(asyncio.get_running_loop())
        self._landed.set()

    def _next_entries(self, limit: int) -> list[Entry]:
        """Remove the next requests from the queue, in order. Requests that their callers gave up are dropped."""
        entries: list[Entry] = []
        num_bytes = 0
        while self._queue and len(entries) < limit and num_bytes < MAX_BATCH_BYTES:
            entry = self._queue.popleft()
            request, future, on_outcome = entry
            if on_outcome is not None or not future.cancelled():
                entries.append(entry)
                if (field := request.token_field) is not None:
                    num_bytes += len(getattr(request, field).data)
        return entries

    async def wait(self, ticket: int) -> Message:
        request = WaitRequest(session_id=self.session_id, epoch=self.epoch, ticket=ticket)
        response: Message = await self._setting_lost(self._call(self._actor.wait, request))
        return response

    async def next_events(self, after_seq: int, timeout_s: float, tier: str = DEVICE) -> PackedEvents:
        request = NextEvents(
            session_id=self.session_id, epoch=self.epoch, after_seq=after_seq, tier=tier, timeout_s=timeout_s
        )
        events: PackedEvents = await self._setting_lost(self._call(self._actor.next_events, request))
        return events

    async def pool_handle(self) -> PoolHandle:
        handle: PoolHandle = await self._call(self._actor.pool_handle)
        return handle

    def local_pool(self) -> KVPool | RecordPool | None:
        return None

    async def read_kv(self, request: ReadKV) -> KVResponse:
        response: KVResponse = await self._setting_lost(self._call(self._actor.read_kv, request))
        return response

    async def write_kv(self, request: WriteKV) -> None:
        await self._setting_lost(self._call(self._actor.write_kv, request))

    async def close(self) -> None:
        request = CloseSession(session_id=self.session_id)
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._finish()
                await self._call(self._actor.close_session, request)
        except TimeoutError:
            self._actor.close_session.remote(request)  # it obeys, should it ever go on
            why = f"the cache has not answered for {_CLOSE_S:g} s"
            self.give_up(why)
            raise CacheUnavailable(why) from None
        finally:
            if self._socket is not None:
                self._socket.close()

    async def _finish(self) -> None:
        """Wait until all submitted requests have been answered."""
        while self._queue or self._in_flight:
            await asyncio.sleep(0)  # the queue is sent at the end of this tick
            if self._in_flight or self._asking_why is not None:
                self._landed.clear()
                await self._landed.wait()


def _responses(answer: object) -> Sequence[Any]:
    """Return the response or error of each request of a batch; raise the error of a refused batch."""
    if isinstance(answer, CacheError):
        raise answer
    return checked_response(BatchResponse, answer).responses


def settle(future: asyncio.Future[Message], on_outcome: OnOutcome | None, outcome: Outcome) -> None:
    """Pass the outcome of a request to `on_outcome`, and to the future unless its caller gave up."""
    if on_outcome is not None:
        try:
            on_outcome(outcome)
        except CacheError as error:
            outcome = error
    if future.done():
        return
    if isinstance(outcome, CacheError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
