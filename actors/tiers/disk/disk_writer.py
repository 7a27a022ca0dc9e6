"""`DiskWriter`: copies pages to buffers, writes them to a disk, and works on its index."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch

from raydix.actors.tiers.copier import WriteCap
from raydix.actors.tiers.disk.checksums import checksums
from raydix.actors.tiers.disk.disk_errors import DiskError
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.record_file import Rows, aligned_bytes, stride_of
from raydix.actors.tiers.job_threads import Ended, JobThreads
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import CHUNK_BYTES, KINDS, Kind, PageRecords
from raydix.cache_core.tree.packed_slots import Starts

logger = logging.getLogger(__name__)

BUFFER_BYTES = 32 * 2**20  # size of each of the two buffers
NUM_THREADS = 5  # two for each of two loads; a write leaves them at least two, and they leave it one


class Records(NamedTuple):
    """Records of one kind to write.

    Attributes:
        starts: their first slots in the pool.
        rows: their rows, in the same order; the sums are filled in.
    """

    starts: Starts
    rows: Sequence[IndexRow]


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
    done: Callable[[Ended], object]
    source: PageRecords
    is_cancelled: bool = False
    buffer: Rows | None = None
    rows: list[IndexRow] = field(default_factory=list)
    error: DiskError | None = None  # of the records, which have no rows then


class _Work(NamedTuple):
    """Work on the store."""

    task: Callable[[DiskStore], Any]
    done: Callable[[Ended], object]


class DiskWriter:
    """Writes pages to a disk, and works on its index, in order, in threads that the loads of the disk share.

    A write has three steps. The first one copies its pages to one of two buffers, and sums them. From then on no page
    of the pool is needed, so none is locked while the disk is written. The second one writes the records, which frees
    the buffer, and the third one commits their rows. One thread at a time does each step, so one write is copied while
    another one is written, and one thread at a time works on the index.

    All methods are called on the event loop, and so are the callbacks.

    Args:
        open_store: opens the store, in a thread.
        opened: called when it is open, or with the error. After an error, the writer does nothing.
        pool: of the first tier. All tiers above the disk have records of its sizes.
        write_mib_s: MiB of writes a second; None: without a limit.
        buffer_bytes: of each buffer.
        clock: seconds, for the limit.

    Attributes:
        threads: of the disk. Its loads use them, too.
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
        self.threads = self._make_threads()
        self._steps = _Steps(PageRecords(pool), asyncio.get_running_loop(), self.threads.changed, open_store, opened)
        self.threads.add(self._steps)

    def _make_threads(self) -> JobThreads:
        return JobThreads("raydix-disk", NUM_THREADS)

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
        done: Callable[[Ended], object],
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
        num_bytes = self._steps.num_bytes(records)
        if num_bytes > self.buffer_bytes:
            raise ValueError(f"records must take {self.buffer_bytes:,} bytes at most, not {num_bytes:,}")
        self._cap.charge(num_bytes, self._clock())

        def free() -> None:
            assert write.buffer is not None
            self._free.append(write.buffer)
            write.buffer = None
            self.on_free()

        def end(written: Ended) -> None:
            self._writes.discard(write)
            done(written)

        write = Write(records, gathered, free, end, source or self._steps.pool, buffer=self._free.popleft())
        self._writes.add(write)
        self._steps.add(self._steps.to_copy, write)
        return write

    def cancel(self, write: Write) -> None:
        """End a write, at once or before the next chunk is copied; `gathered` and `done` are called later.

        A write of which all pages were copied goes on: it locks none.
        """
        write.is_cancelled = True
        self._steps.drop(write)

    def submit(self, task: Callable[[DiskStore], Any], done: Callable[[Ended], object]) -> None:
        """Do work on the store in a thread, behind all work before and the writes that are copied."""
        if self._is_closed:
            asyncio.get_running_loop().call_soon(done, Ended(error=DiskError("the disk is closed")))
            return
        self._steps.add(self._steps.to_write, _Work(task, done))

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
        self._steps.stop()
        has_ended = self._steps.wait(timeout_s)
        self.threads.close(0.0)
        return has_ended


class _Steps:
    """The writes and the other work, by the next step of each. They know no `DiskWriter`, so that one can be dropped.

    Attributes:
        to_copy, to_write, to_commit: what waits for a step.
        store: that is open.
    """

    def __init__(
        self,
        pool: PageRecords,
        loop: asyncio.AbstractEventLoop,
        changed: threading.Condition,
        open_store: Callable[[], DiskStore],
        opened: Callable[[DiskStore | Exception], object],
    ) -> None:
        self.to_copy: deque[Write] = deque()
        self.to_write: deque[Write | _Work] = deque()
        self.to_commit: deque[Write | _Work] = deque()
        self.store: DiskStore | None = None
        self.pool = pool
        self._loop = loop
        self._changed = changed
        self._to_open: tuple[Callable[[], DiskStore], Callable[[DiskStore | Exception], object]] | None
        self._to_open = open_store, opened
        self._refusal: DiskError | None = None  # the store could not be opened
        self._is_stopped = False
        self._steps: dict[str, tuple[deque[Any], Callable[[Any], None]]] = {
            "commit": (self.to_commit, self.commit_one),
            "write": (self.to_write, self.write_one),
            "copy": (self.to_copy, self.copy_one),
        }
        self._busy: set[str] = set()  # steps in which a thread is

    # ---------------------------------------------------------------- jobs

    def add(self, queue: deque[Any], item: Write | _Work) -> None:
        """Let an item wait for a step."""
        with self._changed:
            queue.append(item)
            self._changed.notify()

    def drop(self, write: Write) -> None:
        """End a cancelled write if it has not begun."""
        with self._changed:
            if write not in self.to_copy:
                return
            self.to_copy.remove(write)
        self._post(write.gathered)
        self._end_uncopied(write, None)

    def take(self) -> Callable[[], object] | None:
        """Return a step that may begin now."""
        if self._to_open is not None:
            opening, self._to_open = self._to_open, None
            self._busy |= {"commit", "write"}
            return partial(self._do, ("commit", "write"), partial(self.open_store, *opening))
        for name, (queue, work) in self._steps.items():
            if queue and name not in self._busy:
                self._busy.add(name)
                return partial(self._do, (name,), partial(work, queue.popleft()))
        if self._is_stopped and self._is_idle and self.store is not None:
            store, self.store = self.store, None
            self._busy.add("close")
            return partial(self._do, ("close",), partial(_close, store))
        return None

    def wait_s(self) -> float | None:
        """Return None: no step waits for a time."""
        return None

    def _do(self, names: tuple[str, ...], work: Callable[[], object]) -> None:
        try:
            work()
        finally:
            del work
            with self._changed:
                self._busy.difference_update(names)
                if self._is_stopped or len(names) > 1:  # The next one of a step is this thread's.
                    self._changed.notify_all()

    @property
    def _is_idle(self) -> bool:
        return not (self._to_open or self._busy or self.to_copy or self.to_write or self.to_commit)

    def stop(self) -> None:
        """Close the store behind what was asked for so far."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the store is closed; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_idle and self.store is None, timeout_s)

    def num_bytes(self, records: Mapping[Kind, Records]) -> int:
        """Return the bytes that records take in a buffer."""
        return sum(len(part.rows) * stride_of(self.pool.num_bytes(kind)) for kind, part in records.items())

    # ---------------------------------------------------------------- copying

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
            self.add(self.to_write, write)
        else:
            self._end_uncopied(write, error)

    def _end_uncopied(self, write: Write, error: DiskError | None) -> None:
        self._post(write.free)
        self._post(write.done, Ended(error=error, result=[]))

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
                sums = checksums(records, digests, kind)
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

    # ---------------------------------------------------------------- writing

    def write_one(self, item: Write | _Work) -> None:
        """Write the records of a write, if there is a store, and pass it or other work on to the index."""
        if isinstance(item, Write):
            if self.store is not None:
                self._write(self.store, item)
            self._post(item.free)
        self.add(self.to_commit, item)

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

    def open_store(
        self, open_store: Callable[[], DiskStore], opened: Callable[[DiskStore | Exception], object]
    ) -> None:
        """Open the store; if that fails, refuse all work."""
        try:
            self.store = open_store()
        except Exception as error:  # reported to the caller
            self._refusal = DiskError(f"the disk is not open: {error}")
            self._post(opened, error)
            return
        self._post(opened, self.store)

    def commit_one(self, item: Write | _Work) -> None:
        """Commit the rows of a write, or do other work, and report its end."""
        if self.store is None:
            self._post(item.done, Ended(error=self._refusal, result=[] if isinstance(item, Write) else None))
        elif isinstance(item, Write):
            self._post(item.done, _committed(self.store, item))
        else:
            self._post(item.done, _done(self.store, item.task))

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed
            logger.exception("the end of work on a disk could not be reported")


def _committed(store: DiskStore, write: Write) -> Ended:
    """Commit the rows of a write."""
    if write.error is not None:
        return Ended(error=write.error, result=[])
    done = _done(store, lambda store: store.index.commit(write.rows))
    return done._replace(result=done.result or [])


def _done(store: DiskStore, task: Callable[[DiskStore], Any]) -> Ended:
    try:
        return Ended(result=task(store))
    except DiskError as error:
        return Ended(error=error)
    except Exception as failure:
        logger.exception("work on the index of a disk failed")
        return Ended(error=DiskError(f"work on the index failed: {type(failure).__name__}: {failure}"))


def _close(store: DiskStore) -> None:
    try:
        store.close()
    except DiskError:
        logger.exception("the index of a disk could not be closed")
