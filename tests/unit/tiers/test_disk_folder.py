"""A disk tier's folder: only this user enters it, one process uses it, and what cannot be one is refused by name."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from support.tiers.faulty_files import FaultyFileCalls
from support.waiting import wait_until

from raydix.actors.tiers.disk.disk_errors import DiskError, FolderInUse
from raydix.actors.tiers.disk.disk_folder import RECORDS, DiskFolder, clear, list_folders
from raydix.actors.tiers.disk.disk_index import DiskIndex, IndexLayout
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.schemas import CacheUnavailable

ABC, DEF = "abc" + "0" * 13, "def" + "0" * 13  # layouts


@contextmanager
def opened(path: Path, cache: str = "kv-0", layout: str = ABC, **options: Any) -> Iterator[DiskFolder]:
    folder = DiskFolder(str(path), cache, layout, **options)
    try:
        yield folder
    finally:
        folder.close()


def fill(folder: DiskFolder, num_bytes: int = 10_000) -> None:
    """Put the files of a disk tier into a folder."""
    for name in RECORDS.values():
        Path(folder.path, name).write_bytes(b"x" * num_bytes)
    DiskIndex(folder.path, IndexLayout(ABC, 4, "{}")).close()


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[int]:
    """Lock the folder in another process; yield its pid. It is killed at the end."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_lock_and_wait, args=(str(path), theirs))
    child.start()
    assert ours.poll(60) and ours.recv() == "locked" and child.pid is not None
    try:
        yield child.pid
    finally:
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join(60)


def _lock_and_wait(path: str, pipe: Connection) -> None:
    folder = DiskFolder(path, "kv-0", ABC)
    folder.lock()
    pipe.send("locked")
    pipe.poll(600)


# -------------------------------------------------------------------- making it


def test_a_folder_is_made_for_this_user_alone_and_found_again(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with opened(tmp_path) as folder:
            assert folder.path == str(tmp_path / "kv-0" / ABC)
            folder.lock()
            Path(folder.path, "pages.bin").write_bytes(b"kept")
    finally:
        os.umask(previous)
    for place in (tmp_path / "kv-0", tmp_path / "kv-0" / ABC):
        assert place.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "kv-0" / ABC / "lock").stat().st_mode & 0o777 == 0o600

    os.chmod(tmp_path / "kv-0" / ABC, 0o755)
    with opened(tmp_path) as folder:
        assert Path(folder.path, "pages.bin").read_bytes() == b"kept"
        assert os.stat(folder.path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "ä b%", "../../etc"])
def test_names_of_caches_are_names_of_one_folder(tmp_path: Path, name: str) -> None:
    with opened(tmp_path, cache=name) as folder:
        folder.lock()
        fill(folder)
        assert Path(folder.path).parent.parent == tmp_path
        assert len(os.listdir(tmp_path)) == 1
        (facts,) = list_folders(str(tmp_path))
    assert (facts.cache, facts.path) == (name, folder.path)


def refusal(path: object, **options: Any) -> str:
    with pytest.raises(CacheUnavailable) as refused:
        DiskFolder(str(path), "kv-0", ABC, **options)
    return str(refused.value)


def test_places_that_cannot_be_used_are_refused_with_their_reason(tmp_path: Path) -> None:
    assert "disk.path must be absolute" in refusal("some/folder")
    assert "must be a folder that is there: make it first" in refusal(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "it must be a folder" in refusal(tmp_path / "file")
    assert not (tmp_path / "absent").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (link := tmp_path / "link").symlink_to(elsewhere)
    assert "must be a folder, not a symbolic link" in refusal(link)

    (top := tmp_path / "top").mkdir()
    (top / "kv-0").symlink_to(elsewhere)
    assert "Not a directory" in refusal(top)
    (top / "kv-0").unlink()
    (top / "kv-0").mkdir()
    (top / "kv-0" / ABC).symlink_to(elsewhere)
    assert "Not a directory" in refusal(top)
    (top / "kv-0" / ABC).unlink()

    with opened(top) as folder:
        (Path(folder.path) / "lock").symlink_to(tmp_path / "made")
        with pytest.raises(CacheUnavailable, match="Too many levels"):
            folder.lock()
    assert os.listdir(elsewhere) == [] and not (tmp_path / "made").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    os.chmod(tmp_path, 0o500)
    assert "Permission denied" in refusal(tmp_path)


@pytest.mark.parametrize(("number", "name"), [(0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x00C36400, "Ceph")])
def test_disks_of_other_machines_are_refused(
    tmp_path: Path, number: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = FaultyFileCalls()
    calls.type_of_file_system = number
    assert f'lies on {name}; use a local disk, or set disk.direct_io="off"' in refusal(tmp_path, calls=calls)
    assert os.listdir(tmp_path) == []

    with opened(tmp_path, direct_io="off", calls=calls):
        assert f"the disk tier lies on {name}" in caplog.text


def test_the_type_of_a_file_system_is_read(tmp_path: Path) -> None:
    fd = os.open("/proc", os.O_RDONLY)
    try:
        assert FaultyFileCalls().file_system(fd) == 0x9FA0  # PROC_SUPER_MAGIC
    finally:
        os.close(fd)


def test_room_counts_the_files_that_are_there(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    calls.free = 2**20
    with opened(tmp_path, calls=calls) as folder:
        folder.check_room(2**20)
        with pytest.raises(
            CacheUnavailable, match=r"needs 1.5 MiB with its index, and 1 MiB are free; lower disk.num_"
        ):
            folder.check_room(3 * 2**19)
        fill(folder, 2**18)
        folder.check_room(3 * 2**19)


# -------------------------------------------------------------------- the lock


def test_one_object_of_a_process_has_the_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path, layout="0" * 16) as other:
        first.lock()
        other.lock()
        with pytest.raises(FolderInUse, match=f"{first.path} is locked by pid {os.getpid()}"):
            second.lock()
        first.close()
        second.lock()


def test_another_process_has_the_folder_until_it_is_killed(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        with locked_elsewhere(tmp_path) as pid:
            with pytest.raises(FolderInUse) as refused:
                folder.wait_for_lock(timeout_s=0.3)
            assert refused.value.pid == pid
            assert str(refused.value) == f"{folder.path} is locked by pid {pid}"
        folder.lock()
        assert Path(folder.path, "lock").read_text() == f"{os.getpid()}\n"


def test_a_predecessor_is_waited_for(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.lock()
        waiter = threading.Thread(target=second.wait_for_lock, args=(60,))
        waiter.start()
        first.close()
        waiter.join(60)
        assert not waiter.is_alive()
        with opened(tmp_path) as third, pytest.raises(FolderInUse):
            third.lock()


def test_a_wait_is_given_up(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.lock()
        with pytest.raises(FolderInUse):
            second.wait_for_lock(600, is_given_up=lambda: True)


def test_a_lock_without_a_pid_is_named_so(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path) as second:
        first.lock()
        Path(first.path, "lock").write_text("?")
        with pytest.raises(FolderInUse, match="is locked by another process"):
            second.lock()


# -------------------------------------------------------------------- list and clear


def test_folders_are_listed_with_their_size_and_user(tmp_path: Path) -> None:
    with opened(tmp_path) as folder, opened(tmp_path, "kv-1", DEF) as other:
        folder.lock()
        fill(folder)
        other.lock()
        fill(other)
        other.close()
        (tmp_path / "kv-1" / "empty").mkdir()
        (tmp_path / "file").write_text("")
        (tmp_path / "link").symlink_to(tmp_path / "kv-0")

        first, second = list_folders(str(tmp_path))
        assert first[:3] == ("kv-0", ABC, folder.path)
        assert (first.is_locked, first.pid) == (True, os.getpid())
        assert first.num_bytes > 30_000 and first.used_at > 0
        assert second[:3] == ("kv-1", DEF, other.path)
        assert (second.is_locked, second.pid) == (False, None)


def test_clear_removes_all_that_no_process_uses(tmp_path: Path) -> None:
    with opened(tmp_path, "kv-1") as kept:
        for cache, layout in (("kv-0", ABC), ("kv-0", DEF), ("kv-2", ABC)):
            with opened(tmp_path, cache, layout) as folder:
                folder.lock()
                fill(folder)
        kept.lock()
        fill(kept)
        Path(tmp_path, "kv-2", ABC, "notes.txt").write_text("of the user")

        done = clear(str(tmp_path), cache="kv-0", layout=DEF)
        assert [facts[:2] for facts in done.removed] == [("kv-0", DEF)]
        assert os.listdir(tmp_path / "kv-0") == [ABC]

        done = clear(str(tmp_path))
        assert [facts[:2] for facts in done.removed] == [("kv-0", ABC), ("kv-2", ABC)]
        assert [(facts.cache, facts.pid) for facts in done.in_use] == [("kv-1", os.getpid())]
        assert sorted(os.listdir(tmp_path)) == ["kv-1", "kv-2"]
        assert os.listdir(tmp_path / "kv-2" / ABC) == ["notes.txt"]
        assert Path(kept.path, "pages.bin").exists()
    assert [facts.cache for facts in list_folders(str(tmp_path))] == ["kv-1"]


def test_a_folder_that_is_cleared_while_it_is_being_locked_is_not_taken(tmp_path: Path) -> None:
    """`clear` has the lock when it removes its file."""

    class ClearsOnce(FileCalls):
        keeps = ""

        def open(self, name: str, flags: int, folder: int) -> int:
            fd = super().open(name, flags, folder)
            if self.keeps:
                Path(self.keeps, "notes.txt").write_text("so that the folder stays")
                self.keeps = ""
                clear(str(tmp_path))
            return fd

    calls = ClearsOnce()
    with opened(tmp_path, calls=calls) as folder, opened(tmp_path) as other:
        fill(folder)
        calls.keeps = folder.path
        folder.lock()
        with pytest.raises(FolderInUse):
            other.lock()

    with opened(tmp_path) as folder:
        Path(folder.path, "notes.txt").unlink()
        fill(folder)
        clear(str(tmp_path))
        with pytest.raises(CacheUnavailable, match="No such file or directory"):
            folder.lock()


def database(application: int) -> bytes:
    """The bytes of a database of an application."""
    db = sqlite3.connect(":memory:")
    db.execute(f"PRAGMA application_id={application}")
    db.execute("CREATE TABLE t (a)")
    content = db.serialize()
    db.close()
    return content


FOREIGN: dict[str, tuple[str, dict[str, bytes]]] = {  # name of the folder, and its files
    "a name that is no layout": ("app", {"lock": b"", "pages.bin": b"x", "index.db": database(0x52594458)}),
    "a lock with text": (ABC, {"lock": b"held by me\n", "pages.bin": b"x"}),
    "a lock with more than a pid": (ABC, {"lock": b"17\nhost\n", "pages.bin": b"x"}),
    "a database of no application": (ABC, {"lock": b"", "index.db": database(0), "pages.bin": b"x"}),
    "a database of another one": (ABC, {"lock": b"17\n", "index.db": database(7), "index.db-wal": b"log"}),
    "no records": (ABC, {"lock": b"", "index.db": b"text"}),
    "a lock alone": (ABC, {"lock": b""}),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_folders_of_other_programs_are_left_alone(tmp_path: Path, case: str) -> None:
    name, files = FOREIGN[case]
    (folder := tmp_path / "app" / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)

    assert list_folders(str(tmp_path)) == []
    assert clear(str(tmp_path)) == ([], [])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


@pytest.mark.parametrize("file", ["lock", "index.db"])
def test_a_folder_whose_files_are_links_is_left_alone(tmp_path: Path, file: str) -> None:
    (target := tmp_path / "target").write_bytes(b"")
    (folder := tmp_path / "disk" / "kv-0" / ABC).mkdir(parents=True)
    for name in ("lock", "index.db", "pages.bin"):
        (folder / name).write_bytes(b"")
    assert len(list_folders(str(tmp_path / "disk"))) == 1
    (folder / file).unlink()
    (folder / file).symlink_to(target)

    assert list_folders(str(tmp_path / "disk")) == []
    assert clear(str(tmp_path / "disk")) == ([], [])
    assert (folder / file).is_symlink() and target.exists()


def test_clear_leaves_what_has_the_name_of_a_record_file_and_is_none(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_bytes(b"kept")
    (top := tmp_path / "disk").mkdir()
    with opened(top) as folder:
        folder.lock()
        fill(folder)
    for name in ("windows.bin", "states.bin"):
        Path(folder.path, name).unlink()
    Path(folder.path, "windows.bin").mkdir()
    Path(folder.path, "states.bin").symlink_to(target)

    assert len(clear(str(top)).removed) == 1
    assert sorted(os.listdir(folder.path)) == ["states.bin", "windows.bin"]
    assert target.read_bytes() == b"kept"


@pytest.mark.parametrize("part", ["the folder", "the index"])
@pytest.mark.parametrize("reads", [False, True], ids=["a cache", "a list"])
def test_an_index_that_a_link_swaps_for_another_is_refused(tmp_path: Path, part: str, reads: bool) -> None:
    """The link appears between the check of the folder and the opening by SQLite."""
    layout = IndexLayout(ABC, 4, "{}")
    (other := tmp_path / "other").mkdir()
    with opened(other) as foreign:
        fill(foreign)
    before = {path: path.read_bytes() for path in Path(foreign.path).iterdir()}
    (top := tmp_path / "disk").mkdir()

    class Swaps(FileCalls):
        def connect(self, path: str, mode: str = "rw") -> sqlite3.Connection:
            if part == "the folder":
                (top / "kv-0").rename(top / "moved")
                (top / "kv-0").symlink_to(other / "kv-0")
            else:
                Path(path).rename(f"{path}.moved")
                Path(path).symlink_to(Path(foreign.path, "index.db"))
            return super().connect(path, mode)

    with opened(top) as folder:
        folder.lock()
        fill(folder)
        with pytest.raises(CacheUnavailable, match="is not the file of the folder that was locked"):
            DiskIndex(folder.path, None if reads else layout, folder=folder.fd, calls=Swaps())
    assert {path: path.read_bytes() for path in Path(foreign.path).iterdir()} == before


def test_a_new_index_is_not_made_behind_a_link(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    (top := tmp_path / "disk").mkdir()
    with opened(top) as folder:
        folder.lock()
        (top / "kv-0").rename(top / "moved")
        (other / ABC).mkdir()
        (top / "kv-0").symlink_to(other)
        with pytest.raises(DiskError, match="unable to open database file"):
            DiskIndex(folder.path, IndexLayout(ABC, 4, "{}"), folder=folder.fd)
    assert os.listdir(other / ABC) == []


# -------------------------------------------------------------------- forked processes

FORKS = """
import gc, os, sys
from raydix.actors.tiers.disk.disk_index import IndexLayout
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.cache_core import RecordLayout
from raydix.cache_core.tiers.index_row import IndexRow

def opened():
    return DiskStore(
        sys.argv[1], "kv-0", RecordLayout(256, 4, 1250, 0, 0), IndexLayout("abc" + "0" * 13, 4, "{}"),
        direct_io="off", wait_s=0,
    )

def add(store, number):
    store.index.commit([IndexRow("full", number, space, number, bytes(32), bytes(16))])

def fork(work):
    (done, told), (end, live) = os.pipe(), os.pipe()
    if os.fork():
        os.close(told), os.close(end)
        assert os.read(done, 1) == b"x"
        os.close(done)
        return live
    os.close(live), os.close(done)
    work()
    os.write(told, b"x")
    os.read(end, 1)  # it lives until the other process ends
    os._exit(0)

store = opened()
space = store.index.add_space(None, "m", None, "").number
add(store, 1)
"""


def forks(path: Path, program: str) -> None:
    """Run a program that forks, in a process of its own, which has one thread."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS + program, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


KEEPS = """
child = fork(lambda: None)
store.close()
store = opened()  # the child lives
other = fork(lambda: None)
del store
gc.collect()
opened().close()
os.close(child), os.close(other)
"""


def test_a_forked_child_does_not_keep_the_folder_of_a_store_that_was_closed_or_dropped(tmp_path: Path) -> None:
    forks(tmp_path, KEEPS)


KILLED = """
import signal, time
child = os.fork()
if not child:
    time.sleep(600)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_does_not_keep_the_folder_of_a_process_that_was_killed(tmp_path: Path) -> None:
    program = [sys.executable, "-c", FORKS + KILLED, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        child = int(killed.stdout.readline())
        try:
            assert killed.wait(60) == -signal.SIGKILL
            with opened(tmp_path) as folder:
                folder.lock()  # the child lives
        finally:
            os.kill(child, signal.SIGKILL)


CHILD = """
def work():
    global store
    {work}

child = fork(work)
add(store, 2)
try:
    opened()
except Exception as error:
    assert "is locked by pid" in str(error), error
else:
    raise AssertionError("the child has given the lock back")
os._exit(0)  # as if killed: the log alone has the rows
"""


@pytest.mark.parametrize("work", ["store.close()", "del store; gc.collect()"], ids=["closes", "collects"])
def test_a_forked_child_harms_neither_the_index_nor_the_lock_of_its_parent(tmp_path: Path, work: str) -> None:
    forks(tmp_path, CHILD.format(work=work))

    with opened(tmp_path) as folder:
        folder.wait_for_lock(60)  # until the child has ended, too
        index = DiskIndex(folder.path, IndexLayout(ABC, 4, "{}"), folder=folder.fd)
        assert index.num_rows(1) == 2
        index.close()


def test_a_pid_that_does_not_have_the_lock_is_not_named(tmp_path: Path) -> None:
    """A child has it: the process that took it, and wrote its pid, has ended."""
    with opened(tmp_path) as folder, opened(tmp_path) as other:
        folder.lock()
        Path(folder.path, "lock").write_text(f"{os.getppid()}\n")
        fill(folder)
        with pytest.raises(FolderInUse, match="is locked by another process") as refused:
            other.lock()
        assert refused.value.pid is None
        assert [(facts.is_locked, facts.pid) for facts in list_folders(str(tmp_path))] == [(True, None)]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheUnavailable, match="must be a folder that is there"):
        list_folders(str(tmp_path / "absent"))
    with pytest.raises(CacheUnavailable, match="must be absolute"):
        clear("relative")


def test_waiting_processes_get_the_folder_one_after_the_other(tmp_path: Path) -> None:
    order: list[int] = []

    def use(number: int) -> None:
        folder = DiskFolder(str(tmp_path), "kv-0", ABC)
        folder.wait_for_lock(60)
        order.append(number)
        with pytest.raises(FolderInUse), opened(tmp_path) as other:
            other.lock()
        folder.close()

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(order) == 4)
    for thread in threads:
        thread.join(60)
    assert sorted(order) == [0, 1, 2, 3]
