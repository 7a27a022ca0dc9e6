"""Retirements at each point of a write and of a rebuild, and an index that is malformed: nothing stale is found."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiers.disk_rig import PAGE, opened_rig, stalled_copies
from support.tiers.disk_story import EVERY, PROMPTS, DiskStory
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers.disk import disk_errors, disk_opening, space_bindings
from raydix.actors.tiers.disk.disk_index import INDEX

NONE, ALL = [0] * len(PROMPTS), [len(prompt) for prompt in PROMPTS]
ROOMY: dict[str, Any] = {"disk_pages": 64, "num_pages": 64}
WINDOWS_AND_STATES: dict[str, Any] = {"window": 8, "num_states": 24}
MORE = pytest.mark.more
WRITE_CALLS = ("pwritev", "BEGIN", "INSERT", "COMMIT")


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.003)
    monkeypatch.setattr(disk_opening, "_RECORDS_AT_ONCE", 4)
    monkeypatch.setattr(space_bindings, "_ROWS_AT_ONCE", 4)
    monkeypatch.setattr(space_bindings, "_BUILT_AT_ONCE", 2)


async def run(work: Callable[[bool], Awaitable[None]], is_killed: bool) -> None:
    """Do work; or in another process, which must end itself with SIGKILL."""
    if not is_killed:
        await work(False)
        return
    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(work(True)))  # type: ignore[arg-type]
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- in a write


@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "is killed"])
@pytest.mark.parametrize("place", ["gather", "committed", *(pytest.param(name, marks=MORE) for name in WRITE_CALLS)])
@pytest.mark.parametrize("shape", [{}, pytest.param(WINDOWS_AND_STATES, marks=MORE)], ids=["pages", "both"])
async def test_a_retirement_at_each_point_of_a_write(
    tmp_path: Path, shape: dict[str, Any], place: str, is_killed: bool
) -> None:
    story, calls = DiskStory(tmp_path, **ROOMY | shape), FaultyFileCalls()

    async def work(dies: bool) -> None:
        rig = story.rig(calls)
        await rig.ready()
        await rig.twice(PROMPTS[0])
        planted = copies if place == "gather" else calls
        go_on = planted.stall(place)
        name = "COMMIT" if place == "committed" else place
        before = planted.counts[name]
        for _ in range(2):
            rig.request(PROMPTS[1])
        while not rig.disk.all_writes[0].in_flight:  # noqa: ASYNC110 -- each step of the loop counts
            await asyncio.sleep(0)
        while planted.counts[name] == before:  # the loop does not run meanwhile
            time.sleep(0.0005)  # noqa: ASYNC251
        time.sleep(0.005)  # noqa: ASYNC251
        story.note("?new")
        rig.retire("new", None)
        rig.check()
        if dies:
            die()
        go_on()
        deletion = rig.disk.deletions.future()
        assert deletion is not None
        await rig.wait(deletion.done)
        story.note("!new")
        await rig.check_index()
        assert await rig.lengths(*PROMPTS) == NONE
        await rig.twice(PROMPTS[1])
        rig.core.evict(EVERY)
        assert await rig.lengths(PROMPTS[1]) == [32]
        rig.disk.close(60)

    with stalled_copies() as copies:
        await run(work, is_killed)
    await story.check_successor()


async def test_of_two_namespaces_of_a_write_one_is_retired(tmp_path: Path) -> None:
    """The rows of the other one are committed, so its pages are there."""
    with stalled_copies() as copies:
        async with opened_rig(tmp_path) as rig:
            await rig.twice([5] * 8)
            await rig.twice([5] * 8, namespace="a")
            go_on = copies.stall("gather")
            rig.disk.work.paused_until = float("inf")
            for namespace in (None, None, "a", "a"):
                rig.request([1] * 16, namespace)
            rig.disk.work.paused_until = 0
            rig.disk.work.run_slice()
            (batch,) = rig.disk.writes._batches
            assert len(batch.moves) == 2
            rig.retire("new", "a")
            go_on()
            await rig.settle()
            await rig.check_index()
            rig.core.evict(EVERY)
            assert (await rig.load([1] * 16))[0] == 16
            assert (await rig.load([1] * 16, "a"))[0] == 0


async def test_a_cancelled_write_is_still_due(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice([5] * 8)
        rig.request([1] * 16)
        rig.request([1] * 16)
        rig.disk.work.run_slice()
        rig.disk.cancel_writes()
        await rig.settle()

        rig.core.evict(EVERY)
        assert await rig.lengths([1] * 16) == [16]


# ---------------------------------------------------------------- in a rebuild


@pytest.mark.parametrize("is_killed", [False, True], ids=["lives", "is killed"])
@pytest.mark.parametrize(
    "place", ["reading", 10, *(pytest.param(place, marks=MORE) for place in ("opening", 1, 3, 5, 8, 14, 19, 25, 31))]
)
async def test_a_retirement_in_the_middle_of_a_rebuild(tmp_path: Path, place: str | int, is_killed: bool) -> None:
    """While it opens or reads the index, and when so many of its pages are in the tree."""
    story = DiskStory(tmp_path, **ROOMY)
    rig = story.rig()
    await rig.ready()
    await rig.twice(*PROMPTS)
    assert rig.cache.total_size() == 31 * PAGE
    rig.disk.close(60)

    def is_there() -> bool:
        return rig.disk.state == place if isinstance(place, str) else rig.cache.total_size() >= place * PAGE

    async def work(dies: bool) -> None:
        nonlocal rig
        rig = story.rig()
        rig.disk.start()
        while not is_there():  # noqa: ASYNC110 -- each step of the loop counts
            await asyncio.sleep(0)
        story.note("?new")
        rig.retire("new", None)
        rig.check()
        if dies:
            die()
        deletion = rig.disk.deletions.future()
        assert deletion is not None
        await rig.wait(deletion.done)
        story.note("!new")
        await rig.ready()
        await rig.check_index()
        assert await rig.lengths(*PROMPTS) == NONE and rig.cache.free_slots == rig.cache.num_slots
        await rig.twice(*PROMPTS[:2])
        rig.disk.close(60)

    await run(work, is_killed)
    await story.check_successor()


@pytest.mark.parametrize(
    "call", ["SELECT", *(pytest.param(call, marks=MORE) for call in ("open", "fallocate", "BEGIN", "PRAGMA", "preadv"))]
)
async def test_a_call_that_fails_at_the_start_loses_nothing(tmp_path: Path, call: str) -> None:
    """The cache serves without its disk, or the disk is read in spite of it; the next start finds all."""
    story = DiskStory(tmp_path, **ROOMY | {"direct_io": "auto"} if call == "preadv" else ROOMY)
    rig = story.rig()
    await rig.ready()
    await rig.twice(*PROMPTS)
    rig.disk.close(60)
    number = 0
    calls = FaultyFileCalls()
    while not number or calls.counts[call] > number:
        calls = FaultyFileCalls()
        calls.fail(call, errno.EIO, number)
        number += 1
        rig = story.rig(calls)
        rig.disk.start()
        await rig.wait(lambda rig=rig: rig.disk.state == "ready" or rig.disk.state.startswith("failed: "))  # type: ignore[misc]
        if rig.disk.state == "ready":
            await rig.settle()
            assert await rig.lengths(*PROMPTS) == ALL
        rig.check()
        rig.disk.close(60)
    rig = story.rig()
    await rig.ready()
    assert await rig.lengths(*PROMPTS) == ALL
    rig.disk.close(60)


# ---------------------------------------------------------------- tickets


async def test_a_ticket_waits_for_its_own_retirement_alone(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice([1] * 16)
        await rig.twice([1] * 16, namespace="a")
        go_on = [calls.stall("DELETE", number) for number in range(2)]
        rig.retire("new", None)
        first = rig.disk.deletions.future()
        assert first is not None and rig.disk.deletions.future() is first, "a repeated call waits for the same commit"
        rig.retire("new", "a")
        second = rig.disk.deletions.future()
        assert second is not None and second is not first
        go_on[0]()
        await rig.wait(first.done)
        assert not second.done()
        go_on[1]()
        await rig.wait(second.done)
        assert rig.disk.deletions.future() is None


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_retirement_that_was_refused_is_tried_for_the_last_time_at_the_end(
    tmp_path: Path, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_errors, "RETRY_S", 60)
    story = DiskStory(tmp_path, **ROOMY)
    rig = story.rig()
    await rig.ready()
    await rig.twice(*PROMPTS)
    rig.disk.close(60)
    calls = FaultyFileCalls()
    rig = story.rig(calls)
    if is_open:
        await rig.ready()
        calls.fail("DELETE", errno.EIO)
    else:
        rig.disk.start()
    story.note("?new")
    rig.retire("new", None)
    deletion = rig.disk.deletions.future()
    assert deletion is not None
    await rig.wait(lambda: calls.counts["DELETE"] > 0 if is_open else rig.disk.files.writer is not None)
    rig.disk.close(60)
    await rig.wait(deletion.done)
    story.note("!new")

    assert not sum(length * number for length, number in (await story.check_successor()).items())


# ---------------------------------------------------------------- a malformed index


async def test_an_index_that_is_malformed_is_found_when_it_is_read_and_made_again(tmp_path: Path) -> None:
    story = DiskStory(tmp_path, **ROOMY)
    rig = story.rig()
    await rig.ready()
    await rig.twice(*PROMPTS)
    rig.disk.close(60)
    for name in ("spaces", "records", "rows"):
        calls = FaultyFileCalls()
        rig = story.rig(calls)
        numbers = {"spaces": 3, "records": 4, "rows": 13}
        calls.fail("SELECT", errno.EUCLEAN, numbers[name])
        await rig.ready()
        await rig.check_index()
        assert await rig.lengths(*PROMPTS) == NONE, name
        await rig.twice(*PROMPTS)
        rig.disk.close(60)
        rig = story.rig()
        await rig.ready()
        assert await rig.lengths(*PROMPTS) == ALL
        rig.disk.close(60)


@pytest.mark.parametrize("call", ["DELETE", "INSERT"])
async def test_an_index_that_becomes_malformed_is_made_again_and_a_retirement_is_confirmed(
    tmp_path: Path, call: str
) -> None:
    story, calls = DiskStory(tmp_path, **ROOMY), FaultyFileCalls()
    rig = story.rig(calls)
    await rig.ready()
    await rig.twice(*PROMPTS[:3])
    calls.fail(call, errno.EUCLEAN)
    if call == "DELETE":
        await story.retire(rig, "new")
    else:
        await rig.twice(PROMPTS[3])
        await rig.wait(lambda: not rig.cache.total_size())
    await rig.settle()
    await rig.check_index()
    await rig.twice(*PROMPTS[:3])
    rig.core.evict(EVERY)
    assert await rig.lengths(*PROMPTS[:3]) == ALL[:3]
    rig.disk.close(60)
    await story.check_successor()


async def test_an_index_with_damaged_pages_costs_its_rows_alone(tmp_path: Path) -> None:
    """Bytes of the real file are overwritten in turn: the tier starts, and what it finds is right."""
    story = DiskStory(tmp_path, **ROOMY)
    rig = story.rig()
    await rig.ready()
    await rig.twice(*PROMPTS)
    rig.disk.close(60)
    (path,) = tmp_path.glob(f"kv-0/*/{INDEX}")  # noqa: ASYNC240
    whole = path.read_bytes()
    for at in range(0, len(whole), len(whole) // 5):
        path.write_bytes(whole[:at] + bytes(byte ^ 0x5A for byte in whole[at : at + 64]) + whole[at + 64 :])
        rig = story.rig()
        rig.disk.start()
        await rig.wait(lambda rig=rig: rig.disk.state == "ready" or rig.disk.state.startswith("failed: "))  # type: ignore[misc]
        if rig.disk.state == "ready":
            await rig.settle()
            await rig.lengths(*PROMPTS)
            await rig.check_index()
        rig.check()
        rig.disk.close(60)
