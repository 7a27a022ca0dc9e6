"""A lease returns copies of its tensors: changes to them affect neither the lease nor the pool."""

from __future__ import annotations

import pytest
import torch
from support.caches.cache_under_test import CacheUnderTest
from support.caches.unheard_loss import expire_unheard

from raydix.actors import LocalPrefixCache
from raydix.schemas import CacheConfig, InvalidRequest, LeaseExpired, PoolConfig


async def test_arithmetic_on_a_leases_tensors_changes_no_lease(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    async with cache.client.acquire(cache.tokens(1, 2, 3), new_tokens=2) as lease:
        slots, pages, last = lease.slots, lease.pages, await lease.extend(1)
        kept = lease.slots.tolist(), lease.pages.tolist()

        for tensor in (slots, pages, last, lease.slots[:3], lease.pages[1:]):
            tensor.mul_(0).add_(cache.page_size)

        assert (lease.slots.tolist(), lease.pages.tolist()) == kept
        try:
            window = lease.swa_slots
        except InvalidRequest:
            return
        before = window.tolist()
        window.zero_()
        assert lease.swa_slots.tolist() == before


async def test_a_lease_writes_where_it_holds_whatever_its_callers_do_to_its_slots() -> None:
    pool_config = PoolConfig.uniform(
        num_slots=32, num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", device="cpu"
    )
    async with LocalPrefixCache(CacheConfig(page_size=4, pool=pool_config)) as cache:
        pool = await cache.attach_pool()
        async with cache.acquire([1, 2, 3, 4]) as first:
            pool.write(0, first.slots, torch.ones(4, 1, 2), torch.ones(4, 1, 2))
            await first.insert([1, 2, 3, 4])
            theirs = first.slots
        async with cache.acquire([5, 6, 7, 8]) as second:
            rows = second.slots
            rows -= rows - theirs  # in-place arithmetic, for example to index another table
            pool.write(0, second.slots, torch.zeros(4, 1, 2), torch.zeros(4, 1, 2))

        assert pool.gather(0, theirs)[0].eq(1).all()


async def test_pages_are_a_block_table_of_the_slots(cache: CacheUnderTest) -> None:
    page = cache.page_size
    await cache.publish(1)
    async with cache.client.acquire(cache.tokens(1, 2), new_tokens=1) as lease:
        for grown in (0, 1, 2 * page):
            if grown:
                await lease.extend(grown, timeout_s=0)
            slots, pages = lease.slots, lease.pages
            assert pages.dtype == torch.int64
            assert len(pages) == -(-len(lease) // page)
            assert slots.tolist() == [int(pages[i // page]) * page + i % page for i in range(len(slots))]


async def test_slots_and_pages_can_be_read_after_the_session_is_lost() -> None:
    async with LocalPrefixCache(CacheConfig(page_size=4, pool=PoolConfig(num_slots=32, device="cpu"))) as cache:
        lease = await cache.acquire([1, 2, 3, 4])
        before = lease.slots.tolist(), lease.pages.tolist()
        await expire_unheard(cache, cache.session)
        with pytest.raises(LeaseExpired):
            await lease.extend(1)

        assert not cache.session.ready
        assert (lease.slots.tolist(), lease.pages.tolist()) == before


async def test_a_lease_of_no_token_has_no_page(cache1: CacheUnderTest) -> None:
    async with cache1.client.lock([1, 2]) as lease:
        assert (lease.pages.tolist(), lease.slots.tolist()) == ([], [])


@pytest.mark.parametrize("page_size", [1, 4])
async def test_pages_of_rows_go_through_the_row(page_size: int) -> None:
    config = CacheConfig(kind="slots", page_size=page_size, max_seq_len=8, pool=PoolConfig(num_slots=16, device="cpu"))
    async with LocalPrefixCache(config) as cache, cache.acquire([1]), cache.acquire([2] * 6) as lease:
        pages = lease.pages
        assert pages.tolist() == list(range(8 // page_size, 8 // page_size + -(-6 // page_size)))
        assert lease.slots.tolist() == [int(pages[i // page_size]) * page_size + i % page_size for i in range(6)]
