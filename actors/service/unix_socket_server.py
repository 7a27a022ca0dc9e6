"""`UnixSocketServer`: the cache's end of the channels of its clients on the same machine."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from raydix.actors.service.cache_service import CacheService
from raydix.actors.transport import batch_codec
from raydix.actors.transport.error_map import to_cache_error
from raydix.actors.transport.unix_socket import MAX_FRAME_BYTES, FramedProtocol, new_buffer, unix_sockets_are_enabled
from raydix.actors.transport.validation import checked_message
from raydix.schemas import Batch, BatchResponse, CacheError

logger = logging.getLogger(__name__)

_BACKLOG = 4096  # clients that connect while the loop is busy; the kernel's net.core.somaxconn bounds it, too


class UnixSocketServer:
    """Listens on the loop of a cache's actor. What comes by a channel is executed in the tick in which it comes.

    Args:
        service: the cache.
    """

    def __init__(self, service: CacheService) -> None:
        self._service = service
        self._listening: asyncio.Task[str | None] | None = None
        self._server: asyncio.AbstractServer | None = None
        self._buffer = new_buffer()

    async def address(self) -> str | None:
        """Where it listens, from the first call on; None: it does not, and clients call through Ray."""
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
        """Take no further clients. Those that are there are answered that the cache has been shut down."""
        if self._server is not None:
            self._server.close()


class _Connection(FramedProtocol):
    """One client. In each turn of the loop one of its frames is executed, so that others are served between."""

    def __init__(self, service: CacheService, shared: memoryview) -> None:
        super().__init__(shared, MAX_FRAME_BYTES)
        self._service = service
        self._late: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[int, bytes, float]] = deque()  # frames that came with others in one read
        self._had_turn = False
        self._next_turn: asyncio.Handle | None = None
        self._is_heard = True  # the client reads its answers

    def buffer_updated(self, nbytes: int) -> None:
        """Execute the first frame that is whole now, and each other one in a later turn."""
        self._had_turn = bool(self._waiting)
        super().buffer_updated(nbytes)
        if self._waiting and not self._transport.is_closing():
            self._transport.pause_reading()
            self._go_on()

    def frame_received(self, number: int, payload: memoryview) -> None:
        """Execute a batch, once those before it have been, and answer."""
        if self._had_turn:
            self._waiting.append((number, bytes(payload), self._service.clock()))
        else:
            self._had_turn = True
            self._execute(number, payload, self._service.clock())

    def _go_on(self) -> None:
        """Execute the next frame that waits in the next turn; read on once there is none."""
        if not self._is_heard:
            return
        if self._waiting and self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._execute_next)
        elif not self._waiting and not self._transport.is_closing():
            self._transport.resume_reading()

    def _execute_next(self) -> None:
        self._next_turn = None
        if self._is_heard:
            self._execute(*self._waiting.popleft())
            self._go_on()

    def _execute(self, number: int, payload: bytes | memoryview, arrived_at: float) -> None:
        try:
            batch = checked_message(Batch, batch_codec.unpack(payload))
            response = self._service.execute_if_due(batch, arrived_at)
        except Exception as error:
            self._answer(number, to_cache_error(error))
            return
        if response is not None:
            self._answer(number, response)
            return
        task = asyncio.get_running_loop().create_task(self._execute_late(number, batch, arrived_at))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _execute_late(self, number: int, batch: Batch, arrived_at: float) -> None:
        """One that has overtaken the batch before it, which came as a Ray call."""
        try:
            self._answer(number, await self._service.execute_in_turn(batch, arrived_at))
        except Exception as error:
            self._answer(number, to_cache_error(error))

    def _answer(self, number: int, answer: BatchResponse | CacheError) -> None:
        if not self._transport.is_closing():  # nobody waits on one that is
            self.send_frame(number, batch_codec.pack(answer))

    def pause_writing(self) -> None:
        """The client does not read its answers: take no more of its batches until it does."""
        self._is_heard = False
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """It does."""
        self._is_heard = True
        self._go_on()
