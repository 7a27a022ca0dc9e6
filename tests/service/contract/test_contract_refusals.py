"""The contract of refused and waiting requests. See `test_contract_match`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.caches.cache_kinds import MAX_WAITERS, counts_pages, has_no_window, has_states, only, shares
from support.caches.cache_under_test import CacheUnderTest
from support.caches.raw_calls import counts

from raydix.actors import Lease
from raydix.schemas import CacheBusy, CacheError, InvalidRequest, PoolExhausted, UnknownLease

# ---------------------------------------------------------------- mistakes

Misuse = Callable[[CacheUnderTest, Lease], Awaitable[Any]]

MISUSES: dict[str, Misuse] = {  # of a lease for pages 1, 2, 3
    "insert beyond the lease": lambda cache, lease: lease.insert(cache.tokens(1, 2, 3, 4)),
    "insert other tokens": lambda cache, lease: lease.insert(cache.tokens(1, 2, 4)),
    "insert another beginning": lambda cache, lease: lease.insert(cache.tokens(9)),
    "insert other tokens and release": lambda cache, lease: lease.insert(cache.tokens(1, 2, 4), release=True),
    "insert nothing": lambda cache, lease: lease.insert([]),
    "insert no ids": lambda cache, lease: lease.insert(["1"]),
    "extend by nothing": lambda cache, lease: lease.extend(0),
    "release the window before the beginning": lambda cache, lease: lease.release_window(-1),
    "release the window beyond the lease": lambda cache, lease: lease.release_window(len(lease) + 1),
    "acquire nothing": lambda cache, lease: cache.client.acquire([]),
    "acquire negative ids": lambda cache, lease: cache.client.acquire([-1]),
    "acquire a negative number": lambda cache, lease: cache.client.acquire([1], new_tokens=-1),
    "acquire a negative prefix": lambda cache, lease: cache.client.acquire([1], max_prefix_len=-1),
    "wait less than no time": lambda cache, lease: cache.client.acquire([1], timeout_s=-1),
    "lock nothing": lambda cache, lease: cache.client.lock([]),
    "match nothing": lambda cache, lease: cache.client.match([]),
    "match in a wrong namespace": lambda cache, lease: cache.client.match([1], extra_key=7),  # type: ignore[arg-type]
    "evict a negative number": lambda cache, lease: cache.client.evict(-1),
}


async def test_a_mistake_is_refused_and_changes_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    slots, before = lease.slots.tolist(), await counts(cache.client)

    for name, misuse in MISUSES.items():
        with pytest.raises(InvalidRequest):
            await misuse(cache, lease)
        assert await counts(cache.client) == before, name

    assert lease.slots.tolist() == slots
    await cache.insert(lease, 1, 2, 3, release=True)  # the lease is still usable
    assert await cache.matched(1, 2, 3) == cache.reusable(3)


async def test_another_clients_lease_is_unknown(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))
    other = cache.another_client()
    await other.open()
    before = await counts(cache.client)

    uses: list[Callable[[], Awaitable[Any]]] = [
        lambda: other.insert(lease, cache.tokens(1, 2)),
        lambda: other.extend(lease, 1),
        lambda: other.release_window(lease, 1),
        lambda: other.release(lease),
        lambda: other.unlock(lease),
        lambda: other.abort(lease),
    ]
    for use in uses:
        with pytest.raises(UnknownLease, match="belongs to another client"):
            await use()

    assert await counts(cache.client) == before


@only(has_states)
async def test_a_state_is_published_after_whole_pages_at_the_end_of_the_leases_tokens(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    await cache.insert(lease, 1, 2)
    before = await counts(cache.client)

    with pytest.raises(InvalidRequest, match="publish_state needs all published tokens"):
        await cache.insert(lease, 1)
    if cache.page_size > 1:
        with pytest.raises(InvalidRequest, match="publish_state needs whole pages"):
            await lease.insert(cache.tokens(1, 2, 3)[:-1], publish_state=True)

    assert await counts(cache.client) == before


@only(has_no_window)
async def test_without_a_window_there_are_no_window_slots_and_giving_them_up_has_no_effect(
    cache: CacheUnderTest,
) -> None:
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    before = await counts(cache.client)

    await lease.release_window(len(lease))

    assert await counts(cache.client) == before
    with pytest.raises(InvalidRequest, match="no sliding window"):
        _ = lease.swa_slots


# ---------------------------------------------------------------- sizes beyond the pool

TOO_LARGE: dict[str, Misuse] = {
    "a prompt": lambda cache, lease: cache.client.acquire(cache.tokens(*[9] * 9)),
    "new tokens": lambda cache, lease: cache.client.acquire(cache.tokens(9), new_tokens=8 * cache.page_size),
    "a cached prompt": lambda cache, lease: cache.client.acquire(cache.tokens(1, 2), new_tokens=7 * cache.page_size),
    "a lease that grows": lambda cache, lease: lease.extend(6 * cache.page_size),
    "one that would wait": lambda cache, lease: cache.client.acquire(cache.tokens(*[9] * 9), timeout_s=60),
}


@only(counts_pages)
async def test_a_request_larger_than_the_pool_is_refused_immediately(cache: CacheUnderTest) -> None:
    page, held = cache.page_size, cache.reusable(2)
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    for name, asked in TOO_LARGE.items():
        async with asyncio.timeout(25):
            with pytest.raises(PoolExhausted, match="can never fit: shorten the request or enlarge") as caught:
                await asked(cache, lease)

        error = caught.value
        assert (error.needed, error.free, error.evictable) == (9 * page, 5 * page, 0), name
        assert (error.held_slots, error.open_leases, error.can_ever_fit) == (3 * page, 1, False), name
    assert await cache.matched(1, 2) == held


COUNTED: dict[str, Callable[[CacheUnderTest, Lease, int], Awaitable[Any]]] = {
    "evict": lambda cache, lease, count: cache.client.evict(count),
    "new tokens": lambda cache, lease, count: cache.client.acquire(cache.tokens(1, 2), new_tokens=count),
    "a limit": lambda cache, lease, count: hits(cache.client.acquire(cache.tokens(1, 2), max_prefix_len=count)),
    "a lease that grows": lambda cache, lease, count: lease.extend(count),
    "a window": lambda cache, lease, count: lease.release_window(count),
}


async def hits(acquired: Awaitable[Lease]) -> int:
    """Return the number of tokens that a lease hits; the lease is released."""
    async with await acquired as lease:
        return lease.prefix_len


async def answer(asked: Awaitable[Any]) -> tuple[type[Any], str]:
    """Return the answer or refusal to a request for this number, without the number itself."""
    try:
        given = await asked
    except CacheError as refused:
        return type(refused), re.sub(r"\d[\d,.]*\b", "n", str(refused))
    return type(given), str(given)


@pytest.mark.parametrize("count", [2**63, 2**70, 10**5000], ids=["2**63", "2**70", "too long to print"])
async def test_a_huge_number_is_answered_as_a_large_one_is(cache: CacheUnderTest, count: int) -> None:
    lease = await cache.client.acquire(cache.tokens(5, 6))
    for name, asked in COUNTED.items():
        answers = []
        for each in (2**31, count):
            await cache.publish(1, 2)
            answers.append(await answer(asked(cache, lease, each)))

        assert answers[0] == answers[1], name
        assert answers[0][0] is not CacheError, name
    await lease.extend(cache.page_size)
    await lease.release()
    await cache.client.evict(count)
    assert await cache.is_empty()


@only(counts_pages)
async def test_a_request_without_free_slots_gets_an_error_that_names_the_slots_in_use(cache: CacheUnderTest) -> None:
    page, kept = cache.page_size, cache.reusable(2)
    await cache.publish(1, 2)
    await cache.client.acquire(cache.tokens(3, 4))

    with pytest.raises(PoolExhausted, match="release leases, raise timeout_s, or enlarge") as caught:
        await cache.client.acquire(cache.tokens(*[9] * 7), timeout_s=0)

    error = caught.value
    assert (error.needed, error.free, error.evictable) == (7 * page, (6 - kept) * page, kept * page)
    assert (error.held_slots, error.open_leases, error.can_ever_fit) == (2 * page, 1, True)
    assert await cache.matched(1, 2) == kept


# ---------------------------------------------------------------- waiting requests


async def test_a_request_without_free_slots_waits_for_a_release(cache: CacheUnderTest) -> None:
    held = await cache.fill()
    (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(1)))

    await held[0].release()

    lease = await waiting
    assert len(lease) == cache.page_size
    stats = await cache.client.stats()
    assert (stats.waiters, stats.open_leases, stats.free_slots) == (0, len(held), 0)


async def test_those_in_line_are_served_first_in_first_out_whosever_clients_they_are(cache: CacheUnderTest) -> None:
    held = await cache.fill()
    clients = (cache.client, cache.another_client(), cache.another_client())
    tasks = await cache.in_line(*(client.acquire(cache.tokens(number)) for number, client in enumerate(clients)))

    for served in range(3):
        await held[served].release()
        await tasks[served]
        assert not any(task.done() for task in tasks[served + 1 :])


@only(counts_pages)
async def test_a_request_never_overtakes_waiting_ones_even_if_it_would_fit(cache: CacheUnderTest) -> None:
    first, second, *_ = await cache.fill()
    (large,) = await cache.in_line(cache.client.acquire(cache.tokens(1, 2)))
    await first.release()

    with pytest.raises(PoolExhausted):
        await cache.another_client().acquire(cache.tokens(3), timeout_s=0)  # a page for it is free

    await second.release()
    assert len(await large) == 2 * cache.page_size


@only(shares)
async def test_a_request_that_waited_hits_pages_published_meanwhile(cache: CacheUnderTest) -> None:
    publisher = await cache.client.acquire(cache.tokens(1, 2))
    held = await cache.fill()
    (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(1, 2, 3)))

    await cache.insert(publisher, 1, 2)
    for lease in held:
        await lease.release()

    assert (await waiting).prefix_len == cache.reusable(2) * cache.page_size


async def test_published_and_released_pages_are_evicted_for_a_waiting_request(cache: CacheUnderTest) -> None:
    publisher = await cache.client.acquire(cache.tokens(1))
    await cache.fill()
    (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(9)))

    await cache.insert(publisher, 1, release=True)

    assert len(await waiting) == cache.page_size


async def test_a_request_that_waits_in_vain_is_refused_at_the_deadline(cache: CacheUnderTest) -> None:
    held = await cache.fill()

    for timeout_s in (0, 0.01):
        with pytest.raises(PoolExhausted) as caught:
            await cache.client.acquire(cache.tokens(1), timeout_s=timeout_s)

        error = caught.value
        assert (error.free, error.evictable, error.can_ever_fit) == (0, 0, True)
        assert error.needed > 0
        assert (error.held_slots, error.open_leases) == ((await cache.client.stats()).num_slots, len(held))
    assert (await cache.client.stats()).waiters == 0


async def test_beyond_the_bound_of_the_line_the_cache_is_busy(cache: CacheUnderTest) -> None:
    held = await cache.fill()
    tasks = await cache.in_line(*(cache.client.acquire(cache.tokens(number)) for number in range(MAX_WAITERS)))

    with pytest.raises(CacheBusy, match="3 requests wait for room already; try again in"):
        await cache.client.acquire(cache.tokens(9))

    for lease in held[:MAX_WAITERS]:
        await lease.release()
    assert [len(await task) for task in tasks] == [cache.page_size] * MAX_WAITERS


async def test_a_cancelled_request_leaves_the_queue(cache: CacheUnderTest) -> None:
    held = await cache.fill()
    first, second = await cache.in_line(*(cache.client.acquire(cache.tokens(number)) for number in (1, 2)))

    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await cache.until(lambda stats: stats.waiters == 1)
    await held[0].release()

    assert len(await second) == cache.page_size
    assert (await cache.client.stats()).open_leases == len(held)


async def test_a_closing_client_removes_its_requests_from_the_queue(cache: CacheUnderTest) -> None:
    leaving = cache.another_client()
    await cache.fill()
    (waiting,) = await cache.in_line(leaving.acquire(cache.tokens(1)))

    await leaving.close()

    with pytest.raises((UnknownLease, InvalidRequest)):
        await waiting
    assert (await cache.client.stats()).waiters == 0


@only(counts_pages)
async def test_a_lease_that_cannot_grow_waits_and_is_as_before_if_it_gives_up(cache: CacheUnderTest) -> None:
    lease, other, *_ = await cache.fill()
    slots, page = lease.slots.tolist(), cache.page_size
    with pytest.raises(PoolExhausted):
        await lease.extend(page, timeout_s=0.01)
    (cancelled,) = await cache.in_line(lease.extend(page))
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await cache.until(lambda stats: stats.waiters == 0)
    assert lease.slots.tolist() == slots
    (growing,) = await cache.in_line(lease.extend(page))

    await other.release()

    added = await growing
    assert lease.slots.tolist() == slots + added.tolist()
