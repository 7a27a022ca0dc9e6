"""Whether a process of this machine still lives, as the kernel reports by a pidfd.

Each process opens a memfd with an id in its name, which others find through `/proc`, as they do a pool's. The path of
the memfd names the process, and the id proves that it is the process which made the path: on another node, in another
container or later, another process can have the same number. If the memfd cannot be found, the state of the
process is unknown. Children that the process forked do not count: they inherit the memfd, but not the number.
"""

from __future__ import annotations

import os
import re
import select
import sys
import uuid
import weakref
from typing import Self

_PATH = re.compile(r"(/proc/(\d{1,9})/fd/\d{1,9}):([0-9a-f]{32})")  # path of an open memfd, and the id in its name
_NAME = "raydix-life-"

_own: tuple[int, str] | None = None  # the process that opened it, and its path


def own_liveness_path() -> str | None:
    """Return the path by which others see that this process lives; None if there is no `/proc`."""
    global _own
    if sys.platform != "linux":
        return None
    if _own is None or _own[0] != os.getpid():  # a forked child has a life of its own
        life_id = uuid.uuid4().hex
        fd = os.memfd_create(f"{_NAME}{life_id}", os.MFD_CLOEXEC)  # open until the process ends
        _own = os.getpid(), f"/proc/{os.getpid()}/fd/{fd}:{life_id}"
    return _own[1]


def process_id(path: str | None) -> int | None:
    """Return the id that the process had which made a path by `own_liveness_path`; None without such a path."""
    match = None if path is None else _PATH.fullmatch(path)
    return None if match is None else int(match[2])


class ProcessLiveness:
    """The life of a process, as seen from here. Get one by `find`.

    Attributes:
        pid: its number here.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)

    @classmethod
    def find(cls, path: str) -> Self | None:
        """Return the life of the process that made a path by `own_liveness_path`.

        None if no process is found there, if it is another one, or if it has ended, as seen from here.
        """
        if sys.platform != "linux" or (match := _PATH.fullmatch(path)) is None:
            return None
        where, pid, life_id = match.groups()
        try:
            # The pidfd first: the process seen below is then this one, not a later one.
            life = cls(int(pid), os.pidfd_open(int(pid)))
            is_there = os.readlink(where) == f"/memfd:{_NAME}{life_id} (deleted)"
            return life if is_there and life._has_its_number() else None
        except OSError:
            return None

    def has_ended(self) -> bool:
        """Return whether the process has ended, with all of its threads."""
        poll = select.poll()  # one for each call, as threads cannot share one
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def _has_its_number(self) -> bool:
        """Return whether the process lives and has its number in `/proc`, which can be another container's."""
        with open(f"/proc/self/fdinfo/{self._pidfd}") as facts:
            return f"Pid:\t{self.pid}\n" in facts and not self.has_ended()
