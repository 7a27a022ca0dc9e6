"""`DiskFolder`: the folder of a disk tier, which one cache may use at a time; lists of such folders, and their removal.

<path>/<cache name>/<layout digest>/    0700
    pages.bin, windows.bin, states.bin  the records of each kind, 0600
    index.db                            which page each record holds
    lock                                locked with flock while a cache uses the folder; has its pid
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import NamedTuple
from urllib.parse import quote, unquote

from raydix.actors.tiers.disk.disk_errors import FolderInUse
from raydix.actors.tiers.disk.disk_index import APPLICATION, INDEX, INDEX_FILES
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.actors.tiers.disk.record_file import DirectIO
from raydix.cache_core.tiers.page_records import Kind
from raydix.schemas import CacheUnavailable
from raydix.schemas.shown import brief, byte_size, counted

logger = logging.getLogger(__name__)

RECORDS: dict[Kind, str] = {"full": "pages.bin", "swa": "windows.bin", "state": "states.bin"}  # kind -> file
PREDECESSOR_S = 10.0  # seconds that a cache waits for the one before it, which may still write

_LOCK = "lock"
_LAYOUT = re.compile(r"[0-9a-f]{16}")  # the name of the folder of a layout
_LOCK_TEXT = re.compile(rb"([1-9][0-9]{0,9}\n)?")
_SQLITE = b"SQLite format 3\0"  # at the start of a database; the number of its application has 4 bytes at 68
_POLL_S = 0.1
_OWN_S = 1.0  # seconds that a cache waits for another one of its process, of which threads may still end
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NETWORK = {  # f_type of statfs -> name of a file system on other machines
    0x6969: "NFS",
    0xFE534D42: "SMB",
    0xFF534D42: "CIFS",
    0x517B: "SMB",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x0BD00BD0: "Lustre",
}


_own_locks: set[tuple[int, int, int]] = set()  # device and inode of the locks that this process has, and its pid


class DiskFolder:
    """The folder of a cache's records of one layout. It is made if it is not there.

    Args:
        path: an existing folder, absolute.
        cache: the name of the cache.
        layout: digest of the records' format.
        direct_io: "off" allows a file system on another machine.
        calls: of the operating system.

    Attributes:
        path: of the folder of the layout.
        fd: its descriptor.

    Raises:
        CacheUnavailable: the folder cannot be used.
    """

    def __init__(
        self, path: str, cache: str, layout: str, *, direct_io: DirectIO = "auto", calls: FileCalls | None = None
    ) -> None:
        self._calls = calls or FileCalls()
        self._top, self._cache = path, cache
        self._lock_fd: int | None = None
        top = _open_top(path)
        try:
            self._check_file_system(path, top, direct_io)
            above = _open_below(top, _file_name(cache), path)
        finally:
            os.close(top)
        try:
            self.fd = _open_below(above, layout, os.path.join(path, _file_name(cache)))
        finally:
            os.close(above)
        self.path = folder_of(path, cache, layout)

    def _check_file_system(self, path: str, top: int, direct_io: DirectIO) -> None:
        name = _NETWORK.get(self._calls.file_system(top))
        if name is None:
            return
        if direct_io != "off":
            raise _unusable(path, f'it lies on {name}; use a local disk, or set disk.direct_io="off"')
        logger.warning("the disk tier lies on %s (%s): a stalled server stalls its loads and writes", name, path)

    # ---------------------------------------------------------------- the lock

    def lock(self) -> None:
        """Take the folder for this process.

        Raises:
            FolderInUse: another process, or another object of this one, has it.
            CacheUnavailable: the folder has been removed, or its lock is no file.
        """
        assert self._lock_fd is None, "the folder is locked"
        while self._lock_fd is None:
            try:
                fd = self._calls.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, self.fd)
            except OSError as error:  # such as a folder that `clear` has removed
                raise _unusable(os.path.join(self.path, _LOCK), error.strerror or str(error)) from error
            try:
                if not _try_lock(fd, fcntl.LOCK_EX):
                    raise FolderInUse(self.path, _user_of(fd), (*_id_of(fd), os.getpid()) in _own_locks)
                if _is_there(self.fd, fd):  # `clear` removes the file while it has the lock.
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, b"%d\n" % os.getpid(), 0)
                    _own_locks.add((*_id_of(fd), os.getpid()))
                    self._lock_fd, fd = fd, -1
                    _locked_folders.add(self)
            finally:
                if fd >= 0:
                    _unlock(fd)

    def wait_for_lock(self, timeout_s: float = PREDECESSOR_S, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Take the folder for this process, when the process that has it has ended. Call it in a thread.

        Raises:
            FolderInUse: another process still has it, after `timeout_s` or when it is given up; or another cache of
                this process has it, after a second.
        """
        began = monotonic()
        while True:
            try:
                self.lock()
            except FolderInUse as error:
                limit_s = min(timeout_s, _OWN_S) if error.is_own else timeout_s
                if monotonic() >= began + limit_s or is_given_up():
                    raise
                sleep(_POLL_S)
            else:
                return

    def close(self) -> None:
        """Give the folder back. Its files must be closed. A second call has no effect.

        A forked process only closes its descriptor: the lock stays that of the process which took it.
        """
        if self._lock_fd is not None:
            _own_locks.discard((*_id_of(self._lock_fd), os.getpid()))
            _unlock(self._lock_fd)
        if self.fd >= 0:
            os.close(self.fd)
        self._lock_fd, self.fd = None, -1

    def _leave_lock(self) -> None:
        """Close a forked process's copy of the lock, which would keep the folder when the other process is killed."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    # ---------------------------------------------------------------- room

    def check_room(self, num_bytes: int) -> None:
        """Raise CacheUnavailable if the file system has no room for so many bytes, with the files that are there."""
        free = self._calls.free_bytes(self.fd) + _used_bytes(self.fd)
        if num_bytes > free:
            others = f"; {text}" if (text := self.others_text()) else ""
            raise CacheUnavailable(
                f"the disk cannot be used: {self.path} needs {byte_size(num_bytes)} with its index, and "
                f"{byte_size(free)} are free; lower disk.num_slots or disk.size{others}"
            )

    def others_text(self) -> str:
        """Return which folders of this cache have records of other layouts, as a sentence; empty: none has."""
        found = [facts for facts in list_folders(self._top) if facts.cache == self._cache and facts.path != self.path]
        if not found:
            return ""
        command = f"raydix disk clear {shlex.quote(self._top)} --name {shlex.quote(self._cache)} --layout"
        named = ", ".join(
            f"{byte_size(facts.num_bytes)} in {facts.path} (`{command} {facts.layout} --yes` removes them)"
            for facts in found
        )
        return (
            f"there are records of {counted(len(found), 'other layout')} of this cache, which it cannot read: {named}"
        )


_locked_folders: weakref.WeakSet[DiskFolder] = weakref.WeakSet()  # this process has their locks


def _leave_locks_in_child() -> None:
    for folder in list(_locked_folders):
        folder._leave_lock()


os.register_at_fork(after_in_child=_leave_locks_in_child)


def folder_of(path: str, cache: str, layout: str) -> str:
    """Return the path of the folder of a cache's records of one layout."""
    return os.path.join(path, _file_name(cache), layout)


# -------------------------------------------------------------------- folders that are there


class FolderFacts(NamedTuple):
    """Facts about a folder, without its index.

    Attributes:
        cache, layout: the name of the cache, and the digest of the format.
        path: of the folder.
        num_bytes: that its files take on the disk.
        used_at: seconds since the epoch: the last change of its index, or of its lock.
        is_locked: whether a process uses it.
        pid: of that process, if it is known to live and to have the lock.
    """

    cache: str
    layout: str
    path: str
    num_bytes: int
    used_at: float
    is_locked: bool
    pid: int | None


class Cleared(NamedTuple):
    """The result of `clear`: the folders that were removed, and those that processes use."""

    removed: list[FolderFacts]
    in_use: list[FolderFacts]


def list_folders(path: str) -> list[FolderFacts]:
    """Return the folders of disk tiers below a path, by name. Folders of other users and programs are left out.

    Raises:
        CacheUnavailable: `path` cannot be read.
    """
    return [_facts_of(path, name, layout, fd) for name, layout, fd, _ in _folders_below(path)]


def clear(path: str, cache: str | None = None, layout: str | None = None) -> Cleared:
    """Remove the files of disk tiers below a path, and their folders, unless processes use them. Other files stay.

    Args:
        cache: only those of this cache; None: of all.
        layout: only those of this layout; None: of all.

    Raises:
        CacheUnavailable: `path` cannot be read.
    """
    done = Cleared([], [])
    for name, digest, fd, above in _folders_below(path):
        if cache not in (None, unquote(name)) or layout not in (None, digest):
            continue
        facts = _facts_of(path, name, digest, fd)
        (done.removed if _remove_files(fd) else done.in_use).append(facts)
        with suppress(OSError):  # It is in use, or files of others are in it.
            os.rmdir(digest, dir_fd=above)
            os.rmdir(os.path.join("..", name), dir_fd=above)
    return done


@contextmanager
def locked(facts: FolderFacts) -> Iterator[int | None]:
    """Keep caches from using a folder for a while. Files that SQLite adds to read the index are removed at the end.

    Yields:
        The descriptor of the folder; None: a process uses it.
    """
    above, layout = os.path.split(facts.path)
    path, name = os.path.split(above)
    top = _open_top(path)
    try:
        with _opened(top, name) as parent, _opened(parent, layout) as folder:
            if folder is None or not _is_ours(folder):
                raise _unusable(facts.path, "it has been replaced meanwhile")
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                if not _try_lock(lock, fcntl.LOCK_EX) or not _is_there(folder, lock):
                    yield None
                    return
                before = [name for name, _ in _files_of(folder)]
                try:
                    yield folder
                finally:
                    for name in set(INDEX_FILES).difference(before):
                        with suppress(FileNotFoundError):
                            os.unlink(name, dir_fd=folder)
            finally:
                _unlock(lock)
    finally:
        os.close(top)


def _remove_files(folder: int) -> bool:
    """Remove the files of a disk tier; return False if a process uses them."""
    lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not _try_lock(lock, fcntl.LOCK_EX) or not _is_there(folder, lock):
            return False
        for name in (*INDEX_FILES, *RECORDS.values(), _LOCK):  # first the index, without which records are unused
            if _is_file(folder, name):
                os.unlink(name, dir_fd=folder)
        os.fsync(folder)
        return True
    finally:
        _unlock(lock)


def _folders_below(path: str) -> Iterator[tuple[str, str, int, int]]:
    """Yield the folders of disk tiers: the names of the one above and of its own; its descriptor, and the other's."""
    top = _open_top(path)
    try:
        for name in sorted(os.listdir(top)):
            with _opened(top, name) as above:
                for layout in [] if above is None else filter(_LAYOUT.fullmatch, sorted(os.listdir(above))):
                    with _opened(above, layout) as folder:
                        if folder is not None and above is not None and _is_ours(folder):
                            yield name, layout, folder, above
    finally:
        os.close(top)


def _is_ours(folder: int) -> bool:
    """Return whether a folder is that of a disk tier. No database is opened for it."""
    try:
        lock, index = _start_of(folder, _LOCK), _start_of(folder, INDEX) or b""
    except OSError:  # such as a link, or a file of another user
        return False
    if lock is None or not _LOCK_TEXT.fullmatch(lock):
        return False
    if index.startswith(_SQLITE):
        return int.from_bytes(index[68:72], "big") == APPLICATION
    return any(_is_file(folder, name) for name in RECORDS.values())


def _start_of(folder: int, name: str) -> bytes | None:
    """Return the first bytes of a file; None: it is not there.

    Raises:
        OSError: it is no file, or cannot be read.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


@contextmanager
def _opened(above: int | None, name: str) -> Iterator[int | None]:
    """Open a folder of this user; None: it is something else."""
    try:
        fd = os.open(name, _FOLDER, dir_fd=above)
    except OSError:
        yield None
        return
    try:
        yield fd if os.fstat(fd).st_uid == os.geteuid() else None
    finally:
        os.close(fd)


def _facts_of(path: str, name: str, layout: str, folder: int) -> FolderFacts:
    lock = os.open(_LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        is_locked = not _try_lock(lock, fcntl.LOCK_SH)
        pid = _user_of(lock) if is_locked else None
    finally:
        _unlock(lock)
    changes = [facts.st_mtime for file, facts in _files_of(folder) if file.startswith((INDEX, _LOCK))]
    place, used_at = os.path.join(path, name, layout), max(changes, default=0.0)
    return FolderFacts(unquote(name), layout, place, _used_bytes(folder), used_at, is_locked, pid)


def _used_bytes(folder: int) -> int:
    """Return the bytes that the files of a disk tier take on the disk."""
    return sum(facts.st_blocks * 512 for _, facts in _files_of(folder))


def _files_of(folder: int) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of a disk tier that are there."""
    for name in (*RECORDS.values(), *INDEX_FILES, _LOCK):
        with suppress(FileNotFoundError):
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


def _is_file(folder: int, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


# -------------------------------------------------------------------- locks and names


def _try_lock(fd: int, how: int) -> bool:
    """Lock a file until it is closed; return False if another one has locked it."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _id_of(fd: int) -> tuple[int, int]:
    facts = os.fstat(fd)
    return facts.st_dev, facts.st_ino


def _unlock(fd: int) -> None:
    """Give back the lock that a file may have, and close it: a forked process still has a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def _user_of(fd: int) -> int | None:
    """Return the pid in a locked file if that process lives and has the lock; None: another process has it."""
    text = os.pread(fd, 32, 0).strip()
    if not text.isdigit() or not os.path.exists(f"/proc/{int(text)}"):
        return None
    device, inode = _id_of(fd)
    place = f"{os.major(device):02x}:{os.minor(device):02x}:{inode}"
    try:
        with open("/proc/locks", encoding="ascii") as locks:
            # "5: FLOCK  ADVISORY  WRITE 4711 08:02:1234 0 EOF"; one that waits has "->" behind its number.
            found = [line.split() for line in locks]
    except OSError:
        return None
    is_it = any(parts[1] == "FLOCK" and parts[4:6] == [text.decode(), place] for parts in found)
    return int(text) if is_it else None


def _is_there(folder: int, lock: int) -> bool:
    """Return whether an open lock is the one in the folder."""
    try:
        there = os.stat(_LOCK, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(lock))


def _file_name(cache: str) -> str:
    """Return a cache's name as the name of a folder, other characters as %XX."""
    name = quote(cache, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def _open_top(path: str) -> int:
    if not os.path.isabs(path):
        raise CacheUnavailable(f"disk.path must be absolute, as actors have other working folders, not {brief(path)}")
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise _unusable(path, "it must be a folder, not a symbolic link: name the folder it leads to")
        return os.open(path, _FOLDER)
    except FileNotFoundError:
        raise _unusable(path, "it must be a folder that is there: make it first") from None
    except NotADirectoryError:
        raise _unusable(path, "it must be a folder") from None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error


def _open_below(above: int, name: str, where: str) -> int:
    """Open a folder that only this user may enter; make it if it is not there."""
    path = os.path.join(where, name)
    try:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        fd = os.open(name, _FOLDER, dir_fd=above)
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error
    if os.fstat(fd).st_uid != os.geteuid():
        os.close(fd)
        raise _unusable(path, "it must belong to the user of this process")
    os.fchmod(fd, 0o700)
    return fd


def _unusable(path: str, reason: str) -> CacheUnavailable:
    return CacheUnavailable(f"the disk cannot be used at {brief(path)}: {reason}")
