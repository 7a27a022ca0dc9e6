"""Caches with recurrent states: the additional contract. See `test_contract_match`.

Each lease has a state of its own, at first a copy of the one at the end of its prefix.
"""

from __future__ import annotations

import pytest
from support.caches.cache_kinds import TIGHT_STATES, has_states, only
from support.caches.cache_under_test import CacheUnderTest, Reached, check_sizes, holding
from support.models.stamped_kv import check_state, compute

from raydix.schemas import PoolExhausted


async def states(cache: CacheUnderTest) -> tuple[int, int, int]:
    """Return the numbers of states that are free, private, and in the tree."""
    stats = await cache.client.stats()
    check_sizes(stats)
    assert stats.state is not None
    return stats.state.free_slots, stats.state.private_slots, stats.state.tree_slots


@only(has_states)
async def test_a_published_state_is_copied_into_the_next_leases_own(cache: CacheUnderTest) -> None:
    reader, tokens = cache.another_client(), cache.tokens(1, 2, 3)
    pool = await cache.client.attach_pool()
    first = await cache.client.acquire(tokens)
    await compute(cache, pool, first, tokens[: 2 * cache.page_size], 0)
    await cache.insert(first, 1, 2)
    await compute(cache, pool, first, tokens, 2 * cache.page_size)  # its own state goes on

    second = await reader.acquire(tokens)
    third = await reader.acquire(tokens)

    assert second.prefix_len == third.prefix_len == 2 * cache.page_size
    assert len({first.state_slot, second.state_slot, third.state_slot}) == 3
    for lease in (second, third):
        check_state(cache, await reader.attach_pool(), lease, tokens[: 2 * cache.page_size])
    await compute(cache, await reader.attach_pool(), second, tokens, 2 * cache.page_size, "another")
    check_state(cache, pool, first, tokens)
    check_state(cache, pool, third, tokens[: 2 * cache.page_size])


@only(has_states)
async def test_a_miss_begins_with_zeros_whatever_the_slot_held_before(cache: CacheUnderTest) -> None:
    pool, tokens = await cache.client.attach_pool(), cache.tokens(1, 2)
    before = await cache.client.acquire(tokens)
    await compute(cache, pool, before, tokens, 0)
    await before.release()

    lease = await cache.client.acquire(tokens)

    assert lease.state_slot == before.state_slot
    check_state(cache, pool, lease, [])


@only(has_states)
async def test_a_hit_ends_at_a_published_state_and_reports_where_another_would_help(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    await lease.insert(cache.tokens(1, 2, 3))
    page = cache.page_size

    without = await cache.client.match(cache.tokens(1, 2, 3))
    await cache.insert(lease, 1, 2, 3)
    beyond = await cache.client.match(cache.tokens(1, 2, 3, 4))
    inside = await cache.client.match(cache.tokens(1, 2, 4))

    assert (without.prefix_len, without.full_prefix_len, without.branching_len) == (0, 3 * page, 3 * page)
    assert (beyond.prefix_len, beyond.full_prefix_len, beyond.branching_len) == (3 * page, 3 * page, None)
    assert (inside.prefix_len, inside.full_prefix_len, inside.branching_len) == (0, 2 * page, 2 * page)


@only(has_states)
async def test_states_come_and_go_with_leases_and_evictions(cache: CacheUnderTest) -> None:
    (all_free, _, _) = await states(cache)
    lease = await cache.client.acquire(cache.tokens(1, 2))
    await cache.insert(lease, 1)
    await cache.insert(lease, 1, 2)
    assert await states(cache) == (all_free - 3, 1, 2)

    again = await cache.client.acquire(cache.tokens(1, 2), max_prefix_len=cache.page_size)
    await cache.insert(again, 1, 2, release=True)  # the state is there already
    assert await states(cache) == (all_free - 3, 1, 2)

    await lease.release()
    assert await states(cache) == (all_free - 2, 0, 2)
    await cache.client.evict(1)
    assert await states(cache) == (all_free - 1, 0, 1)
    await cache.client.reset()
    assert await states(cache) == (all_free, 0, 0)


@only(has_states)
async def test_a_request_refused_for_lack_of_slots_keeps_no_state(cache: CacheUnderTest) -> None:
    held = await cache.fill()
    before = await states(cache)

    for tokens in (cache.tokens(1), cache.tokens(*range(9))):
        with pytest.raises(PoolExhausted):
            await cache.client.acquire(tokens, timeout_s=0)

    assert await states(cache) == before == (before[0], len(held), 0)


async def test_a_request_that_lacks_a_state_waits_for_one(reached: Reached) -> None:
    async with reached(TIGHT_STATES) as cache:
        held = [await cache.client.acquire(cache.tokens(number)) for number in range(4)]
        with pytest.raises(PoolExhausted) as caught:
            await cache.client.acquire(cache.tokens(4), timeout_s=0)
        assert caught.value.can_ever_fit
        (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(5)))
        assert await cache.pages() == holding(private=4, leases=4)  # there are slots for its KV

        await held[0].release()

        assert len(await waiting) == cache.page_size


async def test_a_request_that_lacks_a_state_evicts_that_of_an_unlocked_prefix(reached: Reached) -> None:
    async with reached(TIGHT_STATES) as cache:
        await cache.publish(1)
        await cache.publish(2)
        holder = await cache.client.lock(cache.tokens(1))
        await cache.client.acquire(cache.tokens(8))
        assert await states(cache) == (0, 2, 2)

        await cache.client.acquire(cache.tokens(9))

        assert await states(cache) == (0, 3, 1)
        assert [await cache.matched(1), await cache.matched(2)] == [1, 0]
        assert holder.prefix_len == cache.page_size


async def test_a_state_that_is_taken_leaves_the_kv_and_the_states_behind_it(reached: Reached) -> None:
    async with reached(TIGHT_STATES) as cache:
        await cache.publish(1, 2)
        for number in (7, 8):
            await cache.client.acquire(cache.tokens(number))

        await cache.client.acquire(cache.tokens(9))

        assert await states(cache) == (0, 3, 1)
        assert [await cache.matched(1), await cache.matched(1, 2)] == [0, 2]
        assert await cache.pages() == holding(private=3, evictable=2, leases=3)


async def test_without_room_for_a_state_nothing_is_published_and_the_lease_goes_on(reached: Reached) -> None:
    async with reached(TIGHT_STATES) as cache:
        lease, other, *_ = [await cache.client.acquire(cache.tokens(number, 7)) for number in range(4)]
        own = lease.slots.tolist()

        with pytest.raises(PoolExhausted):
            await cache.insert(lease, 0, 7)

        found = await cache.client.match(cache.tokens(0, 7))
        assert (found.full_prefix_len, lease.published_len, lease.slots.tolist()) == (0, 0, own)
        assert await cache.pages() == holding(private=8, leases=4)
        await other.release()
        await cache.insert(lease, 0, 7)
        assert await cache.matched(0, 7) == 2


async def test_a_request_refused_for_lack_of_a_state_does_not_read_that_enough_slots_are_free(reached: Reached) -> None:
    async with reached(TIGHT_STATES) as cache:
        leases = [await cache.client.acquire(cache.tokens(number)) for number in range(4)]

        with pytest.raises(PoolExhausted) as caught:
            await cache.client.acquire(cache.tokens(4), timeout_s=0)

        for lease in leases:
            await lease.release()
        assert caught.value.needed > caught.value.free + caught.value.evictable
