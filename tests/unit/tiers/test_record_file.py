"""Records come back as they were written, and a file that cannot keep them is refused with its reason."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiers.faulty_files import FaultyFileCalls

from raydix.actors.tiers.disk.disk_errors import DiskFailed, DiskFull, ShortTransfer
from raydix.actors.tiers.disk.record_file import BLOCK, CALL_BYTES, RecordFile, Rows, aligned_bytes, stride_of
from raydix.schemas import CacheUnavailable

NUMBER, RECORD_BYTES = 40, 5000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def opened(folder: int, number: int = NUMBER, record_bytes: int = RECORD_BYTES, **options: Any) -> RecordFile:
    """A file that is closed with the process."""
    if options.get("direct_io") != "off" and not can_reserve(folder):
        pytest.skip("the file system of the temporary folder cannot reserve room")
    return RecordFile(folder, "pages.bin", record_bytes, number, **options)


def can_reserve(folder: int) -> bool:
    fd = os.open("probe", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=folder)
    try:
        FaultyFileCalls().fallocate(fd, BLOCK)
    except OSError:
        return False
    finally:
        os.close(fd)
        os.unlink("probe", dir_fd=folder)
    return True


def rows_of(file: RecordFile, number: int, seed: int = 0) -> Rows:
    rows = aligned_bytes(number * file.stride).reshape(number, file.stride)
    rows[:] = np.random.default_rng(seed).integers(0, 256, rows.shape)
    return rows


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("record_bytes", [1, BLOCK, 5000, 3 * BLOCK])
def test_records_come_back_in_any_order(folder: int, direct_io: Any, record_bytes: int) -> None:
    file = opened(folder, record_bytes=record_bytes, direct_io=direct_io)
    rng = np.random.default_rng(1)
    known = np.zeros((NUMBER + 1, file.stride), np.uint8)
    for seed in range(6):
        numbers = rng.permutation(NUMBER)[: rng.integers(1, NUMBER)] + 1
        rows = rows_of(file, len(numbers), seed)
        file.write(numbers, rows)
        known[numbers] = rows

        numbers = rng.permutation(NUMBER) + 1
        found = aligned_bytes(NUMBER * file.stride).reshape(NUMBER, file.stride)
        file.read(numbers, found)
        assert (found == known[numbers]).all()
    file.close()


def test_records_that_nothing_has_written_are_zeros(folder: int, tmp_path: Path) -> None:
    file = opened(folder)
    rows = rows_of(file, NUMBER)

    file.read(np.arange(1, NUMBER + 1), rows)

    assert not rows.any()
    assert file.num_bytes == NUMBER * 2 * BLOCK == (tmp_path / "pages.bin").stat().st_size
    facts = (tmp_path / "pages.bin").stat()
    assert facts.st_blocks * 512 >= file.num_bytes, "the room is reserved"
    assert facts.st_mode & 0o777 == 0o600


def test_neighbours_are_one_call_of_bounded_size(folder: int) -> None:
    calls = FaultyFileCalls()
    file = opened(folder, record_bytes=CALL_BYTES // 4, number=12, calls=calls)
    before = calls.counts["preadv"]  # the file system was asked whether it can read so
    rows = rows_of(file, 9)

    file.write(np.array([5, 3, 4, 11, 1, 12]), rows[:6])  # 1 | 3 4 5 | 11 12
    assert calls.counts["pwritev"] == 3
    file.read(np.arange(1, 10), rows)
    assert calls.counts["preadv"] - before == 3

    file.write(np.array([], np.int64), rows[:0])
    assert calls.counts["pwritev"] == 3


def test_many_small_neighbours_are_several_calls(folder: int) -> None:
    calls = FaultyFileCalls()
    file = opened(folder, record_bytes=1, number=1500, calls=calls)
    rows = rows_of(file, 1500)

    file.write(np.arange(1, 1501), rows)

    assert calls.counts["pwritev"] == 2, "1,024 buffers in a call"
    found = rows_of(file, 1500, seed=1)
    file.read(np.arange(1, 1501), found)
    assert (found == rows).all()


def test_records_stay_when_a_file_is_opened_again_longer_or_shorter(folder: int, tmp_path: Path) -> None:
    file = opened(folder)
    rows = rows_of(file, NUMBER)
    file.write(np.arange(1, NUMBER + 1), rows)
    file.close()

    for number in (NUMBER + 9, 7, NUMBER):
        file = opened(folder, number=number)
        assert (tmp_path / "pages.bin").stat().st_size == number * file.stride
        kept = min(number, 7) if number != NUMBER + 9 else NUMBER
        found = rows_of(file, number, seed=1)
        file.read(np.arange(1, number + 1), found)
        assert (found[:kept] == rows[:kept]).all()
        assert not found[kept:].any()
        file.close()


def test_a_file_that_was_cut_is_whole_again_with_zeros(folder: int, tmp_path: Path) -> None:
    file = opened(folder)
    file.write(np.arange(1, NUMBER + 1), rows_of(file, NUMBER))
    file.close()
    os.truncate(tmp_path / "pages.bin", 3 * file.stride + 100)

    file = opened(folder)
    found = rows_of(file, NUMBER, seed=1)
    file.read(np.arange(1, NUMBER + 1), found)
    assert found[:3].any(axis=1).all() and not found[4:].any()


def test_a_file_that_is_cut_while_it_is_open_gives_a_typed_error(folder: int, tmp_path: Path) -> None:
    file = opened(folder)
    os.truncate(tmp_path / "pages.bin", 2 * file.stride)

    with pytest.raises(ShortTransfer, match=r"reading 3 records .* from record 2 ended after 8,192 of 24,576 bytes"):
        file.read(np.array([2, 3, 4]), rows_of(file, 3))


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.EIO, DiskFailed), (errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull)]
)
def test_errors_of_the_system_are_typed_and_the_next_call_works(folder: int, code: int, kind: type) -> None:
    calls = FaultyFileCalls()
    file = opened(folder, calls=calls)
    rows = rows_of(file, 2)
    calls.fail("pwritev", code)
    with pytest.raises(kind, match=r"writing 2 records of pages.bin from record 8 failed: "):
        file.write(np.array([8, 9]), rows)
    file.write(np.array([8, 9]), rows)

    calls.fail("preadv", code)
    with pytest.raises(kind, match=r"reading 1 record of pages.bin from record 8 failed: "):
        file.read(np.array([8]), rows_of(file, 1, seed=1))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_short_calls_are_errors(folder: int, call: str) -> None:
    calls = FaultyFileCalls()
    file = opened(folder, calls=calls)
    calls.shorten(call, file.stride)

    with pytest.raises(ShortTransfer, match=r"ended after 8,192 of 16,384 bytes"):
        (file.read if call == "preadv" else file.write)(np.array([8, 9]), rows_of(file, 2))


def test_a_stalled_read_holds_no_other_thread(folder: int) -> None:
    calls = FaultyFileCalls()
    file = opened(folder, calls=calls)
    let_pass = calls.stall("preadv")
    late = rows_of(file, 1)
    reader = threading.Thread(target=file.read, args=(np.array([1]), late))
    reader.start()

    file.write(np.array([2]), rows_of(file, 1, seed=1))
    file.read(np.array([2]), rows_of(file, 1, seed=2))
    let_pass()
    reader.join(60)
    assert not late.any()


def test_calls_with_wrong_records_are_refused(folder: int) -> None:
    file = opened(folder)
    rows = rows_of(file, 2)

    for numbers in ([0, 1], [1, NUMBER + 1], [-1, 1]):
        with pytest.raises(ValueError, match=f"numbers must be from 1 to {NUMBER}"):
            file.read(np.array(numbers), rows)
    with pytest.raises(ValueError, match=r"rows must be \[1, 8192\]"):
        file.write(np.array([1]), rows)


def test_a_stride_is_whole_blocks() -> None:
    assert [stride_of(number) for number in (1, 4095, 4096, 4097)] == [4096, 4096, 4096, 8192]
    assert aligned_bytes(BLOCK * 3).ctypes.data % BLOCK == 0
    assert len(aligned_bytes(0)) == 0


# -------------------------------------------------------------------- files that are refused


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_reserve_is_refused(folder: int, tmp_path: Path, code: int) -> None:
    for direct_io in ("auto", "on"):
        calls = FaultyFileCalls()
        calls.fail("fallocate", code)
        with pytest.raises(CacheUnavailable, match=r'cannot reserve room for pages.bin: .*disk.direct_io="off"'):
            RecordFile(folder, "pages.bin", 1, 8, direct_io=direct_io, calls=calls)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == [], "nothing is left"


def test_without_direct_io_a_file_need_not_be_reserved(folder: int, caplog: pytest.LogCaptureFixture) -> None:
    calls = FaultyFileCalls()
    calls.fail("fallocate", errno.EOPNOTSUPP)
    file = RecordFile(folder, "pages.bin", 1, 8, direct_io="off", calls=calls)

    assert "the room of pages.bin is not reserved" in caplog.text
    assert not file.is_direct
    file.write(np.array([8]), rows_of(file, 1))


def test_a_full_disk_is_refused_and_the_file_is_as_before(folder: int, tmp_path: Path) -> None:
    calls = FaultyFileCalls()
    calls.fail("fallocate", errno.ENOSPC)
    with pytest.raises(CacheUnavailable, match=r"no room for the 32 KiB of pages.bin \(No space left on device\)"):
        RecordFile(folder, "pages.bin", 1, 8, direct_io="off", calls=calls)
    assert os.listdir(tmp_path) == []

    file = opened(folder)
    file.write(np.array([1]), rows := rows_of(file, 1))
    file.close()
    calls.fail("fallocate", errno.ENOSPC)
    with pytest.raises(CacheUnavailable, match="no room"):
        opened(folder, number=100, calls=calls)
    assert (tmp_path / "pages.bin").stat().st_size == file.num_bytes
    file = opened(folder)
    file.read(np.array([1]), found := rows_of(file, 1, seed=1))
    assert (found == rows).all()


@pytest.mark.parametrize("place", ["open O_DIRECT", "preadv"])
def test_a_file_system_without_direct_io(folder: int, caplog: pytest.LogCaptureFixture, place: str) -> None:
    calls = FaultyFileCalls()
    calls.fail(place, errno.EINVAL, times=2)
    with pytest.raises(CacheUnavailable, match=r'pages.bin has no O_DIRECT; .*disk.direct_io="auto"'):
        opened(folder, direct_io="on", calls=calls)

    file = opened(folder, direct_io="auto", calls=calls)
    assert not file.is_direct
    assert "goes through the page cache" in caplog.text
    rows = np.ones((1, file.stride + 1), np.uint8)[:, 1:]  # the page cache takes any address
    file.write(np.array([1]), rows)


def test_direct_io_needs_no_page_cache(folder: int) -> None:
    file = opened(folder)
    if not file.is_direct:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")

    rows = aligned_bytes(2 * file.stride)[1 : file.stride + 1].reshape(1, file.stride)
    with pytest.raises(DiskFailed, match="Invalid argument"):
        file.write(np.array([1]), rows)


def test_links_and_other_things_are_refused(folder: int, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "pages.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnavailable, match=r"the disk cannot be used: pages.bin: Too many levels"):
        opened(folder)
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    (tmp_path / "pages.bin").unlink()

    (tmp_path / "pages.bin").mkdir()
    with pytest.raises(CacheUnavailable, match=r"pages.bin: Is a directory"):
        opened(folder)
    (tmp_path / "pages.bin").rmdir()

    os.mkfifo(tmp_path / "pages.bin")
    with pytest.raises(CacheUnavailable, match="must be a file of this user"):
        opened(folder, direct_io="off")
