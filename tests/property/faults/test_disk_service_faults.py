"""Proof that the tests of a disk tier find faults: each of its promises is broken once, and found."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.faults.faults import Fault
from support.faults.tier_faults import FAULTS_OF_DISK, FAULTS_OF_MOVES
from support.tiers.disk_rig import PAGE, opened_rig, stalled_copies
from support.tiers.disk_service import DiskService
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.tiered_service import tiered_config
from support.traffic.disk_service import DiskShape, run_disk_traffic
from support.traffic.radix import TrafficFailed

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.record_file import BLOCK
from raydix.cache_core import RadixKey
from raydix.schemas import InsertRequest, LeaseResponse, ResetRequest, SetWeightsRequest, TokenIds, WaitingResponse

SHAPES = [
    DiskShape(1, device_pages=16, host_pages=0, disk_pages=32),
    DiskShape(2, device_pages=16, host_pages=20, disk_pages=32),
    DiskShape(1, device_pages=16, host_pages=0, disk_pages=32, num_states=10),
]
SEEDS = range(4)
NUM_OPERATIONS = 400

# ---------------------------------------------------------------- promises that one request shows


async def check_uses(path: Path) -> None:
    """One use is not enough, two are."""
    async with opened_rig(path) as rig:
        rig.request([1] * 16)
        await rig.settle()
        assert not rig.cache.total_size()
        await rig.twice([1] * 16)
        assert rig.cache.total_size() == 16


async def check_damage(path: Path) -> None:
    """A damaged record is a miss once."""
    async with opened_rig(path) as rig:
        await rig.twice([1] * 16)
        (name,) = path.glob("kv-0/*/pages.bin")  # noqa: ASYNC240
        data = bytearray(name.read_bytes())
        data[2 * BLOCK] ^= 1
        name.write_bytes(data)
        rig.core.evict(10**6)
        await rig.load([1] * 16)
        assert rig.disk.stats().damaged_records == 1
        await rig.settle()
        assert rig.cache.total_size() == 2 * PAGE
        assert await rig.lengths([1] * 16) == [8]


async def check_failures(path: Path) -> None:
    """The index and the records agree when a call of a write has failed."""
    for number, name in enumerate(("pwritev", "INSERT", "COMMIT", "DELETE")):
        calls, folder = FaultyFileCalls(), path / str(number)
        folder.mkdir()
        async with opened_rig(folder, calls=calls, disk_pages=24) as rig:
            await rig.twice([1] * 16)
            calls.fail(name, errno.EIO)
            for prompt in ([2] * 24, [3] * 24, [4] * 24, [5] * 24):
                await rig.twice(prompt)
                await rig.check_index()


async def check_copies(path: Path) -> None:
    """Pages are locked while they are copied, and may be overwritten afterwards."""
    with stalled_copies() as copies:
        async with opened_rig(path) as rig:
            await rig.twice([5] * 8)
            rig.core.evict(10**6)
            before, may_write = copies.counts["gather"], threading.Event()
            go_on, writer = copies.stall("gather"), rig.disk.files.writer
            assert writer is not None
            writer.submit(lambda store: may_write.wait(60), lambda done: None)
            for _ in range(2):
                rig.request([1] * 16)
            await rig.wait(lambda: copies.counts["gather"] > before)
            try:
                assert not rig.core.evict(10**6), "its pages are being copied"
                go_on()
                await rig.wait(lambda: not rig.disk.locks_pool)
                assert rig.core.evict(10**6) == 16
                rig.request([3] * 240)
            finally:
                go_on()
                may_write.set()
            await rig.settle()
            rig.core.evict(10**6)
            assert await rig.lengths([1] * 16) == [16]


async def check_namespaces(path: Path) -> None:
    """One of two namespaces is retired while pages of both are being copied for one write."""
    with stalled_copies() as copies:
        async with opened_rig(path) as rig:
            for name in (None, "a"):
                await rig.twice([5] * 8, namespace=name)
            go_on = copies.stall("gather")
            rig.disk.work.paused_until = float("inf")
            for name in (None, None, "a", "a"):
                rig.request([1] * 16, name)
            rig.disk.work.paused_until = 0
            rig.disk.work.run_slice()
            rig.retire("new", "a")
            go_on()
            await rig.settle()
            await rig.check_index()


async def check_retirements(path: Path) -> None:
    """What is retired is not found after a restart, unless the disk has not confirmed it."""
    for number, times in enumerate((0, 2, 10**3)):
        calls, folder = FaultyFileCalls(), path / str(number)
        folder.mkdir()
        async with opened_rig(folder, calls=calls) as rig:
            await rig.twice([1] * 16)
            calls.fail("DELETE", errno.EIO, times=times)
            rig.retire("new", None)
            deletion = rig.disk.deletions.future()
            for _ in range(20):
                await asyncio.sleep(0.002)
            is_confirmed = deletion is None or deletion.done()
        async with opened_rig(folder) as rig:
            rig.weights[None] = "new" if is_confirmed else ""
            await rig.lengths([1] * 16)


async def check_cancelled(path: Path) -> None:
    """A write that was cancelled for a request is done later."""
    async with opened_rig(path) as rig:
        await rig.twice([5] * 8)
        rig.request([1] * 16)
        rig.request([1] * 16)
        rig.disk.work.run_slice()
        for write in rig.disk.files.writer._writes:  # type: ignore[union-attr]
            rig.disk.files.writer.cancel(write)  # type: ignore[union-attr]
        await rig.settle()
        rig.core.evict(10**6)
        assert await rig.lengths([1] * 16) == [16]


async def check_equal_spaces(path: Path) -> None:
    """The disk refuses a retirement until it is killed; what was computed afterwards is found, nothing else."""
    calls = FaultyFileCalls()
    async with opened_rig(path, calls=calls) as rig:
        await rig.twice([1] * 16)
        calls.fail("PRAGMA", errno.EIO, times=10**3)  # the first statement of a deletion
        rig.retire("new", None)
        for _ in range(2):
            rig.request([2] * 16)
        await rig.wait(lambda: rig.cache.match(RadixKey([2] * 16)).prefix_len == 16)
    async with opened_rig(path) as rig:
        rig.weights[None] = "new"
        assert await rig.lengths([1] * 16, [2] * 16) == [0, 16]


async def a_service(path: Path, **options: Any) -> DiskService:
    """A service with a prompt on its disk."""
    disk: dict[str, Any] = {"path": str(path), "num_slots": 32, "load_timeout_s": 60}
    disk |= {name: options.pop(name) for name in ("load_timeout_s",) if name in options}
    cache = DiskService(tiered_config(device_pages=24, disk=disk, **{"host_pages": 0} | options))
    cache.bind("0")
    await cache.settle()
    return cache


async def check_weights(path: Path) -> None:
    """KV of other weights is not found after a kill, though the disk has not deleted it."""
    cache = await a_service(path)
    await cache.put_on_disk([1] * 8)
    assert isinstance(cache.ask(SetWeightsRequest(label="1")), WaitingResponse)
    await cache.kill()
    cache = DiskService(cache.service.config)
    cache.bind("1")
    for _ in range(2):
        await cache.settle()
        assert await cache.find([1] * 8) == 0
    await cache.kill()


async def check_strangers(path: Path) -> None:
    """No bound session finds KV of sessions that have not bound the model."""
    cache = await a_service(path)
    for session_id, tokens in (("before", [1] * 8), ("after", [2] * 8)):
        cache.open(session_id)
        if session_id == "before":
            await cache.answer(cache.ask(ResetRequest()))
        lease = cache.acquire(tokens, session_id=session_id)
        insert = InsertRequest(lease.lease_id, 8, TokenIds.pack([]), release=True)
        assert cache.ask(insert, session_id).retired == (session_id == "after")
        cache.bind("0")
        assert await cache.find(tokens) == 0
    await cache.kill()


async def check_tiers(path: Path) -> None:
    """A prefetch does not load from the disk what a lease loads from the host."""
    cache = await a_service(path, host_pages=24, host={"reserve": 0.9})
    for _ in range(2):
        cache.publish([1] * 8)
    await cache.settle()
    cache.put_below([1] * 8)
    await cache.settle()
    assert cache.disk.tier.cache.total_size() == 8 and not cache.service.core.evict(10**6)
    ticket = cache.acquire([1] * 8)
    assert isinstance(ticket, WaitingResponse) and len(cache.loads) == 1
    cache.lower.prefetch(RadixKey([1] * 8))
    cache.lower.check_invariants()
    await cache.answer(ticket)
    await cache.kill()


async def check_retired_load(path: Path) -> None:
    """A load that a retirement meets is not handed out."""
    cache = await a_service(path)
    await cache.put_on_disk([1] * 8)
    ticket = cache.acquire([1] * 8)
    assert isinstance(ticket, WaitingResponse)
    cache.service.core.reset()
    lease = await cache.answer(ticket)
    assert isinstance(lease, LeaseResponse) and not lease.prefix_len
    cache.lower.check_invariants()
    await cache.kill()


async def check_late_load(path: Path) -> None:
    """A request goes on without a load of which a chunk does not come back, and the load without the request."""
    cache = await a_service(path, load_timeout_s=0.01)
    await cache.put_on_disk([1] * 8)
    ticket = cache.acquire([1] * 8)
    assert isinstance(ticket, WaitingResponse)
    (copier,) = [copier for copier in cache.copiers if copier.open]
    copier.current = copier.open[0]
    async with asyncio.timeout(5):
        while not cache.is_settled(ticket):  # noqa: ASYNC110 -- timers of the service
            await asyncio.sleep(0.01)
    lease = await cache.outcome(ticket)
    assert isinstance(lease, LeaseResponse) and not lease.prefix_len
    cache.lower.check_invariants()
    await cache.settle()
    cache.lower.check_invariants()
    assert lease.lease_id in {found.lease_id for _, found in cache.service.core.leases.of_clients()}
    await cache.kill()


CHECKS: list[Callable[[Path], Awaitable[None]]] = [
    check_copies,
    check_uses,
    check_damage,
    check_failures,
    check_retirements,
    check_namespaces,
    check_cancelled,
    check_equal_spaces,
    check_weights,
    check_strangers,
    check_tiers,
    check_retired_load,
    check_late_load,
]


def run_checks() -> None:
    for check in CHECKS:
        with TemporaryDirectory() as path:
            asyncio.run(check(Path(path)))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger("raydix")
    level = logger.level
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.003)
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def test_nothing_is_found_without_a_fault() -> None:
    run_checks()


OF_MOVES = [pytest.param(plant, marks=pytest.mark.more, id=plant.__name__) for plant in FAULTS_OF_MOVES]


@pytest.mark.parametrize("plant", [*FAULTS_OF_DISK.cases(), *OF_MOVES])
def test_a_planted_fault_is_found(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises((TrafficFailed, AssertionError, TimeoutError)):
        run_checks()
        for seed in SEEDS:
            for shape in SHAPES:
                run_disk_traffic(shape, range(seed, seed + 1), NUM_OPERATIONS)
