"""A lease is handed from one client to another: it always has one owner, and a grant can be adopted once."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from support.caches.cache_under_test import CacheUnderTest, Pages

from raydix.schemas import InvalidRequest, LeaseExpired, LeaseGrant, UnknownLease


async def test_an_adopted_lease_goes_on_where_it_was(cache: CacheUnderTest) -> None:
    worker = cache.another_client()
    await cache.publish(1)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3), new_tokens=cache.page_size)
    await cache.insert(lease, 1, 2)

    grant = pickle.loads(pickle.dumps(await lease.grant()))
    adopted = await worker.adopt(grant)

    assert isinstance(grant, LeaseGrant)
    assert (adopted.prefix_len, adopted.published_len) == (lease.prefix_len, lease.published_len)
    assert (grant.prefix_len, grant.published_len) == (lease.prefix_len, lease.published_len)
    assert (adopted.slots.tolist(), adopted.state_slot) == (lease.slots.tolist(), lease.state_slot)
    assert len(adopted) == grant.num_slots == 4 * cache.page_size
    await cache.insert(adopted, 1, 2, 3, 4)  # it knows the published tokens
    await adopted.release()
    assert await cache.matched(1, 2, 3, 4) == cache.reusable(4)
    assert (await cache.pages()).private == 0


async def test_what_was_granted_is_no_longer_its_granters(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2])
    grant = await lease.grant()

    for use in (lease.insert([1]), lease.extend(1), lease.confirm_open(), lease.grant()):
        with pytest.raises(UnknownLease, match="has ended"):
            await use
    await lease.release()
    await lease.abort()

    assert await cache1.pages() == Pages(free=6, private=2, leases=1)
    await (await cache1.another_client().adopt(grant)).release()
    assert await cache1.pages() == Pages(free=8)


async def test_leaving_the_block_of_a_granted_lease_does_not_end_it(cache1: CacheUnderTest) -> None:
    async with await cache1.client.acquire([1, 2]) as lease:
        grant = await lease.grant()

    adopted = await cache1.another_client().adopt(grant)

    assert (await adopted.insert([1, 2])).num_inserted == 2


async def test_a_grant_is_good_once(cache1: CacheUnderTest) -> None:
    first, second = cache1.another_client(), cache1.another_client()
    grant = await (await cache1.client.acquire([1, 2])).grant()

    outcomes = await asyncio.gather(first.adopt(grant), second.adopt(grant), return_exceptions=True)

    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Lease", "UnknownLease"]
    with pytest.raises(UnknownLease):
        await first.adopt(grant)
    assert await cache1.pages() == Pages(free=6, private=2, leases=1)


async def test_a_granter_can_adopt_its_own_grant_once(cache1: CacheUnderTest) -> None:
    grant = await (await cache1.client.acquire([1, 2])).grant()

    adopted = await cache1.client.adopt(grant)

    with pytest.raises(UnknownLease):
        await cache1.client.adopt(grant)
    assert (await adopted.insert([1, 2])).num_inserted == 2


async def test_an_adopted_lease_outlives_its_granter_and_an_unadopted_one_does_not(cache1: CacheUnderTest) -> None:
    scheduler, worker = cache1.another_client(), cache1.another_client()
    adopted = await worker.adopt(await (await scheduler.acquire([1, 2])).grant())
    left = await (await scheduler.acquire([3])).grant()

    await scheduler.close()

    assert await cache1.pages() == Pages(free=6, private=2, leases=1)
    with pytest.raises(UnknownLease):
        await worker.adopt(left)
    assert (await adopted.insert([1, 2])).num_inserted == 2


async def test_only_an_open_lease_can_be_granted_and_only_by_its_client(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2])
    with pytest.raises(UnknownLease, match="another client"):
        await cache1.another_client().grant(lease)
    await lease.release()
    with pytest.raises(UnknownLease, match="has ended"):
        await lease.grant()


async def test_what_is_no_grant_cannot_be_adopted(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2])
    forged = LeaseGrant(
        lease_id=lease.lease_id,
        granter=cache1.client.session.session_id,
        epoch=lease.epoch,
        prefix_len=0,
        published_len=0,
        num_slots=2,
        offer_id="forged",
    )

    with pytest.raises(InvalidRequest, match="grant must be a LeaseGrant"):
        await cache1.client.adopt(lease)  # type: ignore[arg-type]
    with pytest.raises(UnknownLease, match="not offered"):
        await cache1.another_client().adopt(forged)
    with pytest.raises(InvalidRequest, match=r"lease_id: .* at most 128 characters"):
        await cache1.another_client().adopt(forged.model_copy(update={"lease_id": "x" * 129}))


async def test_a_lease_that_is_being_extended_is_not_granted(cache1: CacheUnderTest) -> None:
    lease, _ = await cache1.client.acquire([1] * 4), await cache1.client.acquire([2] * 4)
    (growth,) = await cache1.in_line(lease.extend(1))

    with pytest.raises(InvalidRequest, match="is being extended"):
        await lease.grant()

    growth.cancel()
    await asyncio.wait((growth,))
    await lease.grant()


async def test_what_was_on_its_way_when_a_lease_was_granted_takes_effect(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2, 3])

    _, grant = await asyncio.gather(lease.insert([1, 2]), lease.grant())
    adopted = await cache1.another_client().adopt(grant)

    assert adopted.published_len == 2
    assert (await adopted.insert([1, 2, 3])).num_inserted == 1


# ---------------------------------------------------------------- grants that are not adopted


async def test_a_grant_that_is_not_adopted_in_time_ends_its_lease(cache: CacheUnderTest) -> None:
    worker = cache.another_client()
    before = (await cache.client.stats()).grants_expired
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    await cache.insert(lease, 1)

    grant = await lease.grant(timeout_s=0.05)
    stats = await cache.until(lambda stats: stats.open_leases == 0)

    assert stats.private_slots == 0
    assert stats.grants_expired == before + 1
    assert await cache.matched(1) == cache.reusable(1)
    with pytest.raises(LeaseExpired, match="not adopted in time"):
        await worker.adopt(grant)
    assert not await cache.client.revoke(grant)


async def test_an_adopted_lease_outlives_the_time_of_its_grant(cache1: CacheUnderTest) -> None:
    adopted = await cache1.another_client().adopt(await (await cache1.client.acquire([1, 2])).grant(timeout_s=0.2))
    expired = await (await cache1.client.acquire([3, 4])).grant(timeout_s=0.2)

    await cache1.until(lambda stats: stats.open_leases == 1)

    assert (await adopted.insert([1, 2])).num_inserted == 2
    assert not await cache1.client.revoke(expired)


async def test_those_in_line_are_served_when_a_grant_runs_out(cache1: CacheUnderTest) -> None:
    await (await cache1.client.acquire([1] * 8)).grant(timeout_s=0.05)

    lease = await cache1.client.acquire([2] * 8, timeout_s=60)

    assert len(lease) == 8


async def test_a_revoked_grant_ends_its_lease_at_once(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))
    await cache.insert(lease, 1)
    grant = await lease.grant()

    assert await cache.client.revoke(grant)

    pages = await cache.pages()
    assert (pages.private, pages.leases) == (0, 0)
    with pytest.raises(UnknownLease, match="has ended"):
        await cache.another_client().adopt(grant)
    assert not await cache.client.revoke(grant)


async def test_an_adopted_grant_is_not_revoked(cache1: CacheUnderTest) -> None:
    worker = cache1.another_client()
    grant = await (await cache1.client.acquire([1, 2])).grant()
    adopted = await worker.adopt(grant)

    assert not await cache1.client.revoke(grant)
    with pytest.raises(UnknownLease, match="granted by another client"):
        await worker.revoke(grant)

    assert (await adopted.insert([1, 2])).num_inserted == 2


@pytest.mark.parametrize("first", ["revoke", "adopt"])
async def test_of_a_revocation_and_an_adoption_at_once_one_takes_effect(cache1: CacheUnderTest, first: str) -> None:
    worker = cache1.another_client()
    await worker.open()
    grant = await (await cache1.client.acquire([1, 2])).grant()

    both = [cache1.client.revoke(grant), worker.adopt(grant)]
    if first == "adopt":
        both.reverse()
    outcomes = await asyncio.gather(*both, return_exceptions=True)
    revoked, adopted = outcomes if first == "revoke" else reversed(outcomes)

    if revoked is True:
        assert isinstance(adopted, UnknownLease)
        assert await cache1.pages() == Pages(free=8)
    else:
        assert revoked is False
        assert len(adopted) == 2  # type: ignore[arg-type]
        assert await cache1.pages() == Pages(free=6, private=2, leases=1)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan")])
async def test_a_grant_takes_a_positive_number_of_seconds(cache1: CacheUnderTest, timeout_s: object) -> None:
    lease = await cache1.client.acquire([1, 2])

    with pytest.raises(InvalidRequest, match="timeout_s"):
        await lease.grant(timeout_s=timeout_s)  # type: ignore[arg-type]

    assert (await lease.insert([1, 2])).num_inserted == 2


async def test_only_a_grant_can_be_revoked(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2])

    with pytest.raises(InvalidRequest, match="grant must be a LeaseGrant"):
        await cache1.client.revoke(lease)  # type: ignore[arg-type]


async def test_a_cancelled_grant_takes_its_offer_back(cache1: CacheUnderTest) -> None:
    offer_s = 1.0  # on a busy machine, it takes long to take an offer back
    for first in range(0, 16, 4):
        kept = {}
        for ticks in range(first, first + 4):
            lease = await cache1.client.acquire([1])
            task = asyncio.create_task(lease.grant(timeout_s=offer_s))
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
            if task.cancelled():
                kept[ticks] = lease
            else:
                await cache1.client.revoke(task.result())

        if kept:
            await asyncio.sleep(offer_s + 0.05)  # an offer left open would end the lease
        for ticks, lease in kept.items():
            assert len(await lease.extend(1)) == 1, f"cancelled after {ticks} ticks"
            await lease.release()


async def test_a_thousand_hand_overs_cancelled_before_their_adoption_leave_nothing(cache1: CacheUnderTest) -> None:
    scheduler, worker = cache1.another_client(), cache1.another_client()

    async def hand_over(number: int) -> None:
        async with scheduler.acquire([number], timeout_s=60) as lease:
            grant = await lease.grant(timeout_s=0.02)
        await asyncio.Event().wait()  # most tasks are cancelled here, the others earlier
        await worker.adopt(grant)

    for first in range(0, 1000, 100):
        tasks = [asyncio.create_task(hand_over(number)) for number in range(first, first + 100)]
        await asyncio.wait(tasks, timeout=0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    stats = await cache1.until(lambda stats: stats.open_leases == 0)
    assert (stats.private_slots, stats.waiters) == (0, 0)


# ---------------------------------------------------------------- locked and granted in one request


async def test_a_lock_can_be_granted_in_the_same_request(cache: CacheUnderTest) -> None:
    worker = cache.another_client()
    await cache.publish(1, 2)
    before = (await cache.client.stats()).requests

    lease = await cache.client.lock(cache.tokens(1, 2, 3), offer_s=60)

    assert (await cache.client.stats()).requests - before == 2  # the lock, and these statistics
    grant = pickle.loads(pickle.dumps(lease.offered))
    assert (grant.prefix_len, grant.published_len, grant.num_slots) == (lease.prefix_len,) * 2 + (len(lease),)
    with pytest.raises(UnknownLease, match="has ended"):
        await lease.extend(1)
    await lease.release()  # no effect: it is no longer this client's
    adopted = await worker.adopt(grant)
    assert adopted.prefix_len == cache.reusable(2) * cache.page_size
    assert (adopted.slots.tolist(), adopted.state_slot) == (lease.slots.tolist(), lease.state_slot)
    with pytest.raises(UnknownLease):
        await cache.client.adopt(grant)
    await adopted.release()
    assert (await cache.pages()).leases == 0


async def test_a_lock_without_an_offer_is_not_granted(cache1: CacheUnderTest) -> None:
    async with cache1.client.lock([1, 2]) as lease:
        assert lease.offered is None


async def test_a_granted_lock_that_is_not_adopted_in_time_ends(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2)
    before = (await cache1.client.stats()).grants_expired
    lease = await cache1.client.lock([1, 2], offer_s=0.05)
    assert lease.offered is not None

    await cache1.until(lambda stats: stats.open_leases == 0)

    assert (await cache1.client.stats()).grants_expired == before + 1
    with pytest.raises((UnknownLease, LeaseExpired)):
        await cache1.another_client().adopt(lease.offered)


async def test_a_granted_lock_can_be_revoked(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2)
    lease = await cache1.client.lock([1, 2], offer_s=60)
    assert lease.offered is not None

    assert await cache1.client.revoke(lease.offered)

    assert (await cache1.pages()).leases == 0
    assert not await cache1.client.revoke(lease.offered)


@pytest.mark.parametrize("offer_s", [0, -1, float("nan"), float("inf"), "soon"])
async def test_an_offer_lasts_a_positive_number_of_seconds(cache1: CacheUnderTest, offer_s: Any) -> None:
    with pytest.raises(InvalidRequest, match="offer_s"):
        await cache1.client.lock([1, 2], offer_s=offer_s)
    assert (await cache1.pages()).leases == 0


# ---------------------------------------------------------------- inserts that send the new ids alone


async def test_an_insert_sends_the_next_ids_alone(cache: CacheUnderTest) -> None:
    page, tokens = cache.page_size, cache.tokens(1, 2, 3, 4)
    whole = len(tokens)
    async with cache.client.acquire(tokens[: 2 * page], new_tokens=whole - 2 * page) as lease:
        first = await lease.insert_next(page)
        assert (first.published_len, lease.known_len) == (cache.reusable(1) * page, 2 * page)
        await lease.insert_next(3 * page, tokens[2 * page : 3 * page])
        assert (lease.published_len, lease.known_len) == (cache.reusable(3) * page, 3 * page)
        for num_tokens, more in ((whole + 1, [1]), (whole, []), (whole, tokens), (2 * page, [1]), (-1, [])):
            with pytest.raises(InvalidRequest):
                await lease.insert_next(num_tokens, more)
        await cache.insert(lease, 1, 2, 3, 4)  # all of them are compared again
        assert lease.published_len == cache.reusable(4) * page
    assert await cache.matched(1, 2, 3, 4) == cache.reusable(4)


# ---------------------------------------------------------------- cancelled at every await


async def test_a_granted_lock_cancelled_after_any_number_of_ticks_leaves_no_lease(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2)
    for ticks in range(30):
        task = asyncio.create_task(lock_and_offer(cache1))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            assert await cache1.client.revoke(task.result())
        assert (await cache1.pages()).leases == 0, f"cancelled after {ticks} ticks"


async def lock_and_offer(cache: CacheUnderTest) -> LeaseGrant:
    lease = await cache.client.lock([1, 2], offer_s=60)
    assert lease.offered is not None
    return lease.offered


async def test_a_grant_cancelled_after_any_number_of_ticks_leaves_one_owner(cache1: CacheUnderTest) -> None:
    for ticks in range(30):
        lease = await cache1.client.acquire([1, 2])
        task = asyncio.create_task(lease.grant())
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))

        if task.cancelled():
            await lease.release()
        else:
            await (await cache1.client.adopt(task.result())).release()
        assert await cache1.pages() == Pages(free=8), f"cancelled after {ticks} ticks"


async def test_an_adoption_cancelled_after_any_number_of_ticks_leaves_no_lease_behind(cache1: CacheUnderTest) -> None:
    for ticks in range(30):
        scheduler, worker = cache1.another_client(), cache1.another_client()
        grant = await (await scheduler.acquire([1, 2])).grant()
        await worker.open()
        task = asyncio.create_task(worker.adopt(grant))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            await task.result().release()

        await scheduler.close()
        await worker.match([1])  # the cache executes requests in order
        assert await cache1.pages() == Pages(free=8), f"cancelled after {ticks} ticks"
        await worker.close()
