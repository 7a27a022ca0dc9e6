"""The background task relieves pressure before a caller feels it, and yields to other work meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

import raydix.actors.service.eviction_task as eviction_module
from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.service.eviction_task import EvictionTask, Steps
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig, PoolConfig

HIGH, LOW = 0.8, 0.5  # of ten slots: it wakes when nine are in use, and stops at five


def config_of(num_slots: int = 10, **eviction: Any) -> CacheConfig:
    marks = {"high_watermark": HIGH, "low_watermark": LOW}
    return CacheConfig(
        pool=PoolConfig(num_slots=num_slots, device="cpu"), eviction=EvictionConfig(**marks | eviction), validate=True
    )


@asynccontextmanager
async def opened(config: CacheConfig) -> AsyncIterator[LocalPrefixCache]:
    async with LocalPrefixCache(config) as cache:
        yield cache
        core_of(cache).check_invariants()
    assert not eviction_tasks()


@pytest.fixture
async def cache() -> AsyncIterator[LocalPrefixCache]:
    async with opened(config_of()) as cache:
        yield cache


def eviction_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "raydix-eviction" and not task.done()]


async def publish(cache: LocalPrefixCache, *ids: int) -> None:
    """Publish prefixes of one token each without locks, the first the least recently used."""
    for token in ids:
        lease = await cache.acquire([token])
        await lease.insert([token], release=True)


async def cached(cache: LocalPrefixCache, *ids: int) -> list[int]:
    return [token for token in ids if (await cache.match([token])).prefix_len]


async def settle(cache: LocalPrefixCache) -> CacheStats:
    """Return the statistics once the task is idle: in process this needs no time, only turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)
    return await cache.stats()


def core_of(cache: LocalPrefixCache) -> Any:
    return cache._host.service.core


# ---------------------------------------------------------------- marks


async def test_it_starts_with_the_first_session_and_says_so() -> None:
    cache = LocalPrefixCache(config_of())
    before = cache._host.service.stats().eviction_task

    async with cache:
        after = (await cache.stats()).eviction_task

    assert (before.enabled, before.started, before.alive) == (True, False, False)
    assert (after.enabled, after.started, after.alive) == (True, True, True)


async def test_up_to_the_high_mark_it_sleeps(cache: LocalPrefixCache) -> None:
    await publish(cache, *range(1, 9))

    stats = await settle(cache)

    assert (stats.tree_slots, stats.free_slots) == (8, 2)
    task = stats.eviction_task
    assert (task.enabled, task.alive) == (True, True)
    assert (task.rounds, task.slices, task.tokens_evicted) == (0, 0, 0)


async def test_above_the_high_mark_it_evicts_the_least_recently_used_down_to_the_low_one(
    cache: LocalPrefixCache,
) -> None:
    await publish(cache, *range(1, 9))

    held = await cache.acquire([9])
    stats = await settle(cache)

    assert (stats.private_slots, stats.tree_slots, stats.free_slots) == (1, 4, 5)
    assert await cached(cache, *range(1, 9)) == [5, 6, 7, 8]
    assert (stats.eviction_task.rounds, stats.eviction_task.tokens_evicted) == (1, 4)
    assert stats.tokens_evicted == 4
    assert len(held) == 1


async def test_evictions_are_counted_by_pool() -> None:
    pool = PoolConfig(num_slots=1_000, num_swa_slots=20, num_state_slots=10, device="cpu")
    config = CacheConfig(kind="mamba", sliding_window_size=2, pool=pool, eviction=config_of().eviction)
    async with opened(config) as cache:
        for token in range(30):
            lease = await cache.acquire([token, token])
            await lease.insert([token, token], publish_state=True, release=True)

        stats = await settle(cache)

        task = stats.eviction_task
        assert stats.swa is not None and stats.state is not None
        assert task.tokens_evicted == task.retired_tokens == 0
        assert task.window_slots_evicted > 0
        assert task.window_slots_evicted + 2 * task.states_evicted <= stats.swa.evicted
        assert stats.swa.evicted == stats.tokens_evicted == 60 - stats.swa.tree_slots  # leaves go whole
        assert stats.state.evicted == 30 - stats.state.tree_slots


def timers() -> list[str]:
    """Return the loop's timers, except those of heartbeats."""
    scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return [repr(each) for each in scheduled if "LoopTimer" not in repr(each)]


@pytest.mark.asyncio(loop_scope="function")  # on the tests' shared loop, other sessions set timers meanwhile
async def test_it_sleeps_on_an_event_and_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(config_of()) as cache:
        looks: list[int] = []
        gauge = cache._host.service.eviction_task._gauges[0]
        free_slots = gauge.free_slots
        monkeypatch.setattr(gauge, "free_slots", lambda: looks.append(free_slots()) or free_slots())
        await publish(cache, *range(1, 9))
        assert timers() == []

        await asyncio.sleep(0.05)
        assert looks == []
        assert timers() == []

        await cache.acquire([9])
        await settle(cache)
        assert (looks[0], looks[-1]) == (1, 5)
        assert set(looks) == {1, 5}
        turns = len(looks)
        await asyncio.sleep(0.05)
        assert len(looks) == turns
        assert timers() == []


async def test_it_sleeps_again_and_wakes_again(cache: LocalPrefixCache) -> None:
    for first in (1, 11, 21):
        await publish(cache, *range(first, first + 9))
        await settle(cache)

    stats = await cache.stats()

    assert stats.eviction_task.rounds >= 3
    assert stats.free_slots >= 2
    assert stats.eviction_task.alive


async def test_it_stops_at_the_low_mark_though_others_go_on_taking_slots(cache: LocalPrefixCache) -> None:
    await publish(cache, *range(1, 10))
    await asyncio.sleep(0)
    assert (await cache.stats()).tree_slots == 5

    for token in (11, 12, 13):
        await publish(cache, token)
        await asyncio.sleep(0)
    stats = await settle(cache)

    assert (stats.tree_slots, stats.eviction_task.rounds) == (8, 1)  # up to the high mark it sleeps


async def test_it_stops_when_nothing_is_evictable_and_spins_not(cache: LocalPrefixCache) -> None:
    held = await cache.acquire(list(range(1, 10)))

    first = await settle(cache)
    later = await settle(cache)

    assert (first.private_slots, first.eviction_task.rounds, first.eviction_task.tokens_evicted) == (9, 1, 0)
    assert later.eviction_task.slices == first.eviction_task.slices == 1
    await held.release()


async def test_it_evicts_unlocked_prefixes_and_leaves_leased_ones(cache: LocalPrefixCache) -> None:
    await publish(cache, 1, 2, 3)
    held = await cache.acquire([1])
    private = await cache.acquire([7] * 6)

    stats = await settle(cache)

    assert await cached(cache, 1, 2, 3) == [1]
    assert (stats.protected_slots, stats.private_slots, stats.free_slots) == (1, 6, 3)
    await held.release()
    await private.release()


@pytest.mark.parametrize("growth", ["acquire", "extend"])
async def test_whatever_takes_slots_wakes_it(cache: LocalPrefixCache, growth: str) -> None:
    await publish(cache, *range(1, 6))
    lease = await cache.acquire([7, 7])

    await (cache.acquire([8, 8]) if growth == "acquire" else lease.extend(2))
    stats = await settle(cache)

    assert (stats.eviction_task.rounds, stats.tree_slots) == (1, 1)


async def test_a_high_mark_of_one_switches_it_off_and_callers_evict_their_own_shortfall() -> None:
    async with opened(config_of(high_watermark=1.0)) as cache:
        await publish(cache, *range(1, 11))
        assert not eviction_tasks()

        held = await cache.acquire([11, 11, 11])
        stats = await settle(cache)

        assert (stats.tree_slots, stats.private_slots, stats.free_slots) == (7, 3, 0)
        task = stats.eviction_task
        assert (task.enabled, task.alive, task.rounds, task.slices) == (False, False, 0, 0)
        await held.release()


async def test_a_request_that_needs_more_than_is_free_does_not_wait_for_it(cache: LocalPrefixCache) -> None:
    await publish(cache, *range(1, 9))

    held = await cache.acquire([9] * 6, timeout_s=0)

    assert await cached(cache, *range(1, 9)) == [5, 6, 7, 8]
    assert (await cache.stats()).eviction_task.slices == 0  # it has not had a turn yet
    await settle(cache)
    await held.release()


# ---------------------------------------------------------------- faults


async def test_a_round_that_fails_is_logged_and_counted_and_the_next_one_works(
    cache: LocalPrefixCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    evict = core_of(cache).evict
    outcomes: list[Callable[[int], int]] = [failing_evict]
    monkeypatch.setattr(core_of(cache), "evict", lambda n, cause: (outcomes.pop() if outcomes else evict)(n))
    await publish(cache, *range(1, 9))

    with caplog.at_level(logging.ERROR, "raydix.actors.service.eviction_task"):
        first = await cache.acquire([9])
        stats = await settle(cache)
    assert (stats.eviction_task.failures, stats.eviction_task.rounds, stats.eviction_task.alive) == (1, 0, True)
    assert stats.eviction_task.last_error == "RuntimeError: no luck"
    told = [record.message for record in caplog.records if record.name.startswith("raydix")]
    assert told == ["a round of background eviction failed"]

    second = await cache.acquire([10])
    await until(cache, lambda stats: stats.eviction_task.rounds == 1)
    stats = await cache.stats()
    assert (stats.free_slots, stats.tree_slots, stats.private_slots) == (5, 3, 2)
    assert (stats.eviction_task.failures, stats.eviction_task.alive) == (1, True)
    await first.release()
    await second.release()


def failing_evict(num_tokens: int) -> int:
    raise RuntimeError("no luck")


async def until(cache: LocalPrefixCache | PrefixCacheClient, reached: Callable[[CacheStats], bool]) -> None:
    """Wait until the task has acted, after a back-off or in another process."""
    async with asyncio.timeout(60):
        while not reached(await cache.stats()):  # noqa: ASYNC110 -- a cache has no event to wait for
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- slices

NUM_LEAVES = 5_000


@asynccontextmanager
async def full_of_leaves(**eviction: Any) -> AsyncIterator[tuple[LocalPrefixCache, Lease]]:
    """Return a pool full of one-token prefixes, and a lease that is about to put it under pressure."""
    config = config_of(NUM_LEAVES, low_watermark=0.1, **eviction).model_copy(update={"validate": False})
    async with opened(config) as cache:
        lease = await cache.lock([0])
        task = cache._host.service.eviction_task
        wake, task.wake = task.wake, lambda: None  # type: ignore[method-assign]
        core_of(cache).pools._on_pressure = task.wake
        await publish(cache, *range(1, NUM_LEAVES - 99))
        core_of(cache).pools._on_pressure = wake
        yield cache, lease
        await lease.release()


class Clock:
    """A clock that advances by 0.6 ms at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.0006
        return self.now

    def thread_time(self) -> float:
        """Return the processor's time: another program has the core for half of the time."""
        return self.now / 2


async def test_a_mass_eviction_is_cut_in_slices_that_end_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_module, "time", Clock())
    async with full_of_leaves(slice_ms=1) as (cache, lease):
        await lease.extend(1)
        await until(cache, lambda stats: stats.eviction_task.rounds == 1)

        stats = await cache.stats()

        task = stats.eviction_task
        assert stats.free_slots == 4500
        assert (task.rounds, task.tokens_evicted) == (1, 4401)
        assert task.slices == 35  # of two steps of 64 tokens each: the second one passes the millisecond
        assert 0.5 <= task.longest_slice_ms <= 1.2, "the time of the core alone"


def test_steps_grow_while_they_are_quick_and_shrink_when_they_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(eviction_module, "time", clock)
    quick, slow = Steps(slice_s=1.0), Steps(slice_s=0.001)
    quick.begin()

    grown = [(quick.done(), quick.num_tokens)[1] for _ in range(10)]
    slow.num_tokens = 512
    slow.begin()
    shrunk = [(slow.done(), slow.num_tokens) for _ in range(4)]

    assert grown == [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 16_384, 16_384]
    assert shrunk == [(False, 256), (True, 128), (True, 64), (True, 64)]


async def test_a_probe_is_answered_between_any_two_slices() -> None:
    async with full_of_leaves(slice_ms=0.01) as (cache, lease):
        answers: list[int] = []
        await lease.extend(1)
        while not (stats := await cache.stats()).eviction_task.rounds:
            assert (await cache.match([NUM_LEAVES - 100])).prefix_len == 1  # used last, so evicted last
            answers.append(stats.eviction_task.slices)
            await asyncio.sleep(0)

        assert len(answers) >= 8
        assert all(later - earlier <= 1 for earlier, later in pairwise(answers))


async def test_work_goes_on_and_stays_consistent_during_a_mass_eviction() -> None:
    async with full_of_leaves(slice_ms=0.01) as (cache, lease):
        await lease.extend(1)
        token = NUM_LEAVES
        while (await cache.stats()).free_slots < NUM_LEAVES * 9 // 10 - 1:
            async with await cache.acquire([token]) as mine:
                assert (await mine.insert([token])).num_inserted == 1
            token += 1
            await asyncio.sleep(0)

        assert token >= NUM_LEAVES + 8
        assert await cached(cache, *range(NUM_LEAVES, token)) == list(range(NUM_LEAVES, token))


# ---------------------------------------------------------------- life cycle


async def test_it_starts_with_the_first_session_and_ends_with_the_cache() -> None:
    cache = LocalPrefixCache(config_of())
    assert not eviction_tasks()

    await cache.open()
    async with PrefixCacheClient(cache) as client:
        assert (await client.stats()).eviction_task.alive
        assert len(eviction_tasks()) == 1

    await cache.close()
    assert not eviction_tasks()
    assert not cache._host.service.stats().eviction_task.alive


async def test_it_ends_with_the_cache_in_the_middle_of_a_round() -> None:
    async with full_of_leaves(slice_ms=0.01) as (cache, lease):
        await lease.extend(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (await cache.stats()).eviction_task.slices > 0

        await cache.close()

        assert not eviction_tasks()
        task = cache._host.service.stats().eviction_task
        assert (task.alive, task.rounds, task.failures) == (False, 0, 0)


async def test_it_can_be_stopped_before_it_ran() -> None:
    task = EvictionTask(EvictionConfig(), [], lambda max_tokens: 0, lambda: None)

    await task.stop()
    task.start()
    await task.stop()

    assert not task.stats().alive


@pytest.mark.ray
async def test_in_an_actor_it_works_the_same(running_cache: Callable[[CacheConfig], Any]) -> None:
    async with PrefixCacheClient(running_cache(config_of())) as client:
        for token in range(1, 9):
            await (await client.acquire([token])).insert([token], release=True)
        held = await client.acquire([9])

        await until(client, lambda stats: stats.eviction_task.rounds == 1)

        stats = await client.stats()
        assert (stats.private_slots, stats.tree_slots, stats.free_slots) == (1, 4, 5)
        assert stats.eviction_task.alive
        await held.release()


async def test_a_retired_namespace_is_reclaimed_in_the_background_even_if_the_task_is_switched_off() -> None:
    num_slots = 3 * 4096
    config = CacheConfig(pool=PoolConfig(num_slots=num_slots), eviction=EvictionConfig(high_watermark=1.0))
    cache = LocalPrefixCache(config)
    for start in range(0, num_slots, 1024):
        lease = await cache.acquire(list(range(start, start + 1024)), lora_id="a")
        await lease.insert(list(range(start, start + 1024)), release=True)

    await cache.retire(lora_id="a")
    assert num_slots > (await cache.stats()).free_slots >= 4096

    await until(cache, lambda stats: stats.free_slots == num_slots)
    await cache.close()
