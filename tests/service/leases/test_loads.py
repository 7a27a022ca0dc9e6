"""Leases of which a part is loaded from the host: through failures and retries each has the loaded prefix, or none is
left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from support.caches.cache_in_process import HandleInProcess
from support.caches.cache_kinds import KindUnderTest, bigram, hybrid, mamba, radix, window
from support.caches.cache_under_test import CacheUnderTest
from support.more import more
from support.tiers.demotion import demote
from support.tiers.gated_loads import PAGE, GatedLoads, host_config, publish_on_host

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient, acquire_ranks
from raydix.actors.client.lease import Loaded
from raydix.actors.service.unix_socket_server import UnixSocketServer
from raydix.schemas import CacheError, CacheStats, InvalidRequest, TierStats

PROMPT = list(range(1, 4 * PAGE + 1))
ALL = len(PROMPT)
OTHER = list(range(100, 100 + 4 * PAGE))


class Scene:
    """A cache with prompts on the host, a client of it, and the gate of its loads."""

    def __init__(self, cache: LocalPrefixCache, client: PrefixCacheClient, gate: GatedLoads) -> None:
        self.cache = cache
        self.client = client
        self.gate = gate

    async def stats(self) -> CacheStats:
        return await self.cache.stats()

    async def host(self) -> TierStats:
        host = (await self.cache.stats()).host
        assert host is not None
        return host

    async def until_loading(self, number: int) -> None:
        """Wait until so many requests wait for a load."""
        async with asyncio.timeout(60):
            while (await self.host()).loading_requests != number:  # noqa: ASYNC110 -- stats must be polled
                await asyncio.sleep(0.001)

    async def until_idle(self) -> None:
        """Wait until no move is in flight, and no lease is open."""
        async with asyncio.timeout(60):
            while (await self.host()).moves_in_flight or (await self.stats()).open_leases:  # noqa: ASYNC110 -- as above
                await asyncio.sleep(0.001)


def client_of(cache: LocalPrefixCache, way: str) -> PrefixCacheClient:
    if way == "local":
        return PrefixCacheClient(cache)
    server = UnixSocketServer(cache.service) if way == "socket" else None
    return PrefixCacheClient(HandleInProcess(cache, Random(0), socket_server=server))


@pytest.fixture(params=["socket", *more("local", "calls")])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    cache = LocalPrefixCache(host_config())
    gate = GatedLoads(cache)
    async with cache:
        await publish_on_host(cache, PROMPT, OTHER)
        client = client_of(cache, request.param)
        yield Scene(cache, client, gate)
        gate.pass_chunks()
        await client.close()
        scene = Scene(cache, client, gate)
        await scene.until_idle()
        stats = await cache.stats()
        assert (stats.private_slots, stats.quarantined_slots, stats.waiters) == (0, 0, 0)
        await cache.check_invariants()


def check_loaded(lease: Lease, num_tokens: int = ALL) -> None:
    assert (lease.prefix_len, lease.published_len) == (num_tokens, num_tokens)
    assert lease.loaded == Loaded(host=num_tokens)
    assert sum(lease.loaded) == num_tokens


# ---------------------------------------------------------------- hand-out


@pytest.mark.parametrize("verb", ["acquire", "lock"])
async def test_a_lease_is_handed_out_once_its_prefix_is_loaded(scene: Scene, verb: str) -> None:
    assert (await scene.client.match(PROMPT)).prefix_len == 0
    assert (await scene.client.match(PROMPT)).host_len == ALL
    task = asyncio.ensure_future(getattr(scene.client, verb)(PROMPT))
    await scene.gate.until_begun()
    assert (await scene.host()).loading_requests == 1
    assert not task.done()

    scene.gate.pass_chunks()
    lease = await task

    check_loaded(lease)
    assert len(lease) == ALL
    assert (await scene.stats()).tokens_reused == (await scene.host()).tokens_loaded == ALL
    await lease.release()
    async with scene.client.acquire(PROMPT) as again:
        assert (again.prefix_len, again.loaded) == (ALL, Loaded())


@pytest.mark.parametrize("options", [{"load": False}, {"load_timeout_s": 0}], ids=str)
async def test_a_request_that_loads_nothing_takes_what_the_pool_has(scene: Scene, options: dict[str, Any]) -> None:
    for verb in (scene.client.acquire, scene.client.lock):
        async with verb(PROMPT, **options) as lease:
            assert (lease.prefix_len, lease.loaded) == (0, Loaded())
    assert scene.gate.num_begun == 0


async def test_a_limit_of_the_prefix_bounds_the_load(scene: Scene) -> None:
    scene.gate.pass_chunks()

    async with scene.client.acquire(PROMPT, max_prefix_len=ALL - 1) as lease:
        check_loaded(lease, ALL - PAGE)
    assert scene.gate.num_begun == ALL // PAGE - 1


async def test_an_offer_in_the_same_call_begins_at_the_hand_out(scene: Scene) -> None:
    offers = scene.cache.service.core.leases.offers
    task = asyncio.ensure_future(scene.client.lock(PROMPT, offer_s=30))
    await scene.gate.until_begun()
    assert not offers
    loaded_at = time.monotonic()

    scene.gate.pass_chunks()
    lease = await task

    (expires_at,) = offers.values()
    assert expires_at >= loaded_at + 30
    grant = lease.offered
    assert grant is not None
    assert grant.prefix_len == grant.published_len == grant.num_slots == ALL
    adopted = await scene.cache.adopt(grant)
    check_loaded(adopted)
    await adopted.release()


async def test_a_lock_that_waits_for_a_load_says_so(scene: Scene) -> None:
    waits: list[int] = []
    tasks = [asyncio.ensure_future(scene.client.lock(PROMPT, on_wait=waits.append)) for _ in range(2)]
    await scene.until_loading(2)
    async with asyncio.timeout(60):
        while len(waits) < 2:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.001)
    assert waits == [ALL, ALL]
    assert not any(task.done() for task in tasks)

    scene.gate.pass_chunks()
    for lease in await asyncio.gather(*tasks):
        await lease.release()
    async with scene.client.lock(PROMPT, on_wait=waits.append):
        assert len(waits) == 2  # nothing was to be loaded


async def test_requests_for_one_prompt_wait_for_one_load_without_slots(scene: Scene) -> None:
    first = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.gate.until_begun()
    others = [asyncio.ensure_future(scene.client.acquire([*PROMPT, number])) for number in range(3)]
    await scene.until_loading(4)
    assert (await scene.stats()).private_slots == ALL

    scene.gate.pass_chunks()
    leases = await asyncio.gather(first, *others)

    assert [lease.prefix_len for lease in leases] == [ALL] * 4
    assert [sum(lease.loaded) for lease in leases] == [ALL, 0, 0, 0]
    assert (await scene.host()).loads == {"whole": 1}
    for lease in leases:
        await lease.release()


KINDS = [window(4, 6), *more(window(4, 6, bigram=True)), mamba(4), hybrid(4, 6), *more(bigram(4), radix(16, 3))]


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_each_kind_loads_where_a_hit_may_end(kind: KindUnderTest) -> None:
    cache = CacheUnderTest.reached("local", kind.with_host().cache_config(), None, kind)
    local = cache.cache
    assert isinstance(local, LocalPrefixCache)
    await cache.publish(1, 2, 3, 4)
    prompt, reusable = cache.tokens(1, 2, 3, 4, 5), cache.reusable(4) * cache.page_size

    for verb in (local.acquire, local.lock):
        await demote(local)
        found = await local.match(prompt)
        assert (found.prefix_len, found.host_len) == (0, reusable)
        async with verb(prompt, load_timeout_s=60) as lease:
            assert (lease.prefix_len, lease.loaded) == (reusable, Loaded(reusable))
        async with verb(prompt) as lease:
            assert (lease.prefix_len, lease.loaded) == (reusable, Loaded())
    await demote(local)
    await cache.close()


# ---------------------------------------------------------------- failed and late loads


@pytest.mark.parametrize("verb", ["acquire", "lock"])
async def test_a_load_that_fails_gives_a_shorter_prefix(scene: Scene, verb: str) -> None:
    task = asyncio.ensure_future(getattr(scene.client, verb)(PROMPT))
    scene.gate.pass_chunks(2)
    await scene.gate.until_begun(3)
    scene.gate.fails = True
    scene.gate.pass_chunks()

    check_loaded(lease := await task, 2 * PAGE)

    await lease.release()
    scene.gate.fails = False
    async with scene.client.acquire(PROMPT) as again:
        assert (again.prefix_len, again.loaded) == (ALL, Loaded(ALL - 2 * PAGE))


async def test_a_late_load_gives_a_shorter_prefix(scene: Scene) -> None:
    task = asyncio.ensure_future(scene.client.acquire(PROMPT, load_timeout_s=100))
    await scene.gate.until_begun()
    scene.gate.late_s = 100.0
    scene.gate.pass_chunks()

    check_loaded(lease := await task, PAGE)

    assert (await scene.host()).loads == {"late": 1}
    await lease.release()


async def test_after_a_load_that_failed_the_waiting_requests_go_on_without_it(scene: Scene) -> None:
    first = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.gate.until_begun()
    second = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.until_loading(2)

    scene.gate.fails = True
    scene.gate.pass_chunks()

    for lease in (await first, await second):
        assert (lease.prefix_len, lease.loaded) == (0, Loaded())
        await lease.release()
    assert scene.gate.num_begun == 1


async def test_a_reset_in_the_middle_of_a_load_hands_nothing_copied_out(scene: Scene) -> None:
    task = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.gate.until_begun()
    await scene.cache.reset()
    scene.gate.pass_chunks()

    async with await task as lease:
        assert (lease.prefix_len, lease.loaded, len(lease)) == (0, Loaded(), ALL)
        assert (await lease.insert(PROMPT)).num_inserted == ALL
    assert (await scene.stats()).tokens_reused == 0


# ---------------------------------------------------------------- cancelled requests, ended sessions


@pytest.mark.parametrize("verb", ["acquire", "lock"])
async def test_a_cancelled_request_holds_no_lease_and_its_load_goes_on(scene: Scene, verb: str) -> None:
    task = asyncio.ensure_future(getattr(scene.client, verb)(PROMPT))
    await scene.gate.until_begun()
    task.cancel()
    await asyncio.wait((task,))
    await scene.client.match(PROMPT)  # executed after the request that gives the lease up
    assert ((await scene.stats()).open_leases, (await scene.host()).loading_requests) == (0, 0)

    scene.gate.pass_chunks()
    await scene.until_idle()

    assert (await scene.client.match(PROMPT)).prefix_len == ALL
    assert (await scene.host()).tokens_loaded_unused == ALL
    assert (await scene.stats()).tokens_reused == 0


async def test_a_cancelled_first_request_leaves_its_load_to_those_that_wait(scene: Scene) -> None:
    first = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.gate.until_begun()
    second = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.until_loading(2)
    first.cancel()
    await asyncio.wait((first,))
    await scene.client.match(PROMPT)

    scene.gate.pass_chunks()
    async with await second as lease:
        assert lease.prefix_len == ALL
    assert scene.gate.num_begun == ALL // PAGE


async def test_a_request_cancelled_after_any_number_of_ticks_leaves_no_lease(scene: Scene) -> None:
    scene.gate.pass_chunks()
    for ticks in range(0, 24, 2):
        task = asyncio.ensure_future(scene.client.acquire(PROMPT if ticks % 4 else OTHER))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            await task.result().release()
        await scene.client.match(PROMPT)
        await scene.until_idle()
        await scene.cache.evict(10**6)


async def test_a_session_that_ends_during_its_load_leaves_nothing_but_the_pages(scene: Scene) -> None:
    task = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.gate.until_begun()
    await scene.client.close()

    with pytest.raises(CacheError):
        await task
    assert (await scene.stats()).open_leases == 0
    scene.gate.pass_chunks()
    await scene.until_idle()

    assert (await scene.cache.match(PROMPT)).prefix_len == ALL


# ---------------------------------------------------------------- room


async def test_a_lock_without_room_for_its_load_waits_as_long_as_it_may(scene: Scene) -> None:
    scene.gate.pass_chunks()
    blocker = await scene.cache.acquire([7] * (64 - 2 * PAGE))
    async with scene.client.lock(PROMPT) as lease:
        assert (lease.prefix_len, lease.loaded) == (0, Loaded())

    async with scene.client.lock(PROMPT, timeout_s=0.01) as lease:
        assert (lease.prefix_len, lease.loaded) == (0, Loaded())
    task = asyncio.ensure_future(scene.client.lock(PROMPT, timeout_s=None))
    async with asyncio.timeout(60):
        while not (await scene.stats()).waiters:  # noqa: ASYNC110 -- the lock is in the queue then
            await asyncio.sleep(0.001)
    await blocker.release()

    check_loaded(lease := await task)
    await lease.release()


async def test_many_requests_for_one_prompt_load_it_once_in_a_pool_that_holds_few(scene: Scene) -> None:
    most_private = 0

    async def serve(number: int) -> Lease:
        nonlocal most_private
        async with scene.client.acquire([*PROMPT, 1000 + number], new_tokens=2 * PAGE) as lease:
            most_private = max(most_private, (await scene.stats()).private_slots)
            assert lease.prefix_len == ALL
            return lease

    scene.gate.pass_chunks()
    served = await asyncio.gather(*(serve(number) for number in range(64)))

    host, stats = await scene.host(), await scene.stats()
    assert most_private <= 64 - ALL == 4 * 3 * PAGE  # four at a time
    assert sum(sum(lease.loaded) for lease in served) == host.tokens_loaded == ALL
    assert host.loads == {"whole": 1}
    assert (stats.exhausted, stats.tokens_reused) == (0, 64 * ALL)


# ---------------------------------------------------------------- other verbs


async def test_a_prefetch_brings_a_prefix_for_a_later_request(scene: Scene) -> None:
    assert await scene.client.prefetch(PROMPT) == ALL
    await scene.gate.until_begun()
    task = asyncio.ensure_future(scene.client.acquire(PROMPT))
    await scene.until_loading(1)
    scene.gate.pass_chunks()

    async with await task as lease:
        assert (lease.prefix_len, lease.loaded) == (ALL, Loaded())
    assert await scene.client.prefetch(PROMPT) == 0
    assert await scene.client.prefetch([5, 5, 5, 5]) == 0


async def test_each_tier_evicts_its_own_kv(scene: Scene) -> None:
    scene.gate.pass_chunks()
    await (await scene.client.acquire(PROMPT)).release()

    assert (await scene.client.evict(10**6, tier="device")).num_evicted == ALL
    found = await scene.client.match(PROMPT)
    assert (found.prefix_len, found.host_len) == (0, ALL)
    assert (await scene.client.evict(10**6, tier="host")).num_evicted == 2 * ALL
    found = await scene.client.match(PROMPT)
    assert (found.prefix_len, found.host_len) == (0, 0)
    with pytest.raises(InvalidRequest, match="tier must be one of 'device', 'host', not 'disk'"):
        await scene.client.evict(1, tier="disk")


def test_plain_calls_load_too() -> None:
    with LocalPrefixCache(host_config(validate=False)).sync as cache:
        with cache.acquire(PROMPT) as lease:
            lease.insert(PROMPT)
        cache.run(demote(cache.client))  # type: ignore[arg-type]
        assert cache.match(PROMPT).host_len == ALL

        with cache.acquire(PROMPT, load=False) as lease:
            assert lease.loaded == Loaded()
        with cache.lock(PROMPT, timeout_s=1, load_timeout_s=60) as lease:
            assert (lease.prefix_len, lease.loaded) == (ALL, Loaded(ALL))
        assert cache.prefetch(PROMPT) == 0
        assert cache.evict(10**6, tier="host").num_evicted == ALL


# ---------------------------------------------------------------- ranks


async def test_each_rank_loads_what_its_pool_lacks() -> None:
    caches = [LocalPrefixCache(host_config()) for _ in range(2)]
    gates = [GatedLoads(cache) for cache in caches]
    async with caches[0], caches[1]:
        for cache, gate in zip(caches, gates, strict=True):
            await publish_on_host(cache, PROMPT)
            gate.pass_chunks()
        async with caches[1].acquire(PROMPT):  # the second one has it in its pool again
            pass

        leases = await acquire_ranks(caches, [*PROMPT, 99], load_timeout_s=60)

        assert [lease.prefix_len for lease in leases] == [ALL, ALL]
        assert [lease.loaded for lease in leases] == [Loaded(ALL), Loaded()]
        for lease in leases:
            await lease.release()


async def test_the_shortest_prefix_of_all_ranks_counts() -> None:
    caches = [LocalPrefixCache(host_config()) for _ in range(2)]
    gates = [GatedLoads(cache) for cache in caches]
    async with caches[0], caches[1]:
        for cache in caches:
            await publish_on_host(cache, PROMPT)
        gates[0].pass_chunks()
        task = asyncio.ensure_future(acquire_ranks(caches, PROMPT))
        gates[1].pass_chunks(1)
        await gates[1].until_begun(2)
        gates[1].fails = True
        gates[1].pass_chunks()

        leases = await task

        assert [lease.prefix_len for lease in leases] == [PAGE, PAGE]
        assert [sum(lease.loaded) for lease in leases] == [0, 0]  # The attempt before has loaded what they have.
        assert (await caches[0].match(PROMPT)).prefix_len == ALL
        for lease in leases:
            await lease.release()
        leases = await acquire_ranks(caches, PROMPT, load=False)
        assert [lease.prefix_len for lease in leases] == [PAGE, PAGE]
        for lease in leases:
            await lease.release()
