"""The contract of leases: the slots that they allocate, hold and grow by. See `test_contract_match`."""

from __future__ import annotations

import asyncio

import pytest
import torch
from support.caches.cache_kinds import counts_pages, has_no_states, has_states, has_window, only, pages_of_several
from support.caches.cache_under_test import CacheUnderTest, check_sizes, holding, pools_of

from raydix.cache_core.components.window_kv import kept_tail
from raydix.schemas import InvalidRequest, UnknownLease

# ---------------------------------------------------------------- acquire


@only(counts_pages)
async def test_acquired_slots_are_private_until_published_and_then_stay_after_the_release(
    cache: CacheUnderTest,
) -> None:
    kept = cache.reusable(2)
    lease = await cache.client.acquire(cache.tokens(1, 2))
    assert (lease.prefix_len, lease.published_len, len(lease)) == (0, 0, 2 * cache.page_size)
    assert (lease.slots.dtype, lease.slots.device.type) == (torch.int64, "cpu")
    assert await cache.pages() == holding(private=2, leases=1)
    own = cache.page_ids(lease)

    done = await cache.insert(lease, 1, 2)
    assert (done.prefix_len, done.num_inserted) == (0, kept * cache.page_size)
    assert (done.num_duplicates, done.retired) == (0, False)
    assert (lease.prefix_len, lease.published_len) == (0, kept * cache.page_size)
    assert cache.page_ids(lease) == own
    assert await cache.pages() == holding(private=2 - kept, protected=kept, leases=1)

    await lease.release()
    assert await cache.pages() == holding(evictable=kept)
    assert await cache.matched(1, 2) == kept


async def test_unpublished_slots_are_freed_by_the_release(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))

    await lease.release()

    assert await cache.is_empty()
    assert await cache.matched(1, 2) == 0


@only(counts_pages)
async def test_a_hit_takes_new_slots_for_the_rest_alone(cache: CacheUnderTest) -> None:
    first = await cache.client.acquire(cache.tokens(1, 2))
    await cache.insert(first, 1, 2)

    second = await cache.client.acquire(cache.tokens(1, 2, 3))

    shared = cache.reusable(2)
    assert second.prefix_len == second.published_len == shared * cache.page_size
    assert await cache.pages() == holding(private=2 - shared + 3 - shared, protected=shared, leases=2)


@only(counts_pages)
async def test_a_shared_prefix_is_held_until_its_last_holder_lets_go(cache: CacheUnderTest) -> None:
    kept = cache.reusable(2)
    first = await cache.client.acquire(cache.tokens(1, 2))
    await cache.insert(first, 1, 2)
    second = await cache.another_client().acquire(cache.tokens(1, 2))

    await first.release()
    assert await cache.pages() == holding(private=2 - kept, protected=kept, leases=1)

    await second.release()
    assert await cache.pages() == holding(evictable=kept)


async def test_new_tokens_are_slots_beyond_the_prompts(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=2 * cache.page_size)

    assert len(lease) == len(set(lease.slots.tolist())) == 3 * cache.page_size


@only(counts_pages)
async def test_slots_are_taken_in_whole_pages(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=1)

    assert len(lease) == 2 * cache.page_size + 1
    assert await cache.pages() == holding(private=3, leases=1)


@only(counts_pages)
@pytest.mark.parametrize("limit", [(0, 1), (2, -1), (2, 0), (2, 1)], ids=str)
async def test_tokens_beyond_the_callers_limit_are_private_and_their_pages_may_be_evicted(
    cache: CacheUnderTest, limit: tuple[int, int]
) -> None:
    await cache.publish(1, 2, 3)
    kept, max_prefix_len = cache.reusable(3), limit[0] * cache.page_size + limit[1]

    await cache.client.acquire(cache.tokens(1, 2, 3), max_prefix_len=max_prefix_len)

    hit = min(kept, max_prefix_len // cache.page_size)
    assert await cache.pages() == holding(private=3 - hit, evictable=kept - hit, protected=hit, leases=1)


@only(has_window)
async def test_a_lease_holds_the_window_slots_of_the_last_window_and_of_private_tokens(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, 4)

    lease = await cache.client.acquire(cache.tokens(1, 2, 3, 4, 5))

    held = (lease.swa_slots > 0).tolist()
    window = cache.kind.window_size
    assert len(held) == len(lease.slots)
    assert all(held[max(0, lease.prefix_len - window) :])
    assert sum(held[: lease.prefix_len]) <= kept_tail(window, cache.page_size)
    assert len(set(lease.swa_slots[held].tolist())) == sum(held)


@only(has_states)
async def test_each_lease_has_a_state_slot_of_its_own(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    before = (await cache.client.stats()).state
    assert before is not None and before.private_slots == 0

    leases = [await cache.client.acquire(cache.tokens(1, 2)), await cache.client.lock(cache.tokens(1, 2))]

    after = (await cache.client.stats()).state
    assert after is not None and (after.private_slots, after.tree_slots) == (2, before.tree_slots)
    assert len({lease.state_slot for lease in leases} - {None, 0}) == 2


@only(has_no_states)
async def test_where_there_are_no_states_none_can_be_published(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))

    assert lease.state_slot is None
    with pytest.raises(InvalidRequest, match="keeps no states"):
        await lease.insert(cache.tokens(1, 2), publish_state=True)


# ---------------------------------------------------------------- extend, lock


@only(counts_pages, pages_of_several)
async def test_extend_uses_the_rest_of_the_last_page_first(cache: CacheUnderTest) -> None:
    page = cache.page_size
    lease = await cache.client.acquire([1] * (page - 2))
    first = lease.slots[0].item()

    within = await lease.extend(2)
    assert within.tolist() == [first + page - 2, first + page - 1]
    assert await cache.pages() == holding(private=1, leases=1)

    beyond = await lease.extend(1)
    assert lease.slots[page:].tolist() == beyond.tolist()
    assert (len(lease), beyond.item() % page) == (page + 1, 0)
    assert await cache.pages() == holding(private=2, leases=1)


async def test_extend_adds_slots_and_leaves_the_others_as_they_are(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1))
    before = lease.slots.tolist()

    added = await lease.extend(cache.page_size)

    assert lease.slots.tolist() == [*before, *added.tolist()]
    assert len(set(lease.slots.tolist())) == 2 * cache.page_size


@only(counts_pages)
async def test_a_lease_grows_while_it_decodes_and_publishes_all(cache: CacheUnderTest) -> None:
    kept = cache.reusable(4)
    lease = await cache.client.acquire(cache.tokens(1))
    await lease.insert(cache.tokens(1))

    for _ in range(3 * cache.page_size):
        assert len(await lease.extend(1)) == 1
    await cache.insert(lease, 1, 7, 7, 7)

    assert await cache.pages() == holding(private=4 - kept, protected=kept, leases=1)
    assert await cache.matched(1, 7, 7, 7) == kept


@only(counts_pages)
async def test_lock_holds_the_prefix_and_allocates_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    kept = cache.reusable(2)

    lease = await cache.client.lock(cache.tokens(1, 2, 3))

    assert (lease.prefix_len, lease.published_len, len(lease)) == (kept * cache.page_size,) * 3
    assert await cache.pages() == holding(protected=kept, leases=1)
    await cache.client.unlock(lease)
    assert await cache.pages() == holding(evictable=kept)


async def test_a_lock_of_uncached_tokens_holds_nothing(cache: CacheUnderTest) -> None:
    lease = await cache.client.lock(cache.tokens(1))

    assert (lease.prefix_len, lease.slots.tolist()) == (0, [])


async def test_a_lease_is_true_whatever_it_covers(cache: CacheUnderTest) -> None:
    lease = await cache.client.lock(cache.tokens(1))
    assert len(lease) == 0

    if lease:
        await lease.release()

    assert await cache.is_empty()


@only(counts_pages)
async def test_extend_adds_private_slots_behind_a_locked_prefix_and_insert_publishes_them(
    cache: CacheUnderTest,
) -> None:
    await cache.publish(1, 2)
    hit, kept, page = cache.reusable(2), cache.reusable(4), cache.page_size
    lease = await cache.client.lock(cache.tokens(1, 2, 3))

    added = await lease.extend((4 - hit) * page)
    assert lease.slots[hit * page :].tolist() == added.tolist()
    assert await cache.pages() == holding(private=4 - hit, protected=hit, leases=1)

    done = await cache.insert(lease, 1, 2, 3, 4)
    assert (done.prefix_len, done.num_inserted) == (hit * page, (kept - hit) * page)
    assert await cache.pages() == holding(private=4 - kept, protected=kept, leases=1)


# ---------------------------------------------------------------- confirm_open


async def test_a_lease_is_confirmed_as_long_as_it_is_open_and_nothing_changes(cache: CacheUnderTest) -> None:
    await cache.publish(1)
    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=1)
    empty = await cache.client.lock(cache.tokens(3))

    async def sizes() -> list[tuple[int, ...]]:
        stats = await cache.client.stats()
        check_sizes(stats)
        pools = pools_of(stats)
        return [(pool.free_slots, pool.private_slots, pool.evictable_slots, pool.protected_slots) for pool in pools]

    async def confirm() -> None:
        before, slots = await sizes(), lease.slots.tolist()
        for held in (lease, empty):
            await held.confirm_open()
        await asyncio.gather(lease.confirm_open(), lease.confirm_open())
        assert (await sizes(), lease.slots.tolist(), len(empty)) == (before, slots, 0)

    await confirm()
    await cache.insert(lease, 1, 2)
    await confirm()
    await lease.extend(cache.page_size)
    await confirm()

    for held in (lease, empty):
        await held.release()
        with pytest.raises(UnknownLease, match="has ended"):
            await held.confirm_open()
