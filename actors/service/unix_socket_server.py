"""`UnixSocketServer`: the cache's end of the Unix sockets of clients on the same machine."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from raydix.actors.service.cache_service import CacheService
from raydix.actors.transport import batch_codec
from raydix.actors.transport.error_map import to_cache_error
from raydix.actors.transport.unix_socket import (
    MAX_FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    FramedProtocol,
    new_buffer,
    unix_sockets_are_enabled,
)
from raydix.actors.transport.validation import checked_message
from raydix.schemas import Batch, BatchResponse, CacheError, ConfigMismatch
from raydix.schemas.protocol import check_handshake, packed_handshake, read_handshake

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # clients that connect while the loop is busy; the kernel's net.core.somaxconn bounds it, too


class UnixSocketServer:
    """Listens on the loop of a cache's actor. A batch is executed in the tick in which it arrives.

    Args:
        service: the cache.
    """

    def __init__(self, service: CacheService) -> None:
        self._service = service
        self._listening: asyncio.Task[str | None] | None = None
        self._server: asyncio.AbstractServer | None = None
        self._buffer = new_buffer()

    async def address(self) -> str | None:
        """Return the address, and listen from the first call on; None: clients have to call through Ray."""
        if self._listening is None:
            self._listening = asyncio.get_running_loop().create_task(self._listen())
        return await asyncio.shield(self._listening)

    async def _listen(self) -> str | None:
        if not unix_sockets_are_enabled():
            return None
        address = f"\0raydix-{self._service.epoch}"  # the kernel forgets it with this process
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                self._connection, address, backlog=_BACKLOG
            )
        except OSError as error:
            logger.warning("clients on this machine have to call through Ray: %s", error)
            return None
        return address

    def _connection(self) -> asyncio.BaseProtocol:
        return _Connection(self._service, self._buffer)

    def close(self) -> None:
        """Take no further clients. The others' batches are answered that the cache has been shut down."""
        if self._server is not None:
            self._server.close()


class _Connection(FramedProtocol):
    """One client. In each turn of the loop one of its frames is executed, so that others are served between.

    The first frame is the client's handshake. A client of another protocol gets `ConfigMismatch` for each frame.
    """

    def __init__(self, service: CacheService, shared: memoryview) -> None:
        super().__init__(shared, MAX_FIRST_FRAME_BYTES)
        self._service = service
        self._is_admitted = False  # the client speaks this protocol
        self._refusal: ConfigMismatch | None = None  # the client speaks another protocol
        self._waiting: deque[tuple[int, bytes, float]] = deque()  # frames that came with others in one read
        self._had_turn = False
        self._next_turn: asyncio.Handle | None = None
        self._client_reads = True

    def buffer_updated(self, nbytes: int) -> None:
        """Execute the first frame that is whole now, and each other one in a later turn."""
        self._had_turn = bool(self._waiting)
        super().buffer_updated(nbytes)
        if self._waiting and self.is_open:
            self.pause_reading()
            self._go_on()

    def frame_received(self, number: int, payload: memoryview) -> None:
        """Execute a batch, or queue it for a later turn."""
        if self._had_turn:
            self._waiting.append((number, bytes(payload), self._service.clock()))
        else:
            self._had_turn = True
            self._execute(number, payload, self._service.clock())

    def _go_on(self) -> None:
        """Execute the next frame that waits in the next turn; read on once there is none."""
        if not self._client_reads:
            return
        if self._waiting and self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._execute_next)
        elif not self._waiting:
            self.resume_reading()

    def _execute_next(self) -> None:
        self._next_turn = None
        if self._client_reads:
            self._execute(*self._waiting.popleft())
            self._go_on()

    def _execute(self, number: int, payload: bytes | memoryview, arrived_at: float) -> None:
        if not self._is_admitted:
            self._compare_versions(number, payload)
            return
        answer: BatchResponse | CacheError
        try:
            batch = checked_message(Batch, batch_codec.unpack(payload))
            answer = self._service.execute(batch.session_id, batch.epoch, batch.requests, arrived_at)
        except Exception as error:
            answer = to_cache_error(error)
        self._answer(number, answer)

    def _compare_versions(self, number: int, payload: bytes | memoryview) -> None:
        """Answer the first frame with this cache's handshake; refuse each frame of a client of another protocol."""
        if self._refusal is None:
            try:
                check_handshake(payload, "client")
                self._is_admitted, self.max_frame_bytes = True, MAX_FRAME_BYTES
            except ConfigMismatch as error:
                self._refusal = error
            if read_handshake(payload) is not None:
                self.send_frame(number, packed_handshake())
                return
        assert self._refusal is not None
        self._answer(number, self._refusal)  # clients of protocol 0 read pickled errors alone

    def _answer(self, number: int, answer: BatchResponse | CacheError) -> None:
        if self.is_open:
            self.send_frame(number, batch_codec.pack(answer))

    def pause_writing(self) -> None:
        """Take no more batches until the client reads its answers."""
        self._client_reads = False
        self.pause_reading()

    def resume_writing(self) -> None:
        """Go on: the client reads its answers."""
        self._client_reads = True
        self._go_on()
