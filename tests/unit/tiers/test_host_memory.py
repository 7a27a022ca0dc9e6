"""The memory of a host pool is reserved while the cache serves, or the state says why not."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

import pytest
import torch
from support.waiting import wait_until

from raydix.actors.memory import pinned_memory, pool_memory
from raydix.actors.tiers.host.host_memory import HostMemory, host_bytes
from raydix.cache_core import RecordLayout
from raydix.schemas import CacheConfig, CacheUnavailable, HostConfig, PoolConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is reserved on Linux")

PAGE = 4096
LAYOUT = RecordLayout(num_slots=160, page_size=4, slot_bytes=300, num_swa_slots=40, swa_slot_bytes=70)
NAME = "e" * 32


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "_RESERVED_BYTES", PAGE)


def ready(**options: object) -> HostMemory:
    memory = HostMemory(LAYOUT, NAME, **options)  # type: ignore[arg-type]
    wait_until(lambda: memory.state != "reserving")
    return memory


def test_the_bytes_of_a_host_tier_are_those_of_its_records() -> None:
    pool = PoolConfig.uniform(num_slots=32, num_layers=2, num_kv_heads=2, head_dim=4, dtype="float32", device="cpu")
    config = CacheConfig(page_size=4, pool=pool, host=HostConfig(num_slots=64))

    # 2 layers of K and V, with 2 heads of 4 numbers of 4 bytes; one page more is the padding page.
    assert host_bytes(config) == (64 + 4) * 2 * 2 * 2 * 4 * 4
    assert host_bytes(config.model_copy(update={"host": None})) == 0


def open_files() -> list[str]:
    """The anonymous files of these tests' host pools that this process has open or mapped."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if f"raydix-{NAME}-host" in line]


def test_a_pool_is_ready_when_all_of_it_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, ranges, may_go_on = os.posix_fallocate, [], threading.Event()

    def noted(fd: int, start: int, length: int) -> None:
        assert may_go_on.wait(60)
        ranges.append((start, length))
        reserve(fd, start, length)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    changes: list[str] = []
    files = len(os.listdir("/proc/self/fd"))
    memory = HostMemory(LAYOUT, NAME, on_change=lambda: changes.append("changed"))
    assert (memory.state, memory.pool, memory.pinned) == ("reserving", None, False)

    may_go_on.set()
    wait_until(lambda: changes == ["changed"])

    assert memory.state == "ready"
    assert memory.pool is not None and memory.pool.layout is LAYOUT
    assert memory.pool.storage.numel() == LAYOUT.num_bytes
    assert memory.pool.storage.count_nonzero() == 0
    assert sorted(start for start, _ in ranges) == list(range(0, LAYOUT.num_bytes, PAGE))
    assert sum(length for _, length in ranges) == LAYOUT.num_bytes
    assert len(os.listdir("/proc/self/fd")) == files, "the mapping alone keeps the memory"
    memory.pool.pages.fill_(7)
    memory.close()
    assert (memory.state, memory.pool) == ("closed", None)
    wait_until(lambda: gc.collect() is not None and not open_files())


def test_the_state_says_why_there_is_no_pool(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(fd: int, start: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fails)
    files = len(os.listdir("/proc/self/fd"))
    memory = ready()

    assert memory.pool is None
    assert memory.state.startswith("the host pool needs 52 KiB with its tables of slots, but ")
    assert "lower host.num_slots" in memory.state and "No space left on device" in memory.state
    wait_until(lambda: f"the cache serves without its host pool: {memory.state}" in caplog.text)
    assert len(os.listdir("/proc/self/fd")) == files
    wait_until(lambda: gc.collect() is not None and not open_files())


def test_closing_gives_a_reservation_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    may_go_on, ranges = threading.Event(), []

    def slow(fd: int, start: int, length: int) -> None:
        ranges.append(start)
        assert may_go_on.wait(60)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    changes: list[str] = []
    before = set(threading.enumerate())
    memory = HostMemory(LAYOUT, NAME, on_change=lambda: changes.append("changed"))
    wait_until(lambda: len(ranges) == 8)  # threads

    memory.close()
    may_go_on.set()
    wait_until(lambda: set(threading.enumerate()) <= before)

    assert (memory.state, memory.pool, changes) == ("closed", None, [])
    assert len(ranges) == 8
    assert caplog.text == ""
    wait_until(lambda: gc.collect() is not None and not open_files())


def test_a_pool_larger_than_the_memory_is_refused_and_the_argument_named(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    with pytest.raises(CacheUnavailable, match=r"the host pool needs .* lower host\.num_slots"):
        HostMemory(RecordLayout(num_slots=2**40, page_size=4, slot_bytes=2**20), NAME)
    assert set(threading.enumerate()) <= before


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
def test_a_process_without_a_gpu_registers_nothing() -> None:
    memory = ready()
    assert not memory.pinned and memory._pinned is None
    memory.close()
    with pytest.raises(CacheUnavailable, match=r"host\.pin=True.*: this process has no GPU"):
        HostMemory(LAYOUT, NAME, pin=True)


@pytest.mark.parametrize("end", ["close", "drop"])
def test_where_there_is_a_gpu_the_memory_is_registered_until_it_is_not_used(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[int, int] = {}
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", 5 * PAGE)
    monkeypatch.setattr(pinned_memory, "_register", registered.__setitem__)
    monkeypatch.setattr(pinned_memory, "_unregister", registered.pop)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not ready(pin=False).pinned
    memory: HostMemory | None = ready(pin=True)
    wait_until(lambda: memory is not None and memory.pinned)

    assert memory is not None and memory.pool is not None
    assert sum(registered.values()) == LAYOUT.num_bytes
    assert min(registered) == memory.pool.storage.data_ptr()
    storage = weakref.ref(memory.pool.storage)
    if end == "close":
        memory.close()
    memory = None
    wait_until(lambda: gc.collect() is not None and storage() is None)
    assert registered == {}


def test_memory_that_cannot_be_registered_is_ready_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(address: int, num_bytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinned_memory, "_register", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = ready()
    wait_until(lambda: memory._pinned is not None and memory._pinned.error == "CUDA error: out of memory")

    assert memory.state == "ready" and memory.pool is not None and not memory.pinned
    memory.close()


def test_memory_that_is_not_reserved_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_memory, "_reserve", lambda fd, num_bytes, _: os.ftruncate(fd, num_bytes))
    with pytest.raises(AssertionError):
        test_a_pool_is_ready_when_all_of_it_is_reserved(monkeypatch)
