"""The contract of publishing: the part of a lease that moves to the tree, and the part it then holds.

See `test_contract_match`.
"""

from __future__ import annotations

import asyncio

import pytest
from support.caches.cache_kinds import counts_pages, only, pages_of_several, shares
from support.caches.cache_under_test import CacheUnderTest, holding

from raydix.schemas import UnknownLease


@only(counts_pages, pages_of_several)
async def test_the_tail_of_the_last_page_is_never_in_the_tree(cache: CacheUnderTest) -> None:
    prompt = cache.tokens(1, 2) + cache.tokens(3)[1:]
    kept = cache.kind.reusable(len(prompt))
    lease = await cache.client.acquire(prompt)
    assert await cache.pages() == holding(private=3, leases=1)

    done = await lease.insert(prompt)

    assert done.num_inserted == lease.published_len == kept * cache.page_size
    assert len(lease) == len(prompt)
    assert await cache.pages() == holding(private=3 - kept, protected=kept, leases=1)
    await lease.release()
    assert await cache.pages() == holding(evictable=kept)


@only(counts_pages, pages_of_several)
async def test_less_than_a_page_publishes_nothing(cache: CacheUnderTest) -> None:
    prompt = cache.tokens(1)[1:]
    lease = await cache.client.acquire(prompt)

    done = await lease.insert(prompt)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (0, 0, 0)
    assert await cache.pages() == holding(private=1, leases=1)


@only(counts_pages, shares)
async def test_a_page_computed_again_for_its_logits_is_freed_when_it_is_inserted(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    kept, page = cache.reusable(3), cache.page_size
    lease = await cache.client.acquire(cache.tokens(1, 2, 3), max_prefix_len=kept * page - 1)
    assert lease.prefix_len == (kept - 1) * page

    done = await cache.insert(lease, 1, 2, 3)

    assert done.prefix_len == lease.published_len == kept * page
    counted = (page, 0) if cache.kind.replaces_unused else (0, page)
    assert (done.num_inserted, done.num_duplicates) == counted
    assert await cache.pages() == holding(private=3 - kept, protected=kept, leases=1)


@only(counts_pages)
async def test_pages_that_another_published_first_are_freed_and_the_lease_names_the_trees(
    cache: CacheUnderTest,
) -> None:
    shared, kept, page = cache.reusable(2), cache.reusable(3), cache.page_size
    first = await cache.client.acquire(cache.tokens(1, 2))
    second = await cache.another_client().acquire(cache.tokens(1, 2, 3))
    assert await cache.pages() == holding(private=5, leases=2)
    await cache.insert(first, 1, 2)
    own = cache.page_ids(second)

    done = await cache.insert(second, 1, 2, 3)

    assert done.prefix_len == shared * page
    assert (done.num_inserted, done.num_duplicates) == ((kept - shared) * page, shared * page)
    assert cache.page_ids(second) == [*cache.page_ids(first)[:shared], *own[shared:]]
    assert (second.prefix_len, second.published_len) == (0, kept * page)
    assert await cache.pages() == holding(private=2 - shared + 3 - kept, protected=kept, leases=2)


@only(counts_pages)
async def test_generated_tokens_are_published_behind_the_prompt(cache: CacheUnderTest) -> None:
    early, kept, page = cache.reusable(3), cache.reusable(4), cache.page_size
    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=2 * page)

    first = await cache.insert(lease, 1, 2, 3)
    second = await cache.insert(lease, 1, 2, 3, 4)

    assert (first.num_inserted, second.num_inserted) == (early * page, (kept - early) * page)
    assert (second.prefix_len, lease.published_len) == (early * page, kept * page)
    assert lease.prefix_len == 0
    await lease.release()
    assert await cache.pages() == holding(evictable=kept)
    assert await cache.matched(1, 2, 3, 4) == kept


@only(counts_pages)
async def test_a_long_prompt_is_published_chunk_by_chunk_while_it_is_computed(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2, 3, 4))

    for done in range(1, 5):
        await cache.insert(lease, *range(1, done + 1))
        kept = cache.reusable(done)
        assert await cache.matched(1, 2, 3, 4) == kept
        assert await cache.pages() == holding(private=4 - kept, protected=kept, leases=1)


@only(counts_pages)
async def test_inserting_published_tokens_again_changes_nothing(cache: CacheUnderTest) -> None:
    kept = cache.reusable(2)
    lease = await cache.client.acquire(cache.tokens(1, 2))
    await cache.insert(lease, 1, 2)

    again = await cache.insert(lease, 1, 2)
    shorter = await lease.insert(cache.tokens(1))

    assert (again.num_inserted, again.num_duplicates) == (0, 0)
    assert (shorter.num_inserted, shorter.num_duplicates) == (0, 0)
    assert lease.published_len == kept * cache.page_size
    assert await cache.pages() == holding(private=2 - kept, protected=kept, leases=1)


@only(counts_pages)
@pytest.mark.parametrize("order", [(2, 4), (4, 2), (3, 3)], ids=str)
async def test_two_inserts_at_once_on_one_lease_publish_the_longer(
    cache: CacheUnderTest, order: tuple[int, int]
) -> None:
    kept = cache.reusable(max(order))
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=3 * cache.page_size)
    own = cache.page_ids(lease)
    computed = cache.tokens(1, 2, 3, 4)

    await asyncio.gather(*(lease.insert(computed[: pages * cache.page_size]) for pages in order))

    assert lease.published_len == kept * cache.page_size
    assert cache.page_ids(lease) == own
    assert await cache.pages() == holding(private=4 - kept, protected=kept, leases=1)


@only(counts_pages)
async def test_insert_can_end_the_lease_in_the_same_message(cache: CacheUnderTest) -> None:
    kept = cache.reusable(2)
    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=cache.page_size)

    done = await cache.insert(lease, 1, 2, release=True)

    assert done.num_inserted == kept * cache.page_size
    assert await cache.pages() == holding(evictable=kept)
    with pytest.raises(UnknownLease, match="has ended"):
        await lease.insert(cache.tokens(1, 2))
