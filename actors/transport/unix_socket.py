"""A Unix socket between a client and a cache on the same machine, which carries batches and their answers.

Ray places the cache, finds it and notices its death; a Ray call takes a few hundred microseconds, however short it is.
If client and cache share a machine, all batches of a session go through one socket, for a tenth of that time. If they
do not, all batches go as Ray calls. A socket that breaks ends its session.

The first frame and its answer are the handshakes of `raydix.schemas.protocol`. All later frames are pickled, so both
ends speak only to processes of their own user, which the kernel names. The socket has no name in any folder: the kernel
removes it when its processes end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, cast

import numpy as np

from raydix.schemas import CacheUnavailable
from raydix.schemas.protocol import check_handshake, packed_handshake

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 2**32 - 1  # largest payload
MAX_FIRST_FRAME_BYTES = 64 * 2**20  # the largest that clients of protocol 0 send; a handshake takes a few
SWITCH = "RAYDIX_CHANNEL"  # "0" in the environment of a client or a cache: no sockets, Ray calls only
_HEADER = struct.Struct("<QI")  # the number of a batch, and the bytes that follow; never changes
_HANDSHAKE_NUMBER = 0  # number of its frame; batches count from 1
_LONG_BYTES = 65_536  # payload that takes longer to copy than to send its header apart
_BUFFER_BYTES = 262_144
_CREDENTIALS = struct.Struct("3i")  # a peer's process, user, group

Answer = bytes | memoryview | BaseException  # a memoryview is valid until the callback returns
OnAnswer = Callable[[Answer], None]


def unix_sockets_are_enabled() -> bool:
    """Return whether this process may use Unix sockets: Linux alone has such names for them."""
    return sys.platform == "linux" and os.environ.get(SWITCH, "1") != "0"


def new_buffer() -> memoryview:
    """Return a buffer that the connections of one loop can share."""
    return np.empty(_BUFFER_BYTES, np.uint8).data


class FramedProtocol(asyncio.BufferedProtocol, ABC):
    """Numbered frames of bytes over one connection, between processes of one user.

    Data is read into a buffer that connections of one loop may share, as each handles its data before the loop reads
    more. A frame that has arrived in part gets a buffer of its own size.

    Attributes:
        max_frame_bytes: a longer payload ends the connection.

    Args:
        shared: the buffer that the connections share.
    """

    def __init__(self, shared: memoryview, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._transport: asyncio.Transport
        self._shared = self._buffer = shared
        self._filled = 0  # bytes of `_buffer`: the beginning of a frame

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users' processes."""
        self._transport = cast(asyncio.Transport, transport)  # a duck type: uvloop's are no subclass of it
        peer: socket.socket = transport.get_extra_info("socket")
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            logger.warning("a process of user %d was refused: this one belongs to user %d", user, os.geteuid())
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return not self._transport.is_closing()

    def pause_reading(self) -> None:
        """Read no frames until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read frames again; no effect on a connection that is closed."""
        if self.is_open:
            self._transport.resume_reading()

    def send_frame(self, number: int, payload: bytes) -> None:
        """Send a frame, or queue it until the other end reads."""
        header = _HEADER.pack(number, len(payload))
        if len(payload) < _LONG_BYTES:
            self._transport.write(header + payload)
        else:  # a view: bytes that the kernel does not take now are copied once
            self._transport.write(header)
            self._transport.write(memoryview(payload))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer that the loop reads into."""
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Pass every whole frame to `frame_received`."""
        if self._transport.is_closing():
            return
        self._filled += nbytes
        view, at, needed = self._buffer[: self._filled], 0, _HEADER.size
        while len(view) - at >= _HEADER.size:
            number, size = _HEADER.unpack_from(view, at)
            if size > self.max_frame_bytes:
                logger.error("a frame of %d bytes was refused: that is no frame", size)
                self._transport.abort()
                return
            stop = at + _HEADER.size + size
            if stop > len(view):
                needed = stop - at
                break
            self.frame_received(number, view[at + _HEADER.size : stop])
            at = stop
        self._keep(view[at:], needed)

    def _keep(self, begun: memoryview, num_bytes: int) -> None:
        """Keep the start of an incomplete frame; read on into a buffer of its size, if that is known."""
        if begun and (self._buffer is self._shared or len(self._buffer) < num_bytes):
            self._buffer = np.empty(num_bytes, np.uint8).data  # not touched before it is filled
            self._buffer[: len(begun)] = begun
        elif not begun:
            self._buffer = self._shared
        self._filled = len(begun)

    @abstractmethod
    def frame_received(self, number: int, payload: memoryview) -> None:
        """A frame has come. It must not raise; the payload is valid until it returns."""


class UnixSocketClient(FramedProtocol):
    """A client's end of the socket. Make one with `open`; it lives as long as the object that it is opened for."""

    def __init__(self) -> None:
        super().__init__(new_buffer())
        self._on_answer: dict[int, OnAnswer] = {}  # number of the batch -> callback

    @classmethod
    async def open(cls, address: str | None, holder: object) -> Self | None:
        """Connect to the cache at an address that it gave, and compare versions.

        Return None if the cache cannot be reached by a socket. The socket is closed when `holder` is collected.

        Raises:
            ConfigMismatch: the cache speaks another protocol.
        """
        if address is None or not unix_sockets_are_enabled():
            return None
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, address)  # uvloop cannot connect to such an address by itself
            _check_connected(connection)
            transport, client = await loop.create_unix_connection(cls, sock=connection)
        except BlockingIOError as error:
            connection.close()
            logger.warning("no socket to the cache, Ray calls instead: %s", error)
            return None
        except OSError as error:  # it is on another machine, or in another network namespace
            connection.close()
            logger.debug("no socket to the cache, Ray calls instead: %s", error)
            return None
        except BaseException:
            connection.close()
            raise
        weakref.finalize(holder, _close, loop, transport).atexit = False
        return await client._shake_hands()

    async def _shake_hands(self) -> Self | None:
        answered: asyncio.Future[bytes | BaseException] = asyncio.get_running_loop().create_future()

        def on_answer(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer if isinstance(answer, BaseException) else bytes(answer))

        self.ask(_HANDSHAKE_NUMBER, packed_handshake(), on_answer)
        try:
            answer = await answered
            if isinstance(answer, BaseException):
                logger.warning("no socket to the cache, Ray calls instead: %s", answer)
                return None
            check_handshake(answer, "cache")
        except BaseException:
            self.abort()
            raise
        return self

    def ask(self, number: int, payload: bytes, on_answer: OnAnswer) -> None:
        """Send a batch; `on_answer` is called once, in a later tick: with the answer, or with the error instead."""
        self._on_answer[number] = on_answer
        self.send_frame(number, payload)

    def frame_received(self, number: int, payload: memoryview) -> None:
        """Pass the answer on to the callback of its batch."""
        if (on_answer := self._on_answer.pop(number, None)) is not None:
            on_answer(payload)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all batches without an answer: the cache may have executed them or not."""
        why = f": {error}" if error is not None else ""
        waiting, self._on_answer = self._on_answer, {}
        for on_answer in waiting.values():
            on_answer(
                CacheUnavailable(f"the cache is dead, restarting, or cannot be reached: its connection broke{why}")
            )

    def close(self) -> None:
        """Close the socket after the queued frames have been sent."""
        self._transport.close()

    def abort(self) -> None:
        """Send nothing more, and fail all batches without an answer."""
        self._transport.abort()


def _check_connected(connection: socket.socket) -> None:
    """Raise BlockingIOError unless a socket is connected: loops take a full backlog for a connection under way."""
    try:
        connection.getpeername()
    except OSError as error:
        raise BlockingIOError("too many clients connect to it at the same time") from error


def _close(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Close a transport from the thread that the collector runs in."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(transport.close)
