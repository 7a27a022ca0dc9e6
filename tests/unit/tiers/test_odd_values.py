"""An index with values of other types and sizes: damaged rows are dropped and counted, and the others are served."""

from __future__ import annotations

import errno
import operator
import sqlite3
from functools import partial
from pathlib import Path

import pytest
from support.tiers.disk_rig import PAGE, DiskRig, opened_rig
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_index import DiskIndex, IndexLayout
from raydix.cache_core import RadixKey

PROMPT, OTHER = [1] * 24, [2] * 16
ODD = ["0", "-1", "7", "9223372036854775807", "1.5", "'text'", "''", "x''", "x'00ff'", "CAST(x'ff' AS TEXT)", "NULL"]
FEW = ["CAST(x'ff' AS TEXT)"]
COLUMNS = {
    "rows": ("kind", "record", "space", "depth", "digest", "sum", "parent", "tokens", "planes"),
    "spaces": ("number", "namespace", "base", "adapter", "label", "arity", "created"),
    "layout": ("digest", "page_size", "description"),
}
WHERE = {"rows": "depth = 5", "spaces": "namespace = x'61'", "layout": "1"}  # one row of each


def change(path: Path, *statements: str) -> int:
    """Change an index that nothing has open; return the rows that were changed. SQLite may refuse a value."""
    (file,) = path.glob("*/*/index.db")
    database = sqlite3.connect(file, isolation_level=None)
    try:
        database.execute("PRAGMA writable_schema=ON")
        database.execute("UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '')")
        database.execute("PRAGMA writable_schema=RESET")
        return sum(database.execute(statement).rowcount for statement in statements)
    except sqlite3.IntegrityError:
        return 0
    finally:
        database.close()


async def write(path: Path) -> None:
    """Put two prompts on the disk, and one in a namespace of its own."""
    async with opened_rig(path) as rig:
        await rig.twice(PROMPT, OTHER)
        await rig.twice(PROMPT, namespace="a")


async def check_use(rig: DiskRig) -> None:
    """Check that the disk takes and gives prompts of both namespaces."""
    rig.core.evict(10**6)
    for namespace in (None, "a"):
        await rig.twice(PROMPT, OTHER, namespace=namespace)
        rig.core.evict(10**6)
        assert [(await rig.load(prompt, namespace))[0] for prompt in (PROMPT, OTHER)] == [24, 16]
        rig.core.evict(10**6)


def bad_rows(rig: DiskRig) -> int:
    assert rig.disk.files.store is not None
    return rig.disk.files.store.num_bad_rows


async def check_value(path: Path, table: str, column: str, value: str) -> None:
    if (column, value) == ("namespace", "NULL"):
        return  # It is right: the default namespace.
    path.mkdir()  # noqa: ASYNC240
    await write(path)
    if not change(path, f"UPDATE {table} SET {column} = {value} WHERE {WHERE[table]}"):
        return
    async with opened_rig(path) as rig:
        found = await rig.lengths(PROMPT, OTHER)
        if table == "layout":
            assert found in ([0, 0], [24, 16])
        else:
            assert found[1] == 16 and found[0] in ((16, 24) if table == "rows" else (24,))
        await rig.check_index()
    async with opened_rig(path) as rig:
        assert bad_rows(rig) == 0, "a damaged row is met again"
        await check_use(rig)
        await rig.check_index()


@pytest.mark.parametrize("table", COLUMNS)
async def test_an_odd_value_costs_its_row_alone(tmp_path: Path, table: str) -> None:
    for column in COLUMNS[table]:
        for value in FEW:
            await check_value(tmp_path / f"{column} {FEW.index(value)}", table, column, value)


@pytest.mark.more
@pytest.mark.parametrize("table", COLUMNS)
@pytest.mark.parametrize("value", [value for value in ODD if value not in FEW])
async def test_each_odd_value_costs_its_row_alone(tmp_path: Path, table: str, value: str) -> None:
    for column in COLUMNS[table]:
        await check_value(tmp_path / column, table, column, value)


async def test_bad_rows_and_a_bad_space_are_counted(tmp_path: Path) -> None:
    await write(tmp_path)
    assert change(tmp_path, "UPDATE rows SET kind = 7 WHERE space = 1 AND depth = 6") == 1
    assert change(tmp_path, "UPDATE rows SET tokens = 0 WHERE space = 1 AND depth = 5") == 1
    assert change(tmp_path, "UPDATE spaces SET arity = 'x' WHERE namespace = x'61'") == 1

    async with opened_rig(tmp_path) as rig:
        assert await rig.lengths(PROMPT, OTHER) == [16, 16]
        assert bad_rows(rig) == 2 + 1 + len(PROMPT) // PAGE
        assert rig.disk.stats().bad_rows == bad_rows(rig)
        await rig.wait(lambda: num_rows(rig) == 8)
        assert rig.disk.stats().num_spaces == 1


async def test_rows_that_are_damaged_by_hundreds_are_all_dropped(tmp_path: Path) -> None:
    await write(tmp_path)
    more = "INSERT INTO rows SELECT 7, value, 1, value, x'', x'', NULL, NULL, 0 FROM more"
    change(
        tmp_path, f"WITH RECURSIVE more(value) AS (VALUES (1) UNION ALL SELECT value + 1 FROM more LIMIT 1100) {more}"
    )

    async with opened_rig(tmp_path) as rig:
        assert bad_rows(rig) == 1100
        assert await rig.lengths(PROMPT, OTHER) == [24, 16]
    async with opened_rig(tmp_path) as rig:
        assert bad_rows(rig) == 0


def test_a_transaction_of_which_the_end_has_failed_blocks_no_other(tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    index = DiskIndex(str(tmp_path), IndexLayout("d1", PAGE, "{}"), calls=calls)
    calls.fail("COMMIT", errno.EIO)
    calls.fail("ROLLBACK", errno.EIO)
    with pytest.raises(disk_errors.DiskFailed):
        index.add_space(None, "base", None, "")
    assert index.add_space(None, "base", None, "").number == 1
    index.close()


def test_a_table_that_is_not_there_is_damage(tmp_path: Path) -> None:
    index = DiskIndex(str(tmp_path), IndexLayout("d1", PAGE, "{}"))
    index._db.execute("DROP TABLE rows")
    with pytest.raises(disk_errors.IndexDamaged, match="no such table"):
        index.clean()
    index.close()


# ---------------------------------------------------------------- rows of retired spaces


def num_rows(rig: DiskRig) -> int:
    assert rig.disk.files.store is not None
    (found,) = rig.disk.files.store.index._db.execute("SELECT count(*) FROM rows").fetchone()
    return int(found)


async def test_rows_that_a_retirement_has_left_are_deleted_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill behind a confirmed `reset`. A commit that fails is tried again."""
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.003)
    await write(tmp_path)
    change(tmp_path, "DELETE FROM spaces WHERE namespace = x'61'")
    async with opened_rig(tmp_path) as rig:
        await rig.wait(lambda: num_rows(rig) == (len(PROMPT) + len(OTHER)) // PAGE)
        assert await rig.lengths(PROMPT, OTHER) == [24, 16]
    calls = FaultyFileCalls()
    change(tmp_path, "DELETE FROM spaces")
    rig = DiskRig(tmp_path, calls=calls)
    calls.fail("DELETE", errno.EIO)
    rig.disk.start()
    await rig.wait(lambda: rig.disk.state == "ready" and num_rows(rig) == 0)
    rig.disk.close(60)


# ---------------------------------------------------------------- a disk that does not open


async def test_a_disk_that_does_not_open_keeps_few_retirements(tmp_path: Path) -> None:
    """1,024 are kept by name. One more stands for all namespaces."""
    await write(tmp_path)
    for number, found in ((1024, [24, 16]), (1025, [0, 0])):
        calls = FaultyFileCalls()
        go_on = calls.stall("fallocate")
        rig = DiskRig(tmp_path, calls=calls)
        rig.disk.start()
        for name in range(number):
            rig.core.retire(partial(operator.eq, f"other {name}"))
        deletion = rig.disk.deletions.future()
        assert deletion is not None
        go_on()
        await rig.wait(deletion.done)
        await rig.ready()
        assert await rig.lengths(PROMPT, OTHER) == found
        rig.core.evict(10**6)
        rig.disk.close(60)
    async with opened_rig(tmp_path) as rig:
        assert rig.cache.match(RadixKey(PROMPT)).prefix_len == 0
