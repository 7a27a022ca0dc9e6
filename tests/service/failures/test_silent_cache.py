"""A stopped cache: waiting callers get an error in time, and no slot is lost when the cache resumes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.caches.cache_fixtures import ON_RAY, over_calls
from support.caches.cache_under_test import CacheUnderTest, Pages, small_config
from support.processes.client_processes import all_free, until

from raydix.actors import PrefixCacheClient
from raydix.actors.client import client_session
from raydix.actors.transport import ray_transport
from raydix.schemas import CacheConfig, CacheUnavailable, LeaseConfig, LeaseExpired

pytestmark = pytest.mark.ray

HASTY = LeaseConfig(session_ttl_s=2, quarantine_grace_s=0.2)  # a busy machine can delay a beat by a second


@pytest.fixture
async def hasty(running_cache: Callable[[CacheConfig], Any]) -> AsyncIterator[tuple[Any, PrefixCacheClient]]:
    """A cache with sessions that expire after 2 s, and a client of it."""
    cache = running_cache(small_config().model_copy(update={"leases": HASTY}))
    async with PrefixCacheClient(cache) as client:
        yield cache, client
        await until(client, all_free)
        await client.reset()
        await client.check_invariants()


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        while not all(map(_is_stopped, Path(f"/proc/{pid}/task").iterdir())):
            time.sleep(0.01)  # until it stops, a running thread may still answer
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _is_stopped(thread: Path) -> bool:
    try:
        status = (thread / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return True
    return "\nState:\tT" in status


async def process_of(cache: Any) -> int:
    return int((await cache.pool_handle.remote()).path.split("/")[2])


@pytest.mark.more
async def test_who_waits_for_a_cache_that_stands_still_is_told_so(
    hasty: tuple[Any, PrefixCacheClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, client = hasty
    held = await client.acquire([1] * 8)
    in_line = asyncio.create_task(client.acquire([2], timeout_s=300))
    await until(client, lambda stats: stats.waiters == 1)

    with monkeypatch.context() as patch, standing_still(await process_of(cache)):
        patch.setattr(ray_transport, "_ANSWER_S", 0.5)
        patch.setattr(client_session, "_SILENT_S", 1.0)
        verbs = (client.match([1]), client.acquire([3]), held.insert([1] * 4), client.stats())
        asked = [in_line, *map(asyncio.ensure_future, verbs)]
        async with asyncio.timeout(200):
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            with pytest.raises(CacheUnavailable):
                await client.match([4])

    for outcome in outcomes:
        assert isinstance(outcome, CacheUnavailable)
        assert "the cache has not answered for" in str(outcome)
    await held.release()
    await until(client, all_free)  # the resumed cache may have served requests that had failed


@pytest.mark.more
@pytest.mark.parametrize("way", ["socket", pytest.param("calls", marks=pytest.mark.long)])
def test_a_client_whose_own_loop_stood_still_does_not_blame_the_cache(
    running_cache: Callable[[CacheConfig], Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blocked loop, such as during a model load, lets the session expire. The next verb opens another one."""
    if way == "calls":
        over_calls(monkeypatch)
    cache = running_cache(small_config().model_copy(update={"leases": HASTY}))

    async def load_a_model() -> None:
        async with PrefixCacheClient(cache) as client:
            lease = await client.acquire([1, 2])
            await asyncio.sleep(0.05)  # a beat is in flight
            stand_still()
            asked = [client.match([1]), client.acquire([3]), client.stats()]
            async with asyncio.timeout(60):
                found, other, stats = await asyncio.gather(*asked)
                await other.release()

            assert (found.prefix_len, stats.epoch) == (0, lease.epoch)
            with pytest.raises(LeaseExpired):
                await lease.insert([1])
            await lease.release()
            await until(client, all_free)

    def stand_still() -> None:
        time.sleep(3 * HASTY.session_ttl_s)
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 60)  # the loop's clock jumps a minute ahead

    with asyncio.Runner() as runner:
        runner.run(load_a_model())


async def test_a_client_of_a_cache_that_stands_still_can_be_closed(
    hasty: tuple[Any, PrefixCacheClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, watching = hasty
    monkeypatch.setattr(ray_transport, "_CLOSE_S", 0.5)
    client = PrefixCacheClient(cache)
    await client.acquire([1, 2])

    with standing_still(await process_of(cache)):
        asked = asyncio.create_task(client.match([1]))
        await asyncio.sleep(0)
        async with asyncio.timeout(200):
            await client.close()
            with pytest.raises(CacheUnavailable, match=r"has not answered for 0\.5 s"):
                await asked

    await until(watching, lambda stats: not stats.open_leases)


@pytest.mark.parametrize("access", ON_RAY, indirect=True)
async def test_answers_that_come_after_all_are_dropped_and_what_they_granted_is_given_back(
    cache1: CacheUnderTest,
) -> None:
    await cache1.publish(1, 2)
    client = cache1.client
    asked = [asyncio.create_task(client.acquire([1, number])) for number in range(3)]
    for _ in range(3):
        await asyncio.sleep(0)

    client.session.transport.give_up("it is silent")

    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(outcome, CacheUnavailable)
        assert str(outcome) == "it is silent"
    assert await cache1.matched(1, 2) == 2
    assert await cache1.pages() == Pages(free=6, evictable=2)
