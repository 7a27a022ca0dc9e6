"""Copies that are slow, fail or flip a byte: `GatedCopies` under a real copier, and `FaultyCopier` in place of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from support.tiers.pool_pages import scatter

from raydix.actors.tiers.copier import Copy, CopyCounts
from raydix.actors.tiers.disk.disk_copies import DiskCopies
from raydix.actors.tiers.disk.disk_errors import DiskError
from raydix.actors.tiers.job_threads import End, Ended
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.page_records import Chunk, CopyPlan, PageCopies, PageRecords

Done = Callable[[Ended], object]
Call = tuple[str, CopyPlan, int]  # "load" or "write", the plan, the first page of the chunk


class GatedCopies(PageCopies):
    """Copies that a test lets through one by one, and in which it plants faults.

    Attributes:
        calls: of chunks that began.
        fail: raises where a chunk shall fail.
    """

    def __init__(self, pool: KVPool | RecordPool, lower: RecordPool, *, is_open: bool = False) -> None:
        super().__init__(pool, lower)
        self.calls: list[Call] = []
        self.fail: Callable[[Call], None] = lambda call: None
        self._may_pass = threading.Semaphore(10**9 if is_open else 0)

    def pass_chunks(self, number: int = 1) -> None:
        """Let chunks through, those that come later as well."""
        self._may_pass.release(number)

    def write(self, plan: CopyPlan, start: int, stop: int) -> None:
        self._wait(("write", plan, start))
        super().write(plan, start, stop)

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        self._wait(("load", plan, start))
        super().load(plan, start, stop)

    def _wait(self, call: Call) -> None:
        self.calls.append(call)
        assert self._may_pass.acquire(timeout=60), "the test lets no more chunks through"
        self.fail(call)


class FaultyCopier:
    """A copier without a thread: each copy ends when the test says so, in any order, and as the test says.

    It has the methods of `Copier`. A copy goes page by page, also between index-only pools. `finish` calls `done`, as
    the event loop would; what `cancel` and `close` end is reported by `deliver`.

    Attributes:
        open: copies that have not ended.
        current: the copy of which a page is being copied, if any: `cancel` ends it behind that page, which `pass_page`
            copies.

    Args:
        pool: of the upper tier.
        lower: of the tier below; or what copies from a disk.
    """

    def __init__(self, pool: KVPool | RecordPool, lower: RecordPool | DiskCopies) -> None:
        self.open: list[Copy] = []
        self.current: Copy | None = None
        self._copies: PageCopies | DiskCopies
        self._records = {True: PageRecords(pool)}  # is_load -> of the target
        if isinstance(lower, DiskCopies):
            self._copies = lower
        else:
            self._copies, self._records[False] = PageCopies(pool, lower), PageRecords(lower)
        self._counts = {True: CopyCounts(), False: CopyCounts()}  # is_load -> counts
        self._ended: list[Copy] = []  # and not reported

    def load(self, plan: CopyPlan, done: Done, timeout_s: float | None = None, *, is_awaited: bool = True) -> Copy:
        return self._start(Copy(plan, self._copies, done, is_load=True, deadline=timeout_s, is_awaited=is_awaited))

    def write(self, plan: CopyPlan, done: Done) -> Copy:
        return self._start(Copy(plan, self._copies, done, is_load=False))

    def _start(self, copy: Copy) -> Copy:
        copy.chunks = self._copies.chunks(copy.plan, 1)
        if not any(chunk.num_bytes for chunk in copy.chunks):
            copy.chunks = [Chunk(page, page + 1, 0) for page in range(len(copy.plan))] or copy.chunks
        self.open.append(copy)
        return copy

    def advance(self, copy: Copy, num_pages: int) -> None:
        """Copy some more pages of a slow copy. It stays open, unless the disk fails."""
        try:
            self._advance(copy, num_pages)
        except DiskError:
            self._end(copy, "failed")
            self._report(copy)

    def _advance(self, copy: Copy, num_pages: int) -> None:
        for _ in range(min(num_pages, len(copy.chunks) - copy.num_chunks)):
            copy.copy_chunk()
            copy.num_chunks += 1

    def finish(self, copy: Copy, end: End = "whole", num_pages: int | None = None) -> None:
        """End a copy, and report it.

        Args:
            end: "whole", or what cuts it off.
            num_pages: pages that it copied in all; None: all of them with "whole", else those copied so far.
        """
        if end == "whole":
            self.advance(copy, len(copy.chunks))
        elif num_pages is not None:
            self.advance(copy, num_pages - copy.num_pages)
        if copy.result is None:
            self._end(copy, end)
            self._report(copy)

    def pass_page(self) -> None:
        """Copy the page of the current copy, which ends behind it if it was cancelled or has no more pages."""
        copy, self.current = self.current, None
        assert copy is not None
        self.advance(copy, 1)
        if copy.result is not None:
            return
        if copy.num_chunks == len(copy.chunks):
            self.finish(copy)
        elif copy.is_cancelled:
            self.finish(copy, "cancelled")

    def _end(self, copy: Copy, end: End) -> None:
        if copy is self.current:
            self.current = None
        self.open.remove(copy)
        self._ended.append(copy)
        self._counts[copy.is_load].ends[end] += 1
        copy.result = Ended(copy.num_pages, end, OSError("planted") if end == "failed" else None)

    def _report(self, copy: Copy) -> None:
        assert copy.result is not None
        self._ended.remove(copy)
        copy.done(copy.result)

    def deliver(self) -> None:
        """Report all ends that were not reported."""
        while self._ended:
            self._report(self._ended[0])

    def flip(self, copy: Copy, page: int) -> None:
        """Flip a bit of a page that an open copy has copied, where it was copied to."""
        assert copy in self.open and page < copy.num_pages
        records = self._records[copy.is_load]
        start = (copy.plan.upper if copy.is_load else copy.plan.lower)[page : page + 1]
        record = torch.empty(1, records.num_bytes(), dtype=torch.uint8)
        records.gather(start, record)
        record[0, 0] ^= 1
        scatter(records, start, record)

    def cancel(self, copy: Copy) -> None:
        copy.is_cancelled = True
        if copy.result is None and copy is not self.current:
            self._end(copy, "cancelled")

    def stop_all(self, timeout_s: float | None = None) -> None:
        if self.current is not None:
            with suppress(DiskError):
                self._advance(self.current, 1)  # it waits for the chunk
        for copy in list(self.open):
            self._end(copy, "cancelled")
        self._ended.clear()  # their ends are not reported

    def counts(self, *, loads: bool) -> CopyCounts:
        return self._counts[loads]

    def queued_bytes(self, *, loads: bool) -> int:
        return sum(copy.bytes_left for copy in self.open if copy.is_load == loads)

    def bytes_ahead(self) -> int:
        return sum(copy.bytes_left for copy in self.open if copy.is_load and copy.is_awaited)

    def close(self, timeout_s: float | None = None) -> None:
        for copy in list(self.open):
            self._end(copy, "closed")
