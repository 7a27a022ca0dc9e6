"""Lost and reordered answers: afterwards a lease has the slots that the cache has recorded, or raises an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from support.caches.unsteady_handle import Unsteady

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.client import client_session
from raydix.actors.transport import ray_transport
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.schemas import CacheConfig, CacheUnavailable, LeaseConfig, PoolConfig

PROMPT = [1, 2, 3, 4]


@pytest.fixture
async def cache() -> AsyncIterator[LocalPrefixCache]:
    pool = PoolConfig.uniform(num_slots=32, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", device="cpu")
    config = CacheConfig(pool=pool, sliding_window_size=2, leases=LeaseConfig(session_ttl_s=0.3))
    async with LocalPrefixCache(config) as cache:
        yield cache


@pytest.fixture
async def handle(cache: LocalPrefixCache) -> Unsteady:
    return Unsteady(cache)


@pytest.fixture
async def client(handle: Unsteady) -> AsyncIterator[PrefixCacheClient]:
    async with PrefixCacheClient(handle) as client:
        yield client


async def overtaken(client: PrefixCacheClient, cache: LocalPrefixCache, prompt: list[int]) -> Lease:
    """Return a lease, after another client has published the same prompt."""
    lease = await client.acquire(prompt, new_tokens=2)
    await (await cache.acquire(prompt)).insert(prompt, release=True)
    return lease


async def unanswered(handle: Unsteady, method: str, verb: Awaitable[Any]) -> None:
    """Await a verb and lose the answer of the method that it calls."""
    handle.lost = {method}
    with pytest.raises(CacheUnavailable):
        await verb
    handle.lost.clear()


def check_slots(cache: LocalPrefixCache, lease: Lease) -> LeaseRecord:
    """Check that a lease and the cache agree on its slots, and return the cache's record."""
    core = cache._host.service.core
    record = core.leases.get(lease.lease_id, lease.transport.session_id)
    assert lease.slots.tolist() == record.starts.tolist()
    assert lease.swa_slots.tolist() == core.swa_starts(record).tolist()
    return record


def check_known(cache: LocalPrefixCache, lease: Lease) -> None:
    record = check_slots(cache, lease)
    assert lease.published_len == cache._host.service.core.published_len(record)


# ---------------------------------------------------------------- inserts


async def test_after_an_insert_that_was_not_answered_another_tells_of_both(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await overtaken(client, cache, PROMPT)
    before = lease.slots.tolist()
    await unanswered(handle, "execute", lease.insert(PROMPT))

    response = await lease.insert([*PROMPT, 5])

    assert (response.prefix_len, response.num_inserted, response.num_duplicates) == (4, 1, 0)
    assert lease.slots.tolist() != before
    check_known(cache, lease)
    assert len(await lease.extend(2)) == 2


async def test_slots_that_may_be_others_by_now_are_not_given(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await overtaken(client, cache, PROMPT)
    await unanswered(handle, "execute", lease.insert(PROMPT))

    for look in (lambda: lease.slots, lambda: lease.swa_slots):
        with pytest.raises(CacheUnavailable, match="was not answered: insert again, or abort it"):
            look()
    await lease.insert(PROMPT)
    check_known(cache, lease)


async def test_a_growth_tells_of_the_slots_of_an_insert_that_was_not_answered(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await overtaken(client, cache, PROMPT)
    await unanswered(handle, "execute", lease.insert(PROMPT))

    assert len(await lease.extend(2)) == 2

    check_slots(cache, lease)
    assert (lease.published_len, (await lease.insert(PROMPT)).num_inserted) == (0, 0)
    check_known(cache, lease)


async def test_a_growth_asked_for_before_an_insert_was_lost_tells_of_its_slots(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await overtaken(client, cache, PROMPT)
    handle.lost = {"execute"}
    inserting = asyncio.create_task(lease.insert(PROMPT))
    await asyncio.sleep(0)
    client.session.transport._pump(asyncio.get_running_loop())  # sends the insert
    handle.lost.clear()
    growing = asyncio.create_task(lease.extend(2))
    with pytest.raises(CacheUnavailable):
        await inserting

    await growing

    check_slots(cache, lease)


async def test_an_insert_answered_while_a_growth_stood_in_line_is_not_undone_by_it(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await overtaken(client, cache, PROMPT)
    late = handle.held_back["wait"] = asyncio.Event()
    async with await cache.lock(PROMPT), await cache.acquire([7] * 22):
        growing = asyncio.create_task(lease.extend(4))
        while not (await cache.stats()).waiters:  # noqa: ASYNC110 -- the extend is in the queue then
            await asyncio.sleep(0)
    while cache._host.service.wait_queue._by_ticket:  # noqa: ASYNC110 -- the extend is served and its answer sent then
        await asyncio.sleep(0)

    await lease.insert(PROMPT)
    late.set()
    await growing

    check_known(cache, lease)


async def test_an_insert_that_was_refused_leaves_no_doubt(cache: LocalPrefixCache, client: PrefixCacheClient) -> None:
    lease = await client.acquire(PROMPT)
    await cache.reset()

    assert (await lease.insert(PROMPT)).retired

    check_known(cache, lease)


async def test_of_two_inserts_the_answer_to_the_first_may_come_last(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await overtaken(client, cache, PROMPT)
    late = handle.held_back["execute"] = asyncio.Event()
    first = asyncio.create_task(lease.insert(PROMPT[:2]))
    while handle.held_back:  # noqa: ASYNC110 -- the first is sent then
        await asyncio.sleep(0)

    await lease.insert(PROMPT)
    check_known(cache, lease)
    late.set()
    await first

    check_known(cache, lease)


async def test_a_window_given_up_while_the_lease_stood_in_line_stays_given_up(cache: LocalPrefixCache) -> None:
    lease = await cache.acquire(PROMPT)
    other = await cache.acquire([7] * 28)
    growing = asyncio.create_task(lease.extend(2))
    while not (await cache.stats()).waiters:  # noqa: ASYNC110 -- the extend is in the queue then
        await asyncio.sleep(0)

    await other.release()  # the extend is served, but its coroutine has not resumed yet
    await lease.release_window(5)
    await growing

    assert lease.swa_slots[:2].tolist() == [0, 0]
    check_known(cache, lease)
    await lease.release()


async def test_a_window_whose_release_was_not_answered_is_not_given_until_another_answer_tells_of_it(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    lease = await client.acquire([*PROMPT, 5, 6])
    for heal in (lambda: lease.release_window(5), lambda: lease.extend(1), lambda: lease.insert(PROMPT)):
        await unanswered(handle, "execute", lease.release_window(5))

        assert len(lease.slots) == len(lease)  # `release_window` does not change them
        with pytest.raises(CacheUnavailable, match=r"release_window of lease .* was not answered"):
            lease.swa_slots  # noqa: B018
        await heal()
        check_slots(cache, lease)


async def test_an_adoption_that_was_lost_with_its_undoing_does_not_end_one_made_anew(
    cache: LocalPrefixCache, handle: Unsteady, client: PrefixCacheClient
) -> None:
    grant = await (await cache.acquire(PROMPT)).grant()
    handle.loss = 1.0
    with pytest.raises(CacheUnavailable):
        await client.adopt(grant)
    while client.session._compensations:  # noqa: ASYNC110 -- until its abort is also lost
        await asyncio.sleep(0)
    handle.loss = 0.0

    lease = await client.adopt(grant)
    async with asyncio.timeout(20):
        while client.session._undos or client.session._compensations:  # noqa: ASYNC110 -- until the next heartbeat
            await asyncio.sleep(0.01)

    assert (await lease.insert(PROMPT)).num_inserted == 4


# ---------------------------------------------------------------- sessions


async def test_a_client_whose_opening_was_not_answered_may_come_back_after_any_time(
    cache: LocalPrefixCache, handle: Unsteady
) -> None:
    client = PrefixCacheClient(handle)
    await unanswered(handle, "open_session", client.match(PROMPT))
    async with asyncio.timeout(60):
        while cache._host.service.stats().open_sessions > 1:  # noqa: ASYNC110 -- the session it does not know of
            await asyncio.sleep(0.01)

    assert (await client.match(PROMPT)).prefix_len == 0

    await client.close()


async def test_a_client_whose_opening_is_not_answered_can_be_closed(
    handle: Unsteady, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_session, "_OPENING_S", 0.05)
    client = PrefixCacheClient(handle)
    handle.held_back["open_session"] = asyncio.Event()
    asked = asyncio.create_task(client.match(PROMPT))
    await asyncio.sleep(0)

    async with asyncio.timeout(20):
        await client.close()
        with pytest.raises(CacheUnavailable, match=r"has not answered for 0\.05 s"):
            await asked


async def test_a_session_whose_last_requests_are_not_answered_is_closed_all_the_same(
    cache: LocalPrefixCache, handle: Unsteady, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_transport, "_CLOSE_S", 0.02)
    client = PrefixCacheClient(handle)
    await client.acquire(PROMPT)
    handle.held_back["execute"] = asyncio.Event()
    asked = asyncio.create_task(client.match(PROMPT))
    await asyncio.sleep(0)

    await client.close()
    with pytest.raises(CacheUnavailable, match=r"has not answered for 0\.02 s"):
        await asked
    async with asyncio.timeout(20):
        while (stats := await cache.stats()).open_sessions > 1:  # noqa: ASYNC110 -- until the close arrives
            await asyncio.sleep(0)

    assert (stats.expired_sessions, stats.quarantined_slots, stats.free_slots) == (0, 0, 32)


async def test_what_an_opening_failed_with_is_not_told_to_whoever_comes_later(
    cache: LocalPrefixCache, handle: Unsteady
) -> None:
    client = PrefixCacheClient(handle)
    handle.lost = {"open_session"}
    first = asyncio.create_task(client.match(PROMPT))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    opening = client.session._opening
    assert opening is not None
    await asyncio.wait((opening,))  # it fails, and no caller waits for it
    handle.lost.clear()

    assert (await client.match(PROMPT)).prefix_len == 0

    await client.close()
