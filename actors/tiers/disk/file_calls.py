"""`FileCalls`: the calls of the operating system and of SQLite that a disk tier makes."""

from __future__ import annotations

import ctypes
import os
import sqlite3
from collections.abc import Sequence
from functools import cache
from typing import Any
from urllib.parse import quote

_STATFS_BYTES = 256  # more than the structure has on any machine


class FileCalls:
    """Makes the calls. A test derives from it to let some of them fail, stall or end the process."""

    def open(self, name: str, flags: int, folder: int) -> int:
        """Open a file of a folder; a new one can be read and written by this user alone."""
        return os.open(name, flags, 0o600, dir_fd=folder)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Read from a place in a file into buffers; return the number of bytes."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        """Write buffers to a place in a file; return the number of bytes."""
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, num_bytes: int) -> None:
        """Reserve the first bytes of a file, and make it at least so long.

        `os.posix_fallocate` writes to each block where the file system cannot reserve; this call fails there.

        Raises:
            OSError: the file system cannot reserve (EOPNOTSUPP), or has no room.
        """
        if _libc().fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, num_bytes)

    def file_system(self, fd: int) -> int:
        """Return the number of the type of the file system (`f_type` of statfs) on which a file lies."""
        facts = ctypes.create_string_buffer(_STATFS_BYTES)
        if _libc().fstatfs(fd, facts):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return ctypes.c_long.from_buffer(facts).value & 0xFFFFFFFF

    def free_bytes(self, fd: int) -> int:
        """Return the bytes that this process may still write to the file system on which a file lies."""
        facts = os.fstatvfs(fd)
        return facts.f_bavail * facts.f_frsize

    def connect(self, path: str, mode: str = "rw") -> sqlite3.Connection:
        """Open a database that is there; transactions are begun by hand. One thread at a time may use the connection.

        Args:
            mode: "rw", or "ro": it is only read.
        """
        uri = f"file:{quote(os.fsencode(path))}?mode={mode}"
        return sqlite3.connect(uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
