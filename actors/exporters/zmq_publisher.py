"""`ZmqPublisher`: numbered payloads on a ZMQ socket, with the latest of them kept for subscribers that missed some."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from raydix.schemas import CacheError, InvalidRequest
from raydix.schemas.shown import brief

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 1_000  # after the close, for the last payloads
_TERM_S = 2.0  # after that second, for the threads of ZMQ to end
_FRAMES_A_TURN = 100  # of a replay, before other tasks get their turn


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
        num_replays: answered requests.
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
        on_demand: Callable[[], Awaitable[None]],
    ) -> None:
        """Open the sockets and serve them. Needs a running loop.

        Args:
            connect: connect to the endpoint instead of binding it.
            max_payloads, max_bytes: kept for replays.
            hwm: payloads that wait for a slow subscriber; beyond it, that subscriber misses some.
            on_demand: publishes everything from the beginning, with `is_base`. Called when a subscriber needs payloads
                that are not kept any more; without a replay socket, when a subscriber comes.

        Raises:
            InvalidRequest: an endpoint cannot be used.
        """
        self.next_number = time.time_ns() // 1_000
        self.num_replays = 0
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        self._max_payloads = max_payloads
        self._max_bytes = max_bytes
        self._base = self.next_number  # the last payload that needs none before it
        self._on_demand = on_demand
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        try:
            self._pub = self._open(zmq.XPUB, hwm)  # a PUB that reports subscriptions
            self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
            self.endpoint = _attach(self._pub, endpoint, "endpoint", connect)
            self._tasks = [asyncio.create_task(self._serve_subscriptions(replay_endpoint is None))]
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._router = self._open(zmq.ROUTER, max_payloads + 1)
                self.replay_endpoint = _attach(self._router, replay_endpoint, "replay_endpoint")
                self._tasks.append(asyncio.create_task(self._serve_replays()))
        except BaseException:
            self._context.destroy(linger=0)
            raise

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
        await self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    async def close(self) -> None:
        """Stop serving, and close the sockets once the last payloads are sent, or after a second.

        libzmq 4.3.5 sometimes waits without end for the socket of a peer that left just before. The wait goes on in a
        daemon thread then, and a warning is logged.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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

    # ---------------------------------------------------------------- the tasks

    async def _serve_subscriptions(self, are_demands: bool) -> None:
        while True:
            message: bytes = await self._pub.recv()
            if message[:1] == b"\x01" and are_demands:
                await self._demand()

    async def _serve_replays(self) -> None:
        while True:
            frames: list[bytes] = await self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                logger.warning("a replay was asked for in a wrong form: %s", brief(frames[1:]))
                continue
            await self._replay(frames[0], int.from_bytes(frames[2], "big"))

    async def _replay(self, subscriber: bytes, first: int) -> None:
        oldest = self._kept[0][0] if self._kept else self.next_number
        if first < oldest and self._base < oldest:
            await self._demand()
        kept = [each for each in self._kept if each[0] >= first]
        for place, (number, payload) in enumerate(kept):
            if place % _FRAMES_A_TURN == 0:
                await asyncio.sleep(0)
            await self._router.send_multipart((subscriber, b"", self._topic, number.to_bytes(8, "big"), payload))
        await self._router.send_multipart((subscriber, b"", b"", END_OF_REPLAY, b""))
        self.num_replays += 1

    async def _demand(self) -> None:
        try:
            await self._on_demand()
        except CacheError as error:
            logger.warning("a subscriber needs all events, but the cache does not give them: %s", error)


def _attach(socket: zmq.asyncio.Socket, endpoint: str, argument: str, connect: bool = False) -> str:
    """Bind or connect a socket; return its endpoint, with the port that was chosen."""
    try:
        if connect:
            socket.connect(endpoint)
            return endpoint
        socket.bind(endpoint)
    except (zmq.ZMQError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{argument} must be a free ZMQ address, such as tcp://127.0.0.1:5557, not {brief(endpoint)}: {error}"
        ) from None
    return str(socket.get_string(zmq.LAST_ENDPOINT))
