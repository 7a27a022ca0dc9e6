"""The errors of a disk tier at work. A disk that cannot be used from the start is refused with `CacheUnavailable`.

DiskError
├── DiskFull        the file system has no room
├── DiskFailed      a call of the operating system failed, or a device did
├── ShortTransfer   fewer bytes were read or written than asked for
├── RecordDamaged   the checksum of a record does not match
├── IndexDamaged    the index is no database, or a malformed one
└── FolderInUse     another process has the folder
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from raydix.schemas.shown import counted

_MOST_NAMED = 8
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

RETRY_S = 1.0  # after work on a disk that failed, until it is tried again


class DiskError(Exception):
    """A disk tier could not read or write."""


class DiskFull(DiskError):
    """The file system has no room."""


class DiskFailed(DiskError):
    """A call of the operating system failed."""


class ShortTransfer(DiskError):
    """Fewer bytes were read or written than asked for."""


class RecordDamaged(DiskError):
    """The checksums of records do not match: they are torn, zeroed, flipped or of other pages.

    Attributes:
        kind: of the records.
        numbers: of the damaged ones.
    """

    def __init__(self, kind: str, numbers: tuple[int, ...]) -> None:
        super().__init__(kind, numbers)
        self.kind = kind
        self.numbers = numbers

    def __str__(self) -> str:
        named = ", ".join(map(str, self.numbers[:_MOST_NAMED])) + ", ..." * (len(self.numbers) > _MOST_NAMED)
        return f"{counted(len(self.numbers), 'damaged record')} of kind {self.kind!r}: {named}"


class IndexDamaged(DiskError):
    """The index is no database of this format, or a malformed one."""


@contextmanager
def index_values(doing: str) -> Iterator[None]:
    """Raise errors that values of an index cause as `IndexDamaged`: the block works on values that were read."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, LookupError) as error:
        raise IndexDamaged(f"{doing} failed: {type(error).__name__}: {error}") from error


class FolderInUse(DiskError):
    """Another process has the folder, or another cache of this one.

    Attributes:
        pid: of that process; None: it has not written it yet.
        is_own: whether it is this process.
    """

    def __init__(self, path: str, pid: int | None, is_own: bool = False) -> None:
        super().__init__(path, pid, is_own)
        self.path = path
        self.pid = pid
        self.is_own = is_own

    def __str__(self) -> str:
        return f"{self.path} is locked by {'another process' if self.pid is None else f'pid {self.pid}'}"


def disk_error(error: OSError, doing: str) -> DiskError:
    """Return the error that stands for an `OSError`.

    Args:
        doing: the call, such as "reading 3 records of pages.bin".
    """
    kind = DiskFull if error.errno in _NO_ROOM else DiskFailed
    return kind(f"{doing} failed: {error.strerror or error}")
