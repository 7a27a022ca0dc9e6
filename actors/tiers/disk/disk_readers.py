"""`DiskReaders`: reads the records of a disk tier, and notes the records that are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.disk.disk_copies import DiskCopies
from raydix.actors.tiers.disk.disk_store import DiskStore, Unread
from raydix.actors.tiers.job_threads import Ended, JobThreads
from raydix.cache_core import KVCache, KVPool, RecordPool
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tree.packed_slots import Starts

logger = logging.getLogger(__name__)

NUM_LOADS = 2  # loads at the same time
_AGAIN_S = 1.0  # after the first read of a record that failed, another one counts
_LOG_S = 60.0  # from one line of the log about such reads to the next
_MOST_UNREAD = 1024  # records that are remembered


class DiskReaders:
    """Reads records of a disk straight into the pool.

    Args:
        clock: seconds.

    Attributes:
        copier: copies the records; None before `open`.
        num_damaged: records whose checksum did not match.
        num_failed: reads of records that failed, one for each load and thread.
        last_error: of these reads.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.copier: Copier | None = None
        self.num_damaged = self.num_failed = 0
        self.last_error = ""
        self._clock = clock
        self._copies: DiskCopies | None = None
        self._store: DiskStore | None = None
        self._lost: set[tuple[Kind, int]] = set()  # until the load that has met them ends
        # Records that could not be read: kind, number and digest -> time of the first failure, good reads before it.
        self._unread: dict[tuple[Kind, int, bytes], tuple[float, int]] = {}
        self._failed_at: float | None = None
        self._logged_at = float("-inf")

    def open(self, pool: KVPool | RecordPool, store: DiskStore, threads: JobThreads) -> float:
        """Load with these threads; return the bytes that they read for a token."""
        self._store = store
        self._copies = DiskCopies(pool, store, threads.help)
        self.copier = self.make_copier(self._copies, threads)
        return sum(file.stride for kind, file in store.files.items() if kind != "state") / pool.layout.page_size

    def make_copier(self, copies: DiskCopies, threads: JobThreads) -> Copier:
        """Return a copier, which `close` closes."""
        return Copier(copies, threads, num_loads=NUM_LOADS, clock=self._clock)

    @property
    def error_s(self) -> float | None:
        """The seconds since the last read that failed; None: none did."""
        return None if self._failed_at is None else self._clock() - self._failed_at

    def end(self, move: Move, copied: Ended, disk: KVCache) -> bool:
        """Drop the pages of a load that has ended of which the records are lost, and all pages below them.

        A record is lost if it is damaged; or if its reads fail in two loads at least a second apart, and others were
        read in between. Of retired pages nothing is remembered.

        Returns:
            Whether the tier must stall: a record cannot be read again, and none was read in between.
        """
        assert self._store is not None
        found = self._store.take_damaged()
        self.num_damaged += len(found)
        self._lost.update(found)
        must_stall = self._note_unread(self._store.take_unread())
        if not (self._lost or self._unread):
            return must_stall
        page = disk.page_size
        records: list[tuple[tuple[Kind, int], int]] = []  # of the move, each with its page
        parts: tuple[tuple[Kind, Starts, int], ...] = (
            ("full", move.source_starts, 0),
            ("swa", move.source_windows, move.num_pages - len(move.source_windows)),
        )
        for kind, starts, first in parts:
            records += [((kind, number), first + at) for at, number in enumerate((starts // page).tolist())]
        if move.source_state is not None:
            records.append((("state", move.source_state), move.num_pages - 1))
        named = {record for record, _ in records}
        places = [place for record, place in records if record in self._lost]
        self._lost -= named
        if move.is_retired or copied.end == "whole":
            self._unread = {key: first for key, first in self._unread.items() if key[:2] not in named}
        if places and not move.is_retired:
            # A load of a state alone has no pages: its state stands at the end of the page before it.
            num_tokens = disk.drop_page(move.key, move.first + min(places) * page)
            logger.warning("a load met lost records; %d tokens are dropped from the disk", num_tokens)
        return must_stall

    def _note_unread(self, found: list[Unread]) -> bool:
        """Note records that could not be read; return whether the tier must stall."""
        now, must_stall = self._clock(), False
        for unread in found:
            self.num_failed += 1
            self.last_error, self._failed_at = unread.error, now
            if now - self._logged_at >= _LOG_S:
                self._logged_at = now
                logger.warning("reads of the disk fail, so that their requests compute: %s", unread.error)
            if unread.number is None:
                continue
            key = unread.kind, unread.number, unread.digest
            began, num_good = self._unread.setdefault(key, (now, unread.num_good))
            if now - began < _AGAIN_S:
                continue
            if unread.num_good > num_good:
                self._lost.add(key[:2])
                del self._unread[key]
            else:
                must_stall = True
        while len(self._unread) > _MOST_UNREAD:
            del self._unread[next(iter(self._unread))]
        return must_stall

    def close(self, timeout_s: float | None = None) -> None:
        """End all loads.

        Args:
            timeout_s: for which it waits for chunks that are being read; None: without a limit.
        """
        if self._copies is not None and self.copier is not None:
            self._copies.close()
            self.copier.close(timeout_s)
