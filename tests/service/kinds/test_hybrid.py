"""Caches for models with sliding-window layers and states: the additional contract. See `test_contract_match`.

A hit ends at a published state with a live last window; the lease then has KV, window KV and a state.
"""

from __future__ import annotations

from support.caches.cache_kinds import TIGHT_HYBRID, has_window_and_states, only
from support.caches.cache_under_test import CacheUnderTest, Reached, check_sizes
from support.models.stamped_kv import check_kv, check_state, compute

from raydix.schemas import CacheStats, PoolStats


async def pools(cache: CacheUnderTest) -> tuple[CacheStats, PoolStats, PoolStats]:
    """Return the sizes of all three pools, after checking them."""
    stats = await cache.client.stats()
    check_sizes(stats)
    assert stats.swa is not None
    assert stats.state is not None
    return stats, stats.swa, stats.state


async def publish_computed(cache: CacheUnderTest, *pages: int) -> None:
    """Compute and publish page by page, with a state after each."""
    pool, page = await cache.client.attach_pool(), cache.page_size
    lease = await cache.client.acquire(cache.tokens(*pages))
    for stop in range(lease.prefix_len // page + 1, len(pages) + 1):
        await compute(cache, pool, lease, cache.tokens(*pages[:stop]), (stop - 1) * page)
        await cache.insert(lease, *pages[:stop])
    await lease.release()


async def check_hit(cache: CacheUnderTest, *pages: int, of: int) -> None:
    """Check that this many pages hit, and that the lease has all a model needs to continue."""
    tokens, client = cache.tokens(*pages), cache.another_client()
    found = tokens[: of * cache.page_size]
    lease = await client.acquire(tokens)
    assert lease.prefix_len == len(found)
    assert (lease.swa_slots[max(0, len(found) - cache.kind.window_size) :] > 0).all(), "the window must have no hole"
    for mapped in (True, False):
        await check_kv(cache, await client.attach_pool(mapped=mapped), lease, found)
    check_state(cache, await client.attach_pool(mapped=True), lease, found)
    await lease.release()


@only(has_window_and_states)
async def test_kv_window_and_state_come_back_bit_for_bit_in_a_hit(cache: CacheUnderTest) -> None:
    await publish_computed(cache, 1, 2, 3, 4)

    await check_hit(cache, 1, 2, 3, 4, of=4)
    await check_hit(cache, 1, 2, 9, of=2)
    await check_hit(cache, 8, of=0)


@only(has_window_and_states)
async def test_a_hit_needs_a_state_however_much_window_there_is(cache: CacheUnderTest) -> None:
    pool, tokens = await cache.client.attach_pool(), cache.tokens(1, 2, 3)
    lease = await cache.client.acquire(tokens)
    await compute(cache, pool, lease, tokens, 0)
    await lease.insert(tokens)
    assert await cache.matched(1, 2, 3) == 0

    await lease.insert(tokens, release=True, publish_state=True)

    assert await cache.matched(1, 2) == 0
    await check_hit(cache, 1, 2, 3, 4, of=3)


@only(has_window_and_states)
async def test_a_long_answer_gives_its_window_up_and_is_hit_at_its_end(cache: CacheUnderTest) -> None:
    """Decoding moves its window on page by page, and publishes only at the end."""
    pool, page = await cache.client.attach_pool(), cache.page_size
    answer = range(1, 7)
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=5 * page)
    for stop in answer:
        tokens = cache.tokens(*range(1, stop + 1))
        await compute(cache, pool, lease, tokens, (stop - 1) * page)
        await lease.release_window(max(0, len(tokens) - cache.kind.window_size + 1))
    _, windows, _ = await pools(cache)
    assert windows.private_slots == 3 * page, "of six pages, two for the window and one more"
    assert (lease.swa_slots[: 3 * page] == 0).all()

    await cache.insert(lease, *answer, release=True)

    full, windows, states = await pools(cache)
    assert (full.tree_slots, windows.tree_slots, states.tree_slots) == (6 * page, 3 * page, 1)
    assert await cache.matched(*answer[:5]) == 0, "the hit must have a state"
    await check_hit(cache, *answer, of=6)


@only(has_window_and_states)
async def test_a_window_given_up_early_leaves_its_state_with_the_lease(cache: CacheUnderTest) -> None:
    await publish_computed(cache, 1, 2, 3)
    page = cache.page_size
    lease = await cache.client.acquire(cache.tokens(1, 2, 3), new_tokens=2 * page)
    _, windows, states = await pools(cache)
    assert (windows.protected_slots, states.protected_slots) == (3 * page, 1)

    await lease.release_window(5 * page)

    full, windows, states = await pools(cache)
    assert (full.protected_slots, windows.protected_slots, states.protected_slots) == (3 * page, 0, 1)
    await lease.release()
    assert (await pools(cache))[2].protected_slots == 0
    await check_hit(cache, 1, 2, 3, of=3)


async def test_a_state_goes_with_its_window_and_comes_back_with_it(reached: Reached) -> None:
    async with reached(TIGHT_HYBRID) as cache:
        page = cache.page_size
        await publish_computed(cache, 1, 2, 3)

        other = await cache.client.acquire(cache.tokens(8, 9))  # evicts the first page's window
        full, windows, states = await pools(cache)
        assert (full.tree_slots, windows.tree_slots, states.tree_slots) == (3 * page, 2 * page, 2)
        assert [await cache.matched(1), await cache.matched(1, 2)] == [0, 0], "the window reaches over the first page"
        await check_hit(cache, 1, 2, 3, of=3)
        await other.release()

        await publish_computed(cache, 1)
        full, windows, states = await pools(cache)
        assert (full.tree_slots, windows.tree_slots, states.tree_slots) == (3 * page, 3 * page, 3)
        await check_hit(cache, 1, of=1)
        await check_hit(cache, 1, 2, of=2)
        await check_hit(cache, 1, 2, 3, of=3)


async def test_windows_that_run_short_are_taken_from_unlocked_prefixes(reached: Reached) -> None:
    async with reached(TIGHT_HYBRID) as cache:
        await publish_computed(cache, 1, 2, 3)
        held = await cache.client.acquire(cache.tokens(1, 2, 3))
        for name in range(10, 20):
            await publish_computed(cache, name)

        assert await cache.matched(1, 2, 3) == 3
        await held.release()
        await check_hit(cache, 1, 2, 3, of=3)
