"""`ZmqPublisher`: numbered payloads on a ZMQ socket, with the latest of them kept for subscribers that missed some."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from raydix.actors.exporters.bounded_log import BoundedLog
from raydix.schemas import CacheError, InvalidRequest
from raydix.schemas.shown import brief

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1_000  # the last payloads leave so long after the close
_TERM_S = 2.0  # then the threads of ZMQ have this time to end
_FRAMES_A_TURN = 100  # a replay sends so many before other tasks get their turn
_MAX_WAITING_BYTES = 256 * 2**20  # payloads that wait for one subscriber
_GATHER_S = 0.02  # subscribers that come so close together get one snapshot
_STUCK_S = 5.0  # a replay ends if its subscriber reads nothing for so long
_ROOM_S = 0.01  # the time between two looks for room in the queue of a replay
_MAX_PORT = 65_535


class ZmqPublisher:
    """Sends payloads as vLLM's publisher does: topic, number (8 bytes, big-endian), payload.

    A subscriber that missed some sends the number of the first to the replay socket, behind an empty frame (a REQ
    socket does so itself). It gets all kept payloads from that number on: an empty frame, topic, number, payload; at
    the end an empty frame, an empty topic, the number -1, an empty payload.

    Numbers begin with the time in microseconds, so that a publisher that was started again goes on with higher ones.

    Attributes:
        endpoint: of the payloads, with the port that was chosen.
        replay_endpoint: of the replay socket; None: there is none.
        next_number: of the next payload.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        connect: bool,
        max_payloads: int,
        max_bytes: int,
        hwm: int,
        max_payload_bytes: int,
        on_demand: Callable[[], Awaitable[None]],
    ) -> None:
        """Open the sockets and serve them. Needs a running loop.

        Args:
            connect: connect to the endpoint instead of binding it.
            max_payloads, max_bytes: kept for replays.
            hwm: payloads that wait for a slow subscriber, or fewer, so that they have at most 256 MB. Beyond it, that
                subscriber misses some, which is logged. ZMQ counts payloads, not bytes.
            max_payload_bytes: of nearly every payload.
            on_demand: publishes everything from the beginning, with `is_base`. Called when a subscriber needs payloads
                that are not kept any more; without a replay socket, once for all subscribers that come together.

        Raises:
            InvalidRequest: an endpoint cannot be used.
        """
        self.next_number = time.time_ns() // 1_000
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._max_payloads = max_payloads
        self._max_bytes = max_bytes
        self._base = self.next_number  # the last payload that needs none before it
        self._on_demand = on_demand
        self._demanding = asyncio.Lock()
        self._asked: dict[bytes, int] = {}  # subscriber -> first number of its next replay
        self._replays: dict[bytes, asyncio.Task[None]] = {}  # subscriber -> running replay
        self._slow = BoundedLog(logger)
        self._refused = BoundedLog(logger)
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        most = max(1, _MAX_WAITING_BYTES // max_payload_bytes)  # libzmq 4.3.5 can crash if it is changed later
        try:
            self._pub = self._open(zmq.XPUB, min(hwm, most))  # a PUB that reports subscriptions
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
            self.endpoint = _attach(self._pub, endpoint, "endpoint", connect)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._router = self._open(zmq.ROUTER, min(max_payloads + 1, most))
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error where there is no room, or no subscriber
                self.replay_endpoint = _attach(self._router, replay_endpoint, "replay_endpoint")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._tasks = [asyncio.create_task(self._serve_subscriptions(replay_endpoint is None))]
        if replay_endpoint is not None:
            self._tasks.append(asyncio.create_task(self._serve_replays()))

    async def publish(self, payload: bytes, is_base: bool = False) -> None:
        """Send a payload to all subscribers, and keep it. Never waits.

        Args:
            is_base: a subscriber that begins with this payload misses nothing.
        """
        number = self.next_number
        self.next_number += 1
        if is_base:
            self._base = number
        self._kept.append((number, payload))
        self._num_bytes += len(payload)
        while len(self._kept) > self._max_payloads or (self._num_bytes > self._max_bytes and len(self._kept) > 1):
            self._num_bytes -= len(self._kept.popleft()[1])
        await self._send((self._topic, number.to_bytes(8, "big"), payload))

    async def close(self) -> None:
        """Stop serving, and close the sockets once the last payloads are sent, or after a second.

        libzmq 4.3.5 sometimes waits without end for the socket of a peer that left just before. The wait goes on in a
        daemon thread then, and a warning is logged.
        """
        tasks = [*self._tasks, *self._replays.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for socket in self._sockets:
            socket.close(linger=_LINGER_MS)
        ending = threading.Thread(target=self._context.term, daemon=True, name="raydix-zmq-term")
        ending.start()
        await asyncio.to_thread(ending.join, _LINGER_MS / 1000 + _TERM_S)
        if ending.is_alive():
            logger.warning("ZMQ has not closed %s; its threads stay until this process ends", self.endpoint)

    def _open(self, kind: int, hwm: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        socket.set_hwm(hwm)
        return socket

    async def _send(self, frames: tuple[bytes, bytes, bytes]) -> None:
        """Send a payload to the subscribers that have room for it."""
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            await self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._slow.warn("a subscriber at %s reads too slowly, and misses batches", self.endpoint)
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            await self._pub.send_multipart(frames)

    # ---------------------------------------------------------------- the tasks

    async def _serve_subscriptions(self, are_demands: bool) -> None:
        while True:
            begins = await self._pub.recv()
            await asyncio.sleep(_GATHER_S)
            begun = [begins]
            with suppress(zmq.Again):
                while True:
                    begun.append(await self._pub.recv(zmq.NOBLOCK))
            if are_demands and any(message[:1] == b"\x01" for message in begun):
                await self._demand()

    async def _serve_replays(self) -> None:
        """Begin replays; of a subscriber that asks again before its replay has ended, the latest follows."""
        while True:
            frames: list[bytes] = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                self._refused.warn("a replay was asked for in a wrong form: %s", brief(frames[1:]))
                continue
            subscriber = frames[0]
            self._asked[subscriber] = int.from_bytes(frames[2], "big")
            if subscriber not in self._replays:
                self._replays[subscriber] = asyncio.create_task(self._replay_to(subscriber))

    async def _replay_to(self, subscriber: bytes) -> None:
        """Send replays to a subscriber while it asks for some."""
        try:
            while (first := self._asked.pop(subscriber, None)) is not None:
                await self._replay(subscriber, first)
        except TimeoutError:
            self._slow.warn("a subscriber at %s does not read its replay, which ends", self.replay_endpoint)
        except zmq.ZMQError as error:  # the subscriber has left
            logger.debug("a replay ended: %s", error)
        finally:
            self._asked.pop(subscriber, None)
            del self._replays[subscriber]

    async def _replay(self, subscriber: bytes, first: int) -> None:
        async with self._demanding:
            oldest = self._oldest()
            if first < oldest and self._base < oldest:
                await self._demand()
        end, number = self.next_number, first
        while (number := max(number, self._oldest())) < end:
            payload = self._kept[number - self._oldest()][1]
            await self._send_replay((subscriber, b"", self._topic, number.to_bytes(8, "big"), payload))
            number += 1
            if number % _FRAMES_A_TURN == 0:
                await asyncio.sleep(0)
        await self._send_replay((subscriber, b"", b"", END_OF_REPLAY, b""))

    async def _send_replay(self, frames: tuple[bytes, ...]) -> None:
        """Send a part of a replay as soon as the subscriber's queue has room.

        Raises:
            TimeoutError: it has read nothing for five seconds.
            ZMQError: the subscriber is gone.
        """
        async with asyncio.timeout(_STUCK_S):
            while True:
                try:
                    await self._router.send_multipart(frames, zmq.NOBLOCK)
                    return
                except zmq.Again:
                    await asyncio.sleep(_ROOM_S)

    def _oldest(self) -> int:
        """Return the number of the oldest payload that is kept."""
        return self._kept[0][0] if self._kept else self.next_number

    async def _demand(self) -> None:
        try:
            await self._on_demand()
        except CacheError as error:
            logger.warning("a subscriber needs all events, but the cache does not give them: %s", error)


def _attach(socket: zmq.asyncio.Socket, endpoint: str, argument: str, connect: bool = False) -> str:
    """Bind or connect a socket; return its endpoint, with the port that was chosen."""
    try:
        _check_port(endpoint)
        if connect:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except (zmq.ZMQError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{argument} must be a free ZMQ address, such as tcp://127.0.0.1:5557, not {brief(endpoint)}: {error}"
        ) from None
    return str(socket.get_string(zmq.LAST_ENDPOINT))


def _check_port(endpoint: Any) -> None:
    """Raise an error if the address is no text, or its TCP port is too high: ZMQ would take another one."""
    if not isinstance(endpoint, str):
        raise TypeError("it must be a text")
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp:") and port.isdecimal() and int(port) > _MAX_PORT:
        raise ValueError(f"the port must be at most {_MAX_PORT}")
