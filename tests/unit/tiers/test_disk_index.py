"""The index has all rows of a commit or none, in order, and says what is wrong with a file that is none."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers.disk.disk_errors import DiskError, DiskFailed, DiskFull, IndexDamaged
from raydix.actors.tiers.disk.disk_index import (
    INDEX,
    DiskIndex,
    IndexLayout,
    Space,
    index_bytes,
    log_bytes,
)
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.cache_core.tiers.index_row import FIRST, IndexRow, RowPlace
from raydix.cache_core.tiers.page_records import KINDS
from raydix.schemas import CacheUnavailable

PAGE = 4
LAYOUT = IndexLayout("d1" * 8, PAGE, '{"dtype": "uint8"}')


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskIndex]]:
    """Opens an index, and closes the one before."""
    indexes: list[DiskIndex] = []

    def opened(**options: Any) -> DiskIndex:
        if indexes:
            indexes.pop().close()
        indexes.append(DiskIndex(str(tmp_path), options.pop("layout", LAYOUT), **options))
        return indexes[-1]

    yield opened
    for index in indexes:
        index.close()


def a_space(index: DiskIndex, namespace: str | None = None, label: str = "v1") -> Space:
    return index.add_space(namespace, "base", None, label)


def a_row(rng: Random, space: int, record: int, **values: Any) -> IndexRow:
    kind = values.pop("kind", "full")
    row = IndexRow(kind, record, space, rng.randint(1, 9), rng.randbytes(32), rng.randbytes(16))
    if kind == "full":
        row = row._replace(parent=rng.choice((None, rng.randbytes(32))), tokens=rng.randbytes(4 * PAGE))
    return row._replace(**values)


def rows_of(index: DiskIndex, space: int, limit: int = 1000) -> list[IndexRow]:
    """All rows of a space, read in slices."""
    rows, place = index.rows(space, limit=limit)
    while place is not None:
        more, place = index.rows(space, place, limit)
        rows += more
    return rows


def in_order(rows: list[IndexRow]) -> list[IndexRow]:
    return sorted(rows, key=lambda row: row.place)


# -------------------------------------------------------------------- rows


def test_rows_are_read_by_depth_in_slices_of_any_size(opened: Callable[..., DiskIndex]) -> None:
    index, rng = opened(), Random(1)
    one, two = a_space(index), a_space(index, "other")
    records = rng.sample(range(1, 1000), 120)
    kinds = [rng.choice(("full", "full", "swa", "state")) for _ in records]
    rows = [
        a_row(rng, rng.choice((one, two)).number, record, kind=kind)
        for record, kind in zip(records, kinds, strict=True)
    ]
    for start in range(0, 120, 25):
        assert index.commit(rows[start : start + 25]) == rows[start : start + 25]

    for space in (one.number, two.number):
        expected = in_order([row for row in rows if row.space == space])
        for limit in (1, 7, len(expected), 1000):
            assert rows_of(index, space, limit) == expected
        assert index.num_rows(space) == len(expected)
    index = opened()
    assert rows_of(index, one.number) == in_order([row for row in rows if row.space == one.number])


def test_records_of_all_spaces_are_read_without_their_pages(opened: Callable[..., DiskIndex]) -> None:
    index, rng = opened(), Random(11)
    space, other = a_space(index).number, a_space(index).number
    rows = [a_row(rng, space, record, kind=rng.choice(KINDS)) for record in rng.sample(range(1, 99), 40)]
    rows = [*in_order(rows), a_row(rng, other, 99, depth=1)]
    index.commit(rows)
    expected = [(row.space, row.place.kind, row.record) for row in rows]

    for limit in (1, 9, 40, 1000):
        found: list[tuple[int, int, int]] = []
        place: RowPlace | None = FIRST
        while place is not None:
            spaces, kinds, records, place = index.records(place, limit)
            found += zip(spaces.tolist(), kinds.tolist(), records.tolist(), strict=True)
        assert found == expected


def test_parents_tokens_and_planes_may_be_there_or_not(opened: Callable[..., DiskIndex]) -> None:
    index, rng = opened(), Random(2)
    space = a_space(index).number
    rows = [
        a_row(rng, space, 1, parent=None, tokens=None, depth=1),
        a_row(rng, space, 2, tokens=rng.randbytes(8 * PAGE), planes=5, depth=2),
        a_row(rng, space, 2, kind="swa", depth=2),
        a_row(rng, space, 2, kind="state", depth=2),
    ]
    index.commit(rows)

    assert rows_of(index, space) == rows
    places = [(1, 0, 1), (2, 0, 2), (2, 1, 2), (2, 2, 2)]
    assert [row.place for row in rows] == [RowPlace(space, *place) for place in places]


def test_removed_rows_are_gone_and_others_are_not(opened: Callable[..., DiskIndex]) -> None:
    index, rng = opened(), Random(3)
    space = a_space(index).number
    rows = [a_row(rng, space, record, kind=kind) for record in range(1, 11) for kind in ("full", "swa")]
    index.commit(rows)

    index.commit(removed=[("full", 3), ("swa", 4), ("state", 4), ("full", 77)])
    expected = [row for row in rows if (row.kind, row.record) not in {("full", 3), ("swa", 4)}]
    assert rows_of(index, space) == in_order(expected)

    again = a_row(rng, space, 3)
    index.commit([again])
    assert rows_of(index, space) == in_order([*expected, again])


def test_a_commit_of_nothing_changes_nothing(opened: Callable[..., DiskIndex]) -> None:
    index = opened()
    assert index.commit() == []
    assert index.spaces() == []


@pytest.mark.parametrize("seed", range(3))
def test_random_commits_agree_with_a_dictionary(opened: Callable[..., DiskIndex], seed: int) -> None:
    index, rng = opened(), Random(seed)
    model: dict[tuple[str, int], IndexRow] = {}
    live: dict[int, Space] = {}
    numbers: set[int] = set()
    for _ in range(150):
        what = rng.random()
        if what < 0.15 or not live:
            space = a_space(index, rng.choice((None, "a", "a\ud800")), rng.choice("vw"))
            assert space.number not in numbers
            numbers.add(space.number)
            live[space.number] = space
        elif what < 0.25:
            ended = [number for number in live if rng.random() < 0.3]
            index.delete_spaces(ended)
            for number in ended:
                del live[number]
            model = {key: row for key, row in model.items() if row.space in live}
        elif what < 0.4:
            index.clean()
        elif what < 0.5:
            index = opened()
        else:
            free = [record for record in range(1, 40) if ("full", record) not in model]
            added = [a_row(rng, rng.choice(list(numbers)), record) for record in rng.sample(free, min(5, len(free)))]
            removed = rng.sample(list(model), min(len(model), rng.randint(0, 4)))
            done = index.commit(added, removed)  # type: ignore[arg-type]
            assert done == [row for row in added if row.space in live]
            for key in removed:
                del model[key]
            model.update({(row.kind, row.record): row for row in done})
        assert index.spaces() == [live[number] for number in sorted(live)]
        for number in live:
            assert rows_of(index, number, 6) == in_order([row for row in model.values() if row.space == number])
    while index.clean():
        pass
    assert index.num_bad_rows == 0


# -------------------------------------------------------------------- spaces


def test_spaces_keep_their_values_and_their_numbers_are_never_used_again(opened: Callable[..., DiskIndex]) -> None:
    index = opened()
    first = index.add_space(None, "b1", None, "v1")
    second = index.add_space("salt\ud83d", "b1", "adapter", "ä", arity=2)
    assert [first.number, second.number] == [1, 2]
    assert second[1:6] == ("salt\ud83d", "b1", "adapter", "ä", 2)
    assert opened().spaces() == [first, second]

    index = opened()
    index.delete_spaces([2])
    assert opened().spaces() == [first]
    assert a_space(opened()).number == 3


def test_a_deleted_space_takes_no_rows(opened: Callable[..., DiskIndex]) -> None:
    index, rng = opened(), Random(4)
    ended, live = a_space(index).number, a_space(index).number
    index.commit([a_row(rng, ended, 1)])
    index.delete_spaces([ended])

    late, other = a_row(rng, ended, 2), a_row(rng, live, 3)
    assert index.commit([late, other]) == [other]
    assert rows_of(index, live) == [other]
    never = a_row(rng, live + 7, 4)
    assert index.commit([never]) == []
    assert opened().commit([late]) == []


def test_the_record_of_a_deleted_space_is_used_again_before_its_row_is_cleaned(
    opened: Callable[..., DiskIndex],
) -> None:
    index, rng = opened(), Random(5)
    ended, live = a_space(index).number, a_space(index).number
    index.commit([a_row(rng, ended, record) for record in range(1, 600)])
    index.delete_spaces([ended])
    again = [a_row(rng, live, record) for record in (1, 300, 599)]
    index.commit(again)

    assert index.clean()
    assert index.clean()
    assert not index.clean()
    assert index.num_rows(ended) == 0
    assert rows_of(index, live) == in_order(again)


def test_a_deletion_is_on_the_disk_when_it_returns_and_commits_are_not_waited_for(
    opened: Callable[..., DiskIndex],
) -> None:
    statements: list[str] = []

    class Traced(FileCalls):
        def connect(self, path: str, mode: str = "rw") -> sqlite3.Connection:
            connection = super().connect(path, mode)
            connection.set_trace_callback(statements.append)
            return connection

    index = opened(calls=Traced())
    space = a_space(index).number
    statements.clear()
    index.delete_spaces([space])
    index.commit()

    firsts = [" ".join(statement.split()[:2]) for statement in statements]
    assert firsts == [
        *("PRAGMA synchronous=FULL", "BEGIN IMMEDIATE", "DELETE FROM", "COMMIT", "PRAGMA synchronous=NORMAL"),
        *("BEGIN IMMEDIATE", "COMMIT"),
    ]


@pytest.mark.parametrize("statement", ["BEGIN", "DELETE", "COMMIT"])
def test_a_deletion_that_fails_takes_no_rows_and_can_be_repeated(
    opened: Callable[..., DiskIndex], statement: str
) -> None:
    calls, rng = FaultyFileCalls(), Random(6)
    index = opened(calls=calls)
    space = a_space(index).number
    index.commit([a_row(rng, space, 1)])
    calls.fail(statement, errno.EIO)
    with pytest.raises(DiskFailed, match="deleting spaces of the index failed: Input/output error"):
        index.delete_spaces([space])
    assert index.commit([a_row(rng, space, 2)]) == []

    index.delete_spaces([space])
    assert opened().spaces() == []


# -------------------------------------------------------------------- crashes


def in_child(work: Callable[[], None]) -> int | None:
    """Run work in a copy of this process; return its exit status, -9 if it was killed."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    return child.exitcode


BATCH = 5


def batch(space: int, number: int) -> list[IndexRow]:
    rng = Random(number)
    return [a_row(rng, space, 1 + number * BATCH + place, kind="full") for place in range(BATCH)]


def space_with_a_batch(index: DiskIndex) -> int:
    """Commit a batch of a new space, close the index, and return the space's number."""
    space = a_space(index).number
    index.commit(batch(space, 0))
    index.close()
    return space


def kill_at(statement: str, folder: Path, change: Callable[[DiskIndex], object]) -> None:
    """Make a change in a child process that is killed at a statement, or after the change."""

    def work() -> None:
        calls = FaultyFileCalls()
        index = DiskIndex(str(folder), LAYOUT, calls=calls)
        calls.kill(statement)
        change(index)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL


@pytest.mark.parametrize("statement", ["BEGIN", "DELETE", "INSERT", "COMMIT", "after"])
def test_a_commit_that_is_killed_is_whole_or_absent(
    opened: Callable[..., DiskIndex], statement: str, tmp_path: Path
) -> None:
    space = space_with_a_batch(opened())
    deleted = [("full", row.record) for row in batch(space, 0)[:2]]

    kill_at(statement, tmp_path, lambda index: index.commit(batch(space, 1), deleted))

    expected = batch(space, 0)[2:] + batch(space, 1) if statement == "after" else batch(space, 0)
    assert rows_of(DiskIndex(str(tmp_path), LAYOUT), space) == in_order(expected)


@pytest.mark.parametrize("statement", ["BEGIN", "DELETE", "COMMIT", "after"])
def test_a_deletion_that_is_killed_is_whole_or_absent(
    opened: Callable[..., DiskIndex], statement: str, tmp_path: Path
) -> None:
    space = space_with_a_batch(opened())

    kill_at(statement, tmp_path, lambda index: index.delete_spaces([space]))

    index = DiskIndex(str(tmp_path), LAYOUT)
    assert [found.number for found in index.spaces()] == ([] if statement == "after" else [space])
    assert a_space(index).number == space + 1


def test_a_log_that_was_cut_anywhere_has_the_first_commits_whole(tmp_path: Path) -> None:
    """The log is all that a commit writes: a crash of the machine leaves any beginning of it."""
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    index = DiskIndex(str(live), LAYOUT)
    space = a_space(index).number
    for number in range(6):
        index.commit(batch(space, number))
    expected = [in_order([row for number in range(most) for row in batch(space, number)]) for most in range(7)]
    log_size = (live / f"{INDEX}-wal").stat().st_size
    rng, found = Random(7), []

    for size in sorted({0, log_size, *rng.sample(range(log_size), 25)}):
        shutil.copytree(live, copy)
        with open(copy / f"{INDEX}-wal", "r+b") as log:
            log.truncate(size)
            if rng.random() < 0.5:  # the blocks that are missing may have other bytes
                log.seek(size)
                log.write(rng.randbytes(5000))
        after = DiskIndex(str(copy), LAYOUT)
        found.append(expected.index(rows_of(after, space)))
        after.close()
        shutil.rmtree(copy)

    index.close()
    assert found == sorted(found) and found[0] == 0 and found[-1] == 6
    assert len(set(found)) > 3


@pytest.mark.parametrize(("code", "kind"), [(errno.EIO, DiskFailed), (errno.ENOSPC, DiskFull)])
@pytest.mark.parametrize("statement", ["BEGIN", "DELETE", "INSERT", "COMMIT"])
def test_a_commit_that_fails_is_absent_and_the_next_one_works(
    opened: Callable[..., DiskIndex], statement: str, code: int, kind: type[DiskError]
) -> None:
    calls = FaultyFileCalls()
    index = opened(calls=calls)
    space = a_space(index).number
    index.commit(batch(space, 0))
    calls.fail(statement, code)
    with pytest.raises(kind, match="writing the index failed: "):
        index.commit(batch(space, 1), [("full", 1)])

    assert rows_of(index, space) == in_order(batch(space, 0))
    index.commit(batch(space, 2))
    assert rows_of(opened(), space) == in_order(batch(space, 0) + batch(space, 2))


def test_a_database_that_is_full_is_a_typed_error(opened: Callable[..., DiskIndex]) -> None:
    class Small(FileCalls):
        def connect(self, path: str, mode: str = "rw") -> sqlite3.Connection:
            connection = super().connect(path, mode)
            connection.execute("PRAGMA max_page_count = 20")
            return connection

    index = opened(calls=Small())
    space = a_space(index).number
    with pytest.raises(DiskFull, match="database or disk is full"):
        for number in range(1000):
            index.commit(batch(space, number))
    kept = number
    assert len(rows_of(index, space)) == kept * BATCH
    assert len(rows_of(opened(), space)) == kept * BATCH


# -------------------------------------------------------------------- room


def test_a_new_index_has_room_for_its_rows(opened: Callable[..., DiskIndex], tmp_path: Path) -> None:
    number, rng = 3000, Random(8)
    index = opened(room=index_bytes(number, PAGE))
    size = (tmp_path / INDEX).stat().st_size
    assert size >= index_bytes(number, PAGE)
    assert (tmp_path / INDEX).stat().st_blocks * 512 >= size
    space = a_space(index).number

    records = rng.sample(range(1, number + 1), number)
    for start in range(0, number, 100):
        index.commit([a_row(rng, space, record) for record in records[start : start + 100]])
    for _ in range(20):  # other pages in the same records
        changed = rng.sample(records, 100)
        index.commit(removed=[("full", record) for record in changed])
        index.commit([a_row(rng, space, record) for record in changed])
    index = opened()

    assert (tmp_path / INDEX).stat().st_size == size
    assert not (tmp_path / f"{INDEX}-shm").exists(), "no other process has to see the log"
    assert index.num_rows(space) == number


def test_the_room_of_an_index() -> None:
    assert index_bytes(1000, 16) / 1000 == pytest.approx(400, rel=0.02)
    assert index_bytes(10, 16, 5) - index_bytes(10, 16) == index_bytes(5, 0)
    assert log_bytes(16) == 8192 * 1000 < log_bytes(512)


@pytest.mark.parametrize("statement", ["INSERT", "COMMIT"])
def test_a_disk_without_room_for_the_index_is_refused(tmp_path: Path, statement: str) -> None:
    calls = FaultyFileCalls()
    calls.fail(statement, errno.ENOSPC)
    with pytest.raises(CacheUnavailable, match=r"the disk cannot be used: no room for the index of 391 KiB"):
        DiskIndex(str(tmp_path), LAYOUT, room=400_000, calls=calls)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("statement", ["CREATE", "INSERT", "COMMIT"])
def test_an_index_that_was_killed_while_it_was_made_is_made_again(tmp_path: Path, statement: str) -> None:
    def work() -> None:
        calls = FaultyFileCalls()
        calls.kill(statement)
        DiskIndex(str(tmp_path), LAYOUT, room=100_000, calls=calls)

    assert in_child(work) == -signal.SIGKILL
    assert not (tmp_path / INDEX).exists()
    index = DiskIndex(str(tmp_path), LAYOUT)
    assert index.spaces() == []
    assert sorted(os.listdir(tmp_path)) == [INDEX, f"{INDEX}-wal"]
    index.close()


# -------------------------------------------------------------------- files that are no index


def test_only_this_user_may_read_the_files(opened: Callable[..., DiskIndex], tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        a_space(opened())
    finally:
        os.umask(previous)

    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in os.listdir(tmp_path)}
    assert modes == {INDEX: 0o600, f"{INDEX}-wal": 0o600}


@pytest.mark.parametrize("name", [INDEX, f"{INDEX}-wal", f"{INDEX}-journal"])
def test_links_are_refused(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (tmp_path / name).symlink_to(elsewhere)

    with pytest.raises(CacheUnavailable, match=f"the disk cannot be used: {name} must be a file of this user: remove"):
        DiskIndex(str(tmp_path), LAYOUT)
    assert elsewhere.read_bytes() == b"precious"


def test_an_index_of_another_layout_or_version_is_refused(opened: Callable[..., DiskIndex], tmp_path: Path) -> None:
    opened().close()
    others = {
        "its digest is 'd1d1d1d1d1d1d1d1', not 'd2d2d2d2d2d2d2d2'": LAYOUT._replace(digest="d2" * 8),
        "page_size is 4, not 16": LAYOUT._replace(digest="d3" * 8, page_size=16),
        "dtype is 'uint8', not 'int8'": LAYOUT._replace(digest="d2" * 8, description='{"dtype": "int8"}'),
    }
    for difference, layout in others.items():
        with pytest.raises(CacheUnavailable, match=f"another layout than the cache: {difference}. `raydix disk clear`"):
            DiskIndex(str(tmp_path), layout)
    assert opened(layout=None).layout == LAYOUT
    opened().close()

    database = sqlite3.connect(tmp_path / INDEX)
    database.execute("PRAGMA user_version=2")
    database.close()
    with pytest.raises(CacheUnavailable, match=r"index has format 2, and this version of Raydix reads format 1"):
        DiskIndex(str(tmp_path), LAYOUT)
    DiskIndex.discard(str(tmp_path))
    assert DiskIndex(str(tmp_path), LAYOUT).spaces() == []


def test_files_of_others_are_no_index(tmp_path: Path) -> None:
    path = tmp_path / INDEX
    path.write_bytes(b"hello, world" * 1000)
    with pytest.raises(IndexDamaged, match="file is not a database"):
        DiskIndex(str(tmp_path), LAYOUT)

    path.write_bytes(b"")
    with pytest.raises(IndexDamaged, match="the file is a database of another program"):
        DiskIndex(str(tmp_path), LAYOUT)

    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(IndexDamaged, match="another program"):
        DiskIndex(str(tmp_path), LAYOUT)


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_index_is_found_or_its_rows_are_as_they_were(tmp_path: Path, seed: int) -> None:
    """Flips, zeros or cuts a part of the file: SQLite finds it, or the rows are right, or they have other values."""
    index, rng = DiskIndex(str(tmp_path), LAYOUT), Random(seed)
    space = a_space(index).number
    for number in range(30):
        index.commit(batch(space, number))
    index.close()
    path, size = tmp_path / INDEX, (tmp_path / INDEX).stat().st_size
    with open(path, "r+b") as file:
        for _ in range(rng.choice((1, 3, 20))):
            file.seek(rng.randrange(size))
            file.write(rng.choice((rng.randbytes(1), bytes(50), rng.randbytes(4096))))
        file.truncate(rng.choice((size, size, size - 4096, size // 2)))

    try:
        index = DiskIndex(str(tmp_path), LAYOUT)
        found = rows_of(index, space, 40)
        index.num_rows(space)
        index.records()
        index.commit(batch(space, 31), [("full", 3)])
        index.clean()
        index.close()
    except (DiskError, CacheUnavailable):
        pass
    else:
        assert len(found) <= 30 * BATCH
        assert all(len(row.digest) == 32 and len(row.record_sum) == 16 and row.record > 0 for row in found)
    DiskIndex.discard(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_rows_that_are_none_are_left_out_and_counted(opened: Callable[..., DiskIndex], tmp_path: Path) -> None:
    index, rng = opened(), Random(9)
    space = a_space(index).number
    rows = [a_row(rng, space, record) for record in range(1, 12)]
    index.commit(rows)
    index.close()
    database = sqlite3.connect(tmp_path / INDEX)
    wrong = [
        "kind = 7",
        "depth = 0",
        "digest = x'00'",
        "sum = x''",
        "parent = x'01'",
        "tokens = x'0000'",
        "planes = -1",
    ]
    for record, change in enumerate(wrong, start=1):
        database.execute(f"UPDATE rows SET {change} WHERE record = {record}")
    database.commit()
    database.close()

    index = DiskIndex(str(tmp_path), LAYOUT)
    assert rows_of(index, space, 3) == in_order(rows[len(wrong) :])
    assert index.num_bad_rows == len(wrong)
    index.close()


def test_another_process_cannot_use_the_index_meanwhile(opened: Callable[..., DiskIndex], tmp_path: Path) -> None:
    index = opened()
    a_space(index)

    with pytest.raises(DiskFailed, match="database is locked"):
        DiskIndex(str(tmp_path), LAYOUT)
    a_space(index)
