"""The contract of eviction, resets and statistics. See `test_contract_match`."""

from __future__ import annotations

import asyncio

from support.caches.cache_kinds import counts_pages, has_no_states, has_no_window, only, shares, shares_slots
from support.caches.cache_under_test import CacheUnderTest, check_sizes, holding

# ---------------------------------------------------------------- evict


@only(counts_pages)
async def test_evict_frees_the_least_recently_used_first_and_says_how_much(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3, 4)
    await cache.publish(5, 6)
    await (await cache.client.lock(cache.tokens(1, 2))).release()
    kept = cache.reusable(2)
    gone = cache.kind.leaf(kept)

    evicted = (await cache.client.evict(1)).num_evicted

    assert evicted == gone * cache.page_size
    assert await cache.pages() == holding(evictable=3 * kept - gone)
    found = [await cache.matched(1, 2), await cache.matched(3, 4), await cache.matched(5, 6)]
    assert found == [kept, kept - gone, kept]


async def test_evict_frees_all_unlocked_pages_if_asked_for_more(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    await cache.publish(1, 4)
    cached = (await cache.client.stats()).tree_slots

    evicted = (await cache.client.evict(10**6)).num_evicted

    assert evicted == cached
    assert await cache.is_empty()
    assert [await cache.matched(1, 2, 3), await cache.matched(1, 4)] == [0, 0]


async def test_evict_of_nothing_frees_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)

    assert (await cache.client.evict(0)).num_evicted == 0

    assert await cache.matched(1, 2) == cache.reusable(2)


@only(shares_slots, counts_pages)
async def test_evict_leaves_leased_pages(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    held, kept = cache.reusable(2), cache.reusable(3)
    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=cache.page_size)
    slots = lease.slots.tolist()

    evicted = (await cache.client.evict(8 * cache.page_size)).num_evicted

    assert evicted == (kept - held) * cache.page_size  # the part beyond the locked prefix
    assert await cache.pages() == holding(private=3 - held, protected=held, leases=1)
    assert (await cache.client.evict(8 * cache.page_size)).num_evicted == 0
    assert lease.slots.tolist() == slots
    assert await cache.matched(1, 2, 3) == held


@only(shares)
async def test_evicted_tokens_can_be_published_again(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    await cache.client.evict(10**6)

    await cache.publish(1, 2, 3)

    assert await cache.matched(1, 2, 3) == cache.reusable(3)


# ---------------------------------------------------------------- eviction for a request


@only(shares, counts_pages)
async def test_a_caller_in_need_evicts_its_shortfall_and_no_more(cache: CacheUnderTest) -> None:
    for page in (1, 3, 5):
        await cache.publish(page, page + 1)
    kept = cache.reusable(2)
    gone = cache.kind.leaf(kept)
    free = 8 - 3 * kept

    lease = await cache.client.acquire(cache.tokens(*[9] * (free + 1)))

    assert lease.prefix_len == 0
    assert await cache.pages() == holding(private=free + 1, evictable=3 * kept - gone, leases=1)
    found = [await cache.matched(1, 2), await cache.matched(3, 4), await cache.matched(5, 6)]
    assert found == [kept - gone, kept, kept]


@only(shares, counts_pages)
async def test_a_lease_that_grows_evicts_its_shortfall(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    kept = cache.reusable(2)
    lease = await cache.client.acquire(cache.tokens(3))

    await lease.extend((8 - kept) * cache.page_size)

    gone = cache.kind.leaf(kept)
    assert await cache.pages() == holding(private=9 - kept, evictable=kept - gone, leases=1)


@only(counts_pages)
async def test_a_caller_in_need_never_evicts_its_own_prefix(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3, 4)
    kept = cache.reusable(2)

    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=6 * cache.page_size)

    assert lease.prefix_len == kept * cache.page_size
    assert await cache.pages() == holding(private=8 - kept, protected=kept, leases=1)
    assert await cache.matched(1, 2) == kept


@only(counts_pages)
async def test_a_refused_caller_evicts_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    held = await cache.client.acquire(cache.tokens(3))
    before = await cache.pages()

    (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(*[9] * 8)))

    assert await cache.pages() == before
    assert await cache.matched(1, 2) == cache.reusable(2)
    await held.release()
    assert len(await waiting) == 8 * cache.page_size


# ---------------------------------------------------------------- reset


async def test_reset_makes_everything_unmatchable_and_frees_unlocked_pages(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(1, 2, lora_id="x")

    await cache.client.reset()

    assert await cache.is_empty()
    assert (await cache.matched(1, 2), await cache.matched(1, 2, lora_id="x")) == (0, 0)


@only(counts_pages)
async def test_a_lease_from_before_a_reset_keeps_its_slots_publishes_nothing_and_frees_all_at_its_end(
    cache: CacheUnderTest,
) -> None:
    await cache.publish(1, 2)
    held = cache.reusable(2)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    slots = lease.slots.tolist()

    await cache.client.reset()
    assert await cache.pages() == holding(private=3 - held, protected=held, leases=1)
    assert await cache.matched(1, 2) == 0

    done = await cache.insert(lease, 1, 2, 3)
    assert (done.num_inserted, done.num_duplicates, done.retired) == (0, 0, True)
    assert lease.slots.tolist() == slots
    assert await cache.matched(1, 2, 3) == 0
    assert await cache.pages() == holding(private=3 - held, protected=held, leases=1)

    await lease.extend(cache.page_size)
    assert await cache.pages() == holding(private=4 - held, protected=held, leases=1)
    await lease.release()
    assert await cache.is_empty()


async def test_leases_from_before_a_reset_end_in_any_order(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    leases = [await cache.client.acquire(cache.tokens(1, 2)) for _ in range(2)]
    await cache.insert(leases[1], 1, 2)

    await cache.client.reset()
    await cache.client.check_invariants()

    for lease in leases:
        await lease.release()
        await cache.client.check_invariants()
    assert await cache.is_empty()


@only(counts_pages)
async def test_after_a_reset_the_same_tokens_are_published_again(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    kept = cache.reusable(2)
    old = await cache.client.acquire(cache.tokens(1, 2))
    await cache.client.reset()

    new = await cache.client.acquire(cache.tokens(1, 2))
    done = await cache.insert(new, 1, 2)

    assert (new.prefix_len, done.num_inserted, done.retired) == (0, kept * cache.page_size, False)
    assert set(cache.page_ids(new)).isdisjoint(cache.page_ids(old))
    assert await cache.pages() == holding(private=2 * (2 - kept), protected=2 * kept, leases=2)
    await old.release()
    assert await cache.pages() == holding(private=2 - kept, protected=kept, leases=1)


# ---------------------------------------------------------------- statistics

COUNTERS = "acquires hits tokens_requested tokens_reused tokens_inserted tokens_duplicate tokens_evicted probes".split()


@only(shares, counts_pages)
async def test_stats_count_requests_hits_and_evictions(cache: CacheUnderTest) -> None:
    page, kept = cache.page_size, cache.reusable(3)
    before = (await cache.client.stats()).model_dump()
    await cache.publish(1, 2, 3)
    again = await cache.client.acquire(cache.tokens(1, 2, 3), max_prefix_len=(kept - 1) * page)
    await cache.insert(again, 1, 2, 3, release=True)
    await cache.matched(1)
    await cache.client.evict(1)  # the page computed again: an acquire with a shorter prefix has split it off

    after = (await cache.client.stats()).model_dump()

    inserted, duplicate = (kept + 1, 0) if cache.kind.replaces_unused else (kept, 1)
    assert {name: after[name] - before[name] for name in COUNTERS} == {
        "acquires": 2,
        "hits": 1,
        "tokens_requested": 6 * page,
        "tokens_reused": (kept - 1) * page,
        "tokens_inserted": inserted * page,
        "tokens_duplicate": duplicate * page,
        "tokens_evicted": page,
        "probes": 1,
    }


async def test_stats_count_the_requests_and_name_the_epoch(cache: CacheUnderTest) -> None:
    before = await cache.client.stats()
    lease = await cache.client.acquire(cache.tokens(1))
    await cache.matched(1)

    after = await cache.client.stats()

    assert after.requests == before.requests + 3  # the second request for statistics is one of them
    assert lease.epoch == after.epoch == before.epoch
    assert after.num_slots == cache.kind.cache_config().pool.num_slots


@only(has_no_window, has_no_states)
async def test_where_there_is_one_pool_there_are_no_other_numbers(cache: CacheUnderTest) -> None:
    stats = await cache.client.stats()

    assert (stats.swa, stats.state) == (None, None)


async def test_every_slot_of_every_pool_is_counted_once_at_every_step(cache: CacheUnderTest) -> None:
    async def check() -> None:
        check_sizes(await cache.client.stats())
        await cache.client.check_invariants()

    await cache.publish(1, 2, 3)
    await check()
    lease = await cache.client.acquire(cache.tokens(1, 2, 4), new_tokens=cache.page_size)
    other = await cache.another_client().acquire(cache.tokens(1, 2, 4))
    await check()
    await cache.insert(lease, 1, 2, 4)
    await cache.insert(other, 1, 2, 4)
    await check()
    await lease.release_window(len(lease))
    await cache.client.evict(cache.page_size)
    await check()
    await other.abort()
    await cache.client.reset()
    await check()
    await lease.release()
    assert await cache.is_empty()


# ---------------------------------------------------------------- concurrent requests


@only(counts_pages)
async def test_requests_made_at_once_by_many_coroutines_each_get_their_own_answer(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    shared, kept, page = cache.reusable(2), cache.reusable(3), cache.page_size

    async def cycle(number: int) -> tuple[int, int]:
        async with await cache.client.acquire(cache.tokens(1, 2, number)) as lease:
            return lease.prefix_len, (await cache.insert(lease, 1, 2, number)).num_inserted

    answers = await asyncio.gather(*map(cycle, range(10, 14)))

    assert answers == [(shared * page, (kept - shared) * page)] * 4
    assert await cache.pages() == holding(evictable=shared + 4 * (kept - shared))
