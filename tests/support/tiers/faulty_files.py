"""`FaultyFileCalls`: calls of the operating system and of SQLite that fail, end early, stall, or kill the process."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import quote

from raydix.actors.tiers.disk.file_calls import FileCalls

Fault = Callable[[], None]

_SQLITE_CODES = {
    errno.EIO: sqlite3.SQLITE_IOERR,
    errno.ENOSPC: sqlite3.SQLITE_FULL,
    errno.EUCLEAN: sqlite3.SQLITE_CORRUPT,
}


class FaultyFileCalls(FileCalls):
    """Makes the real calls, and before some of them what a test has planted.

    A call is named by its method, such as "pwritev"; a statement of SQL by its first word, such as "INSERT". Of a
    statement that runs for many rows, one call is counted.

    Attributes:
        counts: calls so far, by name.
        type_of_file_system: None: the real one.
        free: bytes that the file system has; None: the real ones.
    """

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.type_of_file_system: int | None = None
        self.free: int | None = None
        self._faults: dict[str, dict[int, Fault]] = {}
        self._shortened: dict[str, int] = {}
        self._lock = threading.Lock()

    # ---------------------------------------------------------------- faults

    def fail(self, name: str, code: int, skipped: int = 0, times: int = 1) -> None:
        """Let calls fail with an error number; the `skipped` next ones pass first."""
        self._plant(name, skipped, times, lambda: _fail(name, code))

    def kill(self, name: str, skipped: int = 0) -> None:
        """End the process with SIGKILL before a call; the `skipped` next ones pass first."""
        self._plant(name, skipped, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def stall(self, name: str, skipped: int = 0) -> Callable[[], None]:
        """Let a call wait until the returned function is called."""
        may_pass = threading.Event()
        self._plant(name, skipped, 1, lambda: _wait(may_pass))
        return may_pass.set

    def shorten(self, name: str, num_bytes: int) -> None:
        """Let the next `preadv` or `pwritev` end after so many bytes."""
        self._shortened[name] = num_bytes

    def _plant(self, name: str, skipped: int, times: int, fault: Fault) -> None:
        first = self.counts[name] + skipped
        faults = self._faults.setdefault(name, {})
        faults.update(dict.fromkeys(range(first, first + times), fault))

    def meet(self, name: str) -> None:
        """Count a call, and do what is planted before it."""
        with self._lock:
            number = self.counts[name]
            self.counts[name] += 1
        if fault := self._faults.get(name, {}).get(number):
            fault()

    # ---------------------------------------------------------------- calls

    def open(self, name: str, flags: int, folder: int) -> int:
        self.meet("open")
        if flags & os.O_DIRECT:
            self.meet("open O_DIRECT")
        return super().open(name, flags, folder)

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self.meet("preadv")
        return super().preadv(fd, self._cut("preadv", buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self.meet("pwritev")
        return super().pwritev(fd, self._cut("pwritev", buffers), offset)

    def _cut(self, name: str, buffers: Sequence[Any]) -> Sequence[Any]:
        left = self._shortened.pop(name, None)
        if left is None:
            return buffers
        kept = []
        for buffer in buffers:
            kept.append(buffer[:left])
            left -= len(kept[-1])
        return [buffer for buffer in kept if len(buffer)]

    def fallocate(self, fd: int, num_bytes: int) -> None:
        self.meet("fallocate")
        super().fallocate(fd, num_bytes)

    def file_system(self, fd: int) -> int:
        return super().file_system(fd) if self.type_of_file_system is None else self.type_of_file_system

    def free_bytes(self, fd: int) -> int:
        return super().free_bytes(fd) if self.free is None else self.free

    def connect(self, path: str, mode: str = "rw") -> sqlite3.Connection:
        calls = self

        class FaultyConnection(sqlite3.Connection):
            def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
                calls.meet(sql.split()[0])
                return super().execute(sql, parameters)

            def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
                calls.meet(sql.split()[0])
                return super().executemany(sql, parameters)

        uri = f"file:{quote(path)}?mode={mode}"
        return sqlite3.connect(
            uri, uri=True, timeout=0, isolation_level=None, check_same_thread=False, factory=FaultyConnection
        )


def _fail(name: str, code: int) -> None:
    if not name.isupper():
        raise OSError(code, os.strerror(code))
    error = sqlite3.OperationalError(os.strerror(code))
    error.sqlite_errorcode = _SQLITE_CODES[code]
    raise error


def _wait(may_pass: threading.Event) -> None:
    assert may_pass.wait(60), "the test did not let the call pass"
