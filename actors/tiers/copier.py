"""`Copier`: copies pages between a cache's pool and the tier below it, loads before writes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic, perf_counter
from typing import Protocol

from raydix.actors.tiers.disk.disk_errors import DiskError
from raydix.actors.tiers.job_threads import End, Ended, JobThreads
from raydix.cache_core.tiers.page_records import CHUNK_BYTES, Chunk, CopyPlan

logger = logging.getLogger(__name__)

_KEPT = 0.9  # share of the sums of recent copies that is kept with each chunk


class Copies(Protocol):
    """Copies pages between a pool and the tier below it, such as `PageCopies` and `DiskCopies`."""

    def chunks(self, plan: CopyPlan, max_bytes: int = CHUNK_BYTES) -> list[Chunk]:
        """Return the parts in which a plan is copied."""

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan to the pool."""

    def write(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan to the tier below."""


class Copy:
    """One copy of a `Copier`.

    Attributes:
        plan: its pages.
        is_load: whether it copies up, to the pool.
        is_awaited: whether a request waits for it. Other loads, prefetches, give way to it between two chunks.
        result: None until it has ended.
        chunk_began: time at which its present chunk began; None: none of its chunks is being copied.
    """

    def __init__(
        self,
        plan: CopyPlan,
        copies: Copies,
        done: Callable[[Ended], object],
        *,
        is_load: bool,
        deadline: float | None = None,
        is_awaited: bool = True,
    ) -> None:
        self.plan = plan
        self.is_load = is_load
        self.is_awaited = is_awaited
        self.result: Ended | None = None
        self.chunk_began: float | None = None
        self.copies = copies
        self.done = done
        self.deadline = deadline
        self.chunks: list[Chunk] = []
        self.num_chunks = 0  # copied ones
        self.is_cancelled = False
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def num_pages(self) -> int:
        """The leading pages that were copied so far."""
        return self.chunks[self.num_chunks - 1].stop if self.num_chunks else 0

    @property
    def bytes_left(self) -> int:
        """The bytes that are still to be copied."""
        return sum(chunk.num_bytes for chunk in self.chunks[self.num_chunks :])

    def copy_chunk(self) -> None:
        """Copy the next chunk."""
        chunk = self.chunks[self.num_chunks]
        copy = self.copies.load if self.is_load else self.copies.write
        copy(self.plan, chunk.start, chunk.stop)


@dataclass(slots=True)
class CopyCounts:
    """Counts of loads, or of writes, since the copier began.

    Attributes:
        num_bytes: copied bytes.
        seconds: the time that they took.
        longest_s: the time of the longest chunk.
        ends: how many copies ended in each way.
        recent_bytes, recent_s: sums of recent chunks, in which earlier chunks count less.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    ends: Counter[End] = field(default_factory=Counter)
    recent_bytes: float = 0.0
    recent_s: float = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The measured rate of recent copies; None before the first."""
        return self.recent_bytes / self.recent_s if self.recent_s else None

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a chunk."""
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.longest_s = max(self.longest_s, seconds)
        self.recent_bytes = _KEPT * self.recent_bytes + num_bytes
        self.recent_s = _KEPT * self.recent_s + seconds


class WriteCap:
    """A token bucket for the bytes of writes, with room for one chunk; None: without a limit."""

    def __init__(self, mib_s: float | None) -> None:
        self._seconds_per_byte = 0.0 if mib_s is None else 1 / (mib_s * 2**20)
        self._next_at = float("-inf")

    def wait_s(self, now: float) -> float:
        """Return the seconds until a chunk may be written; 0 or less: now."""
        return self._next_at - now

    def charge(self, num_bytes: int, now: float) -> None:
        """Count a chunk that begins now."""
        self._next_at = max(self._next_at, now) + num_bytes * self._seconds_per_byte


class Copier:
    """Copies pages in threads, and calls back on the event loop when a copy has ended.

    Loads that requests wait for go before prefetches, and these before writes, each in the order in which they came: a
    load waits for one chunk of the others at most. Between two chunks, a thread looks at cancellations, deadlines and
    the cap of writes. A copy confirms whole pages from the front: those of all chunks that were copied.

    It is a queue of its threads, and does not refer to them, so that the threads end if their owner is dropped.

    Args:
        copies: copies pages between the pool and the tier below.
        threads: those that copy; their owner closes them.
        num_loads: loads of which chunks are copied at the same time. Of prefetches there is one among them.
        write_mib_s: MiB of writes a second; None: without a limit. Loads have none.
        chunk_bytes: bytes that one call copies.
        clock: returns seconds, for deadlines and the cap.
    """

    def __init__(
        self,
        copies: Copies,
        threads: JobThreads,
        *,
        num_loads: int = 1,
        write_mib_s: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._copies = copies
        self._chunk_bytes = chunk_bytes
        self._clock = clock
        self._cap = WriteCap(write_mib_s)
        self._changed = threads.changed
        self._num_loads = num_loads
        self._loads: deque[Copy] = deque()
        self._writes: deque[Copy] = deque()
        self._counts = {True: CopyCounts(), False: CopyCounts()}  # is_load -> counts
        self._is_closed = False
        threads.add(self)

    def load(
        self,
        plan: CopyPlan,
        done: Callable[[Ended], object],
        timeout_s: float | None = None,
        *,
        is_awaited: bool = True,
    ) -> Copy:
        """Copy pages of the tier below to the pool. Call it on the event loop.

        Args:
            plan: the pages. Both ends must be locked, or private to the caller, until the copy has ended.
            done: called on the event loop when the copy has ended.
            timeout_s: the copy ends between two chunks if it takes longer, from now on; None: without a limit.
            is_awaited: False: it gives way to loads that requests wait for. `Copy.is_awaited` can be set later.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        copy = Copy(plan, self._copies, done, is_load=True, deadline=deadline, is_awaited=is_awaited)
        return self._start(copy)

    def write(self, plan: CopyPlan, done: Callable[[Ended], object]) -> Copy:
        """Copy pages of the pool to the tier below. Call it on the event loop. The arguments are those of `load`."""
        return self._start(Copy(plan, self._copies, done, is_load=False))

    def _start(self, copy: Copy) -> Copy:
        copy.loop = asyncio.get_running_loop()
        copy.chunks = self._copies.chunks(copy.plan, self._chunk_bytes)
        with self._changed:
            self._queue_of(copy).append(copy)
            if self._is_closed:
                self._end(copy, "closed")
            self._changed.notify()
        return copy

    # ---------------------------------------------------------------- threads

    def take(self) -> Callable[[], object] | None:
        """Return the copying of a chunk that may be copied now; None if there is none."""
        now = self._clock()
        for load in [load for load in self._loads if load.deadline is not None and load.deadline <= now]:
            if load.chunk_began is None:
                self._end(load, "late")
        if (copy := self._next_load()) is None:
            if not (self._may_write and self._cap.wait_s(now) <= 0):
                return None
            copy = self._writes[0]
            self._cap.charge(copy.chunks[copy.num_chunks].num_bytes, now)
        copy.chunk_began = now
        return partial(self._copy_chunk, copy)

    def _next_load(self) -> Copy | None:
        busy = [load for load in self._loads if load.chunk_began is not None]
        if len(busy) >= self._num_loads:
            return None
        idle = [load for load in self._loads if load.chunk_began is None]
        may_prefetch = all(load.is_awaited for load in busy)
        return next((load for load in idle if load.is_awaited), idle[0] if idle and may_prefetch else None)

    @property
    def _may_write(self) -> bool:
        """Whether a chunk of a write waits for the cap alone."""
        return bool(self._writes) and self._writes[0].chunk_began is None

    def wait_s(self) -> float | None:
        """Return the seconds until the cap allows the next write; None: none waits for it."""
        return self._cap.wait_s(self._clock()) if self._may_write else None

    def _copy_chunk(self, copy: Copy) -> None:
        """Copy the next chunk of a copy, and note it."""
        error, started = None, perf_counter()
        try:
            copy.copy_chunk()
        except Exception as failure:  # reported to the caller of the copy; the thread goes on with others
            if not isinstance(failure, DiskError):  # The readers of a disk log what their disk raises.
                logger.exception("a %s of %d pages failed", "load" if copy.is_load else "write", len(copy.plan))
            error = failure.with_traceback(None)  # Its frames have the pool.
        seconds = perf_counter() - started
        with self._changed:
            copy.chunk_began = None
            if copy.is_cancelled or self._is_closed:  # The event loop may wait. The next chunk is this thread's.
                self._changed.notify_all()
            if error is not None:
                self._end(copy, "failed", error)
                return
            self._counts[copy.is_load].add(copy.chunks[copy.num_chunks].num_bytes, seconds)
            copy.num_chunks += 1
            if copy.num_chunks == len(copy.chunks):
                self._end(copy, "whole")
            elif copy.is_cancelled:
                self._end(copy, "cancelled")
            elif self._is_closed:
                self._end(copy, "closed")

    # ---------------------------------------------------------------- ends

    def cancel(self, copy: Copy) -> None:
        """End a copy: in this call if none of its chunks is being copied, else behind that chunk.

        `done` is called in both cases. A copy that has ended stays as it is.
        """
        with self._changed:
            copy.is_cancelled = True
            if copy.chunk_began is None and copy.result is None:
                self._end(copy, "cancelled")

    def stop_all(self, timeout_s: float | None = None) -> None:
        """End all copies, without calls of `done`: `Copy.result` has the end. It waits for at most one chunk.

        Args:
            timeout_s: for which it waits; None: without a limit. A copy of which the chunk has not ended has no result.
        """
        with self._changed:
            for copy in (*self._loads, *self._writes):
                copy.loop = None
                copy.is_cancelled = True
            self._end_idle("cancelled", timeout_s)

    def stop(self) -> None:
        """End all copies behind their chunks, and let none begin."""
        self.close(0.0)

    def close(self, timeout_s: float | None = None) -> None:
        """End all copies. It waits for the chunks that are being copied.

        The calls of `done` are scheduled on the event loop, so they run after this call. Later copies end with 0 pages.

        Args:
            timeout_s: for which it waits; None: without a limit.
        """
        with self._changed:
            self._is_closed = True
            self._end_idle("closed", timeout_s)

    def _end_idle(self, end: End, timeout_s: float | None) -> None:
        """End all copies of which no chunk is being copied, and wait for the others."""
        for copy in (*self._loads, *self._writes):
            if copy.chunk_began is None:
                self._end(copy, end)
        self._changed.wait_for(lambda: not (self._loads or self._writes), timeout_s)

    # ---------------------------------------------------------------- state

    def counts(self, *, loads: bool) -> CopyCounts:
        """Return the counts of loads or of writes, as a copy."""
        with self._changed:
            counts = self._counts[loads]
            return replace(counts, ends=counts.ends.copy())

    def queued_bytes(self, *, loads: bool) -> int:
        """Return the bytes of loads or of writes that are still to be copied."""
        with self._changed:
            return sum(copy.bytes_left for copy in (self._loads if loads else self._writes))

    def bytes_ahead(self) -> int:
        """Return the bytes of loads that are copied before the next load that a request waits for."""
        lanes = [0] * self._num_loads
        with self._changed:
            for load in self._loads:
                num_bytes = load.bytes_left
                if not load.is_awaited:
                    num_bytes = 0 if load.chunk_began is None else load.chunks[load.num_chunks].num_bytes
                lanes[lanes.index(min(lanes))] += num_bytes
        return min(lanes)

    def _queue_of(self, copy: Copy) -> deque[Copy]:
        return self._loads if copy.is_load else self._writes

    def _end(self, copy: Copy, end: End, error: Exception | None = None) -> None:
        """Remove a copy, and report its end to the event loop."""
        assert copy.result is None
        self._queue_of(copy).remove(copy)
        self._counts[copy.is_load].ends[end] += 1
        copy.result = Ended(copy.num_pages, end, error)
        if copy.loop is None:
            return
        try:
            copy.loop.call_soon_threadsafe(copy.done, copy.result)
        except RuntimeError:  # The loop is closed, as at the end of a program that does not close its cache.
            logger.debug("the end of a copy was not reported, as its event loop is closed: %s", copy.result)
