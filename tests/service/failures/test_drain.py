"""A draining cache rejects new leases, serves the open ones, and shuts down after the last of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import ray
from support.caches.cache_fixtures import ON_RAY
from support.caches.cache_kinds import Access
from support.caches.cache_under_test import small_config

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient, shutdown_cache, start_cache
from raydix.actors.transport.process_liveness import ProcessLiveness
from raydix.schemas import AcquireRequest, CacheUnavailable, ExtendRequest, InvalidRequest, LockRequest, UnknownLease


class Drained:
    """A cache of eight slots, and the calls that shut it down."""

    def __init__(self, access: Access) -> None:
        self.cache: Any = start_cache(small_config()) if access == "ray" else LocalPrefixCache(small_config())
        self.client: PrefixCacheClient = self.cache if access == "local" else PrefixCacheClient(self.cache)

    def shut_down(self, drain_s: float) -> asyncio.Task[None]:
        """Start the shutdown of the cache in a task."""
        if isinstance(self.cache, LocalPrefixCache):
            return asyncio.create_task(self.cache.close(drain_s=drain_s))
        return asyncio.create_task(asyncio.to_thread(shutdown_cache, self.cache, drain_s=drain_s))

    async def drain(self) -> asyncio.Task[None]:
        """Start a shutdown with 500 s for open leases. The open leases must fill the pool."""
        waiter = asyncio.create_task(self.client.acquire([99] * 8))
        async with asyncio.timeout(300):
            while not (await self.client.stats()).waiters:  # noqa: ASYNC110 -- there is no event for it
                await asyncio.sleep(0.001)
        ending = self.shut_down(500)
        with pytest.raises(CacheUnavailable, match="is draining"):
            await waiter  # queued requests fail immediately
        return ending

    async def close(self) -> None:
        """Shut the cache down. A second shutdown has no effect."""
        if isinstance(self.cache, LocalPrefixCache):
            await self.cache.close()
        else:
            await asyncio.to_thread(shutdown_cache, self.cache)
        await self.client.close()


@pytest.fixture
async def drained(request: pytest.FixtureRequest, access: Access) -> AsyncIterator[Drained]:
    if access == "ray":
        request.getfixturevalue("ray_cluster")
    cache = Drained(access)
    yield cache
    await cache.close()


async def refuses(verb: Callable[[], Awaitable[Any]]) -> None:
    with pytest.raises(CacheUnavailable, match="is draining"):
        await verb()


async def takes_nothing_new(client: PrefixCacheClient, lease: Lease) -> None:
    """Assert the claim that a planted fault must break."""
    await refuses(lambda: client.acquire([1, 2], timeout_s=0))
    await refuses(lambda: client.lock([1]))
    await refuses(lambda: client.extend(lease, 1))


async def test_a_draining_cache_takes_nothing_new_and_ends_with_its_last_lease(drained: Drained) -> None:
    client = drained.client
    short, long = await client.acquire([1, 2]), await client.acquire([3], new_tokens=5)
    ending = await drained.drain()

    await takes_nothing_new(client, short)
    await short.confirm_open()  # it may be read
    assert (await short.insert([1, 2])).num_inserted == 2
    assert (await client.match([1, 2])).prefix_len == 2
    await short.release()
    with pytest.raises(UnknownLease):
        await client.session.transport.submit(ExtendRequest(lease_id=short.lease_id, num_slots=2, known_pages=2))
    await takes_nothing_new(client, long)  # though there is room now
    stats = await client.stats()
    assert (stats.open_leases, stats.waiters, ending.done()) == (1, 0, False)

    assert (await long.insert([3, 4], release=True)).num_inserted == 2
    async with asyncio.timeout(300):  # less than `drain_s`
        await ending
    with pytest.raises((CacheUnavailable, InvalidRequest)):
        await client.match([1])


@pytest.mark.parametrize("access", ["client", *ON_RAY], indirect=True)  # with `local` there is no other client
async def test_leases_in_flight_to_another_client_arrive(drained: Drained) -> None:
    other = PrefixCacheClient(drained.cache)
    await other.open()
    grant = await (await drained.client.acquire([1] * 8)).grant()
    ending = await drained.drain()

    adopted = await other.adopt(grant)

    await adopted.insert([1] * 8, release=True)
    async with asyncio.timeout(300):
        await ending
    await other.close()


async def test_nobody_new_may_come_in(drained: Drained) -> None:
    lease = await drained.client.acquire([1] * 8)
    ending = await drained.drain()

    newcomer = PrefixCacheClient(drained.cache)
    await refuses(newcomer.open)

    await lease.release()
    await ending


async def test_what_is_open_after_the_time_is_cut_short(drained: Drained, caplog: pytest.LogCaptureFixture) -> None:
    lease = await drained.client.acquire([1])

    with caplog.at_level(logging.WARNING, "raydix.actors"):
        await drained.shut_down(0.1)

    assert "the shutdown of the cache cut short 1 lease" in [each.getMessage() for each in caplog.records]
    await lease.release()


@pytest.mark.parametrize("drain_s", [0, 0.1])
async def test_a_local_cache_is_closed_even_if_the_caller_is_cancelled(drain_s: float) -> None:
    cache = LocalPrefixCache(small_config())
    client = PrefixCacheClient(cache)
    await client.acquire([1])
    await cache.match([1])
    closing = asyncio.create_task(cache.close(drain_s=drain_s))
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait((closing,))

    async with asyncio.timeout(20):
        while cache._host.service.stats().open_leases:  # noqa: ASYNC110 -- no task waits for the close
            await asyncio.sleep(0.01)

    with pytest.raises(CacheUnavailable, match="shut down"):
        await client.acquire([2])


async def test_a_second_close_cuts_the_drain_of_the_first_short() -> None:
    cache = LocalPrefixCache(small_config())
    await cache.acquire([1])
    draining = asyncio.create_task(cache.close(drain_s=60))
    await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await cache.close()
        await draining


async def test_a_drain_that_lets_a_lease_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Drained("local")
    lease = await cache.client.acquire([1] * 8)
    ending = await cache.drain()
    await takes_nothing_new(cache.client, lease)

    for model in (AcquireRequest, LockRequest, ExtendRequest):
        monkeypatch.setattr(model, "takes_slots", False)

    with pytest.raises((pytest.fail.Exception, Exception), match=r"DID NOT RAISE|needs"):
        await takes_nothing_new(cache.client, lease)
    await lease.release()
    await ending


@pytest.mark.more
@pytest.mark.ray
async def test_a_cache_killed_while_it_drains_does_not_come_back(ray_cluster: None) -> None:
    """Ray must not restart it. Its pool is an unnamed file and is freed with its process."""
    cache = Drained("ray")
    await cache.client.acquire([1] * 8)
    handle = await cache.cache.pool_handle.remote()
    pid = int(handle.path.split("/")[2])
    ending = await cache.drain()

    os.kill(pid, signal.SIGKILL)

    async with asyncio.timeout(300):
        await ending
    with pytest.raises(ray.exceptions.RayActorError):
        await cache.cache.config_digest.remote()
    assert handle.liveness_path is not None
    assert ProcessLiveness.find(handle.liveness_path) is None
    await cache.client.close()
