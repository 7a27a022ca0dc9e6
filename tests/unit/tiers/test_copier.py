"""The copier's thread: order, cancellation, deadlines, the cap of writes, failures and its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers.faulty_copier import Call, FaultyCopier, GatedCopies
from support.tiers.pool_pages import LAYOUTS, PAGE, contents, copied, pool_below, random_plan, random_pool
from support.waiting import wait_until

from raydix.actors.tiers.copier import Copier, Copy, WriteCap
from raydix.actors.tiers.job_threads import Ended, JobThreads
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies, PageRecords

LOGGER = "raydix.actors.tiers.copier"


class Laboratory:
    """A copier of one page a chunk, its pools, and the copies that ended."""

    def __init__(self, name: str = "attention", *, is_open: bool = False, write_mib_s: float | None = None) -> None:
        torch.manual_seed(0)
        self.pool = random_pool(LAYOUTS[name], torch.bfloat16)
        self.below = pool_below(self.pool)
        self.copies = GatedCopies(self.pool, self.below, is_open=is_open)
        self.now = 0.0
        self.threads = JobThreads("copier", 1)
        self.copier = Copier(self.copies, self.threads, write_mib_s=write_mib_s, chunk_bytes=1, clock=lambda: self.now)
        self.ended: list[tuple[CopyPlan, Ended]] = []

    def start(self, num_pages: int, *, load: bool = False, timeout_s: float | None = None) -> Copy:
        plan = random_plan(random.Random(num_pages), self.pool, self.below, num_pages)

        def done(result: Ended) -> None:
            assert threading.current_thread() is threading.main_thread()
            self.ended.append((plan, result))

        return self.copier.load(plan, done, timeout_s) if load else self.copier.write(plan, done)

    async def result(self, copy: Copy) -> Ended:
        """The result that was reported to the event loop."""
        await until(lambda: any(plan is copy.plan for plan, _ in self.ended))
        (result,) = [result for plan, result in self.ended if plan is copy.plan]
        assert result == copy.result
        return result

    def calls(self) -> list[tuple[str, int, int]]:
        return [(direction, len(plan), start) for direction, plan, start in self.copies.calls]


async def until(is_true: Callable[[], bool]) -> None:
    """Wait while the event loop runs."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 -- a thread makes it true
            await asyncio.sleep(0.001)


@pytest.fixture
def lab() -> Iterator[Laboratory]:
    laboratory = Laboratory()
    yield laboratory
    laboratory.copies.pass_chunks(100)
    laboratory.copier.close()
    laboratory.threads.close()


@pytest.mark.parametrize("name", LAYOUTS)
async def test_what_is_written_and_loaded_are_the_bytes_of_the_plan(name: str) -> None:
    lab = Laboratory(name, is_open=True)
    for number, down in ((5, True), (3, False), (0, True)):
        source, target = (lab.pool, lab.below) if down else (lab.below, lab.pool)
        plan = random_plan(random.Random(number), lab.pool, lab.below, number)
        wanted = copied(plan, contents(source), contents(target), down=down)

        copy = lab.start(number, load=not down)

        assert await lab.result(copy) == Ended(number, "whole")
        assert contents(target) == wanted
        assert copy.plan is not plan and lab.copies.first_difference(plan) is None
    writes, loads = lab.copier.counts(loads=False), lab.copier.counts(loads=True)
    assert (writes.ends, loads.ends) == ({"whole": 2}, {"whole": 1})
    assert bool(writes.num_bytes) == bool(writes.bytes_per_s) == (name != "no layers")
    lab.copier.close()


async def test_a_load_goes_before_writes_and_waits_for_the_chunk_of_one_at_most(lab: Laboratory) -> None:
    await check_order(lab)


async def check_order(lab: Laboratory) -> None:
    first, second = lab.start(3), lab.start(2)
    await until(lambda: len(lab.copies.calls) == 1)  # the first write is inside a chunk
    loads = [lab.start(4, load=True), lab.start(1, load=True)]
    assert lab.copier.queued_bytes(loads=True) == 5 * PageRecords(lab.pool).num_bytes()

    lab.copies.pass_chunks(10)

    assert [(await lab.result(copy)).end for copy in (second, first, *loads)] == ["whole"] * 4
    assert lab.calls() == [
        ("write", 3, 0),
        *(("load", 4, start) for start in range(4)),
        ("load", 1, 0),
        ("write", 3, 1),
        ("write", 3, 2),
        ("write", 2, 0),
        ("write", 2, 1),
    ]
    assert [len(plan) for plan, _ in lab.ended] == [4, 1, 3, 2]
    assert lab.copier.queued_bytes(loads=True) == lab.copier.queued_bytes(loads=False) == 0


async def test_a_cancelled_copy_ends_behind_its_chunk_and_a_queued_one_in_the_call(lab: Laboratory) -> None:
    await check_cancel(lab)


async def check_cancel(lab: Laboratory) -> None:
    running, queued, other = lab.start(4), lab.start(3), lab.start(2)
    lab.copies.pass_chunks()
    await until(lambda: len(lab.copies.calls) == 2)

    lab.copier.cancel(queued)
    assert queued.result == Ended(0, "cancelled")
    assert await lab.result(queued) == queued.result  # no chunk went through since
    lab.copier.cancel(running)
    lab.copier.cancel(running)
    assert running.result is None

    lab.copies.pass_chunks()
    assert await lab.result(running) == Ended(2, "cancelled")
    lab.copies.pass_chunks(2)
    assert await lab.result(other) == Ended(2, "whole")
    lab.copier.cancel(other)  # it has ended
    assert other.result == Ended(2, "whole")
    assert lab.copier.counts(loads=False).ends == {"cancelled": 2, "whole": 1}


async def test_a_copy_that_is_cancelled_in_its_last_chunk_is_whole(lab: Laboratory) -> None:
    copy = lab.start(1)
    await until(lambda: len(lab.copies.calls) == 1)
    lab.copier.cancel(copy)
    lab.copies.pass_chunks()

    assert await lab.result(copy) == Ended(1, "whole")


async def test_a_late_load_ends_behind_its_chunk_and_one_behind_it_before_it_begins(lab: Laboratory) -> None:
    first, second, third = (
        lab.start(number, load=True, timeout_s=timeout_s) for number, timeout_s in ((3, 5.0), (2, 6.0), (4, None))
    )
    lab.copies.pass_chunks()
    await until(lambda: len(lab.copies.calls) == 2)
    lab.now = 6.0
    lab.copies.pass_chunks()

    assert await lab.result(first) == Ended(2, "late")
    assert await lab.result(second) == Ended(0, "late")
    lab.copies.pass_chunks(4)
    assert await lab.result(third) == Ended(4, "whole")
    assert lab.copier.counts(loads=True).ends == {"late": 2, "whole": 1}


async def test_the_cap_holds_writes_back_and_no_loads() -> None:
    lab = Laboratory(is_open=True, write_mib_s=2**-20)  # a byte a second
    size = PageRecords(lab.pool).num_bytes()
    write = lab.start(3)
    await until(lambda: len(lab.copies.calls) == 1 and lab.copier.queued_bytes(loads=False) == 2 * size)

    assert await lab.result(lab.start(5, load=True)) == Ended(5, "whole")
    lab.now = size - 1.0
    assert await lab.result(lab.start(4, load=True)) == Ended(4, "whole")
    assert lab.calls().count(("write", 3, 1)) == 0
    lab.now = float(size)
    assert await lab.result(lab.start(2, load=True)) == Ended(2, "whole")  # it wakes the thread
    await until(lambda: lab.copier.queued_bytes(loads=False) == size)

    lab.copier.cancel(write)
    assert await lab.result(write) == Ended(2, "cancelled")
    lab.copier.close()


def test_the_bucket_has_room_for_one_chunk_however_long_it_was_unused() -> None:
    cap, now, sent = WriteCap(10), 100.0, 0
    for _ in range(50):
        now += max(0.0, cap.wait_s(now))
        cap.charge(2**20, now)
        sent += 1
    assert now - 100 == pytest.approx((sent - 1) / 10)
    now += 1000
    assert cap.wait_s(now) <= 0
    cap.charge(2**20, now)
    assert cap.wait_s(now) == pytest.approx(0.1)
    unlimited = WriteCap(None)
    unlimited.charge(2**40, now)
    assert unlimited.wait_s(now) <= 0


async def test_a_failure_is_reported_with_the_pages_before_it_and_the_thread_goes_on(
    lab: Laboratory, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: Call) -> None:
        if call[2] == 2:
            raise RuntimeError("CUDA error: an illegal memory access")

    lab.copies.fail = fail
    lab.copies.pass_chunks(10)
    with caplog.at_level(logging.ERROR):
        failed, other = lab.start(4, load=True), lab.start(2)

        num_pages, end, error, _ = await lab.result(failed)
        assert (num_pages, end) == (2, "failed")
        assert isinstance(error, RuntimeError) and str(error) == "CUDA error: an illegal memory access"
    assert await lab.result(other) == Ended(2, "whole")
    assert [record.getMessage() for record in caplog.records] == ["a load of 4 pages failed"]
    assert lab.copier.counts(loads=True).ends == {"failed": 1}


async def test_a_plan_with_wrong_slots_fails(lab: Laboratory) -> None:
    lab.copies.pass_chunks(10)
    ended: list[Ended] = []
    lab.copier.write(CopyPlan(np.asarray([PAGE]), np.asarray([10**6 * PAGE])), ended.append)
    await until(lambda: bool(ended))

    assert (ended[0].num_pages, ended[0].end) == (0, "failed")
    assert "first slots of pages" in str(ended[0].error)


async def test_closing_in_the_middle_ends_all_copies_behind_one_chunk(lab: Laboratory) -> None:
    await check_close(lab)


async def check_close(lab: Laboratory, patience_s: float = 0.2) -> None:
    running = lab.start(4)
    await until(lambda: len(lab.copies.calls) == 1)  # else the load would begin
    queued = lab.start(3), lab.start(2, load=True)
    closing = threading.Thread(target=lab.copier.close)
    closing.start()
    await until(lambda: all(copy.result == Ended(0, "closed") for copy in queued))
    closing.join(patience_s)
    assert closing.is_alive() and running.result is None
    lab.copies.pass_chunks()
    await until(lambda: not closing.is_alive())

    assert running.result == Ended(1, "closed")
    assert len(lab.copies.calls) == 1
    late = lab.start(5)
    for copy in (running, *queued, late):
        await lab.result(copy)
    assert late.result == Ended(0, "closed")
    lab.copier.close()


def test_an_end_that_no_loop_takes_is_kept_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=LOGGER)
    lab = Laboratory()
    loop = asyncio.new_event_loop()

    async def start() -> Copy:
        return lab.start(1)

    copy = loop.run_until_complete(start())
    loop.close()
    lab.copies.pass_chunks()
    wait_until(lambda: copy.result is not None)
    lab.copier.close()

    assert copy.result == Ended(1, "whole")
    assert [record.levelname for record in caplog.records if record.name == LOGGER] == ["DEBUG"]


async def test_a_copier_that_is_dropped_ends_its_thread_and_keeps_no_pool() -> None:
    pool = random_pool(LAYOUTS["attention"])
    copies, before = PageCopies(pool, pool_below(pool)), set(threading.enumerate())
    threads = JobThreads("copier", 1)
    copier, ended = Copier(copies, threads), list[Ended]()
    (thread,) = set(threading.enumerate()) - before
    copier.write(CopyPlan(np.asarray([PAGE]), np.asarray([PAGE])), ended.append)
    await until(lambda: ended == [Ended(1, "whole")])
    storage = weakref.ref(pool.storage)

    del copier, copies, pool, threads
    gc.collect()

    await until(lambda: not thread.is_alive())
    assert storage() is None


# -------------------------------------------------------------------- the copier of tests


@pytest.mark.parametrize("name", ["mixed", "opaque", "no layers"])
def test_a_faulty_copier_ends_copies_in_any_order_and_cuts_them_off(name: str) -> None:
    pool = random_pool(LAYOUTS[name], torch.float32)
    below = pool_below(pool)
    copies, faulty, ended = PageCopies(pool, below), FaultyCopier(pool, below), list[tuple[Copy, Ended]]()
    plans = [random_plan(random.Random(number), pool, below, 4) for number in range(6)]

    def start(begin: Callable[..., Copy], plan: CopyPlan) -> Copy:
        copy = begin(plan, lambda result: ended.append((copy, result)))
        return copy

    started = [start(faulty.write, plan) for plan in plans[:5]]
    before = contents(below)
    faulty.finish(started[3], "failed", num_pages=2)
    assert contents(below) == copied(plans[3], contents(pool), before, down=True, stop=2)
    faulty.advance(started[1], 1)
    faulty.cancel(started[1])
    assert started[1].result == Ended(1, "cancelled") and len(ended) == 1
    faulty.deliver()
    faulty.finish(started[0])
    assert copies.first_difference(plans[0]) is None
    faulty.advance(started[2], 4)
    if name != "no layers":
        faulty.flip(started[2], 1)
        assert copies.first_difference(plans[2]) == 1
    faulty.finish(started[2])
    load = start(faulty.load, plans[5])
    before = contents(pool)
    faulty.finish(load, "late", num_pages=3)
    assert contents(pool) == copied(plans[5], contents(below), before, down=False, stop=3)
    faulty.close()
    faulty.deliver()

    assert [(copy, result.num_pages, result.end) for copy, result in ended] == [
        (started[3], 2, "failed"),
        (started[1], 1, "cancelled"),
        (started[0], 4, "whole"),
        (started[2], 4, "whole"),
        (load, 3, "late"),
        (started[4], 0, "closed"),
    ]
    assert faulty.open == [] and faulty.queued_bytes(loads=True) == 0
    assert faulty.counts(loads=False).ends == {"failed": 1, "cancelled": 1, "whole": 2, "closed": 1}


# -------------------------------------------------------------------- planted faults


close = Copier.close

FAULTS: dict[str, tuple[type, str, Any, Callable[[Laboratory], Awaitable[None]]]] = {
    "writes go before loads": (
        Copier,
        "_queue_of",
        lambda copier, copy: copier._writes if copy.is_load else copier._loads,
        check_order,
    ),
    "a page too many is confirmed": (
        Copy,
        "num_pages",
        property(lambda copy: copy.chunks[min(copy.num_chunks, len(copy.chunks) - 1)].stop),
        check_cancel,
    ),
    "a queued copy ends when its turn comes": (
        Copier,
        "cancel",
        lambda _, copy: setattr(copy, "is_cancelled", True),
        check_cancel,
    ),
    "`close` does not wait for the chunk": (
        Copier,
        "close",
        lambda copier: close(copier, 0.0),
        partial(check_close, patience_s=60),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_checks_see_that(fault: str, lab: Laboratory, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, check = FAULTS[fault]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        with pytest.raises(AssertionError):
            await check(lab)
        lab.copies.pass_chunks(100)
        lab.copier.close()
        await asyncio.sleep(0)
