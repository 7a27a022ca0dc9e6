"""Pages go to the disk and come back as they were, or an error says why not; no page is needed while it is written."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.pool_pages import LAYOUTS, contents, layout_of, random_pool
from support.tiers.small_disk import result_of

from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.disk import disk_copies
from raydix.actors.tiers.disk.disk_copies import DiskCopies
from raydix.actors.tiers.disk.disk_errors import (
    DiskError,
    DiskFailed,
    DiskFull,
    FolderInUse,
    RecordDamaged,
    ShortTransfer,
)
from raydix.actors.tiers.disk.disk_index import INDEX, IndexLayout
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter, Records, Write
from raydix.actors.tiers.disk.record_file import aligned_bytes
from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import KINDS, CopyPlan, Kind, PageRecords, Pairs
from raydix.schemas import CacheUnavailable

NUM_RECORDS = {"full": 20, "swa": 12, "state": 6}
Pool = KVPool | RecordPool


def store_of(pool: Pool, path: Path, calls: FaultyFileCalls | None = None, **options: Any) -> DiskStore:
    """A store for the records of a pool. The folder of the tests need not reserve, nor have O_DIRECT."""
    records = PageRecords(pool)
    page = records.page_size
    layout = layout_of(records, NUM_RECORDS["full"] * page, NUM_RECORDS["swa"] * page, NUM_RECORDS["state"])
    options = {"direct_io": "off", "wait_s": 0.0} | options
    return DiskStore(str(path), "kv-0", layout, IndexLayout("abc", page, "{}"), calls=calls, **options)


def read_back(store: DiskStore) -> dict[tuple[Kind, int], bytes]:
    """The bytes of all records with rows, checked."""
    found: dict[tuple[Kind, int], bytes] = {}
    for space in store.index.spaces():
        rows, _ = store.index.rows(space.number)
        store.note(rows)
        for row in rows:
            file = store.files[row.kind]
            buffer = aligned_bytes(file.stride).reshape(1, -1)
            store.read(row.kind, np.array([row.record]), buffer)
            found[row.kind, row.record] = buffer[0, : file.record_bytes].tobytes()
    return found


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def a_batch(pool: Pool, space: int, rng: Random, number: int = 4) -> dict[Kind, Records]:
    """Some records of each kind of the pool."""
    source = PageRecords(pool)
    batch: dict[Kind, Records] = {}
    for kind, in_pool in contents(pool).items():
        if not source.num_bytes(kind):
            continue
        step = 1 if kind == "state" else source.page_size
        some = min(number, NUM_RECORDS[kind], len(in_pool) - 1)
        starts = np.array(rng.sample(range(1, len(in_pool)), some), np.int64) * step
        records = rng.sample(range(1, NUM_RECORDS[kind] + 1), some)
        rows = [
            IndexRow(
                kind, record, space, 1, rng.randbytes(32), b"", None, rng.randbytes(16) if kind == "full" else None
            )
            for record in records
        ]
        batch[kind] = Records(starts, rows)
    return batch


def expected(pool: Pool, batch: dict[Kind, Records]) -> dict[tuple[Kind, int], bytes]:
    """The bytes that the records of a batch must have."""
    page, in_pool = PageRecords(pool).page_size, contents(pool)
    return {
        (kind, row.record): in_pool[kind][start // (1 if kind == "state" else page)]
        for kind, part in batch.items()
        for start, row in zip(part.starts.tolist(), part.rows, strict=True)
    }


class Disk:
    """A writer, and what it has reported."""

    def __init__(self, pool: Pool, path: Path, calls: FaultyFileCalls | None = None, **options: Any) -> None:
        self.pool = pool
        self.events: list[str] = []
        self.store: asyncio.Future[DiskStore] = asyncio.get_running_loop().create_future()
        self.writer = DiskWriter(lambda: store_of(pool, path, calls), self._opened, pool, **options)

    def _opened(self, found: DiskStore | Exception) -> None:
        assert threading.current_thread() is threading.main_thread()
        if isinstance(found, Exception):
            self.store.set_exception(found)
        else:
            self.store.set_result(found)

    async def work(self, task: Callable[[DiskStore], Any]) -> Any:
        """Do work in the writer's thread; return its result, or raise its error."""
        return await result_of(self.writer, task)

    async def space(self) -> int:
        space = await self.work(lambda store: store.index.add_space(None, "base", None, "v1"))
        return space.number  # type: ignore[no-any-return]

    def start(self, batch: dict[Kind, Records]) -> tuple[Write, asyncio.Future[Ended]]:
        written: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        write = self.writer.write(batch, lambda: self.events.append("gathered"), written.set_result)
        return write, written

    async def write(self, batch: dict[Kind, Records]) -> Ended:
        async with asyncio.timeout(60):
            return await self.start(batch)[1]


async def until(is_true: Callable[[], bool]) -> None:
    """Wait while the event loop runs."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 -- a thread makes it true
            await asyncio.sleep(0.001)


@asynccontextmanager
async def opened(pool: Pool, path: Path, *arguments: Any, **options: Any) -> AsyncIterator[Disk]:
    disk = Disk(pool, path, *arguments, **options)
    try:
        yield disk
    finally:
        disk.writer.close()


@pytest.fixture
def pool() -> Iterator[Pool]:
    torch.manual_seed(0)
    yield random_pool(LAYOUTS["opaque, mixed"])


# -------------------------------------------------------------------- there and back


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"no layers"}))
async def test_records_are_on_the_disk_after_a_restart(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pool, rng = random_pool(LAYOUTS[name]), Random(name)
    on_disk: dict[tuple[Kind, int], bytes] = {}
    async with opened(pool, tmp_path) as disk:
        space = await disk.space()
        for _ in range(3):
            batch = a_batch(pool, space, rng)
            written = await disk.write(batch)
            assert written.error is None
            assert {(row.kind, row.record) for row in written.result} == expected(pool, batch).keys()
            on_disk |= expected(pool, batch)
        assert disk.events == ["gathered"] * 3

    store = store_of(pool, tmp_path)
    assert read_back(store) == on_disk
    store.close()


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"no layers"}))
async def test_a_copier_loads_from_the_disk(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    pool, rng = random_pool(LAYOUTS[name]), Random(name)
    before = contents(pool)
    async with opened(pool, tmp_path) as disk:
        batch = a_batch(pool, await disk.space(), rng)
        await disk.write(batch)
        target = random_pool(LAYOUTS[name])
        copier = Copier(DiskCopies(target, await disk.store), threads=disk.writer.threads, chunk_bytes=100)
        page = PageRecords(pool).page_size
        to = {kind: part.starts[::-1].copy() for kind, part in batch.items()}
        numbers = {kind: np.array([row.record for row in part.rows]) for kind, part in batch.items()}
        none = np.empty(0, np.int64)
        pairs = {
            kind: Pairs(to[kind], numbers[kind] * (1 if kind == "state" else page), np.arange(len(to[kind])))
            if kind in to
            else Pairs(none, none, none)
            for kind in KINDS[1:]
        }
        lower = numbers["full"] * page if "full" in numbers else none
        plan = CopyPlan(to.get("full", none), lower, pairs["swa"], pairs["state"])

        done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        copier.load(plan, done.set_result)
        async with asyncio.timeout(60):
            copied = await done
        copier.close()

    assert (copied.end, copied.num_pages) == ("whole", len(plan))
    after = contents(target)
    for kind, part in batch.items():
        step = 1 if kind == "state" else page
        for source, place in zip(part.starts.tolist(), to[kind].tolist(), strict=True):
            assert after[kind][place // step] == before[kind][source // step]


async def test_a_load_ends_before_a_damaged_record(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path) as disk:
        batch = a_batch(pool, await disk.space(), Random(1))
        await disk.write(batch)
        store, page = await disk.store, PageRecords(pool).page_size
        numbers = np.array([row.record for row in batch["full"].rows])
        file = store.files["full"]
        flip(Path(store.folder.path, file.name), (int(numbers[2]) - 1) * file.stride + 7)
        copier = Copier(DiskCopies(pool, store), threads=disk.writer.threads, chunk_bytes=1)
        done: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        copier.load(CopyPlan(batch["full"].starts, numbers * page), done.set_result)
        async with asyncio.timeout(60):
            copied = await done
        copier.close()

        assert (copied.end, copied.num_pages) == ("failed", 2)
        assert str(copied.error) == f"1 damaged record of kind 'full': {numbers[2]}"
        with pytest.raises(RecordDamaged) as damaged:
            store.read("full", numbers, aligned_bytes(len(numbers) * file.stride).reshape(len(numbers), -1))
        assert damaged.value.numbers == (numbers[2],)


async def test_two_threads_share_a_load(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_copies, "PART_BYTES", 1)
    calls = FaultyFileCalls()
    async with opened(pool, tmp_path, calls) as disk:
        batch = a_batch(pool, await disk.space(), Random(8), 10)
        await disk.write(batch)
        wanted, page = contents(pool)["full"], PageRecords(pool).page_size
        starts, numbers = batch["full"].starts, np.array([row.record for row in batch["full"].rows])
        pool.storage.zero_()
        copies, before, done = (
            DiskCopies(pool, await disk.store, disk.writer.threads.help),
            calls.counts["preadv"],
            threading.Event(),
        )
        let_pass = calls.stall("preadv")

        def load() -> None:
            copies.load(CopyPlan(starts, numbers * page), 0, len(starts))
            done.set()

        threading.Thread(target=load, daemon=True).start()
        await until(lambda: calls.counts["preadv"] - before == len(starts))
        assert not done.is_set(), "the pages of a load are not its own until both threads have ended"
        let_pass()
        await until(done.is_set)
        found = contents(pool)["full"]
        assert all(found[start // page] == wanted[start // page] for start in starts.tolist())
        copies.close()


@pytest.mark.parametrize("skipped", range(4))
async def test_a_load_fails_in_whichever_thread_it_does(
    skipped: int, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_copies, "PART_BYTES", 1)
    calls = FaultyFileCalls()
    async with opened(pool, tmp_path, calls) as disk:
        batch = a_batch(pool, await disk.space(), Random(9), 10)
        await disk.write(batch)
        numbers = np.array([row.record for row in batch["full"].rows]) * PageRecords(pool).page_size
        copies = DiskCopies(pool, await disk.store, disk.writer.threads.help)
        plan = CopyPlan(batch["full"].starts, numbers)
        calls.fail("preadv", errno.EIO, skipped)
        with pytest.raises(DiskFailed, match=r"reading 1 record of pages\.bin from record"):
            copies.load(plan, 0, len(numbers))
        copies.load(plan, 0, len(numbers))
        copies.close()
        with pytest.raises(DiskError, match="the disk is closed"):
            copies.load(plan, 0, 1)


def test_pools_with_other_records_are_refused(pool: Pool, tmp_path: Path) -> None:
    store = store_of(pool, tmp_path)
    with pytest.raises(ValueError, match="store must have records of the pool's sizes in bytes"):
        DiskCopies(random_pool(LAYOUTS["attention"]), store)
    with pytest.raises(TypeError, match="a DiskWriter writes"):
        DiskCopies(pool, store).write(CopyPlan(np.empty(0, np.int64), np.empty(0, np.int64)), 0, 0)
    store.close()


# -------------------------------------------------------------------- order


async def test_pages_are_not_needed_while_the_disk_is_written(pool: Pool, tmp_path: Path) -> None:
    calls, rng = FaultyFileCalls(), Random(2)
    async with opened(pool, tmp_path, calls) as disk:
        space = await disk.space()
        let_pass = calls.stall("pwritev")
        batch = a_batch(pool, space, rng)
        wanted = expected(pool, batch)
        _, written = disk.start(batch)
        await until(lambda: "gathered" in disk.events)
        pool.storage.zero_()  # other KV comes into these pages
        assert not written.done()
        assert disk.writer.may_write, "there are two buffers"
        others = a_batch(pool, space, rng, 1)
        _, second = disk.start(others)
        assert not disk.writer.may_write
        let_pass()
        assert (await written).error is None and (await second).error is None
        assert disk.writer.may_write
        found = await disk.work(read_back)
    kept = wanted.keys() - expected(pool, others).keys()
    assert len(kept) > 6 and all(found[key] == wanted[key] for key in kept)


async def test_a_buffer_is_free_when_its_records_are_written(pool: Pool, tmp_path: Path) -> None:
    calls, freed = FaultyFileCalls(), list[bool]()
    async with opened(pool, tmp_path, calls) as disk:
        space = await disk.space()
        disk.writer.on_free = lambda: freed.append(disk.writer.may_write)
        let_pass = calls.stall("BEGIN")
        writes = [disk.start(a_batch(pool, space, Random(number), 1))[1] for number in range(2)]
        await until(lambda: len(freed) == 2)
        writes.append(disk.start(a_batch(pool, space, Random(2), 1))[1])
        await until(lambda: len(freed) == 3)
        assert all(freed) and not any(written.done() for written in writes), "their rows are not committed"
        let_pass()
        assert all([(await written).result for written in writes])


async def test_rows_follow_their_records(pool: Pool, tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(pool, tmp_path, calls) as disk:
        space = await disk.space()
        let_pass = calls.stall("INSERT", skipped=0)
        num_writes, num_inserts = calls.counts["pwritev"], calls.counts["INSERT"]
        _, written = disk.start(a_batch(pool, space, Random(3)))
        await until(lambda: calls.counts["INSERT"] > num_inserts)
        assert calls.counts["pwritev"] - num_writes >= 3, "all records are written before the first row"
        let_pass()
        assert (await written).error is None


async def test_work_waits_for_the_writes_before(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path) as disk:
        space = await disk.space()
        batch = a_batch(pool, space, Random(4))
        await disk.write(batch)
        keys = list(expected(pool, batch))
        await disk.work(lambda store: store.index.commit(removed=keys))
        assert await disk.work(lambda store: store.index.num_rows(space)) == 0


async def test_a_deleted_space_takes_no_rows_of_a_write_in_flight(pool: Pool, tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened(pool, tmp_path, calls) as disk:
        space = await disk.space()
        let_pass = calls.stall("BEGIN")
        deleted: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        disk.writer.submit(lambda store: store.index.delete_spaces([space]), deleted.set_result)
        _, written = disk.start(a_batch(pool, space, Random(5)))
        let_pass()
        assert (await deleted).error is None
        assert await written == Ended(result=[])


async def test_the_limit_spreads_writes(pool: Pool, tmp_path: Path) -> None:
    now = 0.0
    async with opened(pool, tmp_path, write_mib_s=1.0, clock=lambda: now) as disk:
        batch = a_batch(pool, await disk.space(), Random(6))
        num_bytes = sum(len(part.rows) for part in batch.values()) * 4096
        await disk.write(batch)
        assert not disk.writer.may_write
        now = num_bytes / 2**20 - 0.001
        assert not disk.writer.may_write
        now += 0.002
        assert disk.writer.may_write


async def test_a_batch_must_fit_into_a_buffer(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path, buffer_bytes=5 * 4096) as disk:
        batch = a_batch(pool, 1, Random(7))
        with pytest.raises(ValueError, match="records must take 20,480 bytes at most, not"):
            disk.start(batch)
        assert disk.writer.may_write, "no buffer is lost"


# -------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("call", "code", "kind"),
    [
        ("pwritev", errno.EIO, DiskFailed),
        ("pwritev", errno.ENOSPC, DiskFull),
        ("INSERT", errno.EIO, DiskFailed),
        ("COMMIT", errno.ENOSPC, DiskFull),
    ],
)
async def test_a_write_that_fails_leaves_no_row_and_the_next_one_works(
    pool: Pool, tmp_path: Path, call: str, code: int, kind: type[DiskError]
) -> None:
    calls, rng = FaultyFileCalls(), Random(8)
    async with opened(pool, tmp_path, calls) as disk:
        space = await disk.space()
        calls.fail(call, code)
        written = await disk.write(a_batch(pool, space, rng))
        assert written.result == [] and isinstance(written.error, kind)
        assert await disk.work(lambda store: store.index.num_rows(space)) == 0

        batch = a_batch(pool, space, rng)
        assert (await disk.write(batch)).error is None
        assert await disk.work(read_back) == expected(pool, batch)
        calls.shorten("pwritev", 10)
        assert isinstance((await disk.write(a_batch(pool, space, rng))).error, ShortTransfer)


async def test_a_write_is_cancelled_before_it_is_copied(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path) as disk:
        space = await disk.space()
        write, written = disk.start(a_batch(pool, space, Random(9)))
        disk.writer.cancel(write)
        result = await written
        assert disk.events == ["gathered"]
        assert disk.writer.may_write
        if result.result:  # its pages were copied before
            assert len(result.result) == await disk.work(lambda store: store.index.num_rows(space))
        else:
            assert result == Ended(result=[])


async def test_work_that_fails_is_an_error_of_its_own(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path) as disk:
        with pytest.raises(DiskError, match="work on the index failed: ZeroDivisionError"):
            await disk.work(lambda store: 1 / 0)
        assert await disk.work(lambda store: 7) == 7


async def test_a_store_that_cannot_be_opened_is_reported_and_refuses_work(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path / "absent") as disk:
        with pytest.raises(CacheUnavailable, match="must be a folder that is there"):
            await disk.store
        with pytest.raises(DiskError, match="the disk is not open: "):
            await disk.space()
        written = await disk.write(a_batch(pool, 1, Random(10)))
        assert written.result == [] and "the disk is not open" in str(written.error)


async def test_a_second_cache_is_refused_while_the_first_one_is_open(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path) as first:
        await first.store
        async with opened(pool, tmp_path) as second:
            with pytest.raises(FolderInUse, match=f"is locked by pid {os.getpid()}"):
                await second.store
    async with opened(pool, tmp_path) as third:
        await third.store


async def test_close_ends_writes_and_does_the_work_before(pool: Pool, tmp_path: Path) -> None:
    async with opened(pool, tmp_path) as disk:
        space = await disk.space()
        _, written = disk.start(a_batch(pool, space, Random(11)))
        deleted = asyncio.ensure_future(disk.work(lambda store: store.index.delete_spaces([space])))
        await asyncio.sleep(0)
        disk.writer.close()
        assert (await written).error is None
        await deleted
        assert not disk.writer.may_write
        with pytest.raises(DiskError, match="the disk is closed"):
            await disk.space()
    store = store_of(pool, tmp_path)
    assert store.index.spaces() == []
    store.close()


def test_a_damaged_index_is_made_again(pool: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(pool, tmp_path)
    store.index.add_space(None, "b", None, "v")
    path = Path(store.folder.path, INDEX)
    store.close()
    path.write_bytes(b"no database" * 1000)

    store = store_of(pool, tmp_path)
    assert store.index.spaces() == []
    assert "is damaged, so its records are lost" in caplog.text
    store.close()


# -------------------------------------------------------------------- crashes

PLACES = ["pwritev", "pwritev 2", "BEGIN", "DELETE", "INSERT", "COMMIT", "after"]


@pytest.mark.parametrize("place", PLACES)
def test_a_process_that_is_killed_leaves_whole_rows_or_none(pool: Pool, tmp_path: Path, place: str) -> None:
    """Payload without row, a row in a commit, and a row with its payload."""
    rng = Random(12)
    first, second = a_batch(pool, 1, rng), a_batch(pool, 1, rng)

    async def work() -> None:
        calls = FaultyFileCalls()
        async with opened(pool, tmp_path, calls) as disk:
            await disk.space()
            assert (await disk.write(first)).error is None
            if place != "after":
                name, _, skipped = place.partition(" ")
                calls.kill(name, int(skipped or 0))
            assert (await disk.write(second)).error is None
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(work()))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL

    store = store_of(pool, tmp_path)
    both = expected(pool, first) | expected(pool, second)
    overwritten = expected(pool, first).keys() & expected(pool, second).keys()
    if place == "after":
        assert read_back(store) == both
    else:
        damaged = 0
        for row in store.index.rows(1)[0]:
            store.note([row])
            buffer = aligned_bytes(store.files[row.kind].stride).reshape(1, -1)
            try:
                store.read(row.kind, np.array([row.record]), buffer)
            except RecordDamaged:
                damaged += 1
                assert (row.kind, row.record) in overwritten, "only a record that was used again is wrong"
                continue
            record = buffer[0, : store.files[row.kind].record_bytes].tobytes()
            assert record == expected(pool, first)[row.kind, row.record]
        assert store.index.num_rows(1) == len(expected(pool, first))
    store.close()
