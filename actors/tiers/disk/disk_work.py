"""`DiskWork`: the disk tier's own work on the event loop, in slices that know why they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Flag, auto

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_files import DiskFiles
from raydix.actors.tiers.disk.disk_writer import DiskWriter
from raydix.actors.tiers.disk.disk_writes import DiskWrites
from raydix.actors.tiers.disk.free_records import FreeRecords
from raydix.actors.tiers.disk.row_deletions import RowDeletions
from raydix.actors.tiers.disk.space_bindings import SpaceBindings
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver


class Why(Flag):
    """Why a slice runs: what it has to do."""

    BUILD = auto()  # spaces are to be bound or built
    FREE = auto()  # writes may lack records
    DELETE = auto()  # records were evicted, or spaces deleted
    BEGIN = auto()  # a write may begin
    DUE = auto()  # a prefix is due, or the reserve has changed; it waits for the end of a load in flight


NOTHING = Why(0)
ALL = ~NOTHING
WRITE = Why.FREE | Why.DELETE | Why.BEGIN


class DiskWork(RequestObserver):
    """Builds trees, evicts, deletes rows and begins writes, a slice of about 1 ms at a time.

    Where all that leaves memory is written, it observes the first tier's cache.

    Args:
        files: of the tier.
        bindings, writes, loads: of the tier.
        may_begin: returns whether writes may begin, as no request needs the slots.
        on_change, on_load: called when writes, or rows or spaces that were deleted, or when a load has ended.
        clock: seconds.

    Attributes:
        records: that are kept free.
        leaving: deletes rows of records.
        is_scheduled: whether a slice runs in the next turn of the loop.
        paused_until: time from which writes begin again.
        last_error: of a write or a read.
    """

    def __init__(
        self,
        files: DiskFiles,
        records: FreeRecords,
        leaving: RowDeletions,
        bindings: SpaceBindings,
        writes: DiskWrites,
        loads: TierLoads,
        may_begin: Callable[[], bool],
        on_change: Callable[[], object],
        on_load: Callable[[], object],
        clock: Callable[[], float],
    ) -> None:
        self.is_scheduled = False
        self.paused_until = float("-inf")
        self.last_error = ""
        self._why = NOTHING
        self._files = files
        self.records = records
        self.leaving = leaving
        self._bindings = bindings
        self._writes = writes
        self._loads = loads
        self._may_begin = may_begin
        self._on_change = on_change
        self._on_load = on_load
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    # ---------------------------------------------------------------- slices

    def wake(self, why: Why = ALL) -> None:
        """Run a slice soon."""
        self._why |= why
        if self._why and not self.is_scheduled and self._files.is_ready:
            self.is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self.is_scheduled = False
        is_loading = self._loads.has_any and not self._loads.is_stalled
        if self._files.is_ready and not (is_loading and self._why is Why.DUE):
            why, self._why = self._why, NOTHING
            self.run_slice(why)

    def run_slice(self, why: Why = ALL) -> None:
        """Do a part of the disk's work."""
        writer, more = self._files.writer, NOTHING
        assert writer is not None
        if Why.BUILD in why:
            built, has_more = self._bindings.build()
            self._writes.resume([space.namespace for space in built])
            if built and not has_more:
                self._writes.ask_again()
            why |= Why.BEGIN if built else NOTHING
            more |= Why.BUILD if has_more else NOTHING
        if Why.DELETE in why:
            has_freed = self.records.free_deleted()
            why |= Why.BEGIN if has_freed else NOTHING
            more |= Why.DELETE if self._bindings.delete_emptied(writer) or self.records.deleted else NOTHING
        if Why.FREE in why and self.records.evict():
            more |= Why.FREE
        self.leaving.delete(writer)
        if why & (Why.BEGIN | Why.DUE):
            if self._may_begin():
                more |= self._begin(writer)
            else:
                self._why |= Why.DUE
        if more:
            self.wake(more)

    def _begin(self, writer: DiskWriter) -> Why:
        """Begin a write if the limit of writes allows it, else when it does; return what is left to do."""
        wait_s = max(writer.wait_s, self.paused_until - self._clock())
        if wait_s <= 0:
            self._writes.begin(writer, self._bindings)
            if self._writes.may_look_on and writer.may_write:
                return WRITE
        elif self._timer is None and self._writes.has_more and wait_s < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._end_timer)
        return NOTHING

    def _end_timer(self) -> None:
        self._timer = None
        self.wake(WRITE)

    # ---------------------------------------------------------------- ends

    def published(self, lease: LeaseRecord) -> None:
        """Look at the reserve of the lowest tier in memory soon, as pages were published."""
        self.wake(Why.DUE)

    def ended(self, lease: LeaseRecord) -> None:
        """Look at the reserve of the lowest tier in memory soon, as pages were unlocked."""
        self.wake(Why.DUE)

    def note_free(self) -> None:
        """Begin the next write, as a buffer is free."""
        if self._writes.has_more:
            self.wake(Why.FREE | Why.BEGIN)

    def end_load(self) -> None:
        """Go on after a load: with the prefixes that are due, and what its pages have kept from being evicted."""
        why = Why.BEGIN if Why.DUE in self._why else NOTHING
        why |= Why.FREE if self.records.is_short else NOTHING
        self.wake(why | (Why.DELETE if self.records.num_leaving else NOTHING))
        self._on_load()

    def end_write(self, error: Exception | None) -> None:
        """Go on after a write."""
        self.note_error(error)
        self.end_deletion()

    def end_deletion(self) -> None:
        """Go on after rows were deleted: records may be free."""
        self.wake(WRITE)
        self._on_change()

    def note_error(self, error: Exception | None) -> None:
        """Begin no write for a while after an error of one."""
        if error is not None:
            self.last_error = str(error)
            self._files.on_error(error)
            self.paused_until = self._clock() + disk_errors.RETRY_S

    def close(self) -> None:
        """Run no slice any more."""
        if self._timer is not None:
            self._timer.cancel()
