"""The contract of matches for every cache: any kind and page size, in process or on Ray.

Sizes are in pages, of eight in all; tokens are named by the page they fill: `tokens(1, 2)` are two pages. Of two pages,
`reusable(2)` can hit: both, or fewer for some kinds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.caches.cache_kinds import counts_pages, has_no_states, only, pages_of_several, shares, shares_slots
from support.caches.cache_under_test import CacheUnderTest

from raydix.schemas import InvalidRequest

# ---------------------------------------------------------------- probes


async def test_a_probe_finds_exactly_the_published_prefix(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)

    assert await cache.matched(1, 2, 3, 4) == cache.reusable(3)
    assert await cache.matched(1, 2, 3) == cache.reusable(3)
    assert await cache.matched(1, 2) == cache.reusable(2)
    assert await cache.matched(1, 2, 5) == cache.reusable(2)
    assert await cache.matched(1, 5, 3) == cache.reusable(1)
    assert await cache.matched(2, 3) == 0


async def test_branches_of_one_prefix_are_all_found(cache: CacheUnderTest) -> None:
    leases = [await cache.hold(1, 2, 3), await cache.hold(1, 2, 4), await cache.hold(1, 5)]
    for lease in leases:
        await lease.release()

    assert [await cache.matched(1, 2, 3, 9), await cache.matched(1, 2, 4, 9)] == [cache.reusable(3)] * 2
    assert await cache.matched(1, 5, 9) == cache.reusable(2)
    assert await cache.matched(1, 2, 5) == cache.reusable(2)


async def test_a_probe_is_counted_and_changes_nothing_else(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3, 4)
    passing = {"batches", "requests", "batch_size", "probes", "loop_lag_ms", "uptime_s", "oldest_lease_s"}
    before = (await cache.client.stats()).model_dump(exclude=passing)
    probes = (await cache.client.stats()).probes

    assert await cache.matched(1, 2) == cache.reusable(2)
    assert await cache.matched(3, 9) == cache.reusable(1)
    assert await cache.matched(9) == 0

    after = await cache.client.stats()
    assert after.model_dump(exclude=passing) == before
    assert after.probes == probes + 3


@only(shares)
async def test_a_probe_is_no_use(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3, 4)

    await cache.matched(1, 2)
    await cache.client.evict(1)

    assert await cache.matched(1, 2) < cache.reusable(2)  # it is still the least recently used
    assert await cache.matched(3, 4) == cache.reusable(2)


@only(shares, counts_pages)
async def test_a_probe_does_not_split_the_node_where_it_ends(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, 4)

    assert await cache.matched(1, 2, 3) == cache.reusable(3)
    assert await cache.matched(1, 2) == cache.reusable(2)

    evicted = (await cache.client.evict(1)).num_evicted
    assert evicted == cache.kind.leaf(cache.reusable(4)) * cache.page_size


@only(shares, pages_of_several)
async def test_a_hit_ends_on_a_whole_page(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)
    prompt = cache.tokens(1, 2) + cache.tokens(3)[1:]
    hit = cache.kind.reusable(len(prompt)) * cache.page_size

    found = await cache.client.match(prompt)
    lease = await cache.client.acquire(prompt)

    assert found.prefix_len == lease.prefix_len == hit > 0
    assert len(lease) == len(prompt)


@only(has_no_states)
async def test_whatever_is_there_can_be_used(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)

    found = await cache.client.match(cache.tokens(1, 2))

    assert found.prefix_len == found.full_prefix_len == cache.reusable(2) * cache.page_size
    assert found.branching_len is None


async def test_published_pages_are_found_while_their_lease_is_open(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))
    assert await cache.matched(1, 2) == 0

    await cache.insert(lease, 1, 2)

    assert await cache.matched(1, 2) == cache.reusable(2)


async def test_pages_published_by_one_client_hit_for_another(cache: CacheUnderTest) -> None:
    publisher, reader = cache.another_client(), cache.another_client()
    await cache.publish(1, 2, client=publisher)

    lease = await reader.acquire(cache.tokens(1, 2, 3))
    await publisher.close()

    assert lease.prefix_len == lease.published_len == cache.reusable(2) * cache.page_size
    assert await cache.matched(1, 2) == cache.reusable(2)


@pytest.mark.parametrize("limit", [(0, 1), (2, -1), (2, 0), (3, 0), (9, 0)], ids=str)
async def test_a_hit_is_no_longer_than_the_caller_allows(cache: CacheUnderTest, limit: tuple[int, int]) -> None:
    await cache.publish(1, 2, 3)
    max_prefix_len = limit[0] * cache.page_size + limit[1]

    lease = await cache.client.acquire(cache.tokens(1, 2, 3), max_prefix_len=max_prefix_len)

    assert lease.prefix_len == min(cache.reusable(3), max_prefix_len // cache.page_size) * cache.page_size
    assert len(lease) == 3 * cache.page_size


async def test_a_caller_may_allow_no_hit_at_all(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)

    lease = await cache.client.acquire(cache.tokens(1, 2), max_prefix_len=0)

    assert (lease.prefix_len, len(lease)) == (0, 2 * cache.page_size)


# ---------------------------------------------------------------- namespaces

TRIPLES: list[dict[str, str]] = [
    {},
    {"extra_key": ""},
    {"lora_id": "ab"},
    {"cache_salt": "ab"},
    {"extra_key": "a", "lora_id": "b"},
    {"extra_key": "ab", "lora_id": ""},
    {"extra_key": "", "lora_id": "ab"},
    {"extra_key": "1:a-", "cache_salt": "b"},
]


async def test_no_two_namespaces_meet(cache: CacheUnderTest) -> None:
    for published in TRIPLES:
        await cache.publish(1, 2, **published)

        found = [await cache.matched(1, 2, **triple) for triple in TRIPLES]

        assert found == [cache.reusable(2) if triple is published else 0 for triple in TRIPLES]
        await cache.client.reset()


@only(shares)
async def test_namespaces_live_side_by_side_in_slots_of_their_own(cache: CacheUnderTest) -> None:
    names: list[dict[str, str]] = [{}, {"lora_id": "x"}, {"cache_salt": "x"}]
    for name in names:
        await cache.publish(1, 2, **name)

    leases = [await cache.client.lock(cache.tokens(1, 2), **name) for name in names]

    slots = [slot for lease in leases for slot in lease.slots.tolist()]
    assert len(set(slots)) == len(slots) == 3 * cache.reusable(2) * cache.page_size


async def test_generated_tokens_are_published_in_the_leases_own_namespace(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=cache.page_size, lora_id="x")

    await cache.insert(lease, 1, 2)

    assert await cache.matched(1, 2, lora_id="x") == cache.reusable(2)
    assert await cache.matched(1, 2) == 0


# ---------------------------------------------------------------- token ids

SPELLINGS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array": lambda ids: array("q", ids),
    "int16": lambda ids: np.array(ids, np.int16),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "view": lambda ids: np.array(ids * 2, np.int64)[: len(ids)],
    "tensor": lambda ids: torch.tensor(ids),
    "int32 tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
}


async def test_the_same_ids_meet_however_they_are_spelt(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    prompt, hit = cache.tokens(1, 2, 3), cache.reusable(2) * cache.page_size
    for name, spelt in SPELLINGS.items():
        async with await cache.client.acquire(spelt(prompt)) as lease:
            assert lease.prefix_len == hit, name
            await lease.insert(spelt(prompt[:hit] or prompt[:1]))
            with pytest.raises(InvalidRequest, match="must begin with"):
                await lease.insert(spelt([*prompt[:-1], 7]))


async def test_ids_of_more_than_32_bits_differ_from_their_lower_halves(cache: CacheUnderTest) -> None:
    wide = 2**32 + 1
    await cache.publish(1, 2, wide)

    assert await cache.matched(1, 2, wide) == cache.reusable(3)
    assert await cache.matched(1, 2, 1) == cache.reusable(2)
    assert await cache.matched(wide, 2, wide) == 0


async def test_wide_ids_may_follow_a_narrow_prompt(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=2 * cache.page_size)

    await cache.insert(lease, 1, 2**40)
    await cache.insert(lease, 1, 2**40, 2)

    assert await cache.matched(1, 2**40, 2) == cache.reusable(3)


# ---------------------------------------------------------------- the slots of a hit


@only(shares_slots)
async def test_a_hit_is_on_the_publishers_own_slots(cache: CacheUnderTest) -> None:
    first = await cache.client.acquire(cache.tokens(1, 2))
    await cache.insert(first, 1, 2)

    second = await cache.another_client().acquire(cache.tokens(1, 2, 3))

    shared, own = cache.reusable(2), cache.page_ids(first)
    assert cache.page_ids(second)[:shared] == own[:shared]
    assert set(cache.page_ids(second)[shared:]).isdisjoint(own)


async def test_no_slot_is_private_to_two(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    leases = [await client.acquire(cache.tokens(1, 2)) for client in (cache.client, cache.another_client())]

    private = [slot for lease in leases for slot in lease.slots[lease.prefix_len :].tolist()]

    assert len(set(private)) == len(private)
