"""Loads of a disk that does not answer, and prefetches: no request waits for them longer than for its own load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.tiers.disk_rig import PAGE, SLOT_BYTES, DiskRig, opened_rig
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers import tier_loads
from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.disk.disk_copies import DiskCopies
from raydix.actors.tiers.job_threads import JobThreads
from raydix.cache_core import RadixKey
from raydix.cache_core.tiers.loads import Filled
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move

SHORT, LONG, OTHER = [1] * 4 * PAGE, [2] * 15 * PAGE, [3] * 15 * PAGE


class Rig:
    """A disk of which each chunk has one page, and of which the test lets reads through one by one."""

    def __init__(self, rig: DiskRig, calls: FaultyFileCalls) -> None:
        self.rig, self.calls = rig, calls
        self.first = calls.counts["preadv"]
        self.go_on = [calls.stall("preadv", number) for number in range(100)]
        self.num_passed = 0

    @property
    def num_begun(self) -> int:
        return self.calls.counts["preadv"] - self.first

    async def until_begun(self, number: int) -> None:
        await self.rig.wait(lambda: self.num_begun >= number)

    def pass_reads(self, *numbers: int) -> None:
        for number in numbers:
            self.go_on[number]()

    def load(self, prompt: list[int], timeout_s: float = 20) -> tuple[Move | None, asyncio.Future[Filled]]:
        """Begin the load of a lease."""
        core, loads = self.rig.core, self.rig.disk.loads
        lease = core.acquire(self.rig._lease_id(), "s", RadixKey(prompt))
        done: asyncio.Future[Filled] = asyncio.get_running_loop().create_future()
        move = loads.load(lease, LookUp(lease.key), timeout_s)
        if move is not None:
            loads.when_loaded(move, done.set_result)
        return move, done


@asynccontextmanager
async def gated(path: Path, **options: Any) -> AsyncIterator[Rig]:
    """A rig that has three prompts on its disk alone."""
    calls = FaultyFileCalls()
    rig = DiskRig(path, num_pages=160, disk_pages=80, calls=calls, **options)

    def make(copies: DiskCopies, threads: JobThreads) -> Copier:
        return Copier(copies, threads=threads, num_loads=2, chunk_bytes=1, clock=rig.disk.work._clock)

    rig.disk.readers.make_copier = make  # type: ignore[method-assign]
    await rig.ready()
    await rig.twice(SHORT, LONG, OTHER)
    rig.core.evict(10**6)
    held = Rig(rig, calls)
    try:
        yield held
    finally:
        held.pass_reads(*range(100))
        rig.disk.close(20)


async def test_a_lease_goes_before_prefetches_between_two_chunks(tmp_path: Path) -> None:
    """Its 4 pages are read behind one chunk of the prefetches at most, whichever of the readers takes it."""
    async with gated(tmp_path) as held:
        loads = held.rig.disk.loads
        assert (
            loads.prefetch(LookUp(RadixKey(LONG))) is not None and loads.prefetch(LookUp(RadixKey(OTHER))) is not None
        )
        await held.until_begun(1)
        await asyncio.sleep(0.01)
        assert held.num_begun == 1, "prefetches use one reader alone"
        _, done = held.load(SHORT)
        held.pass_reads(*range(1, 5))
        assert (await done).num_tokens == 4 * PAGE
        assert held.num_begun == 5, "the prefetches have stood still"


async def test_a_lease_that_finds_both_readers_at_work_waits_for_one_chunk(tmp_path: Path) -> None:
    async with gated(tmp_path) as held:
        loads = held.rig.disk.loads
        held.load(OTHER)
        await held.until_begun(1)
        assert loads.prefetch(LookUp(RadixKey(LONG))) is not None
        await held.until_begun(2)
        _, done = held.load(SHORT)  # behind the chunk of the prefetch: the other reader has 15 pages to read
        held.pass_reads(1, 2, 3, 4, 5)
        assert (await done).num_tokens == 4 * PAGE
        await held.until_begun(7)
        assert held.num_begun == 7, "reads of the lease that waits, and the next one of the prefetch"


async def test_a_prefetch_that_a_request_waits_for_gives_way_no_more(tmp_path: Path) -> None:
    async with gated(tmp_path) as held:
        loads = held.rig.disk.loads
        move = loads.prefetch(LookUp(RadixKey(LONG)))
        assert move is not None and loads.running_load(LookUp(RadixKey(LONG))) is move
        await held.until_begun(1)
        _, done = held.load(OTHER)
        await held.until_begun(2)
        copier = held.rig.disk.readers.copier
        assert copier is not None and copier.bytes_ahead() == PAGE * SLOT_BYTES, "a chunk of a prefetch"
        loads.hurry(move)
        assert copier.bytes_ahead() == len(LONG) * SLOT_BYTES
        held.pass_reads(*range(100))
        assert (await done).num_tokens == len(OTHER)


async def test_a_prefetch_is_given_up_when_a_chunk_does_not_come_back(tmp_path: Path) -> None:
    """It has no limit as a whole."""
    now = [0.0]
    async with gated(tmp_path, clock=lambda: now[0], load_timeout_s=0.05) as held:
        loads = held.rig.disk.loads
        assert loads.prefetch(LookUp(RadixKey(LONG))) is not None
        ended: list[bool] = []
        running = loads.running_load(LookUp(RadixKey(LONG)))
        assert running is not None
        loads.wait_for(running, ended.append)
        for number in range(5):
            await held.until_begun(number + 1)
            now[0] += 0.04
            await asyncio.sleep(0.06)
            assert not loads.is_stalled
            held.pass_reads(number)
        await held.until_begun(6)
        now[0] += 0.06
        await held.rig.wait(lambda: held.rig.disk.state == "stalled")
        assert ended == [False] and loads.num_stalls == 1
        assert loads.running_load(LookUp(RadixKey(LONG))) is None, "no request waits for it"
        assert held.load(SHORT)[0] is None and loads.prefetch(LookUp(RadixKey(OTHER))) is None
        now[0] += 31
        assert held.rig.disk.state == "ready"
        assert loads.running_load(LookUp(RadixKey(LONG))) is None, "it may never end"
        held.pass_reads(5)
        await held.rig.wait(lambda: not loads._loads)
        held.rig.check()


async def test_a_stalled_tier_has_no_load_that_a_request_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_loads, "GRACE_S", 0.01)
    async with gated(tmp_path) as held:
        loads = held.rig.disk.loads
        stuck, of_stuck = held.load(SHORT, 0.02)
        other, of_other = held.load(LONG)
        queued, of_queued = held.load(OTHER)
        assert stuck is not None and other is not None and queued is not None
        resumed: list[bool] = []
        loads.wait_for(other, resumed.append)
        loads.wait_for(queued, resumed.append)
        assert (await of_stuck).must_restart and (await of_other).must_restart
        ended = await of_queued
        assert ended.lease is not None and ended.num_tokens == 0, "it had not begun"
        assert resumed == [False, False] and held.rig.disk.state == "stalled"
        for prompt in (SHORT, LONG, OTHER):
            assert loads.running_load(LookUp(RadixKey(prompt))) is None
        held.rig.check()


async def test_without_a_time_limit_nothing_is_prefetched(tmp_path: Path) -> None:
    async with opened_rig(tmp_path, load_timeout_s=0) as rig:
        await rig.twice(SHORT)
        rig.core.evict(10**6)
        assert rig.disk.loads.prefetch(LookUp(RadixKey(SHORT))) is None
        assert (await rig.load(SHORT))[0] == len(SHORT), "a request has a limit of its own"
