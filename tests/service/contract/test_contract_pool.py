"""The contract of the pool: a hit reads the KV computed for its prefix, bit for bit.

See `test_contract_match`.
"""

from __future__ import annotations

import pytest
import torch
from support.caches.cache_kinds import only, shares, shares_slots
from support.caches.cache_under_test import CacheUnderTest
from support.models.stamped_kv import check_kv, compute, stamped_kv

from raydix.actors.client import attached_pool
from raydix.schemas import InvalidRequest, UnknownLease

# ---------------------------------------------------------------- one writes, another reads


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "copied"])
async def test_kv_computed_by_one_client_is_read_by_another_after_a_hit(cache: CacheUnderTest, mapped: bool) -> None:
    writer, reader = cache.another_client(), cache.another_client()
    tokens, hit = cache.tokens(1, 2, 3), cache.reusable(2) * cache.page_size
    pool = await writer.attach_pool(mapped=mapped)
    lease = await writer.acquire(tokens)
    await compute(cache, pool, lease, tokens[: 2 * cache.page_size], 0)
    await cache.insert(lease, 1, 2)

    other = await reader.acquire(tokens)
    assert other.prefix_len == hit
    pool = await reader.attach_pool(mapped=mapped)
    await check_kv(cache, pool, other, tokens[:hit])
    await compute(cache, pool, other, tokens, hit)

    await check_kv(cache, pool, other, tokens)
    await check_kv(cache, await writer.attach_pool(mapped=mapped), lease, tokens[: 2 * cache.page_size])


async def test_kv_that_takes_many_messages_arrives_whole(
    cache: CacheUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attached_pool, "_CHUNK_BYTES", 1)  # one slot per chunk
    tokens = cache.tokens(1, 2, 3)
    pool = await cache.client.attach_pool(mapped=False)
    lease = await cache.client.acquire(tokens)
    await compute(cache, pool, lease, tokens, 0)

    await check_kv(cache, pool, lease, tokens)
    outside = torch.cat((lease.slots, lease.slots[-1:] + 10_000))
    with pytest.raises(InvalidRequest, match="does not cover all"):
        await pool.read_kv(lease, outside)


async def test_computed_kv_is_read_after_its_client_has_closed(cache: CacheUnderTest) -> None:
    leaving, tokens = cache.another_client(), cache.tokens(1, 2)
    lease = await leaving.acquire(tokens)
    await compute(cache, await leaving.attach_pool(), lease, tokens, 0)
    await cache.insert(lease, 1, 2)
    await leaving.close()

    hit = await cache.client.acquire(tokens)

    assert hit.prefix_len == cache.reusable(2) * cache.page_size
    await check_kv(cache, await cache.client.attach_pool(), hit, tokens[: hit.prefix_len])


@only(shares, shares_slots)
async def test_a_lease_of_duplicate_pages_reads_the_cached_ones(cache: CacheUnderTest) -> None:
    first, second = cache.client, cache.another_client()
    tokens, hit = cache.tokens(1, 2), cache.reusable(2) * cache.page_size
    leases = [await client.acquire(tokens) for client in (first, second)]
    for client, lease, salt in zip((first, second), leases, ("first", "second"), strict=True):
        await compute(cache, await client.attach_pool(), lease, tokens, 0, salt)
        await cache.insert(lease, 1, 2)

    assert leases[1].published_len == hit
    await check_kv(cache, await second.attach_pool(), leases[1], tokens[:hit], "first")


@only(shares)
async def test_published_slots_cannot_be_written(cache: CacheUnderTest) -> None:
    tokens = cache.tokens(1, 2)
    pool = await cache.client.attach_pool(mapped=False)
    lease = await cache.client.acquire(tokens)
    await compute(cache, pool, lease, tokens, 0)
    await cache.insert(lease, 1, 2)
    other = await cache.client.acquire(tokens)
    arrays = stamped_kv(cache.kind, [7])

    for holder in (lease, other):
        with pytest.raises(InvalidRequest, match="only slots that were not published yet can be written"):
            await pool.write_kv(holder, holder.slots[:1], *arrays)

    await check_kv(cache, pool, other, tokens[: other.prefix_len])


async def test_only_the_holder_reads_and_writes_and_only_while_it_holds(cache: CacheUnderTest) -> None:
    tokens = cache.tokens(1)
    lease = await cache.client.acquire(tokens)
    arrays = stamped_kv(cache.kind, tokens)
    own = await cache.client.attach_pool(mapped=False)
    others = await cache.another_client().attach_pool(mapped=False)

    for use in (lambda: others.read_kv(lease, lease.slots), lambda: others.write_kv(lease, lease.slots, *arrays)):
        with pytest.raises(UnknownLease, match="belongs to another"):
            await use()
    await lease.release()
    for use in (lambda: own.read_kv(lease, lease.slots), lambda: own.write_kv(lease, lease.slots, *arrays)):
        with pytest.raises(UnknownLease, match="has ended"):
            await use()
