"""A channel to a cache on the same machine: a Unix socket that carries batches and their answers.

Ray places the cache, finds it and notices its death; a call costs it a few hundred microseconds whatever travels in it.
Where client and cache share a machine, their batches go straight from one to the other for a tenth of that. Where they
do not, or once the channel has broken, they go as Ray calls: the same batches, by the same numbers.

What travels is pickled, so both ends speak only to processes of their own user, as the kernel tells. The socket has no
name in any folder: nothing is left behind however its processes end.
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

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 2**20  # of a batch: larger ones go as Ray calls; answers may have any size
SWITCH = "RAYDIX_CHANNEL"  # "0" in the environment of a client or a cache: Ray calls only
_HEADER = struct.Struct("<QI")  # the number of a batch, and the bytes that follow
_LONG_BYTES = 65_536  # of a payload: to copy it takes longer than to send its header apart
_BUFFER_BYTES = 262_144
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group

Answer = bytes | memoryview | BaseException  # read it before returning: a memoryview is of a buffer that goes on
Tell = Callable[[Answer], None]


def unix_sockets_are_enabled() -> bool:
    """Whether this process may use channels: there are such sockets on Linux only."""
    return sys.platform == "linux" and os.environ.get(SWITCH, "1") != "0"


def new_buffer() -> memoryview:
    """What the connections of one loop can share."""
    return np.empty(_BUFFER_BYTES, np.uint8).data


class FramedProtocol(asyncio.BufferedProtocol, ABC):
    """Numbered frames of bytes over one connection, between processes of one user.

    What comes is read to where it is looked at: most of it to a buffer that connections of one loop may share, as
    it is looked at before anything else is read; a frame that has begun, to one of its own size.

    Args:
        shared: that buffer.
        max_frame_bytes: of what comes; None: whoever sends is trusted.
    """

    def __init__(self, shared: memoryview, max_frame_bytes: int | None = None) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._transport: asyncio.Transport
        self._shared = self._buffer = shared
        self._filled = 0  # bytes of `_buffer`: the beginning of a frame

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse other users' processes."""
        self._transport = cast(asyncio.Transport, transport)  # of whatever loop: uvloop's are no subclass of it
        peer: socket.socket = transport.get_extra_info("socket")
        told = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(told)
        if user != os.geteuid():
            logger.warning("a process of user %d was refused: this one belongs to user %d", user, os.geteuid())
            self._transport.abort()

    def send_frame(self, number: int, payload: bytes) -> None:
        """Send, or have it sent as soon as the other end takes it."""
        header = _HEADER.pack(number, len(payload))
        if len(payload) < _LONG_BYTES:
            self._transport.write(header + payload)
        else:  # of a view, what is not taken at once is copied once
            self._transport.write(header)
            self._transport.write(memoryview(payload))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where to read to."""
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on every frame that is whole."""
        if self._transport.is_closing():
            return
        self._filled += nbytes
        view, at, needed = self._buffer[: self._filled], 0, _HEADER.size
        while len(view) - at >= _HEADER.size:
            number, size = _HEADER.unpack_from(view, at)
            if self._max_frame_bytes is not None and size > self._max_frame_bytes:
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
        """Read the rest of a frame that has begun, of so many bytes as far as known."""
        if begun and (self._buffer is self._shared or len(self._buffer) < num_bytes):
            self._buffer = np.empty(num_bytes, np.uint8).data  # not touched before it is filled
            self._buffer[: len(begun)] = begun
        elif not begun:
            self._buffer = self._shared
        self._filled = len(begun)

    @abstractmethod
    def frame_received(self, number: int, payload: memoryview) -> None:
        """A frame has come. It must not raise; the payload is valid until it returns."""


class Channel(FramedProtocol):
    """A client's end. Get one by `open`; it lives as long as whoever it was opened for."""

    def __init__(self) -> None:
        super().__init__(new_buffer())
        self._told: dict[int, Tell] = {}  # by the number of the batch that they wait for

    @classmethod
    async def open(cls, address: str | None, holder: object) -> Self | None:
        """A channel to the cache at an address that it gave; None if it cannot be reached so.

        It is closed when `holder` is no more.
        """
        if address is None or not unix_sockets_are_enabled():
            return None
        loop = asyncio.get_running_loop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, address)  # uvloop cannot connect to such an address by itself
            _check_connected(connection)
            transport, channel = await loop.create_unix_connection(cls, sock=connection)
        except BlockingIOError as error:
            connection.close()
            logger.warning("no channel to the cache, calls instead: %s", error)
            return None
        except OSError as error:  # it is on another machine, or behind another wall
            connection.close()
            logger.debug("no channel to the cache, calls instead: %s", error)
            return None
        except BaseException:
            connection.close()
            raise
        weakref.finalize(holder, _close, loop, transport).atexit = False
        return channel

    @property
    def is_open(self) -> bool:
        """Whether it can be sent on."""
        return not self._transport.is_closing()

    def ask(self, number: int, payload: bytes, tell: Tell) -> None:
        """Send a batch; `tell` is called once, in a later tick: with the answer, or with what kept it away."""
        self._told[number] = tell
        self.send_frame(number, payload)

    def frame_received(self, number: int, payload: memoryview) -> None:
        """The answer to a batch."""
        if (tell := self._told.pop(number, None)) is not None:
            tell(payload)

    def connection_lost(self, error: Exception | None) -> None:
        """The cache is gone, or has given up on this client. What was on its way may have been executed or not."""
        why = f": {error}" if error is not None else ""
        told, self._told = self._told, {}
        for tell in told.values():
            tell(CacheUnavailable(f"the cache is dead, restarting, or cannot be reached: its connection broke{why}"))

    def close(self) -> None:
        """Send what waits to be sent, and no more."""
        self._transport.close()

    def abort(self) -> None:
        """Send nothing more, and wait for no answer."""
        self._transport.abort()


def _check_connected(connection: socket.socket) -> None:
    """Raise BlockingIOError unless it is: loops take a queue that is full for a connection that is under way."""
    try:
        connection.getpeername()
    except OSError as error:
        raise BlockingIOError("too many clients connect to it at once") from error


def _close(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Close from whatever thread the collector runs in."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(transport.close)
