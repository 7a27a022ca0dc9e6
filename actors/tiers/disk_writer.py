"""`DiskWriter`: the threads that copy pages to buffers, that write them to a disk, and that keep its index."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from raydix.actors.tiers.copier import WriteCap
from raydix.actors.tiers.disk_errors import DiskError
from raydix.actors.tiers.disk_store import DiskStore
from raydix.actors.tiers.record_file import Rows, aligned_bytes, stride_of
from raydix.actors.tiers.record_sums import record_sums
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import CHUNK_BYTES, KINDS, Kind, PageRecords
from raydix.cache_core.tree.packed_slots import Starts

logger = logging.getLogger(__name__)

BUFFER_BYTES = 32 * 2**20  # size of each of the two buffers


class Records(NamedTuple):
    """Records of one kind to write.

    Attributes:
        starts: their first slots in the pool.
        rows: their rows, in the same order; the sums are filled in.
    """

    starts: Starts
    rows: Sequence[IndexRow]


class Written(NamedTuple):
    """The end of a write.

    Attributes:
        rows: that the index has now; none if the write was cancelled or has failed, or if their space was deleted.
        error: None: it has not failed.
    """

    rows: list[IndexRow]
    error: DiskError | None = None


class Done(NamedTuple):
    """The end of work on the index: its result, or its error."""

    result: Any = None
    error: DiskError | None = None


@dataclass(eq=False)
class Write:
    """One write of a `DiskWriter`.

    Attributes:
        records: by kind.
        gathered: called on the event loop when the pages were copied, or will not be: they may be unlocked.
        free: called on the event loop when the buffer is not needed any more.
        done: called on the event loop when the write has ended.
        source: the pool of the pages.
        is_cancelled: it ends before the next chunk is copied, if not all are.
    """

    records: Mapping[Kind, Records]
    gathered: Callable[[], object]
    free: Callable[[], object]
    done: Callable[[Written], object]
    source: PageRecords
    is_cancelled: bool = False
    buffer: Rows | None = None
    rows: list[IndexRow] = field(default_factory=list)
    error: DiskError | None = None  # of the records, which have no rows then


class _Work(NamedTuple):
    """Work on the store, in the thread of the index."""

    task: Callable[[DiskStore], Any]
    done: Callable[[Done], object]


class DiskWriter:
    """Writes pages to a disk, and works on its index, in order, with three threads.

    The first one copies the pages of a write to one of two buffers, and sums them. From then on no page of the pool is
    needed, so none is locked while the disk is written. The second one writes the records, which frees the buffer, and
    the third one commits their rows.

    All methods are called on the event loop, and so are the callbacks.

    Args:
        open_store: opens the store, in the thread of the index.
        opened: called when it is open, or with the error. After an error, the writer does nothing.
        pool: of the first tier. All tiers above the disk have records of its sizes.
        write_mib_s: MiB of writes a second; None: without a limit.
        buffer_bytes: of each buffer.
        clock: seconds, for the limit.

    Attributes:
        buffer_bytes: that the records of a write may take, with their padding.
        on_free: called when a buffer is free again.
    """

    def __init__(
        self,
        open_store: Callable[[], DiskStore],
        opened: Callable[[DiskStore | Exception], object],
        pool: KVPool | RecordPool,
        *,
        write_mib_s: float | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.buffer_bytes = buffer_bytes
        self.on_free: Callable[[], object] = lambda: None
        self._cap, self._clock = WriteCap(write_mib_s), clock
        self._free = deque(aligned_bytes(buffer_bytes) for _ in range(2))
        self._writes: set[Write] = set()
        self._is_closed = False
        self._threads = _Threads(PageRecords(pool), asyncio.get_running_loop())
        self._running: list[threading.Thread] = []
        self._start(open_store, opened)
        weakref.finalize(self, self._threads.stop)

    def _start(self, open_store: Callable[[], DiskStore], opened: Callable[[DiskStore | Exception], object]) -> None:
        """Start the threads."""
        names = ("raydix-disk-copier", "raydix-disk-writer", "raydix-disk-index")
        targets: tuple[Callable[[], None], ...] = (
            self._threads.copy,
            self._threads.write,
            lambda threads=self._threads: threads.commit(open_store, opened),  # type: ignore[misc]
        )
        self._running = [
            threading.Thread(target=target, name=name, daemon=True) for target, name in zip(targets, names, strict=True)
        ]
        for thread in self._running:
            thread.start()

    @property
    def may_write(self) -> bool:
        """Whether a write may begin now: a buffer is free, and the limit allows it."""
        return bool(self._free) and not self._is_closed and self.wait_s <= 0

    @property
    def wait_s(self) -> float:
        """The seconds until the limit allows a write; 0 or less: it does now."""
        return self._cap.wait_s(self._clock())

    def end_limit(self) -> None:
        """Write without a limit from now on."""
        self._cap = WriteCap(None)

    def write(
        self,
        records: Mapping[Kind, Records],
        gathered: Callable[[], object],
        done: Callable[[Written], object],
        source: PageRecords | None = None,
    ) -> Write:
        """Write records and their rows. `may_write` must be true.

        Args:
            records: by kind. The pages must be locked until `gathered` is called, and the records private until `done`.
            gathered, done: as of `Write`.
            source: the pool of the pages; None: that of the first tier.

        Raises:
            ValueError: the records take more than a buffer.
        """
        num_bytes = self._threads.num_bytes(records)
        if num_bytes > self.buffer_bytes:
            raise ValueError(f"records must take {self.buffer_bytes:,} bytes at most, not {num_bytes:,}")
        self._cap.charge(num_bytes, self._clock())

        def free() -> None:
            assert write.buffer is not None
            self._free.append(write.buffer)
            write.buffer = None
            self.on_free()

        def end(written: Written) -> None:
            self._writes.discard(write)
            done(written)

        write = Write(records, gathered, free, end, source or self._threads.pool, buffer=self._free.popleft())
        self._writes.add(write)
        self._threads.to_copy.put(write)
        return write

    def cancel(self, write: Write) -> None:
        """End a write before the next chunk is copied; `gathered` and `done` are called.

        A write of which all pages were copied goes on: it locks none.
        """
        write.is_cancelled = True

    def submit(self, task: Callable[[DiskStore], Any], done: Callable[[Done], object]) -> None:
        """Do work on the store in the thread of the index, behind all work before and the writes that are copied."""
        if self._is_closed:
            asyncio.get_running_loop().call_soon(done, Done(None, DiskError("the disk is closed")))
            return
        self._threads.to_write.put(_Work(task, done))

    def close(self, timeout_s: float | None = None) -> bool:
        """End writes of which pages are still to be copied, do all other work, and close the store. It waits for that.

        The callbacks are scheduled on the event loop, so they run after this call.

        Args:
            timeout_s: for which it waits, such as for a disk that does not answer; None: without a limit.

        Returns:
            Whether all of it was done. If not, the threads go on, and end with the process at the latest.
        """
        self._is_closed = True
        for write in self._writes:
            write.is_cancelled = True
        self._threads.stop()
        ends_at = None if timeout_s is None else monotonic() + timeout_s
        for thread in self._running:
            thread.join(None if ends_at is None else max(0.0, ends_at - monotonic()))
        return not any(thread.is_alive() for thread in self._running)


class _Threads:
    """The work of the threads. They know no `DiskWriter`, so that one that is dropped without being closed ends."""

    def __init__(self, pool: PageRecords, loop: asyncio.AbstractEventLoop) -> None:
        self.to_copy: SimpleQueue[Write | None] = SimpleQueue()
        self.to_write: SimpleQueue[Write | _Work | None] = SimpleQueue()
        self.to_commit: SimpleQueue[Write | _Work | None] = SimpleQueue()
        self.opened: SimpleQueue[DiskStore | None] = SimpleQueue()  # the store, once; None: there is none
        self.pool = pool
        self._loop = loop

    def stop(self) -> None:
        """Let the threads end behind what was asked for so far."""
        self.to_copy.put(None)

    def num_bytes(self, records: Mapping[Kind, Records]) -> int:
        """Return the bytes that records take in a buffer."""
        return sum(len(part.rows) * stride_of(self.pool.num_bytes(kind)) for kind, part in records.items())

    # ---------------------------------------------------------------- the copier

    def copy(self) -> None:
        """Copy the pages of each write to its buffer, and pass it on."""
        while (write := self.to_copy.get()) is not None:
            self.copy_one(write)
            del write  # the thread keeps no buffer while it waits
        self.to_write.put(None)

    def copy_one(self, write: Write) -> None:
        """Copy the pages of a write to its buffer, and pass it on."""
        error: DiskError | None = None
        try:
            is_whole = self._gather(write)
        except Exception as failure:  # reported to the caller; the thread goes on with others
            logger.exception("the pages of a write could not be copied")
            is_whole, error = False, DiskError(f"copying failed: {type(failure).__name__}: {failure}")
        self._post(write.gathered)
        if is_whole:
            self.to_write.put(write)
        else:
            self._post(write.free)
            self._post(write.done, Written([], error))

    def _gather(self, write: Write) -> bool:
        """Copy pages to the buffer, and sum them; return False if the write is cancelled."""
        for kind, rows in self._parts(write):
            part, record_bytes = write.records[kind], self.pool.num_bytes(kind)
            step = max(1, CHUNK_BYTES // rows.shape[1])
            for start in range(0, len(part.rows), step):
                if write.is_cancelled:
                    return False
                stop = start + step
                records = rows[start:stop, :record_bytes]
                write.source.gather(part.starts[start:stop], torch.from_numpy(records), kind)
                some = part.rows[start:stop]
                digests = np.frombuffer(b"".join([row.digest for row in some]), np.uint8).reshape(len(some), -1)
                sums = record_sums(records, digests, kind)
                write.rows += [row._replace(record_sum=bytes(found)) for row, found in zip(some, sums, strict=True)]
        return not write.is_cancelled

    def _parts(self, write: Write) -> list[tuple[Kind, Rows]]:
        """Return the part of the buffer for each kind."""
        assert write.buffer is not None
        parts: list[tuple[Kind, Rows]] = []
        at = 0
        for kind in KINDS:
            if kind in write.records and (number := len(write.records[kind].rows)):
                stride = stride_of(self.pool.num_bytes(kind))
                parts.append((kind, write.buffer[at : at + number * stride].reshape(number, stride)))
                at += number * stride
        return parts

    # ---------------------------------------------------------------- the writer

    def write(self) -> None:
        """Write the records of each write, and pass all on to the index, in order."""
        store = self.opened.get()
        while (item := self.to_write.get()) is not None:
            self.write_one(store, item)
            del item  # the thread keeps no buffer while it waits
        self.to_commit.put(None)

    def write_one(self, store: DiskStore | None, item: Write | _Work) -> None:
        """Write the records of a write, if there is a store, and pass it or other work on to the index."""
        if isinstance(item, Write):
            if store is not None:
                self._write(store, item)
            self._post(item.free)
        self.to_commit.put(item)

    def _write(self, store: DiskStore, write: Write) -> None:
        try:
            for kind, rows in self._parts(write):
                numbers = np.array([row.record for row in write.records[kind].rows], np.int64)
                store.files[kind].write(numbers, rows)
            store.note(write.rows)
        except DiskError as error:
            write.error = error
        except Exception as failure:
            logger.exception("a write failed")
            write.error = DiskError(f"writing failed: {type(failure).__name__}: {failure}")

    # ---------------------------------------------------------------- the index

    def commit(self, open_store: Callable[[], DiskStore], opened: Callable[[DiskStore | Exception], object]) -> None:
        """Open the store, commit the rows of writes and do all work in order, and close the store."""
        try:
            store = open_store()
        except Exception as error:  # reported to the caller
            self.opened.put(None)
            self._post(opened, error)
            self._refuse(error)
            return
        self.opened.put(store)
        self._post(opened, store)
        try:
            while (item := self.to_commit.get()) is not None:
                self.commit_one(store, item)
                del item
        finally:
            try:
                store.close()
            except DiskError:
                logger.exception("the index of a disk could not be closed")

    def commit_one(self, store: DiskStore, item: Write | _Work) -> None:
        """Commit the rows of a write, or do other work, and report its end."""
        if isinstance(item, Write):
            self._post(item.done, _committed(store, item))
        else:
            self._post(item.done, _done(store, item.task))

    def _refuse(self, error: Exception) -> None:
        """Answer all requests with an error: there is no store."""
        refusal = DiskError(f"the disk is not open: {error}")
        while (item := self.to_commit.get()) is not None:
            self._post(item.done, Written([], refusal) if isinstance(item, Write) else Done(None, refusal))

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed
            logger.exception("the end of work on a disk could not be reported")


def _committed(store: DiskStore, write: Write) -> Written:
    """Commit the rows of a write."""
    if write.error is not None:
        return Written([], write.error)
    done = _done(store, lambda store: store.index.commit(write.rows))
    return Written(done.result or [], done.error)


def _done(store: DiskStore, task: Callable[[DiskStore], Any]) -> Done:
    try:
        return Done(task(store))
    except DiskError as error:
        return Done(None, error)
    except Exception as failure:
        logger.exception("work on the index of a disk failed")
        return Done(None, DiskError(f"work on the index failed: {type(failure).__name__}: {failure}"))
