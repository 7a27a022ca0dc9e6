"""Host memory is registered in pieces, and is registered no more once its pool is dropped."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
import torch
from support.processes.fresh_process import run_fresh
from support.waiting import wait_until

from raydix.actors import LocalPrefixCache
from raydix.actors.memory import pinned_memory
from raydix.actors.memory.pinned_memory import PinnedMemory
from raydix.schemas import CacheConfig, CacheUnavailable, InvalidRequest, PoolConfig

PIECE = 4096
CONFIG = CacheConfig(page_size=4, pool=PoolConfig(num_slots=64, format="opaque", slot_bytes=8, device="cpu"))


class Driver:
    """Notes what is registered. `fail_at` is the call that fails."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self._fail_at = fail_at

    def register(self, address: int, num_bytes: int) -> None:
        self.calls += 1
        if self.calls == self._fail_at:
            raise RuntimeError("CUDA error: out of memory")
        self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "PIECE_BYTES", PIECE)


def memory_at(offset: int, num_bytes: int) -> torch.Tensor:
    """Memory that begins `offset` bytes behind the end of a piece."""
    memory = torch.zeros(num_bytes + 2 * PIECE, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PIECE + offset :][:num_bytes]


@pytest.mark.parametrize(
    ("offset", "num_bytes", "sizes"),
    [
        (0, 2 * PIECE + 100, [PIECE, PIECE, 100]),
        (64, 2 * PIECE, [PIECE - 64, PIECE, 64]),
        (PIECE - 64, 100, [64, 36]),
        (64, 100, [100]),
    ],
)
def test_all_of_the_memory_is_registered_in_pieces_until_it_is_closed(
    offset: int, num_bytes: int, sizes: list[int]
) -> None:
    storage, driver = memory_at(offset, num_bytes), Driver()
    pinned = PinnedMemory(storage, driver.register, driver.unregister)
    pinned.wait()

    first = storage.data_ptr()
    assert pinned.is_ready
    assert driver.registered == {first + sum(sizes[:at]): size for at, size in enumerate(sizes)}
    assert all(address % PIECE == 0 for address in [*driver.registered][1:]), "two pieces must share no page of memory"

    memory = weakref.ref(storage)
    del storage
    assert memory() is not None, "memory that is registered must stay mapped"
    pinned.close()

    assert not pinned.is_ready
    wait_until(lambda: gc.collect() is not None and memory() is None)
    assert driver.registered == {}


def test_after_a_failure_no_piece_stays_registered(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(fail_at=3)
    with caplog.at_level(logging.WARNING):
        pinned = PinnedMemory(memory_at(0, 5 * PIECE), driver.register, driver.unregister)
        pinned.wait()

    assert not pinned.is_ready and pinned.error == "CUDA error: out of memory"
    wait_until(lambda: driver.registered == {})
    assert [record.message for record in caplog.records] == [
        "host memory could not be registered with CUDA (CUDA error: out of memory): copies work, more slowly"
    ]


def test_closing_ends_a_registration_that_has_begun() -> None:
    driver, may_go_on = Driver(), threading.Event()

    def register(address: int, num_bytes: int) -> None:
        driver.register(address, num_bytes)
        assert may_go_on.wait(60)

    pinned = PinnedMemory(torch.zeros(9 * PIECE, dtype=torch.uint8), register, driver.unregister)
    wait_until(lambda: driver.calls == 1)
    pinned.close()
    may_go_on.set()
    pinned.wait()

    wait_until(lambda: driver.registered == {})
    assert driver.calls == 1 and not pinned.is_ready


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has a GPU")
async def test_a_process_without_a_gpu_does_not_pin() -> None:
    async with LocalPrefixCache(CONFIG) as cache:
        pool = await cache.attach_pool()
        assert pool.mapped and not pool.pinned
        with pytest.raises(CacheUnavailable, match="this process has no GPU"):
            await cache.attach_pool(pin=True)
        with pytest.raises(InvalidRequest, match="pin must be True, False or None, not 'yes'"):
            await cache.attach_pool(pin="yes")  # type: ignore[arg-type]


def test_an_interpreter_that_ends_waits_for_the_memory_to_be_registered_no_more() -> None:
    program = """
import time, torch
from raydix.actors.memory.pinned_memory import PinnedMemory
memory = PinnedMemory(torch.zeros(8), lambda *piece: time.sleep(0.2), lambda address: print("unregistered", flush=True))
"""

    done = run_fresh(program)

    assert (done.stdout, done.stderr, done.returncode) == ("unregistered\n", "", 0)
