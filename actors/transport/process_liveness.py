"""Whether a process of this machine still lives: a lock that the kernel releases when it ends.

Each process locks a memfd, which others open through `/proc`, as they do a pool's: it has no name in any folder, so
the kernel removes it with the process. If it cannot be opened (another node, another container), the state of the
process is unknown. A path carries the name of its memfd: the same process and file number can be the lock of
another process there.
"""

from __future__ import annotations

import os
import re
import sys
import uuid
import weakref
from typing import Self

if sys.platform == "linux":
    import fcntl

_PATH = re.compile(r"(/proc/\d+/fd/\d+):([0-9a-f]{32})")  # where a memfd is open, and the id in its name
_NAME = "raydix-life-"

_own: tuple[int, str] | None = None  # the process that locked it, and its path


def own_liveness_path() -> str | None:
    """Return the path by which others see that this process lives; None if there is no `/proc`."""
    global _own
    if sys.platform != "linux":
        return None
    if _own is None or _own[0] != os.getpid():  # a forked child has a life of its own
        life_id = uuid.uuid4().hex
        fd = os.memfd_create(f"{_NAME}{life_id}", os.MFD_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)  # and never unlocked
        _own = os.getpid(), f"/proc/{os.getpid()}/fd/{fd}:{life_id}"
    return _own[1]


class ProcessLiveness:
    """The lock of another process, as seen from here. Get one by `find`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    @classmethod
    def find(cls, path: str) -> Self | None:
        """Return the lock at a path of `own_liveness_path`.

        None if there is none, if it is another process's, or if no process holds it, as seen from here.
        """
        if sys.platform != "linux" or (match := _PATH.fullmatch(path)) is None:
            return None
        where, life_id = match.groups()
        try:
            fd = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        life = cls(fd)
        is_lock = os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:{_NAME}{life_id} (deleted)"
        return life if is_lock and not life.has_ended() else None

    def has_ended(self) -> bool:
        """Return whether the process has ended, with all children that it forked."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True
