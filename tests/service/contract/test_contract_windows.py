"""Caches with sliding-window layers: the additional contract. See `test_contract_match`.

A lease holds a window slot for each private token, and for the tail of its published tokens: see `kept_tail`.
"""

from __future__ import annotations

import pytest
from support.caches.cache_kinds import TIGHT_WINDOW, has_window, only
from support.caches.cache_under_test import CacheUnderTest, Reached, check_sizes, holding
from support.models.stamped_kv import check_kv, compute

from raydix.cache_core.components.window_kv import kept_tail
from raydix.schemas import PoolExhausted


async def window_pages(cache: CacheUnderTest) -> tuple[int, int, int]:
    """Return the pages of the window pool: free, private, in the tree."""
    stats = await cache.client.stats()
    check_sizes(stats)
    assert stats.swa is not None
    free, private, tree = stats.swa.free_slots, stats.swa.private_slots, stats.swa.tree_slots
    return free // cache.page_size, private // cache.page_size, tree // cache.page_size


@only(has_window)
async def test_window_slots_come_and_go_with_the_others(cache: CacheUnderTest) -> None:
    kept = cache.reusable(2)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    assert await window_pages(cache) == (5, 3, 0)
    assert (lease.swa_slots > 0).all()

    await cache.insert(lease, 1, 2)
    assert await window_pages(cache) == (5, 3 - kept, kept)

    await lease.release()
    assert await window_pages(cache) == (8 - kept, 0, kept)


@only(has_window)
async def test_a_released_window_is_free_at_once_and_0_in_the_lease(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(*range(1, 7)))
    page, window = cache.page_size, cache.kind.window_size
    num_freed = (6 * page - kept_tail(window, page)) // page
    assert num_freed > 0

    await lease.release_window(6 * page - window + 1)

    assert (lease.swa_slots[: num_freed * page] == 0).all()
    assert (lease.swa_slots[num_freed * page :] > 0).all()
    assert await window_pages(cache) == (2 + num_freed, 6 - num_freed, 0)
    assert len(lease) == 6 * page
    await lease.release_window(6 * page - window + 1)
    await lease.release_window(page)
    assert await window_pages(cache) == (2 + num_freed, 6 - num_freed, 0)


@only(has_window)
async def test_a_window_passed_by_decoding_may_be_evicted_and_published_tokens_hit_in_full(
    cache: CacheUnderTest,
) -> None:
    page, pool = cache.page_size, await cache.client.attach_pool()
    for num_tokens in range(1, 7 * page + 1, max(1, page - 1)):
        tokens = list(range(1, num_tokens + 1))
        lease = await cache.client.acquire(tokens)
        await compute(cache, pool, lease, tokens, 0)
        await lease.release_window(max(0, num_tokens - cache.kind.window_size + 1))
        await lease.insert(tokens, release=True)

        hit = await cache.client.acquire(tokens)

        assert hit.prefix_len == cache.kind.reusable(num_tokens) * page
        assert (hit.swa_slots[max(0, hit.prefix_len - cache.kind.window_size) :] > 0).all()
        await check_kv(cache, pool, hit, tokens[: hit.prefix_len])
        await hit.release()
        await cache.client.reset()


@only(has_window)
async def test_giving_up_the_window_of_a_hit_leaves_it_to_others(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, 4)
    leaving = await cache.client.acquire(cache.tokens(1, 2, 3, 4, 5, 6, 7))
    staying = await cache.client.acquire(cache.tokens(1, 2, 3, 4))
    before = (staying.swa_slots > 0).tolist()

    await leaving.release_window(len(leaving))

    assert (leaving.swa_slots[: 4 * cache.page_size] == 0).all()
    assert await cache.matched(1, 2, 3, 4) == cache.reusable(4)
    await leaving.release()
    await cache.client.evict(10**6)
    assert (staying.swa_slots > 0).tolist() == before


async def test_tokens_before_the_last_window_are_not_needed_for_a_hit(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        await cache.publish(1, 2, 3, 4)

        async with await cache.client.acquire(cache.tokens(9, 9)):  # allocates two pages of the window pool
            assert await window_pages(cache) == (0, 2, 2)
            found = await cache.client.match(cache.tokens(1, 2))
            assert await cache.matched(1, 2, 3, 4) == 4
            assert (found.prefix_len, found.full_prefix_len) == (0, 2 * cache.page_size)

            lease = await cache.client.acquire(cache.tokens(1, 2, 3, 4))
            assert (lease.swa_slots > 0).tolist() == [False] * 8 + [True] * 8


async def test_a_long_sequence_fits_if_it_gives_up_its_windows_as_it_goes(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        page, pool = cache.page_size, await cache.client.attach_pool()
        tokens = cache.tokens(*range(1, 9))
        lease = await cache.client.acquire(tokens[: 4 * page])
        await compute(cache, pool, lease, tokens[: 4 * page], 0)
        for start in range(4 * page, 8 * page, page):
            await lease.release_window(start - cache.kind.window_size + 1)
            assert len(await lease.extend(page, timeout_s=0)) == page
            await compute(cache, pool, lease, tokens[: start + page], start)
        await lease.insert(tokens, release=True)

        hit = await cache.client.acquire(tokens)

        assert hit.prefix_len == 8 * page
        await check_kv(cache, pool, hit, tokens)


async def test_more_window_slots_than_there_are_can_never_be_had(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        with pytest.raises(PoolExhausted) as caught:
            await cache.client.acquire(cache.tokens(1, 2, 3, 4, 5))

        assert (caught.value.needed, caught.value.can_ever_fit) == (5 * cache.page_size, False)
        assert await cache.is_empty()


async def test_a_request_that_can_never_fit_is_refused_even_if_others_wait(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        held = await cache.client.acquire(cache.tokens(1, 2, 3))
        (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(4, 5)))

        for tokens in (cache.tokens(*range(1, 6)), cache.tokens(*range(1, 10))):  # window slots, slots
            with pytest.raises(PoolExhausted) as caught:
                await cache.client.acquire(tokens)
            assert (caught.value.needed, caught.value.can_ever_fit) == (len(tokens), False)

        await held.release()
        await waiting


async def test_cached_tokens_need_no_window_slots_of_their_own(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        for stop in range(1, 5):
            await cache.publish(*range(1, stop + 1))
        lease = await cache.client.acquire(cache.tokens(*range(1, 5)), new_tokens=2 * cache.page_size)

        assert lease.prefix_len == 4 * cache.page_size


async def test_a_lease_cannot_grow_beyond_the_window_slots_that_there_are(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        lease = await cache.client.acquire(cache.tokens(1, 2, 3))

        with pytest.raises(PoolExhausted) as caught:
            await lease.extend(2 * cache.page_size)

        error = caught.value
        assert (error.pool, error.needed, error.can_ever_fit) == ("window slots", 5 * cache.page_size, False)
        assert len(lease) == 3 * cache.page_size


async def test_a_request_that_lacks_window_slots_waits_for_them(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        held = await cache.client.acquire(cache.tokens(1, 2, 3))
        (waiting,) = await cache.in_line(cache.client.acquire(cache.tokens(4, 5)))
        assert await cache.pages() == holding(private=3, leases=1)

        await held.release_window(3 * cache.page_size)

        assert len(await waiting) == 2 * cache.page_size
        assert await window_pages(cache) == (0, 4, 0)


async def test_a_request_refused_for_lack_of_window_slots_does_not_read_that_enough_are_free(reached: Reached) -> None:
    async with reached(TIGHT_WINDOW) as cache:
        held = await cache.client.acquire(cache.tokens(1, 2, 3))

        with pytest.raises(PoolExhausted) as caught:
            await cache.client.acquire(cache.tokens(4, 5), timeout_s=0)

        await held.release()
        assert caught.value.needed > caught.value.free + caught.value.evictable
