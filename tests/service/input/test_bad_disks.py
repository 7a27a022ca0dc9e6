"""A disk that cannot be used is a clear error of the first start; damaged content is a miss that is counted."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import multiprocessing
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors import LocalPrefixCache
from raydix.actors.service.cache_host import CacheHost, local_device
from raydix.actors.service.findings import Restarts
from raydix.actors.tiers.disk import disk_store, open_disk
from raydix.actors.tiers.disk.disk_errors import FolderInUse
from raydix.actors.tiers.disk.disk_folder import DiskFolder
from raydix.actors.tiers.disk.disk_layout import index_layout
from raydix.actors.tiers.disk.disk_tier import DiskTier
from raydix.schemas import CacheConfig, CacheUnavailable, DiskConfig, PoolConfig

PAGE = 4
PROMPT = list(range(1, 8 * PAGE + 1))
BLOCK = 4096  # bytes that a record takes


def config_of(path: Path | str, head_dim: int = 2, fingerprint: str = "m", **disk: Any) -> CacheConfig:
    """A pool of 64 slots above a disk."""
    fields = {"num_slots": 256, "direct_io": "off", "write_mib_s": None, "load_timeout_s": 60}
    if "size" in disk:
        del fields["num_slots"]
    return CacheConfig(
        page_size=PAGE,
        pool=PoolConfig.uniform(
            num_slots=64, num_layers=1, num_kv_heads=1, head_dim=head_dim, dtype="float32", device="cpu"
        ),
        disk=DiskConfig(path=str(path), **fields | disk),
        fingerprint=fingerprint,
        validate=True,
    )


def tier_of(cache: LocalPrefixCache) -> DiskTier:
    disk = cache.service.disk
    assert disk is not None
    return disk


@asynccontextmanager
async def opened(config: CacheConfig) -> AsyncIterator[LocalPrefixCache]:
    """A cache with its disk open."""
    async with LocalPrefixCache(config) as cache:
        await cache.stats()
        await settled(cache)
        yield cache


async def settled(cache: LocalPrefixCache) -> None:
    """Wait until the disk has nothing to do."""
    disk = tier_of(cache)
    async with asyncio.timeout(60):
        while disk.state != "ready" or not disk.writes.is_idle or disk.files.tasks:  # noqa: ASYNC110 -- threads change it
            await asyncio.sleep(0.002)


def files_in(path: Path) -> list[str]:
    """The names of the files of the cache."""
    return [file.name for file in path.glob("local/*/*")]


def file_of(path: Path, name: str) -> Path:
    """A file of the one folder of the cache."""
    (file,) = path.glob(f"local/*/{name}")
    return file


def kv_of(start: int, stop: int) -> torch.Tensor:
    """The K of the prompt's tokens: each has its position."""
    return torch.arange(start, stop, dtype=torch.float32).reshape(1, -1, 1, 1).expand(1, stop - start, 1, 2).clone()


async def write(cache: LocalPrefixCache) -> None:
    """Use the prompt twice, so that it lies on the disk."""
    pool = cache._host.exported.pool
    assert pool is not None
    for _ in range(2):
        async with cache.acquire(PROMPT) as lease:
            slots = torch.from_numpy(np.array(lease.slots)[lease.prefix_len : len(PROMPT)])
            if len(slots):
                kv = kv_of(lease.prefix_len, len(PROMPT))[0]
                pool.write(0, slots, kv, -kv)  # type: ignore[union-attr]
            await lease.insert(PROMPT)
    await settled(cache)


async def found(cache: LocalPrefixCache) -> int:
    """The prefix of the prompt that the cache has, of which the KV is right."""
    pool = cache._host.exported.pool
    assert pool is not None
    async with cache.acquire(PROMPT) as lease:
        slots = torch.from_numpy(np.array(lease.slots)[: lease.prefix_len])
        k, v = pool.gather(0, slots)[:2]  # type: ignore[union-attr]
        expected = kv_of(0, lease.prefix_len)[0]
        assert torch.equal(k, expected) and torch.equal(v, -expected), "a lease has wrong KV"
        await cache.check_invariants()
        return lease.prefix_len


def refusal(config: CacheConfig) -> str:
    """The error with which a cache does not start."""
    with pytest.raises(CacheUnavailable) as refused:
        LocalPrefixCache(config)
    return str(refused.value)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> FaultyFileCalls:
    """The calls that all disks of this test make."""
    calls = FaultyFileCalls()
    monkeypatch.setattr(disk_store, "FileCalls", lambda: calls)
    return calls


# -------------------------------------------------------------------- paths


def make_file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file"


def make_link(path: Path) -> Path:
    (path / "folder").mkdir()
    (path / "link").symlink_to(path / "folder")
    return path / "link"


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "absent": (lambda path: path / "absent", "it must be a folder that is there: make it first"),
    "file": (make_file, "it must be a folder"),
    "below a file": (lambda path: make_file(path) / "below", "it must be a folder"),
    "link": (make_link, "it must be a folder, not a symbolic link: name the folder it leads to"),
    "read-only": (lambda path: Path("/sys/kernel"), "Operation not permitted|Permission denied|Read-only file system"),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_path_that_cannot_be_used_is_an_error_of_the_start(tmp_path: Path, place: str) -> None:
    make, reason = PLACES[place]
    path = make(tmp_path)

    error = refusal(config_of(path))

    assert error.startswith("the disk cannot be used at ") and path.name in error
    assert any(part in error for part in reason.split("|"))


async def test_a_disk_of_another_machine_is_an_error_of_the_start(tmp_path: Path, calls: FaultyFileCalls) -> None:
    calls.type_of_file_system = 0x6969
    assert 'it lies on NFS; use a local disk, or set disk.direct_io="off"' in refusal(
        config_of(tmp_path, direct_io="auto")
    )
    async with opened(config_of(tmp_path)) as cache:  # direct_io="off"
        await write(cache)


# -------------------------------------------------------------------- sizes


async def test_a_disk_that_is_too_small_is_an_error_of_the_start(tmp_path: Path, calls: FaultyFileCalls) -> None:
    calls.free = 2**20
    assert "needs 8.1 MiB with its index, and 1 MiB are free; lower disk.num_slots or disk.size" in refusal(
        config_of(tmp_path)
    )
    calls.free = None
    calls.fail("fallocate", errno.ENOSPC)
    assert "no room for the 256 KiB of pages.bin (No space left on device)" in refusal(config_of(tmp_path))
    calls.fail("CREATE", errno.ENOSPC)
    assert "no room for the index of" in refusal(config_of(tmp_path))
    assert files_in(tmp_path) == ["lock"], "no room is taken by what cannot be used"
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)


async def test_a_size_below_one_record_is_an_error_of_the_start(tmp_path: Path) -> None:
    error = refusal(config_of(tmp_path, size=4000))

    assert "disk.size must have room for a record of each kind, 4,4" in error and "bytes, not 4,000 bytes" in error
    assert os.listdir(tmp_path) == []


async def test_a_disk_for_which_there_is_no_room_beside_another_layout_names_it(
    tmp_path: Path, calls: FaultyFileCalls, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)
    other = config_of(tmp_path, head_dim=4)
    sentence = f"there are records of 1 other layout of this cache, which it cannot read: .* in {tmp_path}/local/.*"
    sentence += rf"`raydix disk clear {tmp_path} --name local --layout \w+ --yes` removes them"

    calls.free = 2**20
    with pytest.raises(CacheUnavailable, match=f"lower disk.num_slots or disk.size; {sentence}"):
        LocalPrefixCache(other)
    calls.free = None
    async with opened(other) as cache:
        assert await cache.prefetch(PROMPT) == 0
        assert any(sentence.split(":")[0] in record.message for record in caplog.records)
    async with opened(config_of(tmp_path)) as cache:
        assert await found(cache) == len(PROMPT)


async def test_a_file_system_that_cannot_do_what_is_asked_for_is_an_error_of_the_start(
    tmp_path: Path, calls: FaultyFileCalls
) -> None:
    calls.fail("fallocate", errno.EOPNOTSUPP)
    assert "its file system cannot reserve room for pages.bin" in refusal(config_of(tmp_path, direct_io="auto"))
    calls.fail("open O_DIRECT", errno.EINVAL)
    error = refusal(config_of(tmp_path, direct_io="on"))
    assert 'has no O_DIRECT; use another one, or set disk.direct_io="auto"' in error or "cannot reserve" in error


# -------------------------------------------------------------------- layouts


async def test_an_index_of_another_layout_is_an_error_of_the_start_that_names_it(tmp_path: Path) -> None:
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)
    other = config_of(tmp_path, head_dim=4)
    (folder,) = (tmp_path / "local").iterdir()
    shutil.copytree(folder, tmp_path / "local" / index_layout(other).digest)

    error = refusal(other)

    assert "its index is of another layout than the cache: records is " in error
    assert "record_bytes is {'full': 64}, not {'full': 128}. `raydix disk clear` removes it" in error


async def test_an_index_of_another_version_is_an_error_of_the_start(tmp_path: Path) -> None:
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)
    file = file_of(tmp_path, "index.db")
    database = sqlite3.connect(file)
    database.execute("PRAGMA user_version=7")
    database.close()

    assert "its index has format 7, and this version of Raydix reads format 1" in refusal(config_of(tmp_path))


# -------------------------------------------------------------------- folders in use


async def test_two_caches_of_one_process_and_name_are_an_error_of_the_second(tmp_path: Path) -> None:
    first = LocalPrefixCache(config_of(tmp_path))  # it has no session yet
    error = refusal(config_of(tmp_path))
    assert f"another cache of this process has {tmp_path}/local/" in error
    assert "close it first, or give each cache a disk.path of its own" in error
    async with first:
        await write(first)
        assert "another cache of this process" in refusal(config_of(tmp_path))
    async with opened(config_of(tmp_path)) as cache:
        assert await found(cache) == len(PROMPT)


async def test_a_cache_that_is_closed_or_dropped_unused_gives_its_folder_back(tmp_path: Path) -> None:
    await LocalPrefixCache(config_of(tmp_path)).close()
    cache = LocalPrefixCache(config_of(tmp_path))
    del cache
    gc.collect()
    async with opened(config_of(tmp_path)):
        pass


@contextmanager
def locked_elsewhere(config: CacheConfig) -> Iterator[int]:
    """Lock the folder of a cache in another process; yield its pid."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_lock_and_wait, args=(config, theirs))
    child.start()
    assert ours.poll(60) and ours.recv() == "locked" and child.pid is not None
    try:
        yield child.pid
    finally:
        child.kill()
        child.join(60)


def _lock_and_wait(config: CacheConfig, pipe: Connection) -> None:
    assert config.disk is not None
    DiskFolder(config.disk.path, "local", index_layout(config).digest, direct_io="off").lock()
    pipe.send("locked")
    pipe.poll(600)


async def test_a_cache_serves_without_a_disk_that_another_process_has_until_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = disk_store.DiskStore

    def hasty(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **options | {"wait_s": 0.1})

    monkeypatch.setattr(open_disk, "DiskStore", hasty)
    monkeypatch.setattr("raydix.actors.tiers.disk.disk_files.DiskStore", hasty)
    monkeypatch.setattr("raydix.actors.tiers.disk.disk_opening.PREDECESSOR_S", 0.1)
    with locked_elsewhere(config_of(tmp_path)) as pid:
        cache = LocalPrefixCache(config_of(tmp_path))
        assert tier_of(cache).state == f"locked by pid {pid}"
        assert f"is locked by pid {pid}; it goes on trying" in caplog.text
        await cache.stats()
        for _ in range(2):
            async with cache.acquire(PROMPT) as lease:
                await lease.insert(PROMPT)
        assert (await cache.match(PROMPT)).prefix_len == len(PROMPT)
    async with cache:
        await settled(cache)


# -------------------------------------------------------------------- restarts by Ray


@pytest.mark.parametrize("place", ["absent", "link"])
async def test_a_cache_that_ray_restarts_serves_without_a_disk_that_cannot_be_used(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(PLACES[place][0](tmp_path))
    host = CacheHost(config, local_device(config), "node", share=False, restarts=Restarts(1, "killed"))
    disk = host.service.disk
    assert disk is not None
    disk.start()
    async with asyncio.timeout(60):
        while not disk.state.startswith("failed: the disk cannot be used"):  # noqa: ASYNC110 -- a thread opens it
            await asyncio.sleep(0.002)
    assert "the cache serves without its disk: the disk cannot be used" in caplog.text
    await host.service.close()


# -------------------------------------------------------------------- content


def cut(file: Path) -> None:
    os.truncate(file, BLOCK)  # the first record is left


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for start in range(0, len(data), BLOCK):
        data[start + 17] ^= 4
    file.write_bytes(data)


def swap(file: Path) -> None:
    """Give each record the content of the record before it."""
    data = file.read_bytes()
    file.write_bytes(data[-BLOCK:] + data[:-BLOCK])


def replace(file: Path) -> None:
    file.write_bytes(np.random.default_rng(1).bytes(file.stat().st_size))


@pytest.mark.parametrize("damage", [cut, zero, flip, swap, replace])
async def test_damaged_records_are_misses_that_are_counted(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)
    file = file_of(tmp_path, "pages.bin")
    damage(file)

    async with opened(config_of(tmp_path)) as cache:
        assert await found(cache) < len(PROMPT)
        await settled(cache)
        assert tier_of(cache).stats().damaged_records > 0
        await write(cache)
        await cache.evict(10**6)
        assert await found(cache) == len(PROMPT), "it is written again"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_records_of_another_model_are_misses(tmp_path: Path) -> None:
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)
    async with opened(config_of(tmp_path, fingerprint="another")) as cache:
        assert await found(cache) == 0
    async with opened(config_of(tmp_path)) as cache:
        assert await found(cache) == len(PROMPT)


async def test_the_first_lease_without_a_model_warns_once_that_nothing_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(config_of(tmp_path, fingerprint="")) as cache:
        assert not [record for record in caplog.records if "is kept on the disk" in record.message]
        for _ in range(2):
            async with cache.acquire(PROMPT, extra_key="tenant", cache_salt="secret") as lease:
                await lease.insert(PROMPT)
            await write(cache)
        (record,) = [record for record in caplog.records if "is kept on the disk" in record.message]
        assert record.message == (
            "no KV of the namespace with extra_key='tenant', a cache_salt is kept on the disk, as no model is bound to "
            'it: bind_model, or name the base of all sessions with CacheConfig(fingerprint="...")'
        )
        assert "secret" not in caplog.text
        assert tier_of(cache).tier.cache.total_size() == 0


@pytest.mark.parametrize("damage", [cut, zero, replace])
async def test_a_damaged_index_is_made_again(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(config_of(tmp_path)) as cache:
        await write(cache)
    file = file_of(tmp_path, "index.db")
    damage(file)

    async with opened(config_of(tmp_path)) as cache:
        assert "is damaged, so its records are lost" in caplog.text
        assert await found(cache) == 0
        await write(cache)
    async with opened(config_of(tmp_path)) as cache:
        assert await found(cache) == len(PROMPT)


def test_the_error_of_a_folder_in_use_survives_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(FolderInUse("/nvme", 7, is_own=True)))

    assert (error.path, error.pid, error.is_own, str(error)) == ("/nvme", 7, True, "/nvme is locked by pid 7")
