"""An index that SQLite calls malformed is replaced whenever that is found: its pages are lost, and nothing else."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest
from support.tiers.disk_rig import DiskRig, opened_rig
from support.tiers.faulty_files import FaultyFileCalls

from raydix.cache_core import RadixKey

PROMPT, OTHER = [1] * 16, [2] * 16


def damage(path: Path, table: str) -> None:
    """Overwrite the root of a table or of an index of a database that no process has open."""
    (file,) = path.glob("*/*/index.db")
    database = sqlite3.connect(file)
    (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
    database.close()
    with file.open("r+b") as opened:
        opened.seek((root - 1) * page_bytes)
        opened.write(b"\xff" * page_bytes)


async def kept_on_disk(rig: DiskRig, prompt: list[int]) -> bool:
    """Whether a prompt comes back from the disk, after it has been used twice."""
    await rig.twice(prompt)
    rig.core.evict(10**6)
    return await rig.lengths(prompt) == [len(prompt)]


@pytest.mark.parametrize("table", ["by_depth", "rows", "spaces"])
async def test_an_index_that_is_damaged_when_it_is_read_is_replaced(
    tmp_path: Path, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_rig(tmp_path) as rig:
        await rig.twice(PROMPT, OTHER)
    damage(tmp_path, table)

    async with opened_rig(tmp_path) as rig:
        await rig.wait(lambda: "is damaged, so its records are lost" in caplog.text)
        await rig.ready()
        assert await rig.lengths(PROMPT, OTHER) == [0, 0]
        assert rig.disk.stats().slots.free_slots == rig.cache.num_slots
        assert await kept_on_disk(rig, PROMPT)
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(PROMPT, OTHER) == [16, 0]


@pytest.mark.parametrize("statement", ["INSERT", "COMMIT"])
async def test_an_index_that_is_damaged_when_it_is_written_is_replaced(tmp_path: Path, statement: str) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice(PROMPT)
        (before,) = [space.number for space in rig.disk.spaces]
        calls.fail(statement, errno.EUCLEAN)
        await rig.twice(OTHER)
        await rig.wait(lambda: rig.disk.state == "ready")
        rig.core.evict(10**6)

        assert await rig.lengths(PROMPT, OTHER) == [0, 0]
        assert await kept_on_disk(rig, PROMPT)
        (after,) = [space.number for space in rig.disk.spaces]
        assert after > before, "no row of an earlier space may be taken for one of this"
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(PROMPT, OTHER) == [16, 0]


async def test_a_retirement_is_confirmed_by_a_new_index(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice(PROMPT, OTHER)
        calls.fail("DELETE", errno.EUCLEAN)
        rig.core.retire(lambda namespace: True)
        assert rig.disk.deletions.future() is not None
        await rig.wait(lambda: rig.disk.deletions.future() is None)

        await rig.ready()
        assert await rig.lengths(PROMPT, OTHER) == [0, 0]
        assert await kept_on_disk(rig, PROMPT)


async def test_a_retirement_while_the_index_is_replaced_is_confirmed_and_deletes_nothing_later(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice(PROMPT)
        go_on = calls.stall("CREATE")
        calls.fail("INSERT", errno.EUCLEAN)
        rig.request(OTHER)
        rig.request(OTHER)
        await rig.wait(lambda: rig.disk.state == "reading")
        rig.core.retire(lambda namespace: True)
        rig.request(PROMPT)
        go_on()
        await rig.wait(lambda: rig.disk.deletions.future() is None and rig.disk.state == "ready")

        await rig.settle()
        assert await kept_on_disk(rig, PROMPT)
    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(PROMPT, OTHER) == [16, 0]


async def test_a_new_index_that_cannot_be_made_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydix.actors.tiers.disk.disk_errors.RETRY_S", 0.01)
    calls = FaultyFileCalls()
    async with opened_rig(tmp_path, calls=calls) as rig:
        await rig.twice(PROMPT)
        calls.fail("CREATE", errno.EIO, times=3)
        calls.fail("INSERT", errno.EUCLEAN)
        rig.request(OTHER)
        rig.request(OTHER)
        await rig.wait(lambda: rig.disk.state.startswith("failed: making the index failed"))
        assert rig.core.match(RadixKey(OTHER)).prefix_len == 16, "the cache serves"
        await rig.ready()

        assert await kept_on_disk(rig, PROMPT)
