"""Reads of a disk that fail: one line in the log a minute, a finding, and the end of records that stay unreadable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.tiers.disk_rig import PAGE, DiskRig, opened_rig

from raydix.actors.service.findings import disk_finding
from raydix.cache_core import RadixKey
from raydix.cache_core.tiers.look_up import LookUp

PROMPT, OTHER = [1] * 24, [2] * 16
LINE = "reads of the disk fail"


def cut(rig: DiskRig, path: Path, prompt: list[int], page: int) -> bytes:
    """Cut the file of the pages before the record of a page of a prompt; return its bytes."""
    (file,) = path.glob("*/*/pages.bin")
    whole, record = (
        file.read_bytes(),
        int(rig.cache.radix.locate(RadixKey(prompt), len(prompt))[1][page]) // PAGE,
    )
    os.truncate(file, (record - 1) * 4096)
    return whole


def put_back(path: Path, whole: bytes) -> None:
    """Give the file of the pages its bytes again."""
    (file,) = path.glob("*/*/pages.bin")
    file.write_bytes(whole)


async def load(rig: DiskRig, prompt: list[int]) -> int:
    """Load a prompt of which nothing is in the pool."""
    rig.core.evict(10**6)
    return (await rig.load(prompt))[0]


async def test_a_record_that_cannot_be_read_twice_is_dropped_if_others_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    async with opened_rig(tmp_path, clock=lambda: now[0]) as rig:
        await rig.twice(OTHER)
        await rig.twice(PROMPT)
        cut(rig, tmp_path, PROMPT, 5)
        for _ in range(3):
            assert await load(rig, PROMPT) == 0
            assert await load(rig, OTHER) == 16
        assert rig.cache.total_size() == 40, "a second has not passed"
        now[0] += 1
        assert await load(rig, PROMPT) == 0
        assert rig.cache.total_size() == 36 and rig.disk.state == "ready"
        assert await load(rig, PROMPT) == 20
        assert rig.disk.stats().failed_reads == 4 and rig.disk.stats().damaged_records == 0
        await rig.settle()
        await rig.check_index()
    assert caplog.text.count(LINE) == 1


async def test_a_disk_of_which_no_read_succeeds_is_stalled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    async with opened_rig(tmp_path, clock=lambda: now[0]) as rig:
        await rig.twice(OTHER)
        await rig.twice(PROMPT)
        whole = cut(rig, tmp_path, OTHER, 0)
        for wait_s in (0, 1):
            now[0] += wait_s
            assert rig.disk.state == "ready"
            assert await load(rig, PROMPT) == 0
        assert (rig.disk.state, rig.disk.stats().stalls, rig.cache.total_size()) == ("stalled", 1, 40)
        assert (await rig.load(OTHER)) == (0, None), "nothing is read"
        assert rig.disk.loads.prefetch(RadixKey(OTHER)) is None
        now[0] += 31
        assert await load(rig, PROMPT) == 0 and rig.disk.state == "stalled"
        assert caplog.text.count(LINE) == 1
        now[0] += 31
        assert await load(rig, PROMPT) == 0
        assert caplog.text.count(LINE) == 2
        stats = rig.disk.stats()
        assert "ended after 0 of" in str(stats.last_error) and stats.failed_reads == 4
        assert "reads of the disk fail, the last one 0" in disk_finding(stats)
        now[0] += 700
        assert disk_finding(rig.disk.stats()) == ""

        put_back(tmp_path, whole)
        assert await load(rig, OTHER) == 16
        assert await load(rig, PROMPT) == 24, "a disk that works again has lost nothing"


async def test_a_record_that_can_be_read_again_is_forgotten(tmp_path: Path) -> None:
    now = [0.0]
    async with opened_rig(tmp_path, clock=lambda: now[0]) as rig:
        await rig.twice(OTHER)
        await rig.twice(PROMPT)
        for _ in range(3):
            whole = cut(rig, tmp_path, PROMPT, 5)
            assert await load(rig, PROMPT) == 0
            put_back(tmp_path, whole)
            now[0] += 2
            assert await load(rig, PROMPT) == 24
        assert rig.cache.total_size() == 40


async def test_records_of_a_retired_namespace_are_counted_and_forgotten(tmp_path: Path) -> None:
    now = [0.0]
    async with opened_rig(tmp_path, clock=lambda: now[0]) as rig:
        await rig.twice(OTHER, PROMPT)
        (file,) = tmp_path.glob("*/*/pages.bin")  # noqa: ASYNC240
        file.write_bytes(bytes(file.stat().st_size))
        lease = rig.core.acquire("l", "s", RadixKey(PROMPT)) if rig.core.evict(10**6) else None
        assert lease is not None
        assert rig.disk.loads.load(lease, LookUp(lease.key), 60) is not None
        rig.retire("new", None)
        await rig.wait(lambda: not rig.disk.loads.moves.in_flight)
        assert rig.disk.stats().damaged_records > 0 and rig.disk.state == "ready"
        assert not rig.disk.readers._lost and not rig.disk.readers._unread
        await rig.settle()
        await rig.twice(PROMPT, OTHER)
        assert [await load(rig, prompt) for prompt in (PROMPT, OTHER)] == [24, 16]
