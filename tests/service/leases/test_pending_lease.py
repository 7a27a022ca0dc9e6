"""`acquire` returns an object to await or enter once. If the task is cancelled, no lease is left behind."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Coroutine
from typing import Any

import pytest
from support.caches.cache_under_test import CacheUnderTest, Pages

from raydix.actors import Lease
from raydix.actors.client.tracing import trace_verbs
from raydix.schemas import InvalidRequest


@pytest.fixture(params=["plain", "traced"])
def traced(request: Any) -> Any:
    """Run the test without and with tracing spans."""
    if request.param == "plain":
        yield
        return
    pytest.importorskip("opentelemetry.trace")
    stop = trace_verbs()
    yield
    stop()


@pytest.mark.usefixtures("traced")
async def test_it_is_awaited_or_entered(cache1: CacheUnderTest) -> None:
    client = cache1.client
    lease = await client.acquire([1, 2])
    assert isinstance(lease, Lease)
    await lease.release()
    async with await client.acquire([1, 2]) as lease:
        assert len(lease) == 2
    async with client.acquire([1, 2]) as lease:
        assert await cache1.pages() == Pages(free=6, private=2, leases=1)
    assert await cache1.pages() == Pages(free=8)
    with pytest.raises(ZeroDivisionError):
        async with client.acquire([1, 2]):
            raise ZeroDivisionError
    assert await cache1.pages() == Pages(free=8)


async def test_used_without_await_it_says_what_to_do(cache1: CacheUnderTest) -> None:
    client = cache1.client
    pending: Any = client.acquire([1, 2])

    for use, error in (
        (lambda: pending.slots, AttributeError),
        (lambda: pending.insert([1, 2]), AttributeError),
        (lambda: pending.__enter__(), TypeError),
    ):
        with pytest.raises(error, match="await it, or `async with`"):
            use()
    with pytest.raises(InvalidRequest, match="not PendingLease: await it, or `async with`"):
        await client.release(pending)

    assert not hasattr(pending, "prefix_len")
    await (await pending).release()
    assert await cache1.pages() == Pages(free=8)


async def test_lock_and_adopt_are_entered_too(cache1: CacheUnderTest) -> None:
    async with cache1.client.lock([1, 2]) as locked:
        assert len(locked) == 0
    grant = await (await cache1.client.acquire([1, 2])).grant()
    async with cache1.another_client().adopt(grant) as adopted:
        assert len(adopted) == 2
    assert await cache1.pages() == Pages(free=8)


@pytest.mark.usefixtures("traced")
async def test_whatever_runs_coroutines_runs_it(cache1: CacheUnderTest) -> None:
    client = cache1.client
    pending = client.acquire([1])
    assert isinstance(pending, Coroutine)
    pending.close()

    leases = [await asyncio.create_task(client.acquire([1])), await asyncio.wait_for(client.acquire([2]), 60)]
    leases += await asyncio.gather(client.acquire([3]), client.acquire([4]))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(client.acquire([5]))
    leases.append(task.result())
    leases.append(await asyncio.shield(client.acquire([6])))

    assert "acquire" in repr(task)
    assert [len(lease) for lease in leases] == [1] * 6


@pytest.mark.usefixtures("traced")
async def test_it_is_good_once(cache1: CacheUnderTest) -> None:
    pending = cache1.client.acquire([1])
    await pending
    with pytest.raises(RuntimeError, match="already awaited"):
        await pending
    with pytest.raises(RuntimeError, match="already awaited"):
        async with pending:
            pass
    assert await cache1.pages() == Pages(free=7, private=1, leases=1)


@pytest.mark.usefixtures("traced")
async def test_nothing_is_sent_before_it_is_awaited_and_never_awaited_it_warns(cache1: CacheUnderTest) -> None:
    await cache1.client.open()
    wrong = cache1.client.acquire("no tokens")

    with pytest.warns(RuntimeWarning, match=r"acquire.* was never awaited"):
        cache1.client.acquire([1])
        gc.collect()

    assert await cache1.pages() == Pages(free=8)
    with pytest.raises(InvalidRequest):
        await wrong


@pytest.mark.parametrize("way", ["awaited", "entered"])
async def test_cancelled_after_any_number_of_ticks_it_leaves_nothing(cache1: CacheUnderTest, way: str) -> None:
    await cache1.client.open()

    async def hold() -> None:
        if way == "awaited":
            lease = await cache1.client.acquire([1, 2])
            async with lease:
                await asyncio.Event().wait()
        else:
            async with cache1.client.acquire([1, 2]):
                await asyncio.Event().wait()

    for ticks in range(30):
        task = asyncio.create_task(hold())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        await cache1.client.match([1])  # the cache executes requests in order
        assert await cache1.pages() == Pages(free=8), f"cancelled after {ticks} ticks"


async def test_a_closed_coroutine_sends_nothing(cache1: CacheUnderTest) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache1.client.acquire([1]).close()
        gc.collect()
