"""`raydix disk list` and `clear`: the records that caches have left on a disk, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import run, run_json

from raydix.actors import LocalPrefixCache
from raydix.actors.tiers.disk.disk_folder import DiskFolder
from raydix.actors.tiers.disk.disk_index import IndexLayout
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.cache_core import RecordLayout
from raydix.cache_core.tiers.index_row import IndexRow
from raydix.schemas import CacheConfig, DiskConfig, PoolConfig, frame_namespace

PAGE = 4
ABC, DEF = "abc" + "0" * 13, "def" + "0" * 13  # layouts
DESCRIPTION = '{"record_bytes": {"full": 5000, "swa": 100}}'


@contextmanager
def stored(path: Path, cache: str = "kv-0", layout: str = ABC) -> Iterator[DiskStore]:
    """The files of a cache, in use."""
    records = RecordLayout(64 * PAGE, PAGE, 1250, 64 * PAGE, 25)
    store = DiskStore(str(path), cache, records, IndexLayout(layout, PAGE, DESCRIPTION), direct_io="off")
    try:
        yield store
    finally:
        store.close()


def add_pages(store: DiskStore, space: int, kind: Any, numbers: range) -> None:
    rows = [IndexRow(kind, number, space, number, bytes(32), bytes(16)) for number in numbers]
    assert len(store.index.commit(rows)) == len(numbers)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder with three tiers of two caches. One of them has two spaces."""
    with stored(tmp_path) as store:
        first = store.index.add_space(None, "0123456789abcdef", None, "v1").number
        second = store.index.add_space(frame_namespace("tenant", "lora", None), "m", "a", "v2").number
        add_pages(store, first, "full", range(1, 41))
        add_pages(store, first, "swa", range(1, 11))
        add_pages(store, second, "full", range(41, 44))
    for cache, layout in (("kv-0", DEF), ("chat-tp1", ABC)):
        with stored(tmp_path, cache, layout):
            pass
    return tmp_path


def test_a_list_names_each_tier_with_the_pages_of_its_models(disk: Path) -> None:
    chat, tier, other = run_json("disk", "list", disk)

    assert [(each["cache"], each["layout"]) for each in (chat, tier, other)] == [
        ("chat-tp1", ABC),
        ("kv-0", ABC),
        ("kv-0", DEF),
    ]
    assert (tier["path"], tier["is_locked"], tier["fault"]) == (str(disk / "kv-0" / ABC), False, "")
    assert tier["num_bytes"] > 64 * (8192 + 4096)
    assert tier["format"]["page_size"] == PAGE and tier["format"]["description"]["record_bytes"]["full"] == 5000
    first, second = tier["spaces"]
    assert (first["namespace_label"], first["base"], first["label"]) == ("no namespace", "0123456789abcdef", "v1")
    assert (first["num_pages"], first["num_windows"], first["num_bytes"]) == (40, 10, 40 * 8192 + 10 * 4096)
    assert (second["namespace_label"], second["adapter"]) == ("extra_key=tenant, lora_id=lora", "a")
    assert (second["num_pages"], second["num_bytes"]) == (3, 3 * 8192)

    text = run("disk", "list", disk).stdout
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(row.startswith(f"kv-0 {ABC} 4 ") and row.endswith(" -") for row in rows)
    assert any(row.startswith(f"kv-0 {ABC} no namespace 0123456789abcdef v1 40 360 KiB") for row in rows)
    assert any(row.startswith(f"kv-0 {ABC} extra_key=tenant, lora_id=lora m + a v2 3 24 KiB") for row in rows)


def test_a_list_changes_nothing(disk: Path) -> None:
    files = sorted(disk.glob("*/*/*"))
    times = [facts["used_at"] for facts in run_json("disk", "list", disk)]

    assert [facts["used_at"] for facts in run_json("disk", "list", disk)] == times
    assert sorted(disk.glob("*/*/*")) == files


def test_the_log_of_a_killed_cache_is_read_and_stays(disk: Path) -> None:
    """The rows that lie in the log alone are counted, and the cache's next start finds them."""
    folder = disk / "kv-0" / DEF
    with stored(disk, layout=DEF) as store:
        space = store.index.add_space(None, "m", None, "").number
        add_pages(store, space, "full", range(1, 6))
        killed = {path.name: path.read_bytes() for path in folder.glob("index.db*")}
    assert set(killed) == {"index.db", "index.db-wal"} and killed["index.db-wal"]
    for name, content in killed.items():
        (folder / name).write_bytes(content)

    for _ in range(2):
        tier = run_json("disk", "list", disk)[2]
        assert tier["fault"] == "" and tier["spaces"][0]["num_pages"] == 5
        assert {path.name: path.read_bytes() for path in folder.glob("index.db*")} == killed
    with stored(disk, layout=DEF) as store:
        assert store.index.num_rows(space) == 5


def test_a_tier_in_use_is_named_with_its_process_and_not_read(disk: Path) -> None:
    with stored(disk):
        _, tier, _ = run_json("disk", "list", disk)
        assert (tier["is_locked"], tier["pid"], tier["spaces"]) == (True, os.getpid(), None)
        assert f"by pid {os.getpid()}" in run("disk", "list", disk).stdout


def damaged(path: Path) -> None:
    (path / "kv-0" / ABC / "index.db").write_bytes(b"no database" * 1000)


def absent(path: Path) -> None:
    (path / "kv-0" / ABC / "index.db").unlink()


@pytest.mark.parametrize(
    ("spoil", "fault"), [(damaged, "file is not a database"), (absent, "has no index of a disk tier")]
)
def test_an_index_that_cannot_be_read_is_named(disk: Path, spoil: Callable[[Path], None], fault: str) -> None:
    spoil(disk)

    _, tier, other = run_json("disk", "list", disk)

    assert fault in tier["fault"] and tier["spaces"] is None
    assert other["fault"] == "" and other["spaces"] == []
    assert f"{disk}/kv-0/{ABC}: " in run("disk", "list", disk).stdout


def test_nothing_is_removed_without_yes(disk: Path) -> None:
    error = run_json("disk", "clear", disk, exit_code=2)["error"]

    assert error["message"].startswith(f"this removes 3 disk tiers: {disk}/chat-tp1/{ABC} (")
    assert error["advice"] == "the same with --yes"
    assert len(run_json("disk", "list", disk)) == 3


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ((), []),
        (("--name", "kv-0"), [f"chat-tp1/{ABC}"]),
        (("--name", "chat-*"), [f"kv-0/{ABC}", f"kv-0/{DEF}"]),
        (("--layout", ABC), [f"kv-0/{DEF}"]),
        (("--name", "kv-0", "--layout", DEF), [f"chat-tp1/{ABC}", f"kv-0/{ABC}"]),
        (("--name", "other"), [f"chat-tp1/{ABC}", f"kv-0/{ABC}", f"kv-0/{DEF}"]),
    ],
)
def test_clear_removes_the_tiers_that_are_named(disk: Path, options: tuple[str, ...], left: list[str]) -> None:
    done = run_json("disk", "clear", disk, *options, "--yes")

    assert (len(done["removed"]), done["in_use"]) == (3 - len(left), [])
    assert sorted(str(path.relative_to(disk)) for path in disk.glob("*/*")) == left
    assert run_json("disk", "clear", disk, *options, "--yes") == {"removed": [], "in_use": []}


def test_a_tier_in_use_is_left_alone(disk: Path) -> None:
    with stored(disk):
        done = run_json("disk", "clear", disk, "--yes", exit_code=1)
        assert [len(part) for part in (done["removed"], done["in_use"])] == [2, 1]
        text = run("disk", "clear", disk, "--yes", exit_code=1).stdout
        assert text == f"{disk}/kv-0/{ABC}: left alone, as it is in use by pid {os.getpid()}\n"
    assert run("disk", "clear", disk, "--yes").stdout.startswith(f"{disk}/kv-0/{ABC}: removed, ")
    assert run("disk", "clear", disk, "--yes").stdout == f"no such disk tier lies in {disk}\n"


@pytest.mark.parametrize("command", ["list", "clear"])
def test_a_path_that_is_no_folder_is_wrong_usage(tmp_path: Path, command: str) -> None:
    error = run_json("disk", command, tmp_path / "absent", exit_code=2)["error"]

    assert "it must be a folder that is there" in error["message"]
    assert "--json" in run("disk", command, "--help").stdout


async def test_the_tier_of_a_cache_is_listed_and_found_empty_when_it_was_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pool = PoolConfig.uniform(num_slots=64, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu")
    disk = DiskConfig(path=str(tmp_path), num_slots=64, direct_io="off")
    config = CacheConfig(page_size=PAGE, pool=pool, disk=disk)
    for _ in range(2):
        await LocalPrefixCache(config).close()
        (facts,) = run_json("disk", "list", ".")
        assert (facts["cache"], facts["format"]["description"]["record_bytes"]) == ("local", {"full": 64})
        run("disk", "clear", ".", "--yes")
        assert run_json("disk", "list", ".") == []


def test_a_folder_is_locked_while_it_is_read(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that starts meanwhile waits; it does not take the folder."""
    from raydix.actors.tiers.disk import disk_list
    from raydix.actors.tiers.disk.disk_errors import FolderInUse

    real, met = disk_list.DiskIndex, []

    def watched(path: str, layout: None, **options: Any) -> Any:
        folder = DiskFolder(str(disk), Path(path).parent.name, Path(path).name, direct_io="off")
        with pytest.raises(FolderInUse):
            folder.lock()
        folder.close()
        met.append(path)
        return real(path, layout, **options)

    monkeypatch.setattr(disk_list, "DiskIndex", watched)
    assert len(disk_list.list_disks(str(disk))) == len(met) == 3
