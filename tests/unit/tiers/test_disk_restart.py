"""A disk is warm after its process was killed: the parts of the tier together, in two processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.small_disk import PAGE, SmallDisk

from raydix.actors.tiers.disk.record_file import BLOCK
from raydix.cache_core import RadixKey

PROMPTS = [[1] * 16, [1] * 12 + [2] * 20, [1] * 12 + [3] * 4, [7] * 24]  # 4, 5 more, 1 more and 6 pages


@asynccontextmanager
async def opened(path: Path, *arguments: Any, **options: Any) -> AsyncIterator[SmallDisk]:
    disk = SmallDisk(path, *arguments, **options)
    try:
        await disk.open()
        yield disk
    finally:
        await disk.close()


def killed(path: Path, work: Callable[[SmallDisk], Awaitable[None]], calls: FaultyFileCalls | None = None) -> None:
    """Do work on a disk in another process, which is killed at the end, if not before."""

    async def run() -> None:
        async with opened(path, calls=calls) as disk:
            await work(disk)
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(run()))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


async def write_all(disk: SmallDisk) -> None:
    for prompt in PROMPTS:
        disk.compute(prompt)
    for prompt in PROMPTS:
        written = await disk.write(prompt)
        assert written is not None and written.error is None and written.result


async def lengths(disk: SmallDisk) -> list[int]:
    """The prefixes that are loaded, with the right KV."""
    return [(await disk.load(prompt))[0] for prompt in PROMPTS]


async def test_all_prefixes_are_hit_after_a_kill(tmp_path: Path) -> None:
    killed(tmp_path, write_all)

    async with opened(tmp_path) as disk:
        assert await lengths(disk) == [16, 32, 16, 24]
        assert disk.keeper.num_dormant == 0 and disk.disk.free_slots == (40 - 16) * PAGE
        disk.compute([9] * 8)
        assert await disk.write([9] * 8)
    async with opened(tmp_path) as disk:
        assert await lengths(disk) == [16, 32, 16, 24]
        assert (await disk.load([9] * 8))[0] == 8


async def test_evicted_pages_stay_away_and_their_records_are_used_again(tmp_path: Path) -> None:
    async def work(disk: SmallDisk) -> None:
        await write_all(disk)
        await disk.evict(14)
        disk.compute([8] * 48)
        assert await disk.write([8] * 48)

    killed(tmp_path, work)
    async with opened(tmp_path, num_records=40) as disk:
        assert (await disk.load([8] * 48))[0] == 48
        assert sum(await lengths(disk)) < 20


async def test_a_killed_write_leaves_the_writes_before(tmp_path: Path) -> None:
    for number, call in enumerate(("pwritev", "INSERT", "COMMIT")):
        path = tmp_path / call
        path.mkdir()
        calls = FaultyFileCalls()

        async def work(disk: SmallDisk, calls: FaultyFileCalls = calls, call: str = call) -> None:
            for prompt in PROMPTS:
                disk.compute(prompt)
            assert await disk.write(PROMPTS[0])
            calls.kill(call)
            await disk.write(PROMPTS[1])

        killed(path, work, calls)
        async with opened(path) as disk:
            assert await lengths(disk) == [16, 12, 12, 0], f"killed before {call} ({number})"


async def test_a_retirement_is_for_ever_and_what_follows_is_kept(tmp_path: Path) -> None:
    async def work(disk: SmallDisk) -> None:
        await write_all(disk)
        await disk.retire()

    killed(tmp_path, work)
    async with opened(tmp_path) as disk:
        assert await lengths(disk) == [0, 0, 0, 0]
        disk.compute(PROMPTS[0])
        assert await disk.write(PROMPTS[0])
    async with opened(tmp_path) as disk:
        assert await lengths(disk) == [16, 12, 12, 0]


async def test_a_retirement_that_is_killed_before_its_commit_changes_nothing(tmp_path: Path) -> None:
    calls = FaultyFileCalls()

    async def work(disk: SmallDisk) -> None:
        await write_all(disk)
        calls.kill("COMMIT")
        await disk.retire()

    killed(tmp_path, work, calls)
    async with opened(tmp_path) as disk:
        assert await lengths(disk) == [16, 32, 16, 24]


async def test_pages_of_another_model_are_never_hit_and_leave_first(tmp_path: Path) -> None:
    killed(tmp_path, write_all)

    async with opened(tmp_path, model="other") as disk:
        assert await lengths(disk) == [0, 0, 0, 0]
        assert disk.keeper.num_dormant == 16
        disk.compute([8] * 8)
        assert await disk.write([8] * 8)
        await disk.evict(2)
        assert disk.keeper.num_dormant == 14
        assert (await disk.load([8] * 8))[0] == 8
    async with opened(tmp_path) as disk:  # the first model again: the deepest pages are gone
        assert await lengths(disk) == [16, 24, 16, 24]


@pytest.mark.parametrize("page", [0, 3, 7])
async def test_a_damaged_record_ends_loads_before_it_until_it_is_written_again(tmp_path: Path, page: int) -> None:
    killed(tmp_path, write_all)
    prompt = PROMPTS[1]

    async with opened(tmp_path) as disk:
        path = disk.disk.find_source(RadixKey(prompt), len(prompt))
        record = int(path.starts[page]) // PAGE
        disk.disk.end_quietly(path)
        damage(Path(disk.store.folder.path, "pages.bin"), (record - 1) * BLOCK + 17)

        found, copied = await disk.load(prompt)
        assert (found, copied and copied.end) == (0, "failed"), "all pages are one chunk"
        found, copied = await disk.load(prompt)
        assert found == page * PAGE and (copied is None or copied.end == "whole")
        await disk.evict(0)
        disk.compute(prompt)
        assert await disk.write(prompt)
    async with opened(tmp_path) as disk:
        assert (await disk.load(prompt))[0] == 32


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_a_smaller_disk_keeps_what_fits(tmp_path: Path) -> None:
    killed(tmp_path, write_all)

    async with opened(tmp_path, num_records=10) as disk:
        found = await lengths(disk)
        assert 0 < sum(found) < 16 + 32 + 16 + 24
        assert disk.disk.free_slots + sum(map(len, disk.disk.radix.parts.tree.nodes())) <= 10 * PAGE
    async with opened(tmp_path, num_records=60) as disk:
        assert await lengths(disk) == found
