"""A disk's spaces: made by the first write of a namespace, deleted with the last row, found again by their models."""

from __future__ import annotations

import asyncio
import errno
import gc
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.tiers.disk_service import DiskService
from support.tiers.faulty_files import FaultyFileCalls
from support.tiers.settled_tiers import service_of
from support.tiers.tiered_service import tiered_config

from raydix.actors.tiers.disk import disk_errors, space_bindings
from raydix.actors.tiers.disk.disk_index import Space
from raydix.schemas import (
    AcquireRequest,
    BindModelRequest,
    CacheConfig,
    DiskConfig,
    EvictRequest,
    InsertRequest,
    LeaseResponse,
    ModelFingerprint,
    OpenSession,
    PoolConfig,
    ResetRequest,
    RetireRequest,
    TokenIds,
    frame_namespace,
)

PROMPT = [1] * 8
NUM_SALTS = 60_000
MOST_BYTES = 4 * 2**20


def salted(number: int) -> dict[str, Any]:
    """The namespace of a salt, for an `acquire`."""
    return {"namespace": frame_namespace(None, None, f"salt {number}")}


@asynccontextmanager
async def opened(path: Path, label: str = "0", **disk: Any) -> AsyncIterator[DiskService]:
    """A cache that is killed at the end; session "s" has bound the model with weights of a label."""
    calls = disk.pop("calls", None)
    fields = {"path": str(path), "num_slots": 64, "load_timeout_s": 60} | disk
    cache = DiskService(tiered_config(device_pages=32, host_pages=0, disk=fields), calls)
    cache.bind(label)
    await cache.settle()
    yield cache
    await cache.kill()


async def spaces_of(cache: DiskService) -> list[Space]:
    """The spaces of the index. The tier must know the same."""
    await cache.settle()
    reading = asyncio.ensure_future(cache.disk.files.do(lambda store: store.index.spaces()))
    await cache.settle()
    found: list[Space] = await reading
    assert {space.number for space in found} == {space.number for space in cache.disk.spaces}
    return found


async def find(cache: DiskService, **more: Any) -> int:
    """The prefix of the prompt that a lease gets."""
    answer = await cache.answer(cache.acquire(PROMPT, **more))
    assert isinstance(answer, LeaseResponse), answer
    cache.check_prefix(cache.record(answer.lease_id), tuple(PROMPT))
    cache.release(answer.lease_id)
    return answer.prefix_len


async def test_salts_that_write_nothing_have_no_space(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        for number in range(200):
            cache.publish(PROMPT, **salted(number))
        await cache.settle()

        assert await spaces_of(cache) == [] and cache.disk.stats().pages_used == 200 * len(PROMPT)


@pytest.mark.parametrize("admit", ["second_use", "all"])
async def test_the_first_write_of_a_namespace_makes_its_space(tmp_path: Path, admit: str) -> None:
    async with opened(tmp_path, admit=admit, reserve=0.99) as cache:
        for number in (1, 2, 1):
            cache.publish(PROMPT, **salted(number))
        await cache.settle()

        written = [1] if admit == "second_use" else [1, 2]
        wanted = {salted(number)["namespace"] for number in written}
        assert {space.namespace for space in await spaces_of(cache)} == wanted
        cache.service.core.evict(10**6)
        assert await find(cache, **salted(1)) == 8
    async with opened(tmp_path) as cache:
        assert [await find(cache, **salted(number)) for number in (1, 3)] == [8, 0]


async def test_a_retirement_between_the_plan_and_the_commit_of_a_first_write(tmp_path: Path) -> None:
    """At each step of the writer: nothing of it is found, now or after a kill, and no row is left."""
    num_steps = 0
    for step in range(8):
        path = tmp_path / str(step)
        path.mkdir()
        async with opened(path) as cache:
            for _ in range(2):
                cache.publish(PROMPT)
            await cache.turn()
            writer = cache.writer
            assert writer is not None and writer.num_to_copy and writer.num_to_write, "the space is not committed yet"
            for number in range(step):
                num_steps += writer.has_more
                (writer.copy_step, writer.write_step, writer.deliver)[number % 3]()
            is_retired = await cache.answer(cache.ask(ResetRequest()))
            assert not isinstance(is_retired, Exception), is_retired
            cache.bind("0")
            await cache.settle()
            assert await spaces_of(cache) == [] and await find(cache) == 0
            assert cache.disk.tier.cache.free_slots == 64
        async with opened(path) as cache:
            assert await spaces_of(cache) == [] and await find(cache) == 0
    assert num_steps


async def test_a_kill_between_the_commits_of_a_space_and_of_its_rows_leaves_no_space(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        for _ in range(2):
            cache.publish(PROMPT)
        await cache.turn()
        assert cache.writer is not None
        cache.writer.write_step()
        assert cache.writer.store is not None and len(cache.writer.store.index.spaces()) == 1
    async with opened(tmp_path) as cache:
        assert await spaces_of(cache) == [] and await find(cache) == 0


async def test_a_first_write_of_which_the_space_cannot_be_committed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_errors, "RETRY_S", 0.003)
    calls = FaultyFileCalls()
    async with opened(tmp_path, calls=calls) as cache:
        calls.fail("INSERT", errno.EIO)
        for _ in range(2):
            cache.publish(PROMPT)
        await cache.settle()
        cache.clock.now += 10
        cache.disk.wake()
        await cache.settle()

        assert len(await spaces_of(cache)) == 1
        cache.service.core.evict(10**6)
        assert await find(cache) == 8


async def test_a_space_ends_with_its_last_row_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        numbers = []
        for _ in range(2):
            await cache.put_on_disk(PROMPT)
            numbers += [space.number for space in await spaces_of(cache)]
            cache.ask(EvictRequest(num_tokens=10**6, tier="disk"))
            cache.disk.wake()
            assert await spaces_of(cache) == [] and await find(cache) == 0
        assert numbers == sorted(set(numbers)) and len(numbers) == 2
    async with opened(tmp_path) as cache:
        await cache.put_on_disk(PROMPT)
        assert [space.number for space in await spaces_of(cache)] == [numbers[-1] + 1]


async def test_dormant_spaces_end_when_others_need_their_records(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        for number in range(7):
            for _ in range(2):
                cache.publish(PROMPT, **salted(number))
            await cache.settle()
        assert len(await spaces_of(cache)) == 7
    async with opened(tmp_path, "1") as cache:
        for number in range(7):
            for _ in range(2):
                cache.publish(PROMPT, **salted(number))
            await cache.settle()

        labels = [space.label for space in await spaces_of(cache)]
        assert labels.count("1") == 7 and labels.count("0") < 7


async def test_spaces_without_rows_that_another_life_has_left_are_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put_on_disk(PROMPT)
        store = cache.writer.store  # type: ignore[union-attr]
        assert store is not None
        for number in range(600):
            store.index.add_space(salted(number)["namespace"], "base", None, "0")
        store.index.add_space("not framed", "base", None, "0")
    async with opened(tmp_path) as cache:
        assert [space.namespace for space in await spaces_of(cache)] == [None] and await find(cache) == 8


async def test_a_binding_deletes_no_space_so_two_models_take_turns(tmp_path: Path) -> None:
    for number in range(6):
        label = str(number % 2)
        async with opened(tmp_path, label) as cache:
            assert await find(cache) == (8 if number > 1 else 0), "a lease of the model's own"
            await cache.put_on_disk(PROMPT)
            assert [space.label for space in await spaces_of(cache)] == ["0", "1"][: number + 1]


async def test_leases_before_the_binding_leave_the_disk_warm(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        await cache.put_on_disk(PROMPT)
    cache = DiskService(cache.service.config)
    await cache.settle()
    for _ in range(3):
        assert await find(cache) == 0
    assert len(await spaces_of(cache)) == 1
    cache.bind("0")
    await cache.settle()
    assert await find(cache) == 8
    await cache.kill()


@pytest.mark.parametrize("is_looked_at", [True, False])
async def test_a_prefix_that_is_due_while_its_space_is_built_is_written_there_afterwards(
    tmp_path: Path, is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the write comes before the slice that looks at the space: many others may come first."""
    async with opened(tmp_path) as cache:
        await cache.put_on_disk(PROMPT)
    cache = DiskService(cache.service.config)
    await cache.settle()
    with monkeypatch.context() as patch:
        if not is_looked_at:
            patch.setattr(space_bindings, "_LOOKED_AT_ONCE", 0)
        cache.bind("0")
        for _ in range(2):
            cache.publish([*PROMPT, 2, 2, 2, 2])
        await cache.turn(5)
    await cache.settle()

    assert len(await spaces_of(cache)) == 1
    cache.service.core.evict(10**6)
    answer = await cache.answer(cache.acquire([*PROMPT, 2, 2, 2, 2]))
    assert isinstance(answer, LeaseResponse) and answer.prefix_len == 12
    await cache.kill()


async def test_many_spaces_are_retired_by_one_name_or_all(tmp_path: Path) -> None:
    async with opened(tmp_path) as cache:
        for number in range(1, 4):
            for _ in range(2):
                cache.publish(PROMPT, **salted(number))
        await cache.settle()
        await cache.answer(cache.ask(RetireRequest(cache_salt="salt 2")))
        assert len(await spaces_of(cache)) == 2
        cache.service.core.evict(10**6)
        assert [await find(cache, **salted(number)) for number in (1, 2, 3)] == [8, 0, 8]
        await cache.answer(cache.ask(ResetRequest()))
        assert await spaces_of(cache) == []
    async with opened(tmp_path) as cache:
        assert await spaces_of(cache) == []


# ---------------------------------------------------------------- memory


async def _grown(num_salts: int, disk: DiskConfig | None) -> int:
    """The bytes that requests of so many salts leave, of which each writes nothing."""
    pool = PoolConfig(num_slots=64, format="opaque", slot_bytes=8, device="cpu")
    service = service_of(CacheConfig(pool=pool, disk=disk))
    service.open_session(OpenSession(session_id="s", owner="test"))
    model = ModelFingerprint(fields={}, weights="0")
    service.execute("s", "e", (BindModelRequest(fingerprint=model),))

    def request(number: int) -> None:
        lease_id = f"l{number}"
        acquire = AcquireRequest(lease_id, TokenIds.pack([1, 2, 3, 4]), salted(number)["namespace"], timeout_s=0.0)
        insert = InsertRequest(lease_id, 4, TokenIds.pack([]), release=True)
        answers = service.execute("s", "e", (acquire, insert)).responses
        assert not any(isinstance(answer, Exception) for answer in answers), answers

    for number in range(3000):  # tables of fixed sizes are full then
        request(number)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(3000, 3000 + num_salts):
        request(number)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    if service.disk is not None:
        assert len(service.disk.spaces) == 0 and service.disk.stats().pages_used >= 4 * num_salts
    await service.close()
    return grown


@pytest.mark.more
async def test_salts_that_write_nothing_take_no_memory(tmp_path: Path) -> None:
    disk = DiskConfig(path=str(tmp_path), num_slots=4096, direct_io="off", flush_s=0)

    more = await _grown(NUM_SALTS, disk) - await _grown(NUM_SALTS, None)

    assert more <= MOST_BYTES, f"{more:,} bytes"
