"""`DiskStore`: the files and the index of a disk tier, opened together."""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from raydix.actors.tiers.disk.checksums import DIGEST_BYTES, SUM_BYTES, are_right
from raydix.actors.tiers.disk.disk_errors import DiskError, IndexDamaged, RecordDamaged
from raydix.actors.tiers.disk.disk_folder import PREDECESSOR_S, RECORDS, DiskFolder
from raydix.actors.tiers.disk.disk_index import INDEX, DiskIndex, IndexLayout, index_bytes, log_bytes
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.actors.tiers.disk.record_file import DirectIO, RecordFile, Rows, stride_of
from raydix.cache_core import RecordLayout
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import KINDS, Kind
from raydix.cache_core.tiers.record_keeper import Numbers

logger = logging.getLogger(__name__)


def index_room(layout: RecordLayout) -> int:
    """Return the bytes to reserve for the index of records.

    Args:
        layout: the numbers and sizes of the records.
    """
    numbers = [number - 1 for number, num_bytes in layout.shapes if num_bytes and number > 1]
    return index_bytes(layout.num_slots // layout.page_size, layout.page_size, sum(numbers[1:]))


def _give_back(folder: int, kind: type[BaseException] | None, *error: object) -> None:
    """Remove the records of a folder without an index when the store could not be opened: they take room for nothing.

    Args:
        folder: descriptor of the folder, which is locked.
        kind, error: of the failure, as an exit function of an `ExitStack` gets them.
    """
    if kind is not None and INDEX not in os.listdir(folder):
        for name in RECORDS.values():
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


class Unread(NamedTuple):
    """A read that failed.

    Attributes:
        kind, number: of the first record that could not be read; no number: each can be read now.
        digest: of its page.
        num_good: reads of others, so far.
        error: of the read.
    """

    kind: Kind
    number: int | None
    digest: bytes
    num_good: int
    error: str


class DiskStore:
    """The records of a disk tier, and its index.

    Opening it waits for the lock and reserves the disk, so a thread does it, but for a cache's first start. One thread
    at a time may use the index. Records may be read and written by any thread.

    Args:
        path: a folder, absolute.
        cache: the name of the cache.
        layout: the numbers and sizes of the records.
        index_layout: their format.
        direct_io: as of `RecordFile`.
        wait_s: for a predecessor that has the lock.
        is_given_up: checked while it waits.
        calls: of the operating system.

    Attributes:
        folder, index: of the store.
        files: of its records, by kind.

    Raises:
        FolderInUse: another process has the folder.
        CacheUnavailable: the disk cannot be used.
        DiskError: it could not be read or written.
    """

    def __init__(
        self,
        path: str,
        cache: str,
        layout: RecordLayout,
        index_layout: IndexLayout,
        *,
        direct_io: DirectIO = "auto",
        wait_s: float = PREDECESSOR_S,
        is_given_up: Callable[[], bool] = lambda: False,
        calls: FileCalls | None = None,
    ) -> None:
        calls = calls or FileCalls()
        sizes: dict[Kind, tuple[int, int]] = {
            kind: (number - 1, num_bytes)
            for kind, (number, num_bytes) in zip(KINDS, layout.shapes, strict=True)
            if num_bytes and number > 1
        }
        room = index_room(layout)
        self._index_layout, self._room, self._calls = index_layout, room, calls
        self._damaged: deque[tuple[Kind, int]] = deque()
        self._unread: deque[Unread] = deque()
        self._num_good = 0  # reads that were right; of two at the same time, one may be counted
        self._past_bad_rows = 0  # of indexes that were replaced
        with ExitStack() as opened:
            self.folder = DiskFolder(path, cache, index_layout.digest, direct_io=direct_io, calls=calls)
            opened.callback(self.folder.close)
            self.folder.wait_for_lock(wait_s, is_given_up)
            opened.push(partial(_give_back, self.folder.fd))
            num_bytes = sum(number * stride_of(record_bytes) for number, record_bytes in sizes.values())
            self.folder.check_room(num_bytes + room + log_bytes(layout.page_size))
            self.files: dict[Kind, RecordFile] = {}
            for kind, (number, record_bytes) in sizes.items():
                self.files[kind] = RecordFile(
                    self.folder.fd, RECORDS[kind], record_bytes, number, direct_io=direct_io, calls=calls
                )
                opened.callback(self.files[kind].close)
            try:
                self.index = DiskIndex(self.folder.path, index_layout, folder=self.folder.fd, room=room, calls=calls)
            except IndexDamaged as error:
                logger.warning("the index of %s is damaged, so its records are lost: %s", self.folder.path, error)
                self._renew_index(last_space=0)
            self._opened = opened.pop_all()
        # A store that is dropped gives the folder back, too.
        weakref.finalize(self, self._opened.close).atexit = False
        self._digests = {kind: np.zeros((number + 1, DIGEST_BYTES), np.uint8) for kind, (number, _) in sizes.items()}
        self._sums = {kind: np.zeros((number + 1, SUM_BYTES), np.uint8) for kind, (number, _) in sizes.items()}

    def renew_index(self) -> None:
        """Throw a damaged index away, and make a new one, in the thread of the index: the store is empty then.

        Numbers of spaces are not used again. If it fails, it may be repeated.
        """
        with suppress(DiskError):
            self.index.close()
        self._past_bad_rows += self.index.num_bad_rows
        self._renew_index(self.index.last_space)

    @property
    def num_bad_rows(self) -> int:
        """The rows of the index that were none of its format."""
        return self._past_bad_rows + self.index.num_bad_rows

    def holds(self, row: IndexRow) -> bool:
        """Return whether a row names a record of this store. It may be one of a larger disk before."""
        return row.kind in self._digests and row.record < len(self._digests[row.kind])

    def _renew_index(self, last_space: int) -> None:
        DiskIndex.discard(self.folder.path, self.folder.fd)
        self.index = DiskIndex(
            self.folder.path,
            self._index_layout,
            folder=self.folder.fd,
            room=self._room,
            last_space=last_space,
            calls=self._calls,
        )

    def close(self) -> None:
        """Close the files, and give the folder back. No thread may be reading or writing. It may be repeated."""
        try:
            self.index.close()
        finally:
            self._opened.close()

    def note(self, rows: Iterable[IndexRow]) -> None:
        """Remember the digests and sums of records, by which `read` checks them. 48 bytes a record."""
        for row in rows:
            self._digests[row.kind][row.record] = np.frombuffer(row.digest, np.uint8)
            self._sums[row.kind][row.record] = np.frombuffer(row.record_sum, np.uint8)

    def read(self, kind: Kind, numbers: Numbers, rows: Rows) -> None:
        """Read records and check them.

        Args:
            numbers: of records that have been noted.
            rows: of aligned memory, one for each number.

        Raises:
            RecordDamaged: the checksums of some do not match.
            DiskError: they could not be read.
        """
        file = self.files[kind]
        try:
            file.read(numbers, rows)
        except DiskError as error:
            self._unread.append(self._first_unread(kind, numbers, rows, error))
            raise
        records = rows[:, : file.record_bytes]
        right = are_right(records, self._digests[kind][numbers], self._sums[kind][numbers], kind)
        if not right.all():
            damaged = tuple(numbers[~right].tolist())
            self._damaged.extend((kind, number) for number in damaged)
            raise RecordDamaged(kind, damaged)
        self._num_good += 1

    def _first_unread(self, kind: Kind, numbers: Numbers, rows: Rows, error: DiskError) -> Unread:
        """Read records one by one until one cannot be read, and return that one."""
        for at, number in enumerate(numbers.tolist()):
            try:
                self.files[kind].read(numbers[at : at + 1], rows[at : at + 1])
            except DiskError as its_own:
                return Unread(kind, number, self._digests[kind][number].tobytes(), self._num_good, str(its_own))
            self._num_good += 1
        return Unread(kind, None, b"", self._num_good, str(error))

    def take_unread(self) -> list[Unread]:
        """Return the records that `read` could not read since the last call; any thread may ask."""
        return [self._unread.popleft() for _ in range(len(self._unread))]

    def take_damaged(self) -> list[tuple[Kind, int]]:
        """Return the damaged records that `read` has found since the last call; any thread may ask."""
        return [self._damaged.popleft() for _ in range(len(self._damaged))]
