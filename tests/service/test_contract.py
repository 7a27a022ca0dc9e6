"""What every cache promises its callers, in process or on Ray, whatever its page size.

Sizes are in pages of the eight that there are, tokens named by the page they fill: `tokens(1, 2)` are two pages.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np
import pytest
import torch
from cache_under_test import CacheUnderTest, Pages

from raydix.schemas import UnknownLease

# ---------------------------------------------------------------- match


async def test_a_probe_finds_what_was_published_and_no_more(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3)

    assert await cache.matched(1, 2, 3, 4) == 3
    assert await cache.matched(1, 2) == 2
    assert await cache.matched(1, 5, 3) == 1
    assert await cache.matched(2, 3) == 0


async def test_a_probe_holds_nothing_and_counts_as_no_use(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3)
    before = await cache.client.stats()

    assert await cache.matched(1, 2) == 2
    assert await cache.matched(1) == 1

    assert await cache.pages() == Pages(free=5, evictable=3)
    after = await cache.client.stats()
    assert (after.acquires, after.hits, after.tokens_reused) == (before.acquires, before.hits, before.tokens_reused)
    assert after.probes == before.probes + 2
    assert (await cache.client.evict(1)).num_evicted == 2 * cache.page_size  # [1, 2] is still the one used least
    assert (await cache.matched(1, 2), await cache.matched(3)) == (0, 1)


async def test_a_probe_does_not_split_what_it_ends_in(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, 4)

    assert await cache.matched(1, 2) == 2

    assert (await cache.client.evict(1)).num_evicted == 4 * cache.page_size  # one node still


async def test_a_hit_ends_on_a_whole_page(cache16: CacheUnderTest) -> None:
    await cache16.publish(1, 2)

    found = await cache16.client.match(cache16.tokens(1) + [2] * 15)

    assert (found.prefix_len, found.full_prefix_len, found.branching_len) == (16, 16, None)


# ---------------------------------------------------------------- acquire, insert, release


async def test_what_is_acquired_is_private_until_it_is_published_and_stays_after_the_release(
    cache: CacheUnderTest,
) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))
    assert (lease.prefix_len, lease.published_len, len(lease)) == (0, 0, 2 * cache.page_size)
    assert (lease.slots.dtype, lease.slots.device.type) == (torch.int64, "cpu")
    assert await cache.pages() == Pages(free=6, private=2, leases=1)
    own = cache.page_ids(lease)

    done = await lease.insert(cache.tokens(1, 2))
    assert (done.prefix_len, done.num_inserted, done.num_duplicates, done.retired) == (0, 2 * cache.page_size, 0, False)
    assert (lease.prefix_len, lease.published_len) == (0, 2 * cache.page_size)
    assert cache.page_ids(lease) == own
    assert await cache.pages() == Pages(free=6, protected=2, leases=1)

    await lease.release()
    assert await cache.pages() == Pages(free=6, evictable=2)
    assert await cache.matched(1, 2) == 2


async def test_what_was_not_published_is_gone_after_the_release(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))

    await lease.release()

    assert await cache.pages() == Pages(free=8)
    assert await cache.matched(1) == 0


async def test_a_hit_shares_the_trees_slots_and_takes_new_ones_for_the_rest_alone(cache: CacheUnderTest) -> None:
    first = await cache.client.acquire(cache.tokens(1, 2))
    await first.insert(cache.tokens(1, 2))

    second = await cache.client.acquire(cache.tokens(1, 2, 3))

    assert (second.prefix_len, second.published_len) == (2 * cache.page_size, 2 * cache.page_size)
    assert cache.page_ids(second)[:2] == cache.page_ids(first)
    assert await cache.pages() == Pages(free=5, private=1, protected=2, leases=2)


async def test_a_shared_prefix_is_held_until_its_last_holder_lets_go(cache: CacheUnderTest) -> None:
    first = await cache.client.acquire(cache.tokens(1))
    await first.insert(cache.tokens(1))
    second = await cache.another_client().acquire(cache.tokens(1))

    await first.release()
    assert await cache.pages() == Pages(free=7, protected=1, leases=1)

    await second.release()
    assert await cache.pages() == Pages(free=7, evictable=1)


async def test_new_tokens_are_slots_beyond_the_prompts(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=2 * cache.page_size)

    assert len(lease) == 3 * cache.page_size
    assert await cache.pages() == Pages(free=5, private=3, leases=1)


async def test_the_tail_of_the_last_page_is_never_in_the_tree(cache16: CacheUnderTest) -> None:
    prompt = cache16.tokens(1) + [2] * 15
    lease = await cache16.client.acquire(prompt)
    assert await cache16.pages() == Pages(free=6, private=2, leases=1)

    done = await lease.insert(prompt)

    assert (done.num_inserted, lease.published_len, len(lease)) == (16, 16, 31)
    assert await cache16.pages() == Pages(free=6, private=1, protected=1, leases=1)
    await lease.release()
    assert await cache16.pages() == Pages(free=7, evictable=1)


async def test_less_than_a_page_publishes_nothing(cache16: CacheUnderTest) -> None:
    lease = await cache16.client.acquire([1] * 15)

    done = await lease.insert([1] * 15)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (0, 0, 0)
    assert await cache16.pages() == Pages(free=7, private=1, leases=1)


@pytest.mark.parametrize("limit_in_tokens", [-1, 0, 1])
async def test_max_prefix_len_leaves_something_to_compute(cache: CacheUnderTest, limit_in_tokens: int) -> None:
    await cache.publish(1, 2)
    limit = 2 * cache.page_size + limit_in_tokens

    lease = await cache.client.acquire(cache.tokens(1, 2), max_prefix_len=limit)

    hit = 2 if limit_in_tokens >= 0 else 1
    assert lease.prefix_len == hit * cache.page_size
    assert await cache.pages() == Pages(free=8 - 4 + hit, private=2 - hit, evictable=2 - hit, protected=hit, leases=1)


async def test_the_page_computed_again_for_its_logits_is_freed_when_it_is_inserted(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(1, 2), max_prefix_len=2 * cache.page_size - 1)

    done = await lease.insert(cache.tokens(1, 2))

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (2 * cache.page_size, 0, cache.page_size)
    assert lease.published_len == 2 * cache.page_size
    assert await cache.pages() == Pages(free=6, protected=2, leases=1)


# ---------------------------------------------------------------- insert


async def test_pages_that_another_published_first_are_freed_and_the_lease_names_the_trees(
    cache: CacheUnderTest,
) -> None:
    first = await cache.client.acquire(cache.tokens(1, 2))
    second = await cache.client.acquire(cache.tokens(1, 2, 3))
    assert await cache.pages() == Pages(free=3, private=5, leases=2)
    await first.insert(cache.tokens(1, 2))
    third_page = cache.page_ids(second)[2]

    done = await second.insert(cache.tokens(1, 2, 3))

    assert done.prefix_len == 2 * cache.page_size
    assert (done.num_inserted, done.num_duplicates) == (cache.page_size, 2 * cache.page_size)
    assert cache.page_ids(second) == [*cache.page_ids(first), third_page]
    assert (second.prefix_len, second.published_len) == (0, 3 * cache.page_size)
    assert await cache.pages() == Pages(free=5, protected=3, leases=2)


async def test_generated_tokens_are_published_behind_the_prompt(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=2 * cache.page_size)

    first = await lease.insert(cache.tokens(1, 2))
    second = await lease.insert(cache.tokens(1, 2, 3))

    assert (first.num_inserted, second.num_inserted) == (2 * cache.page_size, cache.page_size)
    assert (second.prefix_len, lease.published_len) == (2 * cache.page_size, 3 * cache.page_size)
    assert lease.prefix_len == 0
    await lease.release()
    assert await cache.pages() == Pages(free=5, evictable=3)
    assert await cache.matched(1, 2, 3) == 3


async def test_a_long_prompt_is_published_chunk_by_chunk_while_it_is_computed(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))

    for done, page in ((1, 1), (2, 2), (3, 3)):
        await lease.insert(cache.tokens(1, 2, 3)[: done * cache.page_size])
        assert await cache.matched(1, 2, 3) == page
        assert await cache.pages() == Pages(free=5, private=3 - page, protected=page, leases=1)


async def test_inserting_again_what_is_published_changes_nothing(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1, 2))
    await lease.insert(cache.tokens(1, 2))

    again = await lease.insert(cache.tokens(1, 2))
    shorter = await lease.insert(cache.tokens(1))

    assert (again.num_inserted, again.num_duplicates) == (0, 0)
    assert (shorter.num_inserted, shorter.num_duplicates) == (0, 0)
    assert lease.published_len == 2 * cache.page_size
    assert await cache.pages() == Pages(free=6, protected=2, leases=1)


@pytest.mark.parametrize("order", [(2, 4), (4, 2), (3, 3)], ids=str)
async def test_two_inserts_at_once_on_one_lease_publish_the_longer(
    cache: CacheUnderTest, order: tuple[int, int]
) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=3 * cache.page_size)
    own = cache.page_ids(lease)
    computed = cache.tokens(1, 2, 3, 4)

    await asyncio.gather(*(lease.insert(computed[: pages * cache.page_size]) for pages in order))

    assert lease.published_len == max(order) * cache.page_size
    assert cache.page_ids(lease) == own
    assert await cache.pages() == Pages(free=4, private=4 - max(order), protected=max(order), leases=1)


async def test_insert_can_end_the_lease_in_the_same_message(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=cache.page_size)

    done = await lease.insert(cache.tokens(1), release=True)

    assert done.num_inserted == cache.page_size
    assert await cache.pages() == Pages(free=7, evictable=1)
    with pytest.raises(UnknownLease, match="has ended"):
        await lease.insert(cache.tokens(1))


# ---------------------------------------------------------------- extend, lock


async def test_extend_uses_the_rest_of_the_last_page_first(cache16: CacheUnderTest) -> None:
    lease = await cache16.client.acquire([1] * 10)
    first = lease.slots[0].item()

    within = await lease.extend(6)
    assert within.tolist() == [first + offset for offset in range(10, 16)]
    assert await cache16.pages() == Pages(free=7, private=1, leases=1)

    beyond = await lease.extend(1)
    assert lease.slots[16:].tolist() == beyond.tolist()
    assert (len(lease), beyond.item() % 16) == (17, 0)
    assert await cache16.pages() == Pages(free=6, private=2, leases=1)


async def test_a_lease_grows_while_it_decodes_and_publishes_all(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1))
    await lease.insert(cache.tokens(1))

    generated = []
    for _ in range(3 * cache.page_size):
        assert len(await lease.extend(1)) == 1
        generated.append(7)
    await lease.insert(cache.tokens(1) + generated)

    assert await cache.pages() == Pages(free=4, protected=4, leases=1)
    assert await cache.matched(1, 7, 7, 7) == 4


async def test_lock_holds_the_prefix_and_allocates_nothing(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)

    lease = await cache.client.lock(cache.tokens(1, 2, 3))

    assert (lease.prefix_len, lease.published_len, len(lease)) == (2 * cache.page_size,) * 3
    assert await cache.pages() == Pages(free=6, protected=2, leases=1)
    await cache.client.unlock(lease)
    assert await cache.pages() == Pages(free=6, evictable=2)


async def test_locking_what_is_not_cached_holds_nothing(cache: CacheUnderTest) -> None:
    lease = await cache.client.lock(cache.tokens(1))

    assert (lease.prefix_len, lease.slots.tolist()) == (0, [])
    assert await cache.pages() == Pages(free=8, leases=1)


async def test_extend_adds_private_slots_behind_a_locked_prefix_and_insert_publishes_them(
    cache: CacheUnderTest,
) -> None:
    await cache.publish(1)
    lease = await cache.client.lock(cache.tokens(1, 2))

    added = await lease.extend(2 * cache.page_size)
    assert lease.slots[cache.page_size :].tolist() == added.tolist()
    assert await cache.pages() == Pages(free=5, private=2, protected=1, leases=1)

    done = await lease.insert(cache.tokens(1, 2, 3))
    assert (done.prefix_len, done.num_inserted) == (cache.page_size, 2 * cache.page_size)
    assert await cache.pages() == Pages(free=5, protected=3, leases=1)


# ---------------------------------------------------------------- the end of a lease


@pytest.mark.parametrize("ends", ["release release", "abort abort", "release abort", "abort release"])
async def test_ending_a_lease_twice_is_ending_it_once(cache1: CacheUnderTest, ends: str) -> None:
    lease = await cache1.client.acquire([1, 2])
    await lease.insert([1])

    for end in ends.split():
        await getattr(lease, end)()

    assert await cache1.pages() == Pages(free=7, evictable=1)


async def test_ending_a_lease_from_several_coroutines_at_once_ends_it_once(cache1: CacheUnderTest) -> None:
    lease = await cache1.client.acquire([1, 2])

    await asyncio.gather(lease.release(), lease.abort(), cache1.client.release(lease), cache1.client.abort(lease))

    assert await cache1.pages() == Pages(free=8)


async def test_leaving_the_block_releases_the_lease(cache: CacheUnderTest) -> None:
    async with await cache.client.acquire(cache.tokens(1), new_tokens=cache.page_size) as lease:
        await lease.insert(cache.tokens(1))
        assert await cache.pages() == Pages(free=6, private=1, protected=1, leases=1)

    assert await cache.pages() == Pages(free=7, evictable=1)


async def test_an_exception_in_the_block_aborts_the_lease_and_comes_out(cache: CacheUnderTest) -> None:
    with pytest.raises(ZeroDivisionError):
        async with await cache.client.acquire(cache.tokens(1), new_tokens=cache.page_size) as lease:
            await lease.insert(cache.tokens(1))
            raise ZeroDivisionError

    assert await cache.pages() == Pages(free=7, evictable=1)  # what was inserted was whole then, so it stays


async def test_cancelling_the_block_aborts_the_lease(cache1: CacheUnderTest) -> None:
    inside = asyncio.Event()

    async def request() -> None:
        async with await cache1.client.acquire([1, 2]):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await cache1.pages() == Pages(free=8)


async def test_a_lease_released_in_the_block_is_left_alone_at_its_end(cache1: CacheUnderTest) -> None:
    async with await cache1.client.acquire([1]) as lease:
        await lease.insert([1], release=True)

    assert await cache1.pages() == Pages(free=7, evictable=1)


async def test_closing_a_client_ends_its_leases_and_no_others(cache1: CacheUnderTest) -> None:
    leaving = cache1.another_client()
    await leaving.acquire([1, 2])
    held = await leaving.acquire([3])
    await held.insert([3])
    staying = await cache1.client.acquire([4])

    await leaving.close()
    await leaving.close()

    assert await cache1.pages() == Pages(free=6, private=1, evictable=1, leases=1)
    await held.release()  # ended with its session: no error, no effect
    await staying.insert([4])
    assert await cache1.pages() == Pages(free=6, evictable=1, protected=1, leases=1)


async def test_the_verbs_on_the_client_are_those_on_the_lease(cache1: CacheUnderTest) -> None:
    client = cache1.client
    lease = await client.acquire([1])

    assert (await client.extend(lease, 1)).tolist() == lease.slots[1:].tolist()
    assert (await client.insert(lease, [1, 2])).num_inserted == 2
    await client.release(lease)

    assert await cache1.pages() == Pages(free=6, evictable=2)


# ---------------------------------------------------------------- namespaces and token ids

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
    for number, triple in enumerate(TRIPLES, 1):
        assert await cache.matched(1, **triple) == 0
        await cache.publish(1, **triple)
        assert await cache.pages() == Pages(free=8 - number, evictable=number)

    leases = [await cache.client.acquire(cache.tokens(1), **triple) for triple in TRIPLES]

    assert [lease.prefix_len for lease in leases] == [cache.page_size] * 8
    assert len({cache.page_ids(lease)[0] for lease in leases}) == 8
    assert await cache.pages() == Pages(free=0, protected=8, leases=8)


async def test_generated_tokens_are_published_in_the_leases_own_namespace(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=cache.page_size, lora_id="x")

    await lease.insert(cache.tokens(1, 2))

    assert await cache.matched(1, 2, lora_id="x") == 2
    assert await cache.matched(1, 2) == 0


@pytest.mark.parametrize(
    "spelt",
    [
        list,
        tuple,
        lambda ids: array("q", ids),
        lambda ids: np.array(ids, np.int16),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array(ids * 2, np.int64)[: len(ids)],
        lambda ids: torch.tensor(ids),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
    ],
    ids=["list", "tuple", "array", "int16", "uint64", "view", "tensor", "tensor32"],
)
async def test_the_same_ids_meet_however_they_are_spelt(cache16: CacheUnderTest, spelt: Any) -> None:
    await cache16.publish(1, 2)

    lease = await cache16.client.acquire(spelt(cache16.tokens(1, 2, 3)))

    assert lease.prefix_len == 32
    assert (await lease.insert(spelt(cache16.tokens(1, 2, 3)))).num_inserted == 16


async def test_ids_of_more_than_32_bits_are_told_from_their_lower_halves(cache: CacheUnderTest) -> None:
    wide = 2**32 + 1
    await cache.publish(1, wide)

    assert await cache.matched(1, wide) == 2
    assert await cache.matched(1, 1) == 1
    assert await cache.matched(wide) == 0


async def test_wide_ids_may_follow_a_narrow_prompt(cache: CacheUnderTest) -> None:
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=2 * cache.page_size)

    await lease.insert(cache.tokens(1, 2**40))
    await lease.insert(cache.tokens(1, 2**40, 2))

    assert await cache.matched(1, 2**40, 2) == 3


# ---------------------------------------------------------------- evict, reset, stats


async def test_evict_frees_the_least_recently_used_first_and_says_how_much(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3)
    await cache.publish(4)
    await (await cache.client.lock(cache.tokens(1, 2))).release()

    evicted = (await cache.client.evict(1)).num_evicted

    assert evicted == cache.page_size
    assert await cache.pages() == Pages(free=5, evictable=3)
    assert [await cache.matched(1, 2), await cache.matched(3), await cache.matched(4)] == [2, 0, 1]


async def test_evict_leaves_what_a_lease_holds(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(1), new_tokens=cache.page_size)
    slots = lease.slots.tolist()

    evicted = (await cache.client.evict(8 * cache.page_size)).num_evicted

    assert evicted == cache.page_size  # [2], behind the one that is held
    assert await cache.pages() == Pages(free=6, private=1, protected=1, leases=1)
    assert (await cache.client.evict(8 * cache.page_size)).num_evicted == 0
    assert lease.slots.tolist() == slots


async def test_a_caller_in_need_evicts_its_shortfall_and_no_more(cache: CacheUnderTest) -> None:
    for page in range(1, 7):
        await cache.publish(page)
    assert await cache.pages() == Pages(free=2, evictable=6)

    lease = await cache.client.acquire(cache.tokens(9, 9, 9, 9))

    assert lease.prefix_len == 0
    assert await cache.pages() == Pages(free=0, private=4, evictable=4, leases=1)
    assert [await cache.matched(page) for page in range(1, 7)] == [0, 0, 1, 1, 1, 1]


async def test_a_caller_in_need_never_evicts_its_own_prefix(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(3, 4)

    lease = await cache.client.acquire(cache.tokens(1, 2), new_tokens=6 * cache.page_size)

    assert lease.prefix_len == 2 * cache.page_size
    assert await cache.pages() == Pages(free=0, private=6, protected=2, leases=1)
    assert await cache.matched(1, 2) == 2


async def test_reset_makes_everything_unmatchable_and_frees_what_nobody_holds(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)
    await cache.publish(1, lora_id="x")

    await cache.client.reset()

    assert await cache.pages() == Pages(free=8)
    assert (await cache.matched(1), await cache.matched(1, lora_id="x")) == (0, 0)


async def test_a_lease_from_before_a_reset_keeps_its_slots_publishes_nothing_and_frees_all_at_its_end(
    cache: CacheUnderTest,
) -> None:
    await cache.publish(1, 2)
    lease = await cache.client.acquire(cache.tokens(1, 2, 3))
    slots = lease.slots.tolist()

    await cache.client.reset()
    assert await cache.pages() == Pages(free=5, private=1, protected=2, leases=1)
    assert await cache.matched(1, 2) == 0

    done = await lease.insert(cache.tokens(1, 2, 3))
    assert (done.num_inserted, done.num_duplicates, done.retired) == (0, 0, True)
    assert lease.slots.tolist() == slots
    assert await cache.pages() == Pages(free=5, private=1, protected=2, leases=1)

    await lease.extend(cache.page_size)
    assert await cache.pages() == Pages(free=4, private=2, protected=2, leases=1)
    await lease.release()
    assert await cache.pages() == Pages(free=8)


async def test_after_a_reset_the_same_tokens_are_published_anew(cache: CacheUnderTest) -> None:
    await cache.publish(1)
    old = await cache.client.acquire(cache.tokens(1))
    await cache.client.reset()

    new = await cache.client.acquire(cache.tokens(1))
    done = await new.insert(cache.tokens(1))

    assert (new.prefix_len, done.num_inserted, done.retired) == (0, cache.page_size, False)
    assert set(cache.page_ids(new)).isdisjoint(cache.page_ids(old))
    assert await cache.pages() == Pages(free=6, protected=2, leases=2)
    await old.release()
    assert await cache.pages() == Pages(free=7, protected=1, leases=1)


async def test_stats_count_what_happened(cache: CacheUnderTest) -> None:
    before = (await cache.client.stats()).model_dump()
    await cache.publish(1, 2)
    duplicate = await cache.client.acquire(cache.tokens(1, 2), max_prefix_len=cache.page_size)
    await duplicate.insert(cache.tokens(1, 2), release=True)
    await cache.matched(1)
    await cache.client.evict(1)

    after = (await cache.client.stats()).model_dump()

    counters = "acquires hits tokens_requested tokens_reused tokens_inserted tokens_duplicate tokens_evicted probes"
    grown = {name: after[name] - before[name] for name in counters.split()}
    assert grown == {
        "acquires": 2,
        "hits": 1,
        "tokens_requested": 4 * cache.page_size,
        "tokens_reused": cache.page_size,
        "tokens_inserted": 2 * cache.page_size,
        "tokens_duplicate": cache.page_size,
        "tokens_evicted": cache.page_size,
        "probes": 1,
    }
    assert after["requests"] - before["requests"] == 7  # the second look at the statistics is one of them
    assert (after["epoch"], after["num_slots"]) == (before["epoch"], 8 * cache.page_size)


async def test_requests_made_at_once_by_many_coroutines_each_get_their_own_answer(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)

    async def cycle(page: int) -> tuple[int, int]:
        async with await cache.client.acquire(cache.tokens(1, 2, page)) as lease:
            return lease.prefix_len, (await lease.insert(cache.tokens(1, 2, page))).num_inserted

    answers = await asyncio.gather(*map(cycle, range(10, 16)))

    assert answers == [(2 * cache.page_size, cache.page_size)] * 6
    assert await cache.pages() == Pages(free=0, evictable=8)


# ---------------------------------------------------------------- kind "chunk"


async def test_a_chunk_cache_publishes_nothing_and_keeps_slots_private_to_the_end(chunk_cache: CacheUnderTest) -> None:
    prompt = chunk_cache.tokens(1, 2)
    lease = await chunk_cache.client.acquire(prompt)
    slots = lease.slots.tolist()

    done = await lease.insert(prompt)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates, done.retired) == (0, 0, 0, False)
    assert (lease.published_len, lease.slots.tolist()) == (0, slots)
    assert await chunk_cache.matched(1, 2) == 0
    assert await chunk_cache.pages() == Pages(free=6, private=2, leases=1)
    await lease.release()
    assert await chunk_cache.pages() == Pages(free=8)


async def test_a_chunk_cache_shares_nothing_and_evicts_nothing(chunk_cache: CacheUnderTest) -> None:
    leases = [await chunk_cache.client.acquire(chunk_cache.tokens(1, 2)) for _ in range(2)]
    await leases[0].insert(chunk_cache.tokens(1, 2))
    await leases[1].insert(chunk_cache.tokens(1, 2))

    assert (await chunk_cache.client.evict(8 * 16)).num_evicted == 0

    assert set(chunk_cache.page_ids(leases[0])).isdisjoint(chunk_cache.page_ids(leases[1]))
    assert await chunk_cache.pages() == Pages(free=4, private=4, leases=2)
    await chunk_cache.client.reset()
    assert await chunk_cache.pages() == Pages(free=4, private=4, leases=2)


async def test_a_chunk_caches_lease_grows_and_locks_nothing(chunk_cache: CacheUnderTest) -> None:
    lease = await chunk_cache.client.lock(chunk_cache.tokens(1))
    assert len(lease) == 0

    added = await lease.extend(20)

    assert lease.slots.tolist() == added.tolist()
    assert await chunk_cache.pages() == Pages(free=6, private=2, leases=1)
    await lease.insert(chunk_cache.tokens(1) + [2] * 4)
    assert await chunk_cache.pages() == Pages(free=6, private=2, leases=1)
