"""`LoopTurns`: requests to a cache in the same process leave its background work turns of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.documents import blocks
from support.waiting import wait_until

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.loop.loop_turns import LoopTurns
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.schemas import CacheConfig, DiskConfig, HostConfig, InvalidRequest, ModelFingerprint, PoolConfig

GUIDE = Path(__file__).parents[3] / "examples" / "worker.md"
POOL = PoolConfig.uniform(num_slots=256, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu")
TIERED = CacheConfig(page_size=16, pool=POOL, host=HostConfig(num_slots=1024))


class Turns(LoopTurns):
    """Turns for work that the test names; a wait is over at once."""

    def __init__(self) -> None:
        self.is_busy = self.is_threaded = False
        self.num_asked = 0
        super().__init__(self._ask, lambda: self.is_threaded)

    def _ask(self) -> bool:
        self.num_asked += 1
        return self.is_busy


@contextmanager
def stopped_clock() -> Iterator[list[float]]:
    """Stop the loop's clock; yield its time in seconds."""
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
        yield now


def worker() -> Any:
    """The program of the guide for workers: its `serve`, and its pool."""
    source = next(block.text for block in blocks(GUIDE) if "def serve(" in block.text)
    names: dict[str, Any] = {}
    exec(source.replace("asyncio.run(main())", ""), names)
    return names


# ---------------------------------------------------------------- turns


async def test_requests_look_for_work_now_and_then() -> None:
    turns = Turns()
    with stopped_clock() as now:
        assert [turns.is_due() for _ in range(10)] == [False] * 10 and turns.num_asked == 1
        now[0] += 0.00011
        assert not turns.is_due() and turns.num_asked == 2


async def test_a_turn_is_due_if_the_loop_has_not_run_for_a_millisecond_while_work_is_due() -> None:
    turns = Turns()
    turns.is_busy = True
    with stopped_clock() as now:
        assert not turns.is_due()
        now[0] += 0.0009
        assert not turns.is_due()
        now[0] += 0.0002
        assert turns.is_due()
        turns.is_busy = False
        now[0] += 0.0011
        assert not turns.is_due()


async def test_no_turn_is_due_if_the_loop_runs_by_itself() -> None:
    turns = Turns()
    turns.is_busy = True
    with stopped_clock() as now:
        for _ in range(5):
            assert not turns.is_due()
            await asyncio.sleep(0)
            now[0] += 0.0011
        assert turns.num_asked == 5


async def test_the_loop_runs_during_a_turn_and_the_next_one_is_due_a_millisecond_after_its_begin() -> None:
    turns, seen = Turns(), list[str]()
    turns.is_busy = True
    with stopped_clock() as now:
        turns.is_due()
        now[0] += 0.0011
        for _ in range(3):
            asyncio.get_running_loop().call_soon(seen.append, "a callback")
            task = asyncio.ensure_future(asyncio.sleep(0))

            assert turns.is_due()
            await turns.take()

            assert task.done() and seen.pop() == "a callback"
            assert not turns.is_due()
            now[0] += 0.0011


async def test_a_turn_ends_with_the_copy_that_it_waits_for() -> None:
    turns = Turns()
    turns.is_threaded = True
    waits = asyncio.ensure_future(turns.take())
    while turns._timer is None:  # noqa: ASYNC110
        await asyncio.sleep(0)

    turns.note_progress()
    await waits

    assert not turns.has_waiting


async def test_requests_that_wait_go_on_in_their_order_and_cancelled_ones_do_not() -> None:
    turns, seen = Turns(), list[int]()

    async def request(number: int) -> None:
        await turns.take()
        seen.append(number)

    tasks = [asyncio.ensure_future(request(number)) for number in range(6)]
    await asyncio.sleep(0)
    for number in (0, 3):
        tasks[number].cancel()
    late = asyncio.ensure_future(request(9))
    assert turns.is_due(), "no request overtakes those that wait"
    await asyncio.gather(*tasks, late, return_exceptions=True)
    tasks[5].cancel()

    assert seen == [1, 2, 4, 5, 9]
    assert not turns.has_waiting and not turns._is_turning


async def test_a_request_that_is_cancelled_as_its_turn_comes_lets_the_next_one_go_on() -> None:
    turns, seen = Turns(), list[str]()

    async def request(name: str) -> None:
        await turns.take()
        seen.append(name)

    first, second = (asyncio.ensure_future(request(name)) for name in ("first", "second"))
    await asyncio.sleep(0)
    while not turns._waiting[0].done():  # noqa: ASYNC110
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, second, return_exceptions=True)

    assert seen == ["second"]


# ---------------------------------------------------------------- requests of a local cache


class Seen(RequestObserver):
    """Notes the number of turns at the grant of each lease."""

    def __init__(self, num_turns: list[int]) -> None:
        self.at: list[int] = []
        self._num_turns = num_turns

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        self.at.append(self._num_turns[0])


async def counting(num_turns: list[int]) -> None:
    """Count the turns of the loop."""
    while True:
        num_turns[0] += 1
        await asyncio.sleep(0)


async def busy(cache: LocalPrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a cache of which each request takes a turn."""
    await cache.open()
    turns = cache.service.turns
    assert turns is not None
    monkeypatch.setattr(turns, "is_due", lambda: True)


async def test_a_request_waits_before_it_is_executed_and_not_before_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalPrefixCache(TIERED) as cache:
        await busy(cache, monkeypatch)
        num_turns = [0]
        seen = Seen(num_turns)
        cache.service.core.observers.append(seen)
        counter = asyncio.ensure_future(counting(num_turns))
        for number in range(5):
            before = num_turns[0]
            lease = await cache.acquire([number])
            assert before < seen.at[-1] == num_turns[0]
            await lease.release()
        counter.cancel()


async def test_a_request_that_is_cancelled_while_it_waits_is_not_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalPrefixCache(TIERED) as cache:
        await busy(cache, monkeypatch)
        lease = await cache.acquire(list(range(32)))
        core, counters = cache.service.core, cache.service.core.counters

        async def acquire() -> None:
            await cache.acquire([7] * 16)

        requests: list[Coroutine[Any, Any, Any]] = [acquire(), lease.insert(list(range(32))), lease.extend(16)]
        tasks = [asyncio.ensure_future(request) for request in requests]
        for _ in range(2):
            await asyncio.sleep(0)
        assert cache.service.turns is not None and cache.service.turns.has_waiting
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

        assert all(task.cancelled() for task in tasks)
        assert (counters.acquires, counters.tokens_inserted, len(core.leases)) == (1, 0, 1)
        assert core.private_slots == 32
        assert (await lease.insert(list(range(32)))).num_inserted == 32
        assert len(lease) == 32
        await lease.release()


@pytest.mark.parametrize("verb", ["release", "abort"])
async def test_the_end_of_a_lease_takes_effect_if_its_caller_is_cancelled_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async with LocalPrefixCache(TIERED) as cache:
        await busy(cache, monkeypatch)
        lease = await cache.acquire(list(range(32)))
        ending = asyncio.ensure_future(getattr(lease, verb)())
        await asyncio.sleep(0)
        assert cache.service.turns is not None and cache.service.turns.has_waiting
        ending.cancel()
        await asyncio.wait((ending,))

        assert ending.cancelled()
        assert (len(cache.service.core.leases), cache.service.core.private_slots) == (0, 0)


async def test_requests_of_one_client_are_executed_in_their_order_and_before_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with LocalPrefixCache(TIERED) as cache:
        client = PrefixCacheClient(cache)
        await busy(cache, monkeypatch)
        lease = await client.acquire(list(range(64)))
        order = [asyncio.ensure_future(lease.insert(list(range(end)))) for end in (16, 32, 64)]
        await asyncio.sleep(0)
        ends = asyncio.ensure_future(client.close())

        done = [(await task).num_inserted for task in order]
        await ends

        assert done == [16, 16, 32]
        with pytest.raises(InvalidRequest):
            await client.match([1])


async def test_a_cache_without_tensors_never_waits() -> None:
    async with LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=64))) as cache:
        await cache.open()
        assert cache.session.transport.turns is None and cache.service.turns is None
        ran = []
        asyncio.get_running_loop().call_soon(ran.append, "a turn")
        for number in range(100):
            await (await cache.acquire([number])).insert([number], release=True)
        assert not ran


# ---------------------------------------------------------------- programs


async def test_a_program_with_one_request_after_the_other_gets_a_host_tier() -> None:
    """The guide's program: 60 prompts of 256 tokens, twice. The pool holds 16 of them, the host 128."""
    guide = worker()
    pool = guide["POOL"].model_copy(update={"num_slots": 16 * 256})
    config = CacheConfig(page_size=16, pool=pool, host=HostConfig(num_slots=128 * 256))
    hits = 0
    async with LocalPrefixCache(config) as local, PrefixCacheClient(local) as client:
        tiers = local.service.host
        assert tiers is not None
        wait_until(lambda: tiers.state == "ready")
        for _ in range(2):
            hits = 0
            for number in range(60):
                hits += (await guide["serve"](client, list(range(1000 * number, 1000 * number + 256)), 0, None))[0]
                # The threads copy, and the loop stands still.
                wait_until(lambda: all(copy.result is not None for copy in tiers._batches.values()))
                time.sleep(0.001)  # noqa: ASYNC251 -- the next request takes a turn
        stats = (await client.stats()).host

    assert stats is not None and stats.tokens_loaded == hits
    assert hits >= 11_000, f"{hits} of {60 * 240} tokens"


async def test_a_program_with_one_request_after_the_other_gets_a_disk(tmp_path: Path) -> None:
    guide = worker()
    pool = guide["POOL"].model_copy(update={"num_slots": 180 * 64 + 64})
    disk = DiskConfig(path=str(tmp_path), num_slots=4 * 180 * 64, direct_io="off", write_mib_s=None)
    config = CacheConfig(page_size=16, pool=pool, disk=disk)
    async with LocalPrefixCache(config) as local, PrefixCacheClient(local) as client:
        await client.bind_model(ModelFingerprint(fields={"model": "toy"}, weights="1"))
        for _ in range(2):
            for number in range(180):
                await guide["serve"](client, list(range(1000 * number, 1000 * number + 64)), 0, None)
        deadline = time.monotonic() + 60
        while True:
            stats = (await client.stats()).disk
            assert stats is not None and time.monotonic() < deadline, stats
            if not stats.due_prefixes and stats.tokens_written == 180 * 64:
                break
            time.sleep(0.002)  # noqa: ASYNC251 -- the loop stands still


async def test_statistics_say_that_the_loop_has_not_run() -> None:
    async with LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=64))) as cache:
        await cache.open()
        time.sleep(0.3)  # noqa: ASYNC251 -- the delay to measure
        assert (await cache.stats()).loop_lag_ms > 100
