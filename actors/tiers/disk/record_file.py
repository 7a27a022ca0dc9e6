"""`RecordFile`: the file of a disk tier that has the records of one kind."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from fcntl import F_GETFL, F_SETFL, fcntl
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raydix.actors.tiers.disk.disk_errors import ShortTransfer, disk_error
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.schemas import CacheUnavailable
from raydix.schemas.shown import byte_size, counted

logger = logging.getLogger(__name__)

BLOCK = 4096  # O_DIRECT needs addresses, places and lengths that are multiples of it
CALL_BYTES = 8 * 2**20  # read or written by one call, at most
_MOST_BUFFERS = 1024  # buffers of one call: IOV_MAX

DirectIO = Literal["auto", "on", "off"]
Rows = NDArray[np.uint8]  # `[number, stride]`, a record in each row, padded to whole blocks
Numbers = NDArray[np.int64]
_Call = Callable[[int, Sequence[Any], int], int]  # (file, buffers, place) -> number of bytes


def stride_of(record_bytes: int) -> int:
    """Return the bytes that a record takes in a file: whole blocks."""
    return -(-record_bytes // BLOCK) * BLOCK


def aligned_bytes(num_bytes: int) -> Rows:
    """Return zeroed memory that O_DIRECT can read and write; it begins at a page of the memory."""
    return np.frombuffer(mmap.mmap(-1, max(num_bytes, BLOCK)), np.uint8)[:num_bytes]


class RecordFile:
    """Records of one size, numbered from 1. All of the file is reserved, so that a full disk is met at the start.

    Reads and writes may come from several threads, if no two of them name one record.

    Args:
        folder: descriptor of the folder.
        name: of the file. It is made if it is not there; else its records stay, as many as fit.
        record_bytes: of a record.
        num_records: 1 at least.
        direct_io: "on": past the page cache; "off": through it; "auto": past it where the file system can.
        calls: of the operating system.

    Attributes:
        stride: bytes from one record to the next.
        is_direct: whether reads and writes go past the page cache.

    Raises:
        CacheUnavailable: the file cannot be made or reserved.
    """

    def __init__(
        self,
        folder: int,
        name: str,
        record_bytes: int,
        num_records: int,
        *,
        direct_io: DirectIO = "auto",
        calls: FileCalls | None = None,
    ) -> None:
        self.name = name
        self.record_bytes = record_bytes
        self.stride = stride_of(record_bytes)
        self.num_records = num_records
        self._calls = calls or FileCalls()
        self.is_direct = direct_io != "off"
        self._fd = self._open(folder)
        try:
            self._reserve(folder, must_reserve=direct_io != "off")
            self._check_direct(direct_io)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def num_bytes(self) -> int:
        """The bytes of the file."""
        return self.num_records * self.stride

    def close(self) -> None:
        """Close the file. No thread may be reading or writing."""
        os.close(self._fd)

    # ---------------------------------------------------------------- records

    def write(self, numbers: Numbers, rows: Rows) -> None:
        """Write records.

        Args:
            numbers: different ones.
            rows: of aligned memory, one for each number.

        Raises:
            DiskError: any of the records may have been written in part.
        """
        for first, buffers in self._runs(numbers, rows):
            self._transfer(self._calls.pwritev, "writing", first, buffers)

    def read(self, numbers: Numbers, rows: Rows) -> None:
        """Read records.

        Args:
            numbers: different ones.
            rows: of aligned memory, one for each number.

        Raises:
            DiskError: none of the rows counts as read.
        """
        for first, buffers in self._runs(numbers, rows):
            self._transfer(self._calls.preadv, "reading", first, buffers)

    def _transfer(self, call: _Call, doing: str, first: int, buffers: list[Rows]) -> None:
        try:
            done = call(self._fd, buffers, (first - 1) * self.stride)
        except OSError as error:
            raise disk_error(error, self._name_of(doing, first, buffers)) from error
        if done != len(buffers) * self.stride:
            doing = self._name_of(doing, first, buffers)
            raise ShortTransfer(f"{doing} ended after {done:,} of {len(buffers) * self.stride:,} bytes")

    def _name_of(self, doing: str, first: int, buffers: list[Rows]) -> str:
        return f"{doing} {counted(len(buffers), 'record')} of {self.name} from record {first}"

    def _runs(self, numbers: Numbers, rows: Rows) -> Iterator[tuple[int, list[Rows]]]:
        """Yield the calls to make: a number, and the rows of the records from there on, neighbours in the file."""
        if rows.shape != (len(numbers), self.stride):
            raise ValueError(f"rows must be [{len(numbers)}, {self.stride}], not {list(rows.shape)}")
        if not len(numbers):
            return
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        if ordered[0] < 1 or ordered[-1] > self.num_records:
            raise ValueError(f"numbers must be from 1 to {self.num_records}, not {ordered[0]} to {ordered[-1]}")
        most = max(1, min(_MOST_BUFFERS, CALL_BYTES // self.stride))
        breaks = (np.flatnonzero(np.diff(ordered) != 1) + 1).tolist()
        for start, stop in zip([0, *breaks], [*breaks, len(ordered)], strict=True):
            for first in range(start, stop, most):
                places = order[first : min(first + most, stop)].tolist()
                yield int(ordered[first]), [rows[place] for place in places]

    # ---------------------------------------------------------------- the file

    def _open(self, folder: int) -> int:
        """Open the file; set `is_direct` to whether it was opened past the page cache."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            try:
                fd = self._calls.open(self.name, flags | (os.O_DIRECT if self.is_direct else 0), folder)
            except OSError as error:
                if not self.is_direct or error.errno != errno.EINVAL:
                    raise
                self.is_direct = False
                fd = self._calls.open(self.name, flags, folder)
        except OSError as error:
            raise CacheUnavailable(f"the disk cannot be used: {self.name}: {_reason(error)}") from error
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            os.close(fd)
            raise CacheUnavailable(f"the disk cannot be used: {self.name} must be a file of this user: remove it")
        os.fchmod(fd, 0o600)
        return fd

    def _reserve(self, folder: int, *, must_reserve: bool) -> None:
        had_bytes = os.fstat(self._fd).st_size
        try:
            if had_bytes > self.num_bytes:
                self._calls.truncate(self._fd, self.num_bytes)
            self._calls.fallocate(self._fd, self.num_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                if not must_reserve:
                    self._calls.truncate(self._fd, self.num_bytes)
                    logger.warning("the room of %s is not reserved: its file system cannot do that", self.name)
                    return
                advice = 'use another one, or set disk.direct_io="off"'
                reason = f"its file system cannot reserve room for {self.name}: {advice}"
            else:
                reason = f"no room for the {byte_size(self.num_bytes)} of {self.name} ({_reason(error)})"
            self._give_back(folder, had_bytes)
            raise CacheUnavailable(f"the disk cannot be used: {reason}") from error

    def _give_back(self, folder: int, had_bytes: int) -> None:
        """Give back the room that a failed reservation has taken."""
        if had_bytes:
            os.ftruncate(self._fd, min(had_bytes, self.num_bytes))
        else:
            os.unlink(self.name, dir_fd=folder)

    def _check_direct(self, direct_io: DirectIO) -> None:
        """Read a block, and go through the page cache if the file system refuses that."""
        if self.is_direct:
            try:
                self._calls.preadv(self._fd, [aligned_bytes(BLOCK)], 0)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise CacheUnavailable(f"the disk cannot be used: {self.name}: {_reason(error)}") from error
                self.is_direct = False
                fcntl(self._fd, F_SETFL, fcntl(self._fd, F_GETFL) & ~os.O_DIRECT)
        if not self.is_direct and direct_io == "on":
            raise CacheUnavailable(
                f"the disk cannot be used: the file system of {self.name} has no O_DIRECT; use another one, or set "
                'disk.direct_io="auto"'
            )
        if not self.is_direct and direct_io == "auto":
            logger.warning("%s goes through the page cache: its file system has no O_DIRECT", self.name)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
