"""A cache with a disk that is damaged, full, or does not answer: a miss or a typed error, never wrong KV."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.tiers.disk_rig import opened_rig
from support.tiers.disk_service import DiskService
from support.tiers.disk_story import EVERY, PROMPTS, DiskStory
from support.tiers.tiered_service import tiered_config

from raydix.actors.sessions import admission
from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_index import INDEX
from raydix.actors.tiers.disk.record_file import BLOCK
from raydix.cache_core import RadixKey
from raydix.schemas import (
    CacheError,
    CacheUnavailable,
    LeaseResponse,
    ResetRequest,
    SetWeightsRequest,
    WaitingResponse,
)

PAGE = 2
PROMPT = tuple(range(1, 8 * PAGE + 1))


async def service(path: Path, *, load_timeout_s: float = 60.0, **config: Any) -> DiskService:
    """A service with a disk, of which the model is bound."""
    disk = {"path": str(path), "num_slots": 32 * PAGE, "load_timeout_s": load_timeout_s}
    if "window" in config:
        disk["num_swa_slots"] = 32 * PAGE
    if "num_states" in config:
        disk["num_state_slots"] = 16
    cache = DiskService(tiered_config(page_size=PAGE, device_pages=24, host_pages=0, disk=disk, **config))
    cache.bind("0")
    await cache.settle()
    return cache


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("number", [5, pytest.param(32, marks=pytest.mark.more)])
@pytest.mark.parametrize("shape", [{}, {"window": 4, "num_states": 8}], ids=["pages", "windows and states"])
async def test_each_flipped_bit_is_found(tmp_path: Path, shape: dict[str, Any], number: int) -> None:
    """In any of the records that a load reads: 64 in all."""
    rng, cache = Random(1), await service(tmp_path, **shape)
    below = cache.disk.tier.cache
    for num_found in range(number):
        await cache.put_on_disk(PROMPT)
        key = RadixKey(list(PROMPT))
        node, starts = below.radix.locate(key, len(PROMPT))
        records = [("pages", int(start) // PAGE) for start in starts]
        if below.allocator.swa is not None:
            records += [("windows", int(half) // PAGE) for half in below.allocator.swa_starts(starts) if half]
        if (state := below.tree.state_at(node)) is not None:
            records.append(("states", state))
        kind, record = rng.choice(records)
        with cache.records.with_name(f"{kind}.bin").open("r+b") as file:
            at = (record - 1) * BLOCK + rng.randrange(8 if kind == "states" else 8 * PAGE)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        assert await cache.find(PROMPT) < len(PROMPT)
        await cache.settle()
        assert cache.disk.stats().damaged_records == num_found + 1
    await cache.put_on_disk(PROMPT)
    assert await cache.find(PROMPT) == len(PROMPT)
    await cache.close()


async def test_zeroed_torn_and_swapped_records_are_misses_after_a_restart(tmp_path: Path) -> None:
    """As a machine that lost its power leaves them: rows without payload."""
    cache = await service(tmp_path)
    await cache.put_on_disk(PROMPT)
    await cache.kill()
    whole = cache.records.read_bytes()
    path = cache.records
    for name, data in {
        "zeroed": bytes(len(whole)),
        "torn": whole[: 3 * BLOCK + 5] + bytes(len(whole) - 3 * BLOCK - 5),
        "swapped": whole[BLOCK : 2 * BLOCK] + whole[:BLOCK] + whole[2 * BLOCK :],
        "cut": whole[: 2 * BLOCK],
    }.items():
        path.write_bytes(data)
        cache = await service(tmp_path)
        assert await cache.find(PROMPT) < len(PROMPT), name
        await cache.settle()
        assert cache.disk.stats().damaged_records > 0
        await cache.put_on_disk(PROMPT)
        assert await cache.find(PROMPT) == len(PROMPT)
        await cache.close()
        path.write_bytes(whole)


@pytest.mark.parametrize("num_cuts", [4, pytest.param(40, marks=pytest.mark.more)])
async def test_a_log_that_is_cut_anywhere_costs_its_last_commits_alone(tmp_path: Path, num_cuts: int) -> None:
    """As a kill in the middle of a commit of SQLite leaves it."""
    story = DiskStory(tmp_path / "first", disk_pages=64, num_pages=64)
    story.path.mkdir()
    rig = story.rig()
    await rig.ready()
    await rig.twice(*PROMPTS)
    shutil.copytree(story.path, tmp_path / "copy")  # with the log, which the end would move to the database
    await story.retire(rig, "new")
    await rig.twice(PROMPTS[1])
    rig.disk.close(60)
    (log,) = (tmp_path / "copy").glob(f"kv-0/*/{INDEX}-wal")
    size = log.stat().st_size
    for number in range(num_cuts):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "copy", path)
        os.truncate(path / log.relative_to(tmp_path / "copy"), size * number // num_cuts)
        await DiskStory(path, disk_pages=64, num_pages=64).check_successor()


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted file system of 10 MiB: the records, the index and its log have room."""
    path = tmp_path / "mounted"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        pytest.skip(f"`mount` cannot be run: {error}")
    if done.returncode:
        pytest.skip(f"a file system of 10 MiB cannot be mounted; run this as root: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


async def test_a_file_system_that_others_fill_costs_writes_alone(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are reserved, the log of the index is not."""
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.005)
    async with opened_rig(small_disk, disk_pages=40) as rig:
        await rig.twice(PROMPTS[0])
        with suppress(OSError), (small_disk / "of others").open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass
        for prompt in PROMPTS[1:4] * 3:
            for _ in range(2):
                rig.request(prompt)
            await rig.wait(lambda: rig.disk.writes.is_idle)
            rig.check()
        assert rig.disk.writes.counts.num_failed > 0
        rig.core.evict(EVERY)
        assert (await rig.lengths(PROMPTS[0])) == [16]
        (small_disk / "of others").unlink()
        await rig.settle()
        await rig.twice(PROMPTS[1])
        await rig.check_index()
        rig.core.evict(EVERY)
        assert await rig.lengths(PROMPTS[1]) == [32]
    async with opened_rig(small_disk, disk_pages=40) as rig:
        assert await rig.lengths(PROMPTS[0], PROMPTS[1]) == [16, 32]


async def test_a_file_system_without_room_is_refused(small_disk: Path) -> None:
    async with opened_rig(small_disk, disk_pages=40) as rig:
        await rig.twice(PROMPTS[0])
    story = DiskStory(small_disk, disk_pages=4000)
    rig = story.rig()
    rig.disk.start()
    await rig.wait(lambda: rig.disk.state.startswith("failed: "))
    assert "10 MiB are free" in rig.disk.state
    rig.disk.close(60)
    async with opened_rig(small_disk, disk_pages=40) as rig:
        assert await rig.lengths(PROMPTS[0]) == [16], "the file is as it was"


# ---------------------------------------------------------------- a disk that does not answer


async def test_a_retirement_of_a_stalled_disk_says_so_and_nothing_stale_is_found_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer makes no step: `set_weights` is refused in time, and the next life has the new weights."""
    monkeypatch.setattr(admission, "_COMMIT_TIMEOUT_S", 0.02)
    cache = await service(tmp_path, load_timeout_s=0.02)
    await cache.put_on_disk(PROMPT)
    for _ in range(2):
        answer = cache.ask(SetWeightsRequest(label="1"))
        assert isinstance(answer, WaitingResponse)
        first = cache.disk.deletions.future()
        await asyncio.sleep(0.05)
        error = await cache.outcome(answer)
        assert isinstance(error, CacheUnavailable)
        assert "memory of the cache is clean" in str(error) and "the disk has not confirmed it" in str(error)
        assert "a restart before it does may bring the pages back" in str(error)
        assert cache.disk.deletions.future() is first, "a repeated call waits for the same commit"
    cache.bind("1")
    assert await find_in_pool(cache) == 0
    await cache.kill()

    cache = await service(tmp_path, load_timeout_s=60)
    assert await cache.find(PROMPT) == len(PROMPT), "the disk had not confirmed it, and the weights are those of before"
    await cache.kill()
    cache = DiskService(cache.service.config)
    cache.bind("1")
    await cache.settle()
    assert await cache.find(PROMPT) == 0, "other weights have other pages"
    answer = await cache.answer(cache.ask(ResetRequest()))
    assert not isinstance(answer, CacheError)
    await cache.kill()
    cache = await service(tmp_path)
    assert await cache.find(PROMPT) == 0, "the disk has confirmed it"
    await cache.close()


async def find_in_pool(cache: DiskService) -> int:
    """The length of the prefix that a lease has without a load."""
    answer = cache.acquire(PROMPT, load=False)
    assert isinstance(answer, LeaseResponse)
    cache.release(answer.lease_id)
    return answer.prefix_len


async def test_a_retirement_is_answered_while_the_cache_drains_and_before_it_ends(tmp_path: Path) -> None:
    cache = await service(tmp_path)
    await cache.put_on_disk(PROMPT)
    answer = cache.ask(ResetRequest())
    assert isinstance(answer, WaitingResponse)
    assert cache.service.wait_queue.num_loading == 0, "it waits for no load"
    await cache.service.drain(0)
    assert not cache.is_settled(answer)
    outcome = cache.service.wait_queue._by_ticket[answer.ticket].outcome
    closing = asyncio.ensure_future(cache.service.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    await cache.settle()
    await closing
    assert outcome.exception() is None
    cache.check_end()
