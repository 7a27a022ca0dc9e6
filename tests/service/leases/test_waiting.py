"""Requests that find no room wait in one FIFO queue, each with a deadline, and none is left in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from support.caches.cache_kinds import MAX_WAITERS, TIGHT_STATES, KindUnderTest, slots, window
from support.caches.cache_under_test import CacheUnderTest, Pages, Reached, small_config

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.service.cache_service import CacheService
from raydix.schemas import (
    Ack,
    AcquireRequest,
    CacheBusy,
    CacheConfig,
    CacheError,
    CacheStats,
    CacheUnavailable,
    CloseSession,
    InvalidRequest,
    LeaseConfig,
    LeaseResponse,
    LockRequest,
    OpenSession,
    PoolConfig,
    PoolExhausted,
    ReleaseRequest,
    TenantConfig,
    TokenIds,
    UnknownLease,
    WaitingResponse,
    WaitRequest,
)


def empty(stats: CacheStats) -> bool:
    return (stats.free_slots, stats.open_leases, stats.waiters) == (8, 0, 0)


async def fill(cache: CacheUnderTest, *sizes: int) -> list[Lease]:
    """Acquire one lease per size, with that number of slots. None of the slots can be evicted."""
    return [await cache.client.acquire([100 + number] * size) for number, size in enumerate(sizes)]


# ---------------------------------------------------------------- order


async def test_those_in_line_are_served_first_in_first_out(cache1: CacheUnderTest) -> None:
    held = await fill(cache1, 1, 1, 1, 5)
    served: list[int] = []

    async def request(number: int) -> None:
        await cache1.client.acquire([number])
        served.append(number)

    tasks = await cache1.in_line(request(1), request(2), request(3))
    for number in range(1, 4):
        await held[number - 1].release()
        await tasks[number - 1]

    assert served == [1, 2, 3]
    assert await cache1.pages() == Pages(free=0, private=8, leases=4)


async def test_the_line_is_one_for_all_clients(cache1: CacheUnderTest) -> None:
    (held,) = await fill(cache1, 8)
    others = [cache1.another_client() for _ in range(3)]
    tasks = await cache1.in_line(*(client.acquire([number] * 4) for number, client in enumerate(others)))

    await held.release()

    await asyncio.gather(*tasks[:2])
    assert not tasks[2].done()
    await others[0].close()
    assert (await tasks[2]).slots.numel() == 4


async def test_nobody_overtakes_whom_there_is_room_for(cache1: CacheUnderTest) -> None:
    held, _ = await fill(cache1, 3, 4)
    large, small = await cache1.in_line(cache1.client.acquire([1, 1, 1]), cache1.client.acquire([2]))
    assert await cache1.pages() == Pages(free=1, private=7, leases=2)  # enough for the small one

    with pytest.raises(PoolExhausted):
        await cache1.client.acquire([3], timeout_s=0)

    await held.release()
    assert (len(await large), len(await small)) == (3, 1)


@pytest.mark.parametrize("kind", [slots(1), TIGHT_STATES], ids=str)
async def test_a_lock_behind_a_release_in_one_message_takes_no_room_from_those_in_line(kind: KindUnderTest) -> None:
    service = CacheService(kind.cache_config(), epoch="e")
    service.open_session(OpenSession(session_id="s", owner="test"))
    acquires = [AcquireRequest(lease_id=str(number), tokens=TokenIds.pack([number])) for number in range(9)]
    granted = service.execute("s", "e", tuple(acquires)).responses
    first = next(each for each in granted if isinstance(each, WaitingResponse))

    release, lock = ReleaseRequest(lease_id="0"), LockRequest(lease_id="lock", tokens=TokenIds.pack([20]))
    done = service.execute("s", "e", (release, lock)).responses

    assert list(map(type, done)) == [Ack, PoolExhausted]
    waited = await service.wait(WaitRequest(session_id="s", epoch="e", ticket=first.ticket))
    assert isinstance(waited, LeaseResponse)
    service.reaper.close("s")


async def test_who_will_not_wait_has_what_those_in_line_leave_of_a_release_in_its_message() -> None:
    service = CacheService(small_config(), epoch="e")
    service.open_session(OpenSession(session_id="s", owner="test"))
    held, waiting, at_once = (
        AcquireRequest(lease_id=str(size), tokens=TokenIds.pack([size] * size)) for size in (8, 6, 2)
    )
    service.execute("s", "e", (held, waiting))

    at_once = replace(at_once, timeout_s=0)
    _, lease = service.execute("s", "e", (ReleaseRequest(lease_id="8"), at_once)).responses

    assert (lease.num_slots, service.stats().waiters, service.stats().private_slots) == (2, 0, 8)
    service.reaper.close("s")


async def test_what_one_release_frees_serves_as_many_as_it_can(cache1: CacheUnderTest) -> None:
    (held,) = await fill(cache1, 8)
    tasks = await cache1.in_line(*(cache1.client.acquire([number] * 3) for number in range(3)))

    await held.release()

    assert [len(await task) for task in tasks[:2]] == [3, 3]
    assert await cache1.pages() == Pages(free=2, private=6, leases=2)
    assert (await cache1.client.stats()).waiters == 1
    tasks[2].cancel()


async def test_a_lease_that_grows_goes_before_new_ones(cache1: CacheUnderTest) -> None:
    growing, _, held = await fill(cache1, 2, 5, 1)
    new, growth = await cache1.in_line(cache1.client.acquire([1]), growing.extend(1))

    await held.release()

    assert len(await growth) == 1
    assert not new.done()
    await growing.release()
    assert len(await new) == 1


async def test_a_lease_grows_past_the_line_where_there_is_room(cache1: CacheUnderTest) -> None:
    growing, _ = await fill(cache1, 2, 5)
    (new,) = await cache1.in_line(cache1.client.acquire([1, 1]))

    added = await growing.extend(1, timeout_s=0)

    assert len(added) == 1
    assert not new.done()
    await growing.release()
    await new


async def test_who_waited_hits_what_was_published_meanwhile(cache1: CacheUnderTest) -> None:
    held, publisher = await fill(cache1, 4, 4)
    await publisher.release()
    publisher = await cache1.client.acquire([1, 2, 3, 4])
    (waiting,) = await cache1.in_line(cache1.client.acquire([1, 2, 3, 9]))

    await publisher.insert([1, 2, 3, 4])
    await held.release()

    assert (await waiting).prefix_len == 3
    assert await cache1.pages() == Pages(free=3, private=1, protected=4, leases=2)


# ---------------------------------------------------------------- requests that can never fit


async def test_who_turns_out_never_to_fit_is_told_so_in_turn_and_holds_up_nobody(reached: Reached) -> None:
    async with reached(window(1, 1, num_swa_pages=5)) as cache:  # tails of 3
        prefix = await cache.hold(2, 2, 2, 2, 2)
        (held,) = await fill(cache, 2)
        first, vast, last = await cache.in_line(
            cache.client.acquire([1, 1]),
            cache.client.acquire([2] * 6, max_prefix_len=0),  # would fit with the prefix
            cache.client.acquire([3, 3]),
        )

        await held.release()

        served = await first
        with pytest.raises(PoolExhausted, match="window slots") as caught:
            await vast
        assert (caught.value.needed, caught.value.can_ever_fit) == (6, False)
        await served.release()
        assert len(await last) == 2
        await prefix.release()


async def test_what_does_not_fit_beside_the_window_of_its_own_prefix_never_fits(reached: Reached) -> None:
    async with reached(window(1, 2, num_swa_pages=4)) as cache:
        await cache.publish(1, 2)

        with pytest.raises(PoolExhausted, match="window slots") as caught:
            await cache.client.acquire([1, 2, 3, 4, 5])

        assert (caught.value.needed, caught.value.can_ever_fit) == (5, False)
        assert await cache.pages() == Pages(free=6, evictable=2)
        assert len(await cache.client.acquire([1, 2, 3, 4])) == 4


# ---------------------------------------------------------------- events that free slots


async def release(cache: CacheUnderTest, lease: Lease) -> None:
    await lease.release()


async def abort(cache: CacheUnderTest, lease: Lease) -> None:
    await lease.abort()


async def publish_and_release(cache: CacheUnderTest, lease: Lease) -> None:
    await lease.insert([1, 2], release=True)


async def unlock_what_is_published(cache: CacheUnderTest, lease: Lease) -> None:
    await lease.insert([1, 2])
    await lease.release()


async def insert_duplicates(cache: CacheUnderTest, lease: Lease) -> None:
    done = await lease.insert([1, 2])
    assert done.num_duplicates == 2


async def close_the_client(cache: CacheUnderTest, lease: Lease) -> None:
    await lease.client.close()


MAKE_ROOM: list[Callable[[CacheUnderTest, Lease], Awaitable[None]]] = [
    release,
    abort,
    publish_and_release,
    unlock_what_is_published,
    insert_duplicates,
    close_the_client,
]


@pytest.mark.parametrize("make_room", MAKE_ROOM, ids=lambda function: function.__name__)
async def test_whoever_makes_room_serves_the_line(
    cache1: CacheUnderTest, make_room: Callable[[CacheUnderTest, Lease], Awaitable[None]]
) -> None:
    if make_room is insert_duplicates:
        await cache1.publish(1, 2)
        await cache1.client.lock([1, 2])
    lease = await cache1.another_client().acquire([1, 2], max_prefix_len=0)
    await fill(cache1, (await cache1.pages()).free)
    (waiting,) = await cache1.in_line(cache1.client.acquire([9, 9]))

    await make_room(cache1, lease)

    assert len(await waiting) == 2
    assert (await cache1.client.stats()).waiters == 0


# ---------------------------------------------------------------- deadlines and bounds


async def test_without_time_to_wait_it_is_refused_at_once(cache1: CacheUnderTest) -> None:
    (held,) = await fill(cache1, 8)

    with pytest.raises(PoolExhausted) as caught:
        await cache1.client.acquire([1, 2], timeout_s=0)
    with pytest.raises(PoolExhausted, match="can never fit"):
        await held.extend(1, timeout_s=0)

    error = caught.value
    assert (error.needed, error.free, error.evictable, error.can_ever_fit) == (2, 0, 0, True)
    assert (error.held_slots, error.open_leases) == (8, 1)
    assert (await cache1.client.stats()).waiters == 0


async def test_who_waits_in_vain_is_refused_at_the_deadline_with_what_holds_then(cache1: CacheUnderTest) -> None:
    await fill(cache1, 7, 1)
    started = time.monotonic()

    with pytest.raises(PoolExhausted) as caught:
        await cache1.client.acquire([1, 2, 3], timeout_s=0.2)

    assert 0.2 <= time.monotonic() - started < 20
    error = caught.value
    assert (error.needed, error.free, error.held_slots, error.open_leases) == (3, 0, 8, 2)
    assert await cache1.pages() == Pages(free=0, private=8, leases=2)
    assert (await cache1.client.stats()).waiters == 0


async def test_a_lease_that_grew_in_vain_is_as_before(cache1: CacheUnderTest) -> None:
    lease, other = await fill(cache1, 4, 4)
    slots = lease.slots.tolist()

    with pytest.raises(PoolExhausted):
        await lease.extend(2, timeout_s=0.05)

    assert lease.slots.tolist() == slots
    await other.release()
    assert len(await lease.extend(2)) == 2
    assert await cache1.pages() == Pages(free=2, private=6, leases=1)


async def test_when_the_first_gives_up_those_behind_are_served(cache1: CacheUnderTest) -> None:
    await fill(cache1, 6)
    asked = cache1.client.acquire([1] * 3, timeout_s=0.3), cache1.client.acquire([2] * 2, timeout_s=300)
    large, small = map(asyncio.ensure_future, asked)  # both are sent in one batch

    with pytest.raises(PoolExhausted):
        await large

    assert len(await small) == 2


async def test_the_configuration_says_how_long_to_wait_by_default() -> None:
    config = small_config().model_copy(update={"leases": LeaseConfig(acquire_timeout_s=0.05)})
    async with LocalPrefixCache(config) as cache:
        lease = await cache.acquire([1] * 8)

        with pytest.raises(PoolExhausted):
            await cache.acquire([2])
        with pytest.raises(PoolExhausted, match="can never fit"):
            await lease.extend(1)


async def test_where_nobody_may_wait_it_is_refused_at_once_with_what_holds_the_pool() -> None:
    config = small_config().model_copy(update={"leases": LeaseConfig(max_waiters=0)})
    async with LocalPrefixCache(config) as cache, await cache.acquire([1] * 8):
        for verb in (lambda: cache.acquire([2]), lambda: cache.acquire([3], timeout_s=9)):
            with pytest.raises(PoolExhausted, match=r"by 1 lease, shared .* once: local 8 slots"):
                await verb()
        assert (await cache.stats()).exhausted == 2


async def test_refused_requests_are_counted_by_cause() -> None:
    config = small_config().model_copy(
        update={
            "leases": LeaseConfig(max_waiters=1),
            "tenants": (TenantConfig(name="capped", lora_id="capped", cap_slots=4),),
        }
    )
    async with LocalPrefixCache(config) as cache:
        lease = await cache.acquire([1] * 7)
        for tokens, lora_id in (([2] * 9, None), ([2] * 5, "capped"), ([2] * 2, None)):
            with pytest.raises(PoolExhausted):
                await cache.acquire(tokens, lora_id=lora_id, timeout_s=0)
        with pytest.raises(PoolExhausted):
            await cache.acquire([2] * 2, timeout_s=0.01)
        waiting = asyncio.create_task(cache.acquire([2] * 2))
        while not (await cache.stats()).waiters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(CacheBusy):
            await cache.acquire([3] * 2)
        with pytest.raises(InvalidRequest):
            await cache.retire()
        await lease.release()
        other = await waiting
        await cache.session.ask(ReleaseRequest(lease_id=other.lease_id))
        with pytest.raises(UnknownLease):
            await other.insert([2] * 2)

        stats = await cache.stats()

        assert stats.refusals == {
            "never_fits": 2, "no_wait": 1, "waited_too_long": 1, "queue_full": 1,
            "invalid_request": 1, "unknown_lease": 1,
        }  # fmt: skip
        assert stats.exhausted == 4
        assert cache.report().stats.refusals == stats.refusals


async def test_a_request_of_a_tenant_at_its_cap_is_counted_as_such() -> None:
    capped = TenantConfig(name="capped", lora_id="capped", cap_slots=4)
    async with (
        LocalPrefixCache(small_config().model_copy(update={"tenants": (capped,)})) as cache,
        await cache.acquire([1] * 3, lora_id="capped"),
    ):
        with pytest.raises(PoolExhausted):
            await cache.acquire([2] * 2, lora_id="capped", timeout_s=0)
        assert (await cache.stats()).refusals == {"tenant_cap": 1}


async def test_an_extend_that_breaks_a_deadlock_is_counted_as_such() -> None:
    async with LocalPrefixCache(small_config()) as cache, cache.acquire([1] * 4) as older:
        younger = await cache.acquire([2] * 4)
        waiting = asyncio.create_task(older.extend(1))
        with pytest.raises(PoolExhausted):
            await younger.extend(1)
        await younger.release()
        await waiting

        assert ((stats := await cache.stats()).refusals, stats.exhausted) == ({"deadlocked": 1}, 1)


async def test_a_lock_that_finds_no_row_is_counted() -> None:
    config = CacheConfig(kind="slots", max_seq_len=4, pool=PoolConfig(num_slots=4, device="cpu"))
    async with LocalPrefixCache(config) as cache, await cache.acquire([1]):
        with pytest.raises(PoolExhausted):
            await cache.lock([2])

        assert ((stats := await cache.stats()).refusals, stats.exhausted) == ({"no_wait": 1}, 1)


async def test_beyond_the_bound_of_the_line_the_cache_is_busy(cache1: CacheUnderTest) -> None:
    held, small = await fill(cache1, 7, 1)
    tasks = await cache1.in_line(*(cache1.client.acquire([number] * 2) for number in range(MAX_WAITERS)))

    with pytest.raises(CacheBusy, match="3 requests wait for room already; try again in") as caught:
        await cache1.client.acquire([9])
    with pytest.raises(CacheBusy):
        await small.extend(1)

    assert 0 < caught.value.retry_after_s <= 1
    assert (await cache1.client.stats()).waiters == MAX_WAITERS
    await held.release()
    assert [len(lease) for lease in await asyncio.gather(*tasks)] == [2, 2, 2]
    await cache1.client.acquire([9])


# ---------------------------------------------------------------- cancellation


async def test_cancelling_one_who_waits_takes_it_out_of_line(cache1: CacheUnderTest) -> None:
    (held,) = await fill(cache1, 8)
    first, second = await cache1.in_line(cache1.client.acquire([1] * 8), cache1.client.acquire([2]))

    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await cache1.client.stats()).waiters == 1

    await held.release()
    assert len(await second) == 1
    assert await cache1.pages() == Pages(free=7, private=1, leases=1)


async def test_a_timeout_of_the_callers_own_takes_it_out_of_line(cache1: CacheUnderTest) -> None:
    await fill(cache1, 8)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cache1.client.acquire([1]), 0.05)

    assert (await cache1.client.stats()).waiters == 0
    assert await cache1.pages() == Pages(free=0, private=8, leases=1)


async def test_cancelling_a_lease_that_waits_to_grow_takes_it_out_of_line(cache1: CacheUnderTest) -> None:
    growing, held = await fill(cache1, 4, 4)
    (growth,) = await cache1.in_line(growing.extend(4))

    growth.cancel()
    with pytest.raises(asyncio.CancelledError):
        await growth

    assert (await cache1.client.stats()).waiters == 0
    await held.release()
    assert await cache1.pages() == Pages(free=4, private=4, leases=1)


async def test_a_lease_grows_by_what_the_last_extend_asked_for_after_another_was_cancelled(
    cache1: CacheUnderTest,
) -> None:
    growing, held = await fill(cache1, 4, 4)
    (cancelled,) = await cache1.in_line(growing.extend(1))
    cancelled.cancel()
    await asyncio.wait((cancelled,))

    growth = asyncio.create_task(growing.extend(3))
    await asyncio.sleep(0)  # the request is queued for sending
    await held.release()

    assert len(await growth) == 3


async def test_one_lease_grows_once_at_a_time(cache1: CacheUnderTest) -> None:
    growing, held = await fill(cache1, 4, 4)
    (growth,) = await cache1.in_line(growing.extend(1))

    with pytest.raises(InvalidRequest, match="is being extended already: await one extend first"):
        await growing.extend(1)

    await held.release()
    assert len(await growth) == 1


async def test_an_open_lease_is_confirmed_while_others_wait_for_slots_and_not_while_it_waits_itself(
    cache1: CacheUnderTest,
) -> None:
    growing, held = await fill(cache1, 4, 4)
    growth, new = await cache1.in_line(growing.extend(1), cache1.client.acquire([1]))

    await held.confirm_open()
    with pytest.raises(InvalidRequest, match="is being extended: await that first"):
        await growing.confirm_open()

    assert (await cache1.client.stats()).waiters == 2
    await held.release()
    assert len(await growth) == 1
    await (await new).release()


@pytest.mark.parametrize("end", ["release", "abort"])
async def test_a_lease_that_ends_while_it_waits_to_grow_leaves_the_line(cache1: CacheUnderTest, end: str) -> None:
    growing, _ = await fill(cache1, 4, 4)
    (growth,) = await cache1.in_line(growing.extend(1))

    await getattr(growing, end)()

    with pytest.raises(UnknownLease, match="given up while it waited"):
        await growth
    assert (await cache1.client.stats()).waiters == 0
    assert await cache1.pages() == Pages(free=4, private=4, leases=1)


async def test_a_lease_that_ends_with_an_insert_while_it_waits_to_grow_leaves_the_line(cache1: CacheUnderTest) -> None:
    first, lease, _ = await fill(cache1, 2, 2, 4)
    (before, growing) = await cache1.in_line(first.extend(5), lease.extend(1))

    await lease.insert([101] * 2, release=True)

    assert (await cache1.client.stats()).waiters == 1
    with pytest.raises(UnknownLease, match="given up while it waited"):
        await growing
    before.cancel()


async def test_closing_a_client_takes_its_requests_out_of_line(cache1: CacheUnderTest) -> None:
    await fill(cache1, 8)
    leaving = cache1.another_client()
    await leaving.open()
    first, second = await cache1.in_line(leaving.acquire([1]), cache1.client.acquire([2]))

    await leaving.close()

    with pytest.raises(CacheError, match="given up while it waited"):
        await first
    assert (await cache1.client.stats()).waiters == 1
    second.cancel()


async def test_a_client_closed_while_it_opens_holds_nothing_afterwards(cache1: CacheUnderTest) -> None:
    leaving = PrefixCacheClient(cache1.cache)
    request = asyncio.create_task(leaving.acquire([1, 2]))
    await asyncio.sleep(0)
    try:
        await leaving.close()
        await asyncio.wait((request,))

        assert await cache1.pages() == Pages(free=8)
        assert (await cache1.client.stats()).open_sessions == 1
    finally:
        await end_session(cache1, leaving)


async def test_closing_a_client_whose_opening_fails_is_no_error() -> None:
    cache = LocalPrefixCache(small_config())
    await cache.close()
    client = PrefixCacheClient(cache)
    request = asyncio.create_task(client.match([1]))
    await asyncio.sleep(0)

    await client.close()

    with pytest.raises(CacheUnavailable, match="has been shut down"):
        await request
    with pytest.raises(InvalidRequest, match="make a new one"):
        await client.match([1])


async def test_who_waits_when_the_cache_shuts_down_is_told_so() -> None:
    cache = LocalPrefixCache(small_config())
    client = PrefixCacheClient(cache)
    lease = await client.acquire([1] * 8)
    waiting = [asyncio.create_task(client.acquire([2])), asyncio.create_task(client.acquire([3]))]
    while cache._host.service.stats().waiters < 2:  # noqa: ASYNC110 -- there is no event for it
        await asyncio.sleep(0)

    await cache.close()

    for request in waiting:
        with pytest.raises(CacheUnavailable, match="has been shut down"):
            await request
    await lease.release()


async def end_session(cache: CacheUnderTest, client: PrefixCacheClient) -> None:
    """Close a client's session at the cache, in case its close did not. The next test uses the same cache."""
    message = CloseSession(session_id=client.session.session_id)
    if isinstance(cache.cache, LocalPrefixCache):
        cache.cache._host.service.close_session(message)
    else:
        await cache.cache.close_session.remote(message)


async def test_a_client_closes_with_requests_that_are_not_sent_yet(cache1: CacheUnderTest) -> None:
    leaving = cache1.another_client()
    await leaving.open()
    unsent = asyncio.create_task(leaving.acquire([1, 2]))
    await asyncio.sleep(0)
    try:
        await closed_within_reason(leaving)

        await asyncio.wait((unsent,))
        assert await cache1.pages() == Pages(free=8)
    finally:
        await asyncio.wait((unsent,))
        await end_session(cache1, leaving)


async def closed_within_reason(client: PrefixCacheClient) -> None:
    """Close a client, and fail if the close spins. A timeout would never fire, as the loop would not run its timers."""
    from raydix.actors.transport import ray_transport

    turns = 0

    def counted(*waited_for: Awaitable[Any], **options: Any) -> Awaitable[Any]:
        nonlocal turns
        turns += 1
        assert turns < 1000, "close() spins"
        return asyncio.gather(*waited_for, **options)

    class Asyncio:
        gather = staticmethod(counted)

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_transport, "asyncio", Asyncio())
        await client.close()


# ---------------------------------------------------------------- cancelled at every await


@pytest.mark.parametrize("room", [True, False], ids=["room", "no room"])
async def test_an_acquire_cancelled_after_any_number_of_ticks_leaves_no_lease(
    cache1: CacheUnderTest, room: bool
) -> None:
    held = [] if room else await fill(cache1, 8)
    for ticks in range(40):
        task = asyncio.create_task(cache1.client.acquire([1, 2]))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await end_of(task)

        stats = await cache1.client.stats()
        assert (stats.open_leases, stats.waiters) == (len(held), 0), f"cancelled after {ticks} ticks"


async def test_acquires_cancelled_at_random_moments_leave_no_lease(cache1: CacheUnderTest) -> None:
    rng = Random(7)
    held = await fill(cache1, 4)
    for _ in range(60):
        sizes = [rng.randint(1, 8) for _ in range(3)]
        tasks = [asyncio.create_task(cache1.client.acquire([number] * size)) for number, size in enumerate(sizes)]
        rng.shuffle(tasks)
        for task in tasks:
            await asyncio.sleep(rng.random() * 0.002)
            task.cancel()
            await end_of(task)

        stats = await cache1.client.stats()
        assert (stats.open_leases, stats.waiters, stats.free_slots) == (1, 0, 4)
    await held[0].release()
    assert empty(await cache1.client.stats())


async def test_whole_requests_cancelled_at_random_moments_leave_nothing_private(cache1: CacheUnderTest) -> None:
    rng = Random(11)

    async def request() -> None:
        tokens = [rng.randint(1, 2) for _ in range(4)]
        async with await cache1.client.acquire(tokens[:2], new_tokens=2, timeout_s=20) as lease:
            await lease.insert(tokens[:3])
            try:
                await lease.extend(1)
            except PoolExhausted as error:
                assert error.deadlocked  # the other tasks also wait to grow
                return
            await lease.insert(tokens)

    for _ in range(25):
        tasks = [asyncio.create_task(request()) for _ in range(3)]
        await asyncio.sleep(rng.random() * 0.008)
        for task in tasks:
            task.cancel()
        for task in tasks:
            await end_of(task)

    stats = await cache1.client.stats()
    assert (stats.private_slots, stats.protected_slots, stats.open_leases, stats.waiters) == (0, 0, 0, 0)
    assert await cache1.pages() == Pages(free=8 - stats.tree_slots, evictable=stats.tree_slots)


async def end_of(task: asyncio.Task[Any]) -> None:
    """Wait for a cancelled task. If it finished before the cancellation, release its lease."""
    await asyncio.wait((task,))
    if not task.cancelled() and isinstance(lease := task.result(), Lease):
        await lease.release()
