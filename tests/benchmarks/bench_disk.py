"""Measure how fast pages are written to a disk and loaded from it, against plain loops of O_DIRECT.

    python -m benchmarks.bench_disk [--quick]

in the tests' folder. A plain loop makes calls of the same sizes, from as many threads, for memory as large as the pool.
It has no sums, no index and no buffers. The files lie in the folder for temporary files, which TMPDIR names.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from threading import Thread

import numpy as np
import torch
from benchmarks.figures import HEADING, Figure, median_ratio, times_in_turns
from numpy.typing import NDArray

from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.disk.disk_copies import NUM_LANES, PART_BYTES, DiskCopies
from raydix.actors.tiers.disk.disk_index import IndexLayout
from raydix.actors.tiers.disk.disk_readers import NUM_LOADS
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import BUFFER_BYTES, DiskWriter, Records
from raydix.actors.tiers.disk.disk_writes import MOST_PAGES
from raydix.actors.tiers.disk.record_file import CALL_BYTES, aligned_bytes
from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core import RecordLayout, RecordPool
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tiers.page_records import CopyPlan

PAGE = 16
RECORDS = (64 * 2**10, 128 * 2**10, 2**20)  # bytes
RUNS, SCATTERED = "runs", "scattered"
GOAL, GATE = 0.8, 0.4
NUM_ROUNDS = 5

Numbers = NDArray[np.int64]


class Disk:
    """A pool, the files of a disk tier below it, and a file for plain loops. The files are written once.

    Args:
        path: a folder.
        record_bytes: of a page, whole blocks of 4096.
        num_bytes: bytes of all pages.
    """

    def __init__(self, path: Path, record_bytes: int, num_bytes: int) -> None:
        self.number = num_bytes // record_bytes
        self.record_bytes = record_bytes
        layout = RecordLayout(self.number * PAGE, PAGE, record_bytes // PAGE)
        self._pool = RecordPool(layout)
        self._pool.storage.random_()
        self._runner = asyncio.Runner()
        self._rng = Random(0)
        self._ids = range(1, self.number + 1)
        self._orders = {
            RUNS: np.arange(1, self.number + 1),
            SCATTERED: np.random.default_rng(0).permutation(self.number) + 1,
        }
        self._store, self._space = self._runner.run(self._open(path, layout))
        threads = self._writer.threads
        self._copier = Copier(DiskCopies(self._pool, self._store, threads.help), threads=threads, num_loads=NUM_LOADS)
        self._batches = {how: self._batches_of(numbers) for how, numbers in self._orders.items()}
        self._fd = os.open(path / "plain.bin", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._plain = aligned_bytes(num_bytes)  # memory of plain loops, as large as the pool
        self._plain[:] = 1

    async def _open(self, path: Path, layout: RecordLayout) -> tuple[DiskStore, int]:
        opened: asyncio.Future[DiskStore | Exception] = asyncio.get_running_loop().create_future()
        make = partial(DiskStore, str(path), "bench", layout, IndexLayout("bench", PAGE, "{}"), direct_io="on")
        self._writer = DiskWriter(make, opened.set_result, self._pool)
        store = await opened
        if isinstance(store, Exception):
            raise store
        added: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._writer.submit(
            lambda store: store.index.add_space(None, "m", None, "").number, lambda done: added.set_result(done.result)
        )
        return store, await added

    def close(self) -> None:
        """End the threads, and close the files."""
        self._copier.close()
        self._writer.close()
        os.close(self._fd)
        self._runner.close()

    # ---------------------------------------------------------------- the tier

    def write(self, how: str) -> None:
        """Write all pages."""
        self._runner.run(self._write(self._batches[how]))

    async def _write(self, batches: list[Records]) -> None:
        ended, may_write = asyncio.Queue[Ended](), asyncio.Event()
        self._writer.on_free = may_write.set
        for records in batches:
            while not self._writer.may_write:
                may_write.clear()
                await may_write.wait()
            self._writer.write({"full": records}, lambda: None, ended.put_nowait)
        for _ in batches:
            written = await ended.get()
            assert written.result and written.error is None, written.error

    def _batches_of(self, numbers: Numbers) -> list[Records]:
        """Return the writes of records, as large as the disk tier makes them."""
        step = min(MOST_PAGES, BUFFER_BYTES // self.record_bytes)
        parts = [numbers[first : first + step] for first in range(0, len(numbers), step)]
        return [Records(part * PAGE, [self._row(number) for number in part.tolist()]) for part in parts]

    def _row(self, number: int) -> IndexRow:
        digest, parent, tokens = map(self._rng.randbytes, (32, 32, 4 * PAGE))
        return IndexRow("full", number, self._space, number, digest, b"", parent, tokens)

    def load(self, how: str, num_loads: int) -> None:
        """Load all pages, by so many loads together."""
        self._runner.run(self._load(np.array_split(self._orders[how], num_loads)))

    async def _load(self, parts: list[Numbers]) -> None:
        ends = [asyncio.get_running_loop().create_future() for _ in parts]
        for part, end in zip(parts, ends, strict=True):
            self._copier.load(CopyPlan(part * PAGE, part * PAGE), end.set_result)
        for found in await asyncio.gather(*ends):
            assert isinstance(found, Ended) and found.end == "whole", found

    # ---------------------------------------------------------------- plain loops

    def plain(self, how: str, num_threads: int, *, is_write: bool) -> None:
        """Write or read as many bytes, by calls for runs of records, or for single ones."""
        parts = np.array_split(self._orders[how], num_threads)
        num_bytes = self.record_bytes
        if how == RUNS:
            num_bytes = max(num_bytes, CALL_BYTES if is_write else PART_BYTES)
        call = os.pwritev if is_write else os.preadv
        threads = [Thread(target=self._call, args=(call, part, num_bytes)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _call(self, call: Callable[..., int], numbers: Numbers, call_bytes: int) -> None:
        step = call_bytes // self.record_bytes
        for first in range(0, len(numbers), step):
            at, number = (int(numbers[first]) - 1) * self.record_bytes, len(numbers[first : first + step])
            buffer = self._plain[at : at + number * self.record_bytes]
            assert call(self._fd, [buffer], at) == len(buffer)

    # ---------------------------------------------------------------- works

    def works(self) -> dict[str, Callable[[], object]]:
        """Return the measured works; the plain loop of each has the same name, with "plain " before it."""
        works: dict[str, Callable[[], object]] = {}
        for how in self._orders:
            works[f"write, {how}"] = partial(self.write, how)
            works[f"plain write, {how}"] = partial(self.plain, how, 1, is_write=True)
            for num_loads in range(1, NUM_LOADS + 1):
                name = f"{num_loads} load{'s' * (num_loads > 1)}, {how}"
                works[name] = partial(self.load, how, num_loads)
                works[f"plain {name}"] = partial(self.plain, how, NUM_LANES * num_loads, is_write=False)
        return works


@contextmanager
def opened(record_bytes: int, num_bytes: int) -> Iterator[Disk]:
    """Yield a disk in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="raydix-disk-") as path:
        disk = Disk(Path(path), record_bytes, num_bytes)
        try:
            yield disk
        finally:
            disk.close()


def has_direct_io() -> bool:
    """Return whether files of the temporary folder can be opened with O_DIRECT."""
    with tempfile.NamedTemporaryFile() as file, suppress(OSError):
        os.close(os.open(file.name, os.O_RDWR | os.O_DIRECT))
        return True
    return False


def figures(quick: bool) -> list[Figure]:
    """Return the figures of each size of a record. The temporary folder must have O_DIRECT."""
    return list(_figures(quick))


def _figures(quick: bool) -> Iterator[Figure]:
    """Yield the figures of each size of a record."""
    num_bytes = (64 if quick else 256) * 2**20
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for record_bytes in RECORDS:
        with opened(record_bytes, num_bytes) as disk:
            times = times_in_turns(disk.works(), NUM_ROUNDS)
        for name in (name for name in times if not name.startswith("plain ")):
            rate, ratio = num_bytes / median(times[name]) / 1e9, median_ratio(times, name, f"plain {name}")
            what = f"{name}, records of {record_bytes // 1024} KiB"
            yield Figure("disk", what, rate, "GB/s", ratio, "a plain loop", at_least=GOAL, gate=GATE)
    torch.set_num_threads(num_threads)


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line(), flush=True)


if __name__ == "__main__":
    main()
