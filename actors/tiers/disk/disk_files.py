"""`DiskFiles`: the files of a disk tier, opened in a thread, and the work on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_errors import DiskError, IndexDamaged
from raydix.actors.tiers.disk.disk_index import IndexLayout
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core import KVPool, RecordLayout, RecordPool
from raydix.schemas import DiskConfig

logger = logging.getLogger(__name__)

READY, CLOSED = "ready", "closed"


class DiskFiles:
    """The store of a disk tier, and its writer.

    Args:
        config: of the disk.
        name: of the cache: of its folder.
        layout, index_layout: the numbers and sizes of the records, and their format.
        buffer_bytes: of each buffer of the writer.
        first: the store, if it is open already; else None.
        calls: of the operating system.
        clock: seconds.

    Attributes:
        pool: returns the tensors of the first tier; None: they are not ready.
        writer: None if the store is not being opened, and not open.
        store: None before it is open.
        on_error: called with each error of `do`.
        is_closed: nothing is opened any more.
        state: "ready", "opening", "reading", "closed", "locked by pid N" or "failed: ...".
        tasks: that are running.
    """

    def __init__(
        self,
        config: DiskConfig,
        name: str,
        layout: RecordLayout,
        index_layout: IndexLayout,
        buffer_bytes: int,
        pool: Callable[[], KVPool | RecordPool | None],
        first: DiskStore | None,
        calls: FileCalls | None,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.calls = self._first_calls = calls
        self.index_layout = index_layout
        self.buffer_bytes = buffer_bytes
        self.writer: DiskWriter | None = None
        self.store: DiskStore | None = None
        self.on_error: Callable[[Exception], object] = lambda error: None
        self.is_closed = False
        self.state = "opening"
        self.tasks: set[asyncio.Task[None]] = set()
        self._config = config
        self._name = name
        self._layout = layout
        self._first = first
        self._clock = clock

    @property
    def is_ready(self) -> bool:
        """Whether requests can use the disk."""
        return self.state == READY and not self.is_closed

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work in the background until the disk is closed."""
        task = asyncio.get_running_loop().create_task(work, name="raydix-disk")
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def open(self) -> None:
        """Open the files in a thread, unless they are open.

        Raises:
            CacheUnavailable, DiskError: that fails. There is no writer then.
        """
        pool, loop = self.pool(), asyncio.get_running_loop()
        assert pool is not None, "a pool with tensors has them from the start"
        opened: asyncio.Future[DiskStore | Exception] = loop.create_future()
        first = self._take_first()
        open_new = partial(
            DiskStore,
            self._config.path,
            self._name,
            self._layout,
            self.index_layout,
            direct_io=self._config.direct_io,
            is_given_up=lambda: self.is_closed,
            calls=self.calls,
        )

        def open_store() -> DiskStore:
            return open_new() if first is None else first

        self.writer = writer = self.make_writer(open_store, partial(_settle, opened), pool)
        found = await opened
        if isinstance(found, Exception):
            writer.close()
            self.writer = None
            raise found
        self.store = found

    def make_writer(
        self,
        open_store: Callable[[], DiskStore],
        opened: Callable[[DiskStore | Exception], object],
        pool: KVPool | RecordPool,
    ) -> DiskWriter:
        """Return a writer, which `close` closes."""
        limit, buffer_bytes = self._config.write_mib_s, self.buffer_bytes
        return DiskWriter(open_store, opened, pool, write_mib_s=limit, buffer_bytes=buffer_bytes, clock=self._clock)

    def _take_first(self) -> DiskStore | None:
        """Return the store that was open from the start; None from the second call on."""
        store, self._first = self._first, None
        if store is not None and (self.is_closed or self.calls is not self._first_calls):
            store.close()
            return None
        return store

    async def do(self, task: Callable[[DiskStore], Any]) -> Any:
        """Do work on the store in a thread; return its result.

        Raises:
            DiskError: it failed.
        """
        assert self.writer is not None
        done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.writer.submit(task, partial(_settle, done))
        ended = await done
        if ended.error is not None:
            self.on_error(ended.error)
            raise ended.error
        return ended.result

    async def do_surely(self, task: Callable[[DiskStore], Any]) -> Any:
        """Do work until the disk does not fail; return its result.

        Raises:
            IndexDamaged: the index is damaged.
        """
        while True:
            try:
                return await self.do(task)
            except IndexDamaged:
                raise
            except DiskError as error:
                logger.warning("the disk's index could not be read, and is tried again: %s", error)
                await asyncio.sleep(disk_errors.RETRY_S)

    def close(self, timeout_s: float | None) -> bool:
        """Give the folder back behind the work so far; return whether that was done within the time."""
        self.is_closed = True
        self._take_first()
        return self.writer is None or self.writer.close(timeout_s)


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
