"""Each call of the operating system that a disk tier makes fails once, and each is the last one before a kill."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.tiers.disk_story import DiskStory
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers.disk import disk_errors, disk_opening, space_bindings

SHAPES: dict[str, dict[str, Any]] = {
    "pages": {},
    "host": {"host_pages": 40},
    "both": {"window": 8, "num_states": 24},
}
WRITES = ("pwritev", "preadv", "BEGIN", "INSERT", "DELETE", "COMMIT")
CALLS = (*WRITES, "SELECT", "PRAGMA", "ROLLBACK")
NUM_SHORT = 4  # cases of each kind in `make test`
NUM_SOME = 16  # cases of each kind and shape in `make test-more`
# The disk, its room, and the index: SQLite calls it malformed.
CODES = pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EUCLEAN], ids=["EIO", "ENOSPC", "malformed"])


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.003)
    monkeypatch.setattr(space_bindings, "_ROWS_AT_ONCE", 5)
    monkeypatch.setattr(disk_opening, "_RECORDS_AT_ONCE", 5)
    monkeypatch.setattr(space_bindings, "_BUILT_AT_ONCE", 2)


async def tell(path: Path, shape: str, calls: FaultyFileCalls, *plan: tuple[str, str, int, int]) -> Counter[str]:
    """Tell the story with faults behind the opening; return the calls that it made."""
    story = DiskStory(path, **SHAPES[shape])
    rig = story.rig(calls)
    try:
        await rig.ready()
        before = calls.counts.copy()
        for what, name, number, code in plan:
            if what == "kill":
                calls.kill(name, number)
            else:
                calls.fail(name, code, number)
        await story.tell(rig)
        made = calls.counts - before
        await rig.check_index()
        return made
    finally:
        rig.disk.close(60)


@cache
def number_of_calls(shape: str) -> Counter[str]:
    """The calls of a story that meets nothing."""
    with TemporaryDirectory() as path:
        return asyncio.run(tell(Path(path), shape, FaultyFileCalls()))


def cases(shape: str) -> list[tuple[str, int]]:
    return [(name, number) for name in CALLS for number in range(number_of_calls(shape)[name])]


def spread(found: list[Any], number: int) -> list[Any]:
    """So many of some cases, from all of them."""
    return found[:: max(1, len(found) // number)]


def kill_at(path: Path, shape: str, name: str, number: int) -> None:
    """Tell the story in another process, which is killed at a call."""
    child = multiprocessing.get_context("fork").Process(
        target=lambda: asyncio.run(tell(path, shape, FaultyFileCalls(), ("kill", name, number, 0)))
    )
    child.start()
    child.join(60)
    assert child.exitcode in (-signal.SIGKILL, 0), f"{name} {number}: {child.exitcode}"


def check_kills(shape: str, some: list[tuple[str, int]], tmp_path: Path) -> None:
    for name, number in some:
        path = tmp_path / f"{name} {number}"
        path.mkdir()
        kill_at(path, shape, name, number)
        try:
            asyncio.run(DiskStory(path, **SHAPES[shape]).check_successor())
        except Exception as error:
            raise AssertionError(f"behind a kill at {name} {number}: {error!r}") from error


def check_failures(shape: str, some: list[tuple[str, int]], tmp_path: Path, code: int) -> None:
    for name, number in some:
        path = tmp_path / f"{name} {number} {code}"
        path.mkdir()
        try:
            asyncio.run(tell(path, shape, FaultyFileCalls(), ("fail", name, number, code)))
            asyncio.run(DiskStory(path, **SHAPES[shape]).check_successor())
        except Exception as error:
            raise AssertionError(f"{os.strerror(code)} at {name} {number}: {error!r}") from error


def test_a_kill_at_a_call_leaves_nothing_wrong(tmp_path: Path) -> None:
    check_kills("pages", spread(cases("pages"), NUM_SHORT), tmp_path)


@CODES
def test_a_call_that_fails_leaves_nothing_wrong(tmp_path: Path, code: int) -> None:
    check_failures("pages", spread(cases("pages"), NUM_SHORT), tmp_path, code)


@pytest.mark.more
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kill_at_some_calls_of_each_shape_leaves_nothing_wrong(tmp_path: Path, shape: str) -> None:
    check_kills(shape, spread(cases(shape), NUM_SOME), tmp_path)


@pytest.mark.more
@CODES
@pytest.mark.parametrize("shape", SHAPES)
def test_some_calls_of_each_shape_that_fail_leave_nothing_wrong(tmp_path: Path, shape: str, code: int) -> None:
    check_failures(shape, spread(cases(shape), NUM_SOME), tmp_path, code)


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kill_at_each_call_leaves_nothing_wrong(tmp_path: Path, shape: str) -> None:
    check_kills(shape, cases(shape), tmp_path)


@pytest.mark.long
@CODES
@pytest.mark.parametrize("shape", SHAPES)
def test_each_call_that_fails_leaves_nothing_wrong(tmp_path: Path, shape: str, code: int) -> None:
    check_failures(shape, cases(shape), tmp_path, code)
