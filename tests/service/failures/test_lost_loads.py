"""Lost answers and retries of requests that wait for a load: each gets the loaded prefix, or no lease is left."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.caches.cache_fixtures import over_calls
from support.caches.cache_under_test import CacheUnderTest
from support.caches.raw_calls import Wire
from support.caches.unsteady_handle import Unsteady
from support.more import more
from support.tiers.demotion import demote_first
from support.tiers.gated_loads import PAGE, GatedLoads, host_config, publish_on_host

from raydix.actors import LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.lease import Loaded
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.schemas import (
    AbortRequest,
    AcquireRequest,
    CacheStats,
    CacheUnavailable,
    LeaseConfig,
    LeaseExpired,
    LeaseResponse,
    LockRequest,
    Message,
    ReleaseRequest,
    TokenIds,
    UnknownLease,
    WaitingResponse,
)

PROMPT = list(range(1, 4 * PAGE + 1))
ALL = len(PROMPT)

# ---------------------------------------------------------------- answers that are lost on their way to a client


class Scene:
    """A cache with a prompt on the host, a client over a handle that loses answers, and the gate of the loads."""

    def __init__(self, cache: LocalPrefixCache, handle: Unsteady, gate: GatedLoads) -> None:
        self.cache = cache
        self.handle = handle
        self.gate = gate
        self.client = PrefixCacheClient(handle)

    async def until_nothing_is_left(self) -> CacheStats:
        async with asyncio.timeout(60):
            while True:
                stats = await self.cache.stats()
                assert stats.host is not None
                if not (stats.open_leases or stats.host.moves_in_flight or self.cache.service.core.leases.offers):
                    return stats
                await asyncio.sleep(0.002)


@pytest.fixture(params=["socket", *more("calls")])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    cache = LocalPrefixCache(host_config())
    gate = GatedLoads(cache)
    async with cache:
        await publish_on_host(cache, PROMPT)
        server = UnixSocketServer(cache.service) if request.param == "socket" else None
        scene = Scene(cache, Unsteady(cache, server), gate)
        await scene.client.open()
        yield scene
        gate.pass_chunks()
        await scene.client.close()
        stats = await scene.until_nothing_is_left()
        assert (stats.private_slots, stats.quarantined_slots, stats.waiters) == (0, 0, 0)
        await cache.check_invariants()


VERBS: dict[str, dict[str, Any]] = {"acquire": {}, "lock": {}, "lock and offer": {"offer_s": 60}}


@pytest.mark.parametrize("verb", VERBS)
async def test_a_lease_of_which_the_answer_was_lost_is_given_back_and_another_hits(scene: Scene, verb: str) -> None:
    scene.gate.pass_chunks()
    scene.handle.lost = {"wait"}
    with pytest.raises(CacheUnavailable, match="the answer was lost"):
        await getattr(scene.client, verb.split()[0])(PROMPT, **VERBS[verb])
    scene.handle.lost.clear()

    await scene.until_nothing_is_left()
    async with scene.client.acquire(PROMPT) as lease:
        assert (lease.prefix_len, lease.loaded) == (ALL, Loaded())


@pytest.mark.parametrize("verb", VERBS)
async def test_an_answer_that_comes_after_its_caller_was_cancelled_leaves_no_lease(scene: Scene, verb: str) -> None:
    late = scene.handle.held_back["wait"] = asyncio.Event()
    task = asyncio.ensure_future(getattr(scene.client, verb.split()[0])(PROMPT, **VERBS[verb]))
    await scene.gate.until_begun()
    scene.gate.pass_chunks()
    async with asyncio.timeout(60):
        while not (await scene.cache.stats()).open_leases:  # noqa: ASYNC110 -- until it is handed out
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait((task,))
    late.set()

    await scene.client.match(PROMPT)
    await scene.until_nothing_is_left()
    assert (await scene.client.match(PROMPT)).prefix_len == ALL


async def test_a_ticket_that_was_lost_is_given_up_and_its_load_goes_on() -> None:
    cache = LocalPrefixCache(host_config())
    gate = GatedLoads(cache)
    async with cache:
        await publish_on_host(cache, PROMPT)
        scene = Scene(cache, Unsteady(cache), gate)
        await scene.client.open()
        scene.handle.lost = {"execute"}
        with pytest.raises(CacheUnavailable, match="the answer was lost"):
            await scene.client.acquire(PROMPT)
        scene.handle.lost.clear()
        async with asyncio.timeout(60):
            while (await cache.stats()).open_leases:  # noqa: ASYNC110 -- until it is given up with the next heartbeat
                await asyncio.sleep(0.002)
        task = asyncio.ensure_future(scene.client.acquire(PROMPT))  # it waits for the same load
        await scene.client.match(PROMPT)
        gate.pass_chunks()

        async with await task as lease:
            assert lease.prefix_len == ALL
        assert gate.num_begun == ALL // PAGE
        await scene.client.close()
        await scene.until_nothing_is_left()


async def test_a_connection_that_breaks_during_a_load_ends_the_session_and_its_lease() -> None:
    cache = LocalPrefixCache(host_config(leases=LeaseConfig(session_ttl_s=0.3)))
    gate = GatedLoads(cache)
    async with cache:
        await publish_on_host(cache, PROMPT)
        scene = Scene(cache, Unsteady(cache, UnixSocketServer(cache.service)), gate)
        task = asyncio.ensure_future(scene.client.acquire(PROMPT))
        await gate.until_begun()
        socket = scene.client.session.transport._socket  # type: ignore[attr-defined]
        socket.abort()

        with pytest.raises((LeaseExpired, UnknownLease, CacheUnavailable)):  # the last one: before it had its ticket
            await task
        async with asyncio.timeout(60):
            while (await cache.stats()).open_leases:  # noqa: ASYNC110 -- the end of a session has no event
                await asyncio.sleep(0.005)
        gate.pass_chunks()
        async with scene.client.acquire(PROMPT) as lease:  # in the next session
            assert lease.prefix_len == ALL
        await scene.client.close()
        await scene.until_nothing_is_left()


# ---------------------------------------------------------------- retries by hand


class Sent:
    """The requests of one lease, sent by hand over and over."""

    def __init__(self, wire: Wire, request: Message) -> None:
        self._wire = wire
        self._request = request

    async def again(self) -> Any:
        (response,) = await self._wire.execute(self._request)
        return response

    async def in_one_batch(self, number: int) -> tuple[Any, ...]:
        return await self._wire.execute(*[self._request] * number)


def acquire(wire: Wire, lease_id: str, **options: Any) -> Sent:
    return Sent(wire, AcquireRequest(lease_id=lease_id, tokens=TokenIds.pack(PROMPT), **options))


def lock(wire: Wire, lease_id: str, **options: Any) -> Sent:
    request = LockRequest(lease_id=lease_id, tokens=TokenIds.pack(PROMPT), offer_id=f"offer of {lease_id}", **options)
    return Sent(wire, request)


def check_is_loaded(response: Any, lease_id: str) -> None:
    assert isinstance(response, LeaseResponse), response
    assert (response.lease_id, response.prefix_len, response.loaded_len) == (lease_id, ALL, ALL)


ON_RAY = [pytest.param("ray", marks=pytest.mark.ray), pytest.param("calls", marks=[pytest.mark.ray, pytest.mark.more])]


@pytest.fixture(params=["local", *ON_RAY])
async def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CacheUnderTest]:
    """A cache with the prompt on its host tier."""
    if request.param == "calls":
        over_calls(monkeypatch)
    running: Callable[[Any], Any] | None = None
    if request.param != "local":
        running = request.getfixturevalue("running_cache")
    cache = CacheUnderTest.reached("local" if running is None else "ray", host_config(), running)
    async with cache.client.acquire(PROMPT) as lease:
        await lease.insert(PROMPT)
    await demote_first(cache.client)
    yield cache
    await cache.client.reset()
    await cache.close()


async def counts(cache: CacheUnderTest) -> Counter[str]:
    """Return counts that grow: other tests have used the same cache on Ray."""
    stats = await cache.client.stats()
    host = stats.host
    assert host is not None
    loads = {"loads": sum(host.loads.values()), "loaded": host.tokens_loaded, "unused": host.tokens_loaded_unused}
    return Counter(loads | {"reused": stats.tokens_reused})


@pytest.mark.parametrize("send", [acquire, lock])
async def test_a_retry_during_the_load_gets_the_same_ticket_and_one_after_it_the_lease(
    cache: CacheUnderTest, send: Callable[..., Sent]
) -> None:
    wire = Wire(cache)
    sent = send(wire, "mine")
    before = await counts(cache)

    first, during = await sent.in_one_batch(2)
    assert isinstance(first, WaitingResponse), first
    assert (during.ticket, first.loading_tokens, first.position) == (first.ticket, ALL, 0)
    for response in (await wire.wait(first.ticket), await sent.again()):
        check_is_loaded(response, "mine")
    with pytest.raises(UnknownLease, match="it was collected"):
        await wire.wait(first.ticket)
    assert (await cache.client.stats()).open_leases == 1
    assert await counts(cache) - before == Counter(loads=1, loaded=ALL, reused=ALL)
    await wire.execute(ReleaseRequest(lease_id="mine"))
    assert isinstance(await sent.again(), UnknownLease)


@pytest.mark.parametrize("send", [acquire, lock])
async def test_a_retry_before_the_outcome_is_collected_gets_the_lease(
    cache: CacheUnderTest, send: Callable[..., Sent]
) -> None:
    wire = Wire(cache)
    sent = send(wire, "mine")
    first = await sent.again()
    await cache.until(lambda stats: (stats.open_leases, stats.protected_slots) == (1, ALL))

    check_is_loaded(await sent.again(), "mine")
    check_is_loaded(await wire.wait(first.ticket), "mine")
    await wire.execute(AbortRequest(lease_id="mine"))


@pytest.mark.parametrize("send", [acquire, lock])
async def test_a_retry_of_a_queued_request_gets_its_place_and_then_the_lease(
    cache: CacheUnderTest, send: Callable[..., Sent]
) -> None:
    wire = Wire(cache)
    before = await counts(cache)
    blocker = await cache.client.acquire([7] * (64 - 2 * PAGE))
    sent = send(wire, "mine", timeout_s=60.0)

    queued = await sent.in_one_batch(2)
    assert [response.ticket for response in queued] == [queued[0].ticket] * 2
    assert [response.loading_tokens for response in queued] == [0, 0]
    assert (await cache.client.stats()).waiters == 1
    await blocker.release()

    check_is_loaded(await wire.wait(queued[0].ticket), "mine")
    check_is_loaded(await sent.again(), "mine")
    assert (await cache.client.stats()).waiters == 0
    assert await counts(cache) - before == Counter(loads=1, loaded=ALL, reused=ALL)
    await wire.execute(ReleaseRequest(lease_id="mine"))


async def test_a_request_given_up_during_the_load_is_not_granted_by_a_late_retry(cache: CacheUnderTest) -> None:
    wire = Wire(cache)
    sent = acquire(wire, "mine")
    before = await counts(cache)

    ticket, _ = await wire.execute(sent._request, AbortRequest(lease_id="mine"))

    with pytest.raises(UnknownLease):
        await wire.wait(ticket.ticket)
    assert isinstance(await sent.again(), UnknownLease)
    await cache.until(lambda stats: stats.host is not None and not stats.host.moves_in_flight)
    assert (await cache.client.stats()).open_leases == 0
    assert await counts(cache) - before == Counter(loads=1, unused=ALL)


# ---------------------------------------------------------------- many clients of one cache


async def test_64_requests_of_many_clients_load_their_prompt_once_in_a_pool_that_holds_4(cache: CacheUnderTest) -> None:
    clients = [cache.client, *(cache.another_client() for _ in range(3))]
    before = await counts(cache)

    async def serve(number: int) -> int:
        async with clients[number % 4].acquire([*PROMPT, 1000 + number], new_tokens=2 * PAGE) as lease:
            assert lease.prefix_len == ALL
            return sum(lease.loaded)

    loaded = await asyncio.gather(*(serve(number) for number in range(64)))

    assert sorted(loaded) == [0] * 63 + [ALL]
    assert await counts(cache) - before == Counter(loads=1, loaded=ALL, reused=64 * ALL)


async def test_requests_that_are_cancelled_and_clients_that_close_meanwhile_leave_nothing(
    cache: CacheUnderTest,
) -> None:
    for ticks in range(0, 30, 3):
        leaving = cache.another_client()
        await leaving.open()
        tasks = [asyncio.ensure_future(client.acquire(PROMPT)) for client in (cache.client, leaving)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait((tasks[0], asyncio.ensure_future(leaving.close())))
        for task in tasks:
            await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is None and not task.result().client.closed:
                await task.result().release()

        await cache.until(
            lambda stats: not stats.open_leases and stats.host is not None and not stats.host.moves_in_flight
        )
        await cache.client.check_invariants()
        await cache.client.evict(10**6)


# ---------------------------------------------------------------- the end of the cache


@pytest.mark.parametrize("verb", VERBS)
async def test_a_cache_that_closes_during_a_load_fails_its_request_behind_one_chunk(verb: str) -> None:
    cache = LocalPrefixCache(host_config())
    gate = GatedLoads(cache)
    await publish_on_host(cache, PROMPT)
    client = PrefixCacheClient(cache)
    task = asyncio.ensure_future(getattr(client, verb.split()[0])(PROMPT, **VERBS[verb]))
    await gate.until_begun()
    threading.Timer(0.05, gate.pass_chunks, (1,)).start()  # The close stands still until the chunk has ended.

    await cache.close()

    with pytest.raises(CacheUnavailable):
        await task
    assert gate.num_begun == 1
    cache.service.core.check_invariants()
    stats = cache.service.stats()
    assert (stats.open_leases, stats.private_slots, stats.protected_slots) == (0, 0, 0)
    assert stats.host is not None
    assert (stats.host.state, stats.host.moves_in_flight) == ("closed", 0)
    await client.close()


async def test_a_cache_that_drains_during_a_load_refuses_its_request() -> None:
    cache = LocalPrefixCache(host_config())
    gate = GatedLoads(cache)
    await publish_on_host(cache, PROMPT)
    client = PrefixCacheClient(cache)
    tasks = [asyncio.ensure_future(client.acquire(PROMPT)) for _ in range(2)]
    await gate.until_begun()
    closing = asyncio.ensure_future(cache.close(drain_s=60))
    for task in tasks:
        with pytest.raises(CacheUnavailable, match=r"shut|drain"):
            await task
    gate.pass_chunks()

    async with asyncio.timeout(30):
        await closing
    stats = cache.service.stats()
    assert (stats.open_leases, stats.private_slots) == (0, 0)
    await client.close()
