"""The contract of the end of a lease, by any client and any number of times. See `test_contract_match`."""

from __future__ import annotations

import asyncio

import pytest
from support.caches.cache_kinds import counts_pages, only
from support.caches.cache_under_test import CacheUnderTest, holding, pools_of

from raydix.actors import Lease
from raydix.schemas import UnknownLease


@only(counts_pages)
@pytest.mark.parametrize("ends", ["release release", "abort abort", "release abort", "abort release"])
async def test_ending_a_lease_twice_is_ending_it_once(cache: CacheUnderTest, ends: str) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    await cache.insert(lease, 1, 2)

    for end in ends.split():
        await getattr(lease, end)()

    assert await cache.pages() == holding(evictable=cache.reusable(2))
    await cache.client.check_invariants()


async def test_ending_a_lease_from_several_coroutines_at_once_ends_it_once(cache: CacheUnderTest) -> None:
    lease, client = await cache.client.acquire(cache.tokens(1, 2)), cache.client

    await asyncio.gather(lease.release(), lease.abort(), client.release(lease), client.abort(lease))

    assert await cache.is_empty()


@only(counts_pages)
async def test_leaving_the_block_releases_the_lease(cache: CacheUnderTest) -> None:
    kept = cache.reusable(2)
    async with await cache.client.acquire(cache.tokens(1, 2), new_tokens=cache.page_size) as lease:
        await cache.insert(lease, 1, 2)
        assert await cache.pages() == holding(private=3 - kept, protected=kept, leases=1)

    assert await cache.pages() == holding(evictable=kept)


@only(counts_pages)
async def test_an_exception_in_the_block_aborts_the_lease_and_comes_out(cache: CacheUnderTest) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await cache.client.acquire(cache.tokens(1, 2), new_tokens=cache.page_size) as lease:
            await cache.insert(lease, 1, 2)
            raise ZeroDivisionError

    assert await cache.pages() == holding(evictable=cache.reusable(2))  # the insert took effect as a whole, so it stays


async def test_cancelling_the_block_aborts_the_lease(cache: CacheUnderTest) -> None:
    inside = asyncio.Event()

    async def request() -> None:
        async with await cache.client.acquire(cache.tokens(1, 2)):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await cache.is_empty()


async def test_a_lease_released_in_the_block_is_left_alone_at_its_end(cache: CacheUnderTest) -> None:
    async with await cache.client.acquire(cache.tokens(1, 2)) as lease:
        await cache.insert(lease, 1, 2, release=True)

    assert await cache.matched(1, 2) == cache.reusable(2)
    assert (await cache.client.stats()).open_leases == 0


@only(counts_pages)
async def test_closing_a_client_ends_its_leases_and_no_others(cache: CacheUnderTest) -> None:
    kept = cache.reusable(2)
    leaving = cache.another_client()
    await leaving.acquire(cache.tokens(1, 2))
    held = await leaving.acquire(cache.tokens(3, 4))
    await cache.insert(held, 3, 4)
    staying = await cache.client.acquire(cache.tokens(5, 6))

    await leaving.close()
    await leaving.close()

    assert await cache.pages() == holding(private=2, evictable=kept, leases=1)
    await held.release()  # ended with its session: no error, no effect
    await cache.insert(staying, 5, 6)
    assert await cache.pages() == holding(private=2 - kept, evictable=kept, protected=kept, leases=1)


@only(counts_pages)
async def test_the_verbs_on_the_client_are_those_on_the_lease(cache: CacheUnderTest) -> None:
    client, page, kept = cache.client, cache.page_size, cache.reusable(2)
    lease = await client.acquire(cache.tokens(1))

    assert (await client.extend(lease, page)).tolist() == lease.slots[page:].tolist()
    assert (await client.insert(lease, cache.tokens(1, 2))).num_inserted == kept * page
    await client.release(lease)

    assert await cache.pages() == holding(evictable=kept)


@pytest.mark.parametrize("end", ["release", "abort", "close"])
async def test_an_ended_lease_can_do_nothing_more(cache: CacheUnderTest, end: str) -> None:
    client = cache.another_client()
    lease = await client.acquire(cache.tokens(1))
    await (client.close() if end == "close" else getattr(lease, end)())
    client = cache.client if end == "close" else client

    for use in (lambda: client.insert(lease, cache.tokens(1)), lambda: client.extend(lease, 1)):
        with pytest.raises(UnknownLease, match=r"has ended|belongs to another"):
            await use()

    assert await cache.is_empty()


# ---------------------------------------------------------------- cancelled at every await


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
async def test_an_acquire_cancelled_after_any_number_of_ticks_leaves_no_lease(
    cache: CacheUnderTest, room: bool
) -> None:
    await cache.publish(1, 2)
    keeper = await cache.client.lock(cache.tokens(1, 2))
    held = [keeper, *([] if room else await cache.fill())]
    before = (await cache.client.stats()).model_dump(include={"private_slots", "protected_slots", "swa", "state"})
    for ticks in range(16):
        task = asyncio.create_task(cache.client.acquire(cache.tokens(1, 2, 3)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await end_of(task)

        stats = await cache.client.stats()
        assert (stats.open_leases, stats.waiters) == (len(held), 0), f"cancelled after {ticks} ticks"
        assert stats.model_dump(include=set(before)) == before, f"cancelled after {ticks} ticks"


async def test_whole_requests_cancelled_at_any_moment_leave_nothing_private(cache: CacheUnderTest) -> None:
    page = cache.page_size

    async def request() -> None:
        async with await cache.client.acquire(cache.tokens(1, 2), new_tokens=page, timeout_s=20) as lease:
            await cache.insert(lease, 1, 2, 3)
            await lease.extend(page)
            await cache.insert(lease, 1, 2, 3, 4)

    for ticks in range(0, 48, 3):
        tasks = [asyncio.create_task(request()) for _ in range(2)]
        for _ in range(ticks):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    stats = await cache.client.stats()
    assert (stats.open_leases, stats.waiters) == (0, 0)
    assert not any(pool.private_slots or pool.protected_slots for pool in pools_of(stats))
    assert await cache.matched(1, 2, 3, 4) <= cache.reusable(4)
    await cache.client.check_invariants()


async def end_of(task: asyncio.Task[Lease]) -> None:
    """Wait for a cancelled task; if it has a lease nevertheless, release it."""
    await asyncio.wait((task,))
    if not task.cancelled():
        await task.result().release()
