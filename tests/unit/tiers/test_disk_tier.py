"""`DiskTier`: writes, restarts, retirements, and the cache above a disk that fails."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import operator
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.tiers.disk_rig import PAGE, STATE_BYTES, WAIT_S, DiskRig, opened_rig
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers import tier_loads
from raydix.actors.tiers.disk import disk_errors, disk_files, disk_opening, disk_writes, free_records
from raydix.actors.tiers.disk.disk_work import DiskWork
from raydix.actors.tiers.disk.disk_writes import DiskWrites
from raydix.actors.tiers.disk.record_file import BLOCK, stride_of
from raydix.cache_core import RadixKey
from raydix.cache_core.tiers.look_up import LookUp

PROMPTS = [[1] * 16, [1] * 12 + [2] * 20, [1] * 12 + [3] * 4, [7] * 24]  # 4, 5 more, 1 more and 6 pages
ALL = [16, 32, 16, 24]


# ---------------------------------------------------------------- writes


async def test_a_page_is_written_at_its_second_use_and_loaded_when_it_has_left_the_pool(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        for prompt in PROMPTS:
            rig.request(prompt)
        await rig.settle()
        assert rig.cache.total_size() == 3 * PAGE, "the pages that two prompts share"

        await rig.twice(*PROMPTS)
        assert rig.cache.total_size() == 16 * PAGE
        rig.core.evict(10**6)
        assert await rig.lengths(*PROMPTS) == ALL
        stats = rig.disk.stats()
        assert (stats.state, stats.slots.tree_slots, stats.damaged_records) == ("ready", 16 * PAGE, 0)
        assert stats.written_bytes == 16 * BLOCK
        assert stats.tokens_written == 16 * PAGE and stats.tokens_loaded == 16 * PAGE


async def test_nothing_is_locked_by_a_disk_that_does_not_take_a_write(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        go_on = calls.stall("pwritev")
        rig.request([1] * 16)
        rig.request([1] * 16)
        await rig.wait(lambda: bool(rig.disk.all_writes[0].in_flight) and not rig.disk.writes.locks_pool)

        assert rig.core.evict(10**6) == 16, "the pages are in the writer's buffer"
        rig.check()
        assert rig.cache.total_size() == 0
        go_on()
        await rig.settle()
        assert await rig.lengths([1] * 16) == [16]


async def test_a_page_that_has_left_the_pool_is_written_from_the_host(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, host_pages=64, models=None) as rig:
        rig.models = ("m", None, "v1")
        assert rig.host is not None
        rig.request([1] * 16, cache=rig.host)
        rig.disk.bindings.bind()
        await rig.settle()

        rig.disk.writes.offer(RadixKey([1] * 16))
        rig.disk.wake()
        await rig.settle()

        assert rig.disk.all_writes[1].counts.written == 16 and rig.disk.all_writes[0].counts.written == 0
        assert await rig.lengths([1] * 16) == [16]


async def test_a_prompt_that_has_left_memory_before_its_turn_is_counted(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice([1] * 8)
        rig.disk.writes.offer(RadixKey([5] * 8))
        rig.disk.wake()
        await rig.settle()

        assert rig.disk.writes.counts.due_gone == 1


async def test_admit_all_writes_the_coldest_share_of_the_pool_at_its_first_use(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, num_pages=20, admit="all", reserve=0.5) as rig:
        for prompt in ([1] * 24, [2] * 24, [3] * 24):
            rig.request(prompt)
        rig.disk.wake()
        await rig.settle()
        await rig.wait(lambda: rig.cache.total_size() >= 24)
        await rig.settle()

        assert 24 <= rig.cache.total_size() < 72, "the hottest prompt is not among them"
        rig.core.evict(24)
        assert await rig.lengths([1] * 24) == [24]


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of slices of the disk's work so far."""
    slices = [0]

    def run_slice(self: DiskWork, *arguments: Any) -> None:
        slices[0] += 1
        original(self, *arguments)

    original = DiskWork.run_slice
    monkeypatch.setattr(DiskWork, "run_slice", run_slice)
    return slices


async def test_the_disk_waits_without_work_while_no_write_may_begin(tmp_path: Path, slices: list[int]) -> None:
    async with opened_rig(tmp_path, num_pages=20, admit="all", reserve=0.9) as rig:
        rig.disk.may_begin = lambda: False
        rig.request([1] * 24)
        before = slices[0]
        for _ in range(200):
            await asyncio.sleep(0)
        assert slices[0] - before < 10, "it asks again and again"

        rig.disk.may_begin = lambda: True
        rig.disk.wake()
        await rig.settle()
        assert rig.cache.total_size() == 24


async def test_the_disk_waits_without_work_for_the_records_that_will_be_free(tmp_path: Path, slices: list[int]) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, num_pages=20, disk_pages=8, admit="all", reserve=0.9, calls=calls) as rig:
        for number in range(6):
            rig.request([1 + number] * 12)
            rig.disk.wake()
            await rig.settle()
        go_on = calls.stall("DELETE", skipped=1)  # behind the rows of a write
        for number in range(6):
            rig.request([20 + number] * 12)
            rig.disk.wake()
            await asyncio.sleep(0.01)
        writes = rig.disk.writes
        await rig.wait(lambda: not (writes.is_ahead or writes.has_batches) and rig.disk.keepers["full"].num_leaving > 0)
        before = slices[0]
        for _ in range(200):
            await asyncio.sleep(0)
        assert slices[0] - before < 10, "it asks again and again"

        go_on()
        await rig.settle()
        assert rig.cache.total_size() >= 12


async def test_the_limit_of_the_rate_holds_back_all_but_the_first_write(tmp_path: Path) -> None:
    now = [0.0]
    async with opened_rig(tmp_path, write_mib_s=4 * BLOCK / 2**20, clock=lambda: now[0]) as rig:
        rig.request([1] * 16)
        rig.request([1] * 16)
        await rig.wait(lambda: rig.cache.total_size() == 16)
        for _ in range(2):
            rig.request([2] * 16)
            rig.request([3] * 16)
        await asyncio.sleep(0.05)
        assert rig.cache.total_size() == 16 and rig.disk.stats().due_prefixes == 2

        now[0] += 10
        rig.disk.wake()
        await rig.wait(lambda: rig.cache.total_size() == 48)
        await rig.settle()
        rig.request([4] * 16)
        rig.request([4] * 16)
        assert await rig.disk.flush(60), "a cache that ends keeps no limit"
        assert rig.cache.total_size() == 64


async def test_the_prefix_that_was_used_last_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writes, "MOST_PAGES", 4)
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice([9] * 8)
        go_on = [calls.stall("pwritev", number) for number in range(3)]
        for number in (1, 2, 3, 4, 5):
            rig.request([number] * 16)
            rig.request([number] * 16)
            await asyncio.sleep(0)
        await rig.wait(lambda: rig.disk.stats().due_prefixes == 3)
        go_on[0]()
        await rig.wait(lambda: rig.disk.stats().due_prefixes == 2)
        go_on[1]()
        await rig.wait(lambda: rig.disk.stats().due_prefixes == 1)
        go_on[2]()
        await rig.settle()

        records = [int(rig.cache.radix.locate(RadixKey([number] * 16), 4)[1][0]) for number in (5, 4, 3)]
        assert records == sorted(records), "a new disk hands out its records in order"


async def test_a_full_disk_evicts_its_coldest_pages_ahead_of_need(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, disk_pages=24) as rig:
        for number in range(1, 16):
            await rig.twice([number] * 16)

        keeper = rig.disk.keepers["full"]
        assert keeper.num_leaving == 0 and rig.cache.free_slots >= 3 * PAGE
        rig.core.evict(10**6)
        assert await rig.lengths([15] * 16, [1] * 16) == [16, 0]
    async with opened_rig(tmp_path, disk_pages=24) as rig:
        assert await rig.lengths([15] * 16, [1] * 16) == [16, 0]


async def test_a_slice_looks_up_few_prefixes_and_evicts_few_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(free_records, "_EVICTED_AT_ONCE", 2)
    looked_up, evicted = [0], list[int]()
    begin, plan = DiskWrites.begin, DiskWrites._plan

    def noted_begin(writes: DiskWrites, *arguments: Any) -> None:
        looked_up.append(0)
        begin(writes, *arguments)

    def noted_plan(writes: DiskWrites, *arguments: Any) -> Any:
        looked_up[-1] += 1
        return plan(writes, *arguments)

    monkeypatch.setattr(DiskWrites, "begin", noted_begin)
    monkeypatch.setattr(DiskWrites, "_plan", noted_plan)
    async with opened_rig(tmp_path, num_pages=256, disk_pages=30) as rig:
        evict = rig.cache.evict
        rig.cache.evict = lambda num, *more: (evicted.append(num), evict(num, *more))[1]  # type: ignore[assignment]
        for number in range(100, 200):
            rig.disk.writes.offer(RadixKey([number] * 4))  # it lies nowhere
        await rig.twice(*([number] * 4 for number in range(50)))

        assert sum(looked_up) >= 150 and max(looked_up) <= 16
        assert sum(evicted) >= 20 * PAGE and max(evicted) <= 2 * PAGE
        assert rig.disk.writes.counts.due_gone == 100 and rig.disk.all_writes[0].counts.written >= 50 * PAGE


async def test_a_write_waits_for_the_records_that_will_be_free(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, disk_pages=8) as rig:
        await rig.twice(*([number] * 12 for number in range(20)))

        assert rig.disk.writes.counts.no_room == 0 and rig.disk.all_writes[0].counts.written == 20 * 12


async def test_a_write_that_fails_is_counted_and_its_records_are_free_again(tmp_path: Path) -> None:
    for number, (call, code) in enumerate([("pwritev", errno.EIO), ("INSERT", errno.ENOSPC), ("COMMIT", errno.EIO)]):
        path = tmp_path / str(number)
        path.mkdir()
        calls = FaultyFileCalls()
        async with opened_rig(path, calls=calls) as rig:
            await rig.twice([9] * 8)
            calls.fail(call, code)
            await rig.twice([1] * 16)

            assert rig.disk.writes.counts.num_failed == 1
            assert rig.cache.total_size() == 8 and rig.cache.free_slots == (40 - 2) * PAGE
            rig.core.evict(10**6)
            assert await rig.lengths([1] * 16, [9] * 8) == [0, 8]


async def test_a_request_short_of_slots_cancels_the_writes_that_lock_the_pool(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice([9] * 8)
        rig.core.evict(10**6)
        rig.request([1] * 16)
        rig.request([1] * 16)
        writer, resumed = rig.disk.files.writer, asyncio.Event()
        assert writer is not None
        rig.disk.writes.begin(writer, rig.disk.bindings)
        assert rig.disk.writes.locks_pool and rig.core.evict(10**6) == 0

        rig.disk.writes.after_writes(resumed.set)
        assert not rig.disk.writes.cancel(writer)
        async with asyncio.timeout(60):
            await resumed.wait()
        assert rig.core.evict(10**6) == 16 and rig.disk.writes.cancel(writer)
        await rig.settle()


# ---------------------------------------------------------------- restarts


def killed(path: Path, work: Callable[[DiskRig], Awaitable[None]], calls: FaultyFileCalls | None = None) -> None:
    """Do work on a disk in another process, which is killed at the end, if not before."""

    async def run() -> None:
        async with opened_rig(path, calls=calls) as rig:
            await work(rig)
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(run()))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


async def write_all(rig: DiskRig) -> None:
    await rig.twice(*PROMPTS)


async def test_all_prefixes_are_hit_after_a_kill(tmp_path: Path) -> None:
    killed(tmp_path, write_all)

    async with opened_rig(tmp_path) as rig:
        assert rig.cache.total_size() == 16 * PAGE, "the models are bound, so no lease is needed"
        assert await rig.lengths(*PROMPTS) == ALL
        await rig.twice([9] * 8)
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(*PROMPTS, [9] * 8) == [*ALL, 8]


@pytest.mark.parametrize("call", ["pwritev", "INSERT", "COMMIT"])
async def test_a_kill_in_a_write_leaves_the_writes_before(tmp_path: Path, call: str) -> None:
    calls = FaultyFileCalls()

    async def work(rig: DiskRig) -> None:
        await rig.twice(PROMPTS[0])
        calls.kill(call)
        await rig.twice(PROMPTS[1])

    killed(tmp_path, work, calls)
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(*PROMPTS) == [16, 12, 12, 0]


async def test_a_prefix_without_a_state_is_not_written_and_has_not_left_memory(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, num_states=24) as rig:
        rig.request([*range(4 * PAGE)])
        rig.request([*range(2 * PAGE), *range(100, 100 + 2 * PAGE)])
        await rig.settle()

        assert rig.disk.stats().pages_refused == 6, "two pages were used twice, and no match can end there"
        assert (rig.cache.total_size(), rig.disk.writes.counts.due_gone) == (0, 0)


@pytest.mark.parametrize(("is_done", "hits"), [(False, ALL), (True, [0, 0, 0, 0])])
async def test_a_kill_before_or_after_the_commit_of_a_retirement(
    tmp_path: Path, is_done: bool, hits: list[int]
) -> None:
    calls = FaultyFileCalls()

    async def work(rig: DiskRig) -> None:
        await write_all(rig)
        if not is_done:
            calls.kill("DELETE")
        rig.core.reset()
        deletion = rig.disk.deletions.future()
        assert deletion is not None
        await deletion

    killed(tmp_path, work, calls)
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(*PROMPTS) == hits


async def test_a_kill_while_a_load_reads(tmp_path: Path) -> None:
    calls = FaultyFileCalls()

    async def work(rig: DiskRig) -> None:
        await write_all(rig)
        rig.core.evict(10**6)
        calls.kill("preadv")
        await rig.load(PROMPTS[1])

    killed(tmp_path, work, calls)
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(*PROMPTS) == ALL


async def test_pages_of_other_models_are_not_found_and_are_evicted_first(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, disk_pages=20) as rig:
        await write_all(rig)
    async with opened_rig(tmp_path, disk_pages=20, models=("n", None, "v1")) as rig:
        assert await rig.lengths(*PROMPTS) == [0, 0, 0, 0]
        assert rig.disk.stats().slots.dormant_slots > 0 and rig.cache.total_size() == 0
        await rig.twice([8] * 32)
        assert await rig.lengths([8] * 32) == [32]
    async with opened_rig(tmp_path, disk_pages=20, models=("m", None, "v1")) as rig:
        found = await rig.lengths(*PROMPTS)
        assert 0 < sum(found) < sum(ALL) and await rig.lengths([8] * 32) == [0]


async def test_pages_are_found_when_their_models_are_bound(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await write_all(rig)
    async with opened_rig(tmp_path, models=None) as rig:
        assert await rig.lengths(*PROMPTS) == [0, 0, 0, 0]
        rig.models = ("m", None, "v1")
        rig.disk.bindings.bind()
        await rig.settle()
        assert await rig.lengths(*PROMPTS) == ALL


async def test_nothing_is_kept_of_a_namespace_without_models_and_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_rig(tmp_path, models=None) as rig:
        for _ in range(3):
            rig.request([1] * 16)
            rig.request([1] * 16, "other")
        await rig.settle()

        assert rig.cache.total_size() == 0 and rig.disk.stats().pages_used == 0
        assert sum("no model is bound" in record.message for record in caplog.records) == 1


async def test_namespaces_are_kept_apart(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice([1] * 16)
        await rig.twice([1] * 8, namespace="a")
    async with opened_rig(tmp_path) as rig:
        assert (await rig.load([1] * 16, "a"))[0] == 8
        assert (await rig.load([1] * 16, "b"))[0] == 0
        assert (await rig.load([1] * 16))[0] == 16


KINDS = pytest.mark.parametrize(
    "kind", [{"window": 8}, {"num_states": 24}, {"window": 8, "num_states": 24}], ids=["window", "states", "both"]
)


@KINDS
async def test_windows_and_states_are_written_and_loaded_and_found_after_a_restart(
    tmp_path: Path, kind: dict[str, int]
) -> None:
    prompts = [[1] * 16, [1] * 16 + [2] * 16, [7] * 24]
    async with opened_rig(tmp_path, disk_pages=64, **kind) as rig:
        await rig.twice(*prompts)
        rig.core.evict(10**6)
        assert await rig.lengths(*prompts) == [16, 32, 24]
        rig.check()
    async with opened_rig(tmp_path, disk_pages=64, **kind) as rig:
        assert await rig.lengths(*prompts) == [16, 32, 24]
        rig.core.evict(10**6)
        rig.core.reset()
        await rig.settle()
        rig.cache.reclaim(10**6)
        await rig.settle()
        assert rig.cache.free_slots == 64 * PAGE
    async with opened_rig(tmp_path, disk_pages=64, **kind) as rig:
        assert await rig.lengths(*prompts) == [0, 0, 0]


@KINDS
async def test_a_disk_with_windows_and_states_evicts_ahead_of_need(tmp_path: Path, kind: dict[str, int]) -> None:
    async with opened_rig(tmp_path, disk_pages=24, num_pages=64, **kind) as rig:
        for number in range(1, 12):
            await rig.twice([number] * 24)

        rig.core.evict(10**6)
        assert await rig.lengths([11] * 24, [1] * 24) == [24, 0]
    async with opened_rig(tmp_path, disk_pages=24, num_pages=64, **kind) as rig:
        assert await rig.lengths([11] * 24, [1] * 24) == [24, 0]


# ---------------------------------------------------------------- retirements


async def test_a_retirement_reaches_the_disk_and_what_follows_is_kept(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice([1] * 16)
        await rig.twice([1] * 16, namespace="a")
        rig.core.retire(lambda name: name is None)
        assert rig.cache.match(RadixKey([1] * 16)).prefix_len == 0, "in one step of the loop"
        deletion = rig.disk.deletions.future()
        assert deletion is not None and rig.disk.deletions.future() is deletion
        await deletion
        assert rig.disk.deletions.future() is None
        rig.request([2] * 16)
        await rig.settle()
        await rig.twice([2] * 16)
    async with opened_rig(tmp_path) as rig:
        assert (await rig.load([1] * 16))[0] == 0
        assert (await rig.load([1] * 16, "a"))[0] == 16
        assert (await rig.load([2] * 16))[0] == 16


async def test_a_retirement_before_the_disk_is_open_deletes_what_lies_there(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await write_all(rig)
    rig = DiskRig(tmp_path)
    try:
        rig.disk.start()
        rig.core.reset()
        deletion = rig.disk.deletions.future()
        assert deletion is not None and not deletion.done()
        await rig.wait(deletion.done)
        await rig.settle()
        assert await rig.lengths(*PROMPTS) == [0, 0, 0, 0]
    finally:
        rig.disk.close()
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(*PROMPTS) == [0, 0, 0, 0]


async def test_many_retirements_before_the_disk_is_open_leave_turns_of_the_loop(tmp_path: Path) -> None:
    names = [f"name {number}" for number in range(20)]
    async with opened_rig(tmp_path) as rig:
        for name in names:
            await rig.twice([1] * 4, namespace=name)
    rig, turns, found = DiskRig(tmp_path), [0], list[int]()
    retire = rig.disk.spaces.retire

    def noted(is_meant: Callable[[str | None], bool]) -> list[int]:
        found.append(turns[0])
        if len(found) == 5:
            rig.core.retire(lambda name: name == names[-1])
        return retire(is_meant)

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    rig.disk.spaces.retire = noted  # type: ignore[method-assign]
    for name in names[:-2]:
        rig.core.retire(partial(operator.eq, name))
    deletion = rig.disk.deletions.future()
    counting = asyncio.ensure_future(count())
    await rig.ready()
    counting.cancel()

    assert deletion is not None and deletion.done()
    assert len(set(found)) == len(found) == len(names) - 1, "two retirements looked at all spaces in one turn"
    assert [space.namespace for space in rig.disk.spaces] == names[-2:-1]
    rig.disk.close(WAIT_S)


async def test_a_retirement_while_a_write_is_in_flight_publishes_nothing(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice([5] * 8)
        go_on = calls.stall("pwritev")
        rig.request([1] * 16)
        rig.request([1] * 16)
        await rig.wait(lambda: calls.counts["pwritev"] > 1)
        rig.core.reset()
        rig.check()
        go_on()
        await rig.settle()
        rig.cache.reclaim(10**6)
        await rig.settle()

        assert rig.cache.total_size() == 0 and rig.cache.free_slots == 40 * PAGE
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths([1] * 16, [5] * 8) == [0, 0]


async def test_a_retirement_that_the_disk_refuses_is_tried_until_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.01)
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await write_all(rig)
        calls.fail("DELETE", errno.EIO, times=3)
        rig.core.reset()
        deletion = rig.disk.deletions.future()
        assert deletion is not None
        await rig.wait(deletion.done)
        await rig.settle()
        assert calls.counts["DELETE"] >= 4
        assert await rig.lengths(*PROMPTS) == [0, 0, 0, 0]


# ---------------------------------------------------------------- faults


async def test_a_damaged_record_is_dropped_with_all_below_it_and_counted(tmp_path: Path) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice([1] * 12 + [2] * 20)
        (name,) = tmp_path.glob("kv-0/*/pages.bin")  # noqa: ASYNC240
        _, starts = rig.cache.radix.locate(RadixKey([1] * 12 + [2] * 20), 32)
        with name.open("r+b") as file:
            file.seek((int(starts[4]) // PAGE - 1) * BLOCK + 17)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        rig.core.evict(10**6)

        found, finished = await rig.load([1] * 12 + [2] * 20)
        assert finished is not None and found == 0, "a chunk of 8 MiB is lost for this load"
        assert rig.cache.total_size() == 4 * PAGE and rig.disk.stats().damaged_records == 1
        await rig.settle()
        assert await rig.lengths([1] * 12 + [2] * 20) == [16]
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths([1] * 12 + [2] * 20) == [16]


async def test_a_damaged_state_that_is_loaded_alone_is_dropped(tmp_path: Path) -> None:
    prompt = [1] * 16
    async with opened_rig(tmp_path, num_states=4) as rig:
        await rig.twice(prompt)
        rig.request([*prompt, *[2] * 8])
        await rig.settle()
        rig.core.evict_states(1)
        node, _ = rig.cache.radix.locate(RadixKey(prompt), 16)
        state = rig.cache.tree.state_at(node)
        assert state is not None
        (file,) = tmp_path.glob("*/*/states.bin")  # noqa: ASYNC240
        with file.open("r+b") as records:
            records.seek((state - 1) * stride_of(STATE_BYTES))
            records.write(bytes(8))

        move = rig.disk.loads.prefetch(LookUp(RadixKey(prompt)))
        assert move is not None and not move.num_pages and move.source_state == state
        await rig.wait(lambda: not rig.disk.loads.has_any)
        await rig.settle()

        assert rig.disk.stats().damaged_records == 1
        assert rig.cache.radix.cached_lens(RadixKey(prompt))[0] == 0
        assert rig.disk.loads.prefetch(LookUp(RadixKey(prompt))) is None, "it is met again and again"


async def test_a_read_that_fails_is_a_miss_and_its_pages_stay(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice([1] * 16)
        rig.core.evict(10**6)
        calls.fail("preadv", errno.EIO)

        assert (await rig.load([1] * 16))[0] == 0
        assert (await rig.load([1] * 16))[0] == 16


async def test_a_disk_that_does_not_answer_costs_its_deadline_and_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "GRACE_S", 0.01)
    calls, now = FaultyFileCalls(), [100.0]
    async with opened_rig(tmp_path, calls=calls, clock=lambda: now[0]) as rig:
        await rig.twice([1] * 16)
        rig.core.evict(10**6)
        go_on = calls.stall("preadv")

        found, finished = await rig.load([1] * 16, timeout_s=0.01)
        assert finished is not None and finished.must_restart and found == 0
        assert rig.disk.state == "stalled"
        rig.check()
        assert (await rig.load([1] * 16)) == (0, None), "nothing is loaded"
        rig.core.reset()
        deletion = rig.disk.deletions.future()
        assert deletion is not None
        await rig.wait(deletion.done)
        rig.check()
        go_on()
        await rig.wait(lambda: not (rig.disk.loads.moves.in_flight or rig.disk.all_writes[0].in_flight))
        rig.check()
        assert rig.core.free_slots == 64 * PAGE, "the pages of the late load are free again"
        now[0] += tier_loads.STALL_S
        assert rig.disk.state == "ready"


async def test_a_late_load_goes_on_without_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_loads, "GRACE_S", 0.01)
    calls, now = FaultyFileCalls(), [100.0]
    async with opened_rig(tmp_path, calls=calls, clock=lambda: now[0]) as rig:
        await rig.twice([1] * 16)
        rig.core.evict(10**6)
        go_on = calls.stall("preadv")
        _, finished = await rig.load([1] * 16, timeout_s=0.01)
        assert finished is not None and finished.must_restart
        go_on()
        await rig.wait(lambda: not (rig.disk.loads.moves.in_flight or rig.disk.all_writes[0].in_flight))

        assert rig.core.match(RadixKey([1] * 16)).prefix_len == 16
        assert rig.disk.stats().tokens_loaded_unused == 16
        rig.check()


async def test_a_disk_that_cannot_be_used_leaves_the_cache_at_work(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "nothing")
    try:
        rig.disk.start()
        await rig.wait(lambda: rig.disk.state.startswith("failed: "))
        assert "nothing" in rig.disk.state
        rig.request([1] * 16)
        assert rig.request([1] * 16) == 16
        assert await rig.load([1] * 20) == (16, None)
        rig.check()
    finally:
        assert rig.disk.close(60)


async def test_pages_that_were_used_before_the_disk_was_open_are_written_when_it_is(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path)
    rig.disk.start()
    rig.request([1] * 16)
    rig.request([1] * 16)
    assert rig.disk.state == "opening"
    await rig.ready()

    rig.core.evict(10**6)
    assert await rig.lengths([1] * 16) == [16]
    rig.disk.close(60)


async def test_a_disk_that_another_cache_has_is_taken_when_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk_files.DiskStore
    monkeypatch.setattr(disk_opening, "PREDECESSOR_S", 0.01)
    monkeypatch.setattr(disk_files, "DiskStore", lambda *arguments, **options: real(*arguments, **options, wait_s=0.01))
    async with opened_rig(tmp_path) as first:
        await first.twice([1] * 16)
        second = DiskRig(tmp_path)
        second.disk.start()
        await second.wait(lambda: second.disk.state == f"locked by pid {os.getpid()}")
        assert await second.lengths([1] * 16) == [0]
        first.disk.close(60)
        await second.ready()
        assert await second.lengths([1] * 16) == [16]
        second.disk.close(60)


async def test_closing_waits_no_longer_than_asked_for_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    rig = DiskRig(tmp_path, calls=calls)
    await rig.ready()
    await rig.twice([1] * 16)
    rig.core.evict(10**6)
    go_on = calls.stall("preadv")
    loading = asyncio.ensure_future(rig.load([1] * 16))
    await rig.wait(lambda: calls.counts["preadv"] > 0)

    assert not rig.disk.close(0.05)
    go_on()
    loading.cancel()
    await asyncio.sleep(0.05)
    assert rig.disk.state == "closed"


def test_the_format_of_records_does_not_depend_on_the_sizes_of_tiers(tmp_path: Path) -> None:
    layouts: list[Any] = [
        DiskRig(tmp_path, num_pages=pages, disk_pages=2 * pages).disk.files.index_layout for pages in (8, 64)
    ]

    assert layouts[0] == layouts[1]
