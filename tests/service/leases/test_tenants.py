"""Tenants: floors limit eviction, caps limit slots, and a tenant at its cap does not block other requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.caches.cache_kinds import radix
from support.caches.cache_under_test import CacheUnderTest, Reached

from raydix.actors import LocalPrefixCache
from raydix.schemas import (
    CacheConfig,
    EvictionConfig,
    PoolConfig,
    PoolExhausted,
    TenantConfig,
    frame_namespace,
)

QUIET = TenantConfig(name="quiet", extra_key="q", floor_slots=3)
NOISY = TenantConfig(name="noisy", extra_key="n", cap_slots=5)


@pytest.fixture
async def cache(reached: Reached) -> AsyncIterator[CacheUnderTest]:
    """A cache of eight slots. One tenant has a floor of 3 slots, another a cap of 5."""
    async with reached(replace(radix(1), config={"tenants": (QUIET, NOISY)})) as cache:
        yield cache


async def held(cache: CacheUnderTest) -> list[int]:
    """Return the slots held by the quiet tenant, the noisy tenant and the rest."""
    return [tenant.held_slots for tenant in (await cache.client.stats()).tenants]


async def flood(cache: CacheUnderTest, namespace: str | None) -> None:
    """Publish and release more prompts than the pool can hold."""
    for number in range(100, 120):
        await cache.publish(number, number + 100, number + 200, number + 300, extra_key=namespace)


# ---------------------------------------------------------------- floors


@pytest.mark.parametrize("namespace", ["n", "nobody's", None])
async def test_a_flood_evicts_nothing_below_anothers_floor(cache: CacheUnderTest, namespace: str | None) -> None:
    await cache.publish(1, 2, 3, extra_key="q")

    await flood(cache, namespace)

    assert await cache.matched(1, 2, 3, extra_key="q") == 3


async def test_without_a_floor_the_same_flood_evicts_it(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, extra_key="another")

    await flood(cache, None)

    assert await cache.matched(1, 2, 3, extra_key="another") == 0


async def test_what_is_above_the_floor_is_lent(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, 4, 5, extra_key="q")

    await flood(cache, None)

    assert await cache.matched(1, 2, 3, 4, 5, extra_key="q") == 3
    assert await held(cache) == [3, 0, 4]


async def test_an_unused_floor_is_lent_and_comes_back(cache: CacheUnderTest) -> None:
    await cache.publish(*range(1, 9))
    assert await held(cache) == [0, 0, 8]

    await cache.publish(1, 2, 3, extra_key="q")

    assert (await held(cache))[0] == 3


async def test_evict_and_the_background_task_keep_floors() -> None:
    config = CacheConfig(
        pool=PoolConfig(num_slots=100),
        eviction=EvictionConfig(high_watermark=0.5, low_watermark=0.1),
        tenants=(TenantConfig(name="quiet", extra_key="q", floor_slots=40),),
    )
    async with LocalPrefixCache(config) as cache:
        for namespace in ("q", "n"):
            async with await cache.acquire(range(60 if namespace == "q" else 40), extra_key=namespace) as lease:
                await lease.insert(range(60 if namespace == "q" else 40))

        await cache._host.service.eviction_task.run_round()

        assert [tenant.held_slots for tenant in (await cache.stats()).tenants] == [40, 0]
        assert (await cache.evict(100)).num_evicted == 0
        await cache.retire(extra_key="q")
        assert (await cache.stats()).free_slots == 100


async def test_what_a_floor_keeps_is_told_to_who_is_refused(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, extra_key="q")

    with pytest.raises(PoolExhausted, match="3 kept for other tenants") as caught:
        await cache.client.acquire([1] * 6, timeout_s=0)

    error = caught.value
    assert (error.free, error.evictable, error.kept_slots, error.held_slots, error.open_leases) == (5, 0, 3, 0, 0)
    assert (error.tenant, error.can_ever_fit) == (None, True)


# ---------------------------------------------------------------- caps


async def test_who_is_at_its_cap_evicts_its_own_first(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2)  # the least recently used pages, but not the tenant's
    await cache.publish(3, 4, 5, extra_key="n")

    await cache.publish(6, 7, 8, extra_key="n")

    assert await cache.matched(1, 2) == 2
    assert await held(cache) == [0, 3, 2]
    explanation = await cache.client.explain([3, 4, 5], extra_key="n")
    assert (explanation.reason, explanation.cause) == ("evicted", "cap")


async def test_what_is_beyond_its_cap_is_refused_at_once(cache: CacheUnderTest) -> None:
    with pytest.raises(PoolExhausted, match=r"share of tenant 'noisy'.*can never fit.*enlarge its cap_slots") as caught:
        await cache.client.acquire([1] * 6, extra_key="n")
    assert (caught.value.needed, caught.value.tenant, caught.value.can_ever_fit) == (6, "noisy", False)

    lease = await cache.client.acquire([1] * 4, extra_key="n")
    with pytest.raises(PoolExhausted, match="can never fit"):
        await lease.extend(2)
    assert len(await lease.extend(1)) == 1


async def test_a_refusal_at_the_cap_is_about_the_tenants_share(cache: CacheUnderTest) -> None:
    await cache.client.acquire([1] * 3, extra_key="n")
    await cache.publish(9, extra_key="n")
    await cache.client.acquire([2])

    with pytest.raises(PoolExhausted) as caught:
        await cache.client.acquire([3] * 4, extra_key="n", timeout_s=0)

    error = caught.value
    assert (error.needed, error.free, error.evictable, error.held_slots, error.open_leases) == (4, 1, 1, 3, 1)
    assert (error.tenant, error.can_ever_fit) == ("noisy", True)
    assert [(owner.leases, owner.slots) for owner in error.owners] == [(1, 3)]


async def test_a_cap_bounds_what_is_published_and_private_together(cache: CacheUnderTest) -> None:
    lease = await cache.hold(1, 2, 3, extra_key="n")
    await lease.extend(2)

    with pytest.raises(PoolExhausted):
        await cache.client.acquire([1, 2, 3, 4], extra_key="n", timeout_s=0)

    assert (await cache.client.acquire([1, 2, 3], extra_key="n", timeout_s=0)).prefix_len == 3
    assert await held(cache) == [0, 5, 0]


# ---------------------------------------------------------------- the queue


async def test_who_waits_at_its_cap_holds_up_nobody_else(cache: CacheUnderTest) -> None:
    full = await cache.client.acquire([1] * 5, extra_key="n")
    first, second = await cache.in_line(
        cache.client.acquire([2] * 2, extra_key="n"), cache.client.acquire([3], extra_key="n")
    )

    assert len(await cache.client.acquire([4] * 2, timeout_s=0)) == 2
    with pytest.raises(PoolExhausted):
        await cache.client.acquire([5], extra_key="n", timeout_s=0)

    await full.release()
    assert [len(await first), len(await second)] == [2, 1]


async def test_others_are_served_past_who_waits_at_its_cap(cache: CacheUnderTest) -> None:
    full = await cache.client.acquire([1] * 5, extra_key="n")
    others = await cache.client.acquire([1] * 3)
    capped, other = await cache.in_line(cache.client.acquire([2], extra_key="n"), cache.client.acquire([3] * 3))

    await others.release()

    assert len(await other) == 3
    assert not capped.done()
    await full.release()
    await capped


async def test_who_stays_within_its_floor_waits_for_nobody(cache: CacheUnderTest) -> None:
    rest = await cache.client.acquire([1] * 4)
    (large,) = await cache.in_line(cache.client.acquire([2] * 5))

    lease = await cache.client.acquire([3] * 3, extra_key="q", timeout_s=0)
    with pytest.raises(PoolExhausted):
        await cache.client.acquire([4], extra_key="q", timeout_s=0)  # beyond its floor it queues like the others
    with pytest.raises(PoolExhausted):
        await cache.client.acquire([5], timeout_s=0)  # there is room, but earlier requests wait for it

    await lease.release()
    await rest.release()
    assert len(await large) == 5


async def test_who_waits_within_its_floor_is_served_past_others(cache: CacheUnderTest) -> None:
    rest, small = await cache.client.acquire([1] * 6), await cache.client.acquire([1] * 2)
    large, quiet = await cache.in_line(cache.client.acquire([2] * 4), cache.client.acquire([3] * 2, extra_key="q"))

    await small.release()

    assert len(await quiet) == 2
    assert not large.done()
    await rest.release()
    await large


async def test_the_line_is_bounded_for_each_tenant(cache: CacheUnderTest) -> None:
    full = await cache.client.acquire([1] * 5, extra_key="n")
    others = await cache.client.acquire([1] * 3)
    tasks = await cache.in_line(*(cache.client.acquire([number], extra_key="n") for number in range(2, 5)))

    tasks += await cache.in_line(cache.client.acquire([2]))

    await full.release()
    await others.release()
    assert [len(await task) for task in tasks] == [1, 1, 1, 1]


# ---------------------------------------------------------------- statistics


async def test_statistics_tell_what_each_tenant_holds(cache: CacheUnderTest) -> None:
    await cache.publish(1, 2, 3, extra_key="q")
    await cache.client.acquire([1, 2, 9], extra_key="q")
    await cache.publish(4)

    quiet, noisy, rest = (await cache.client.stats()).tenants

    assert (quiet.name, quiet.held_slots, quiet.evictable_slots, quiet.floor_slots, quiet.cap_slots) == (
        "quiet", 4, 1, 3, None,
    )  # fmt: skip
    assert (noisy.name, noisy.held_slots, noisy.evictable_slots, noisy.floor_slots, noisy.cap_slots) == (
        "noisy", 0, 0, 0, 5,
    )  # fmt: skip
    assert (rest.name, rest.held_slots, rest.evictable_slots, rest.floor_slots, rest.cap_slots) == (
        None, 1, 1, 0, None,
    )  # fmt: skip


async def test_statistics_count_what_was_evicted_of_each_tenant() -> None:
    config = CacheConfig(
        pool=PoolConfig(num_slots=8), tenants=(QUIET, NOISY), eviction=EvictionConfig(high_watermark=1.0)
    )
    async with LocalPrefixCache(config) as cache:
        for namespace in ("q", "n", None):
            async with await cache.acquire([1, 2, 3, 4], extra_key=namespace) as lease:
                await lease.insert([1, 2, 3, 4])

        assert [tenant.tokens_evicted for tenant in (await cache.stats()).tenants] == [1, 4, 0]


async def test_a_tenant_is_one_exact_namespace(cache: CacheUnderTest) -> None:
    await cache.publish(1, extra_key="q", lora_id="a")
    await cache.publish(2, cache_salt="q")

    assert await held(cache) == [0, 0, 2]
    assert QUIET.namespace == frame_namespace("q", None, None)


async def test_the_namespace_of_requests_without_any_may_be_a_tenants() -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=8), tenants=(TenantConfig(name="all", cap_slots=2),))
    async with LocalPrefixCache(config) as cache:
        with pytest.raises(PoolExhausted, match="tenant 'all'"):
            await cache.acquire([1, 2, 3])
        await cache.acquire([1, 2, 3], extra_key="others")
