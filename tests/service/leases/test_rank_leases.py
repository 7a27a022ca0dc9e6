"""`acquire_ranks` and `lease_ranks`: one lease per rank. If it fails at any moment, no rank holds one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from random import Random
from typing import Any

import numpy as np
import pytest
import ray
from support.caches.cache_kinds import KINDS, PAGES_OF_ONE, KindUnderTest, mamba, radix
from support.caches.cache_under_test import CacheUnderTest, Pages, small_config
from support.more import more

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient, acquire_ranks, start_cache
from raydix.actors.client import rank_leases
from raydix.actors.client.rank_leases import lease_ranks, revoke_grants
from raydix.actors.client.shared_acquire import SharedAcquire
from raydix.schemas import (
    CacheConfig,
    CacheUnavailable,
    InvalidRequest,
    LeaseConfig,
    PoolExhausted,
)

Ranks = tuple[CacheUnderTest, CacheUnderTest]


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
async def ranks(request: pytest.FixtureRequest) -> AsyncIterator[Ranks]:
    """Two empty caches of eight slots each, with pages of one token. They must be left with nothing held."""
    running = request.getfixturevalue("running_cache") if request.param == "ray" else None
    first, second = (CacheUnderTest.reached(request.param, config, running) for config in configs_of_ranks())
    yield first, second
    await first.close()
    await second.close()


def configs_of_ranks() -> list[CacheConfig]:
    """Unequal configurations, as all tests on Ray share one cache of each."""
    limits = (LeaseConfig(remembered_leases=number) for number in (1001, 1002))
    return [small_config().model_copy(update={"leases": each}) for each in limits]


def pair_of(kind: KindUnderTest) -> Ranks:
    first, second = (CacheUnderTest.reached("local", kind.cache_config(), None, kind) for _ in range(2))
    return first, second


def clients_of(ranks: Ranks) -> list[PrefixCacheClient]:
    return [rank.client for rank in ranks]


async def pages_of(ranks: Ranks) -> list[Pages]:
    return [await rank.pages() for rank in ranks]


async def check_nothing_held(ranks: Ranks) -> None:
    """Check that no rank has a lease, a private or locked slot, or a waiting request."""
    for rank in ranks:
        stats = await rank.client.stats()
        held = (stats.open_leases, stats.private_slots, stats.protected_slots, stats.waiters)
        assert held == (0, 0, 0, 0)


async def release_all(leases: list[Lease]) -> None:
    for lease in leases:
        await lease.release()


class Steps:
    """The test's own steps, each taken once before a verb of a client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def before(self, client: PrefixCacheClient, verb: str, step: Callable[[], Awaitable[Any]]) -> None:
        """Take a step before the next call of a verb."""
        original, pending = getattr(client, verb), [step]

        async def stepped(*args: Any, **kwargs: Any) -> Any:
            while pending:
                await pending.pop()()
            return await original(*args, **kwargs)

        self._patch.setattr(client, verb, stepped)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


# ---------------------------------------------------------------- the same prefix


async def test_all_ranks_get_the_smallest_prefix_in_the_order_of_the_clients(ranks: Ranks) -> None:
    await ranks[0].publish(1, 2, 3, 4)
    await ranks[1].publish(1, 2)
    prompt = np.array([1, 2, 3, 4, 5])

    for order in (ranks, ranks[::-1]):
        leases = await acquire_ranks(clients_of(order), prompt, new_tokens=1)

        assert [lease.client for lease in leases] == clients_of(order)
        assert [(lease.prefix_len, len(lease)) for lease in leases] == [(2, 6), (2, 6)]
        await release_all(leases)

    leases = await acquire_ranks(clients_of(ranks), prompt)
    for lease in leases:
        await lease.insert(prompt, release=True)
    leases = await acquire_ranks(clients_of(ranks), prompt, max_prefix_len=4)
    assert [lease.prefix_len for lease in leases] == [4, 4]
    await release_all(leases)


@pytest.mark.parametrize("kind", (*KINDS, *PAGES_OF_ONE), ids=str)
async def test_each_kind_of_cache_gives_equal_prefixes(kind: KindUnderTest) -> None:
    ranks = pair_of(kind)
    await ranks[0].publish(1, 2, 3)
    await ranks[1].publish(1, 2)

    leases = await acquire_ranks(clients_of(ranks), ranks[0].tokens(1, 2, 3, 4), timeout_s=0)

    assert [lease.prefix_len for lease in leases] == [kind.reusable(2 * kind.page_size) * kind.page_size] * 2
    await release_all(leases)
    for rank in ranks:
        await rank.close()


async def test_a_limit_within_a_page_is_rounded_down_for_all() -> None:
    ranks = pair_of(radix(16))
    for rank in ranks:
        await rank.publish(1, 2)

    leases = await acquire_ranks(clients_of(ranks), ranks[0].tokens(1, 2), max_prefix_len=31, timeout_s=0)

    assert [lease.prefix_len for lease in leases] == [16, 16]
    await release_all(leases)
    for rank in ranks:
        await rank.close()


async def test_ranks_whose_states_lie_at_different_tokens_agree_on_a_prefix_that_both_have() -> None:
    ranks = pair_of(mamba(1))
    for rank, lengths in zip(ranks, ((1, 3, 5), (1, 2, 4)), strict=True):
        async with rank.client.acquire([1, 2, 3, 4, 5]) as lease:
            for length in lengths:
                await lease.insert([1, 2, 3, 4, 5][:length], publish_state=True)

    leases = await acquire_ranks(clients_of(ranks), [1, 2, 3, 4, 5, 6], timeout_s=0)

    assert [lease.prefix_len for lease in leases] == [1, 1]
    await release_all(leases)
    for rank in ranks:
        await rank.close()


async def test_namespaces_are_matched_at_each_rank(ranks: Ranks) -> None:
    for rank in ranks:
        await rank.publish(1, 2, lora_id="a", cache_salt="b", extra_key="c")

    hits = await acquire_ranks(clients_of(ranks), [1, 2], lora_id="a", cache_salt="b", extra_key="c")
    misses = await acquire_ranks(clients_of(ranks), [1, 2], lora_id="a", cache_salt="b")

    assert [lease.prefix_len for lease in hits + misses] == [2, 2, 0, 0]
    await release_all(hits + misses)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_prefix_evicted_between_match_and_acquire_is_given_up_by_all(
    ranks: Ranks, steps: Steps, place: int
) -> None:
    for rank in ranks:
        await rank.publish(1, 2)
    steps.before(ranks[place].client, "acquire", lambda: ranks[place].client.evict(2))

    leases = await acquire_ranks(clients_of(ranks), [1, 2, 3], timeout_s=0)

    assert [lease.prefix_len for lease in leases] == [0, 0]
    assert [(each.private, each.leases) for each in await pages_of(ranks)] == [(3, 1), (3, 1)]
    await release_all(leases)


# ---------------------------------------------------------------- refusals


async def refuse_at(ranks: Ranks, place: int) -> None:
    """Check that a full rank refuses for all."""
    async with ranks[place].client.acquire([9] * 7):
        with pytest.raises(PoolExhausted) as caught:
            await acquire_ranks(clients_of(ranks), [1, 2], timeout_s=0.05)
        assert (caught.value.needed, caught.value.free) == (2, 1)
        assert (await ranks[1 - place].pages()) == Pages(free=8)
        assert (await ranks[place].pages()) == Pages(free=1, private=7, leases=1)
    await check_nothing_held(ranks)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_full_rank_refuses_for_all_and_nothing_is_held(ranks: Ranks, place: int) -> None:
    await refuse_at(ranks, place)


async def test_a_lease_that_is_kept_after_a_refusal_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = pair_of(radix())
    kept: list[Lease] = []

    async def keep(leases: list[Lease]) -> None:
        kept.extend(leases)

    monkeypatch.setattr(rank_leases, "_end_all", keep)
    with pytest.raises(AssertionError):
        await refuse_at(ranks, 1)

    assert kept
    await release_all(kept)
    for rank in ranks:
        await rank.close()


async def test_slots_are_waited_for_at_the_first_rank(ranks: Ranks) -> None:
    held = await ranks[0].client.acquire([9] * 8)
    (waiting,) = await ranks[0].in_line(acquire_ranks(clients_of(ranks), [1, 2], timeout_s=300))
    assert await ranks[1].pages() == Pages(free=8)

    await held.release()

    await release_all(await waiting)


async def test_slots_of_another_rank_are_asked_for_until_they_are_free(ranks: Ranks) -> None:
    held = await ranks[1].client.acquire([9] * 8)
    before = (await ranks[1].client.stats()).exhausted
    asking = asyncio.create_task(acquire_ranks(clients_of(ranks), [1, 2], timeout_s=300))
    stats = await ranks[1].until(lambda stats: stats.exhausted >= before + 2)
    assert stats.waiters == 0

    await held.release()

    await release_all(await asking)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_request_that_can_never_fit_is_refused_immediately(ranks: Ranks, place: int) -> None:
    small = CacheUnderTest.reached("local", radix_of(4), None)
    both = (small, ranks[1]) if place == 0 else (ranks[0], small)

    with pytest.raises(PoolExhausted) as caught:
        await acquire_ranks(clients_of(both), [1] * 5, timeout_s=10**6)

    assert not caught.value.can_ever_fit
    await check_nothing_held(both)
    await small.close()


def radix_of(num_slots: int, **leases: Any) -> CacheConfig:
    """The configuration of a radix cache with pages of one token and so many slots."""
    config = small_config()
    pool = config.pool.model_copy(update={"num_slots": num_slots})
    return config.model_copy(update={"pool": pool, "leases": LeaseConfig(**leases)})


async def test_the_first_cache_says_how_long_to_wait_by_default() -> None:
    async with (
        LocalPrefixCache(radix_of(8, acquire_timeout_s=0.05)) as first,
        LocalPrefixCache(radix_of(8, acquire_timeout_s=10**6)) as second,
        second.acquire([9] * 8),
    ):
        with pytest.raises(PoolExhausted):
            await acquire_ranks([first, second], [1])
        assert (await first.stats()).open_leases == 0


async def test_a_full_queue_is_a_refusal_like_any_other() -> None:
    first = CacheUnderTest.reached("local", radix_of(8, max_waiters=1), None)
    async with LocalPrefixCache(radix_of(8)) as second:
        held = await first.client.acquire([9] * 8)
        (waiting,) = await first.in_line(first.client.acquire([8]))
        asking = asyncio.create_task(acquire_ranks([first.client, second], [1], timeout_s=300))
        await first.until(lambda stats: bool(stats.refusals))
        assert not asking.done()
        await held.release()

        await release_all(await asking)
        await (await waiting).release()
    await first.close()


# ---------------------------------------------------------------- several callers


async def test_two_callers_that_hold_the_slots_of_each_others_second_rank_both_finish(
    ranks: Ranks, steps: Steps
) -> None:
    callers = [[rank.another_client() for rank in order] for order in (ranks, ranks[::-1])]
    both_hold_one = asyncio.Barrier(2)
    for _, second in callers:
        steps.before(second, "acquire", both_hold_one.wait)

    async def call(clients: list[PrefixCacheClient], token: int) -> None:
        await release_all(await acquire_ranks(clients, [token] * 8, timeout_s=300))

    await asyncio.gather(*(call(clients, token) for token, clients in enumerate(callers)))

    await check_nothing_held(ranks)


async def test_many_callers_in_either_order_all_finish(ranks: Ranks) -> None:
    async def call(token: int) -> None:
        order = ranks if token % 2 else ranks[::-1]
        clients = [rank.another_client() for rank in order]
        for _ in range(5):
            leases = await acquire_ranks(clients, [token] * 8, timeout_s=300)
            await asyncio.sleep(0)
            await release_all(leases)

    await asyncio.gather(*map(call, range(4)))

    await check_nothing_held(ranks)


@pytest.mark.parametrize("seed", [0, *more(*range(1, 4))])
async def test_random_operations_leave_nothing_held(ranks: Ranks, seed: int) -> None:
    rng = Random(seed)

    async def request() -> None:
        order = ranks if rng.random() < 0.5 else ranks[::-1]
        tokens = [rng.randint(1, 2) for _ in range(rng.randint(1, 9))]
        limit = rng.choice([None, None, 0, 2, len(tokens) - 1])
        try:
            leases = await acquire_ranks(
                clients_of(order), tokens, new_tokens=rng.randint(0, 1), max_prefix_len=limit, timeout_s=0.03
            )
        except PoolExhausted:
            return
        assert leases[0].prefix_len == leases[1].prefix_len <= (len(tokens) if limit is None else limit)
        ends = [asyncio.ensure_future(end(lease, tokens)) for lease in leases]
        await asyncio.shield(asyncio.gather(*ends))

    async def end(lease: Lease, tokens: list[int]) -> None:
        await asyncio.sleep(rng.random() * 0.005)
        await lease.insert(tokens[: rng.randint(1, len(tokens))], release=True)

    for _ in range(30):
        tasks = [asyncio.create_task(request()) for _ in range(4)]
        await asyncio.sleep(rng.random() * 0.01)
        if rng.random() < 0.3:
            await rng.choice(ranks).client.evict(2)
        for task in tasks[: rng.randint(0, 2)]:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

    for rank in ranks:  # of cancelled callers, the leases end in the background
        await rank.until(lambda stats: stats.open_leases == 0)
        await rank.client.check_invariants()
    await check_nothing_held(ranks)


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize("full", [None, 0, 1], ids=["room at both", "first is full", "second is full"])
async def test_cancelled_after_any_number_of_ticks_it_leaves_nothing(ranks: Ranks, full: int | None) -> None:
    held = [] if full is None else [await ranks[full].client.acquire([9] * 8)]
    expected = [Pages(free=0, private=8, leases=1) if place == full else Pages(free=8) for place in range(2)]
    await asyncio.gather(*(client.open() for client in clients_of(ranks)))
    for ticks in range(60):
        task = asyncio.create_task(acquire_ranks(clients_of(ranks), [1, 2]))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            await release_all(task.result())

        assert await pages_of(ranks) == expected, f"cancelled after {ticks} ticks"
        assert [(await rank.client.stats()).waiters for rank in ranks] == [0, 0]
    await release_all(held)


PHASES = {"match": (1, "match"), "first acquire": (0, "acquire"), "second acquire": (1, "acquire")}


@pytest.mark.parametrize("phase", PHASES)
async def test_cancelled_in_each_phase_it_leaves_nothing(ranks: Ranks, steps: Steps, phase: str) -> None:
    place, verb = PHASES[phase]
    reached = asyncio.Event()

    async def stay() -> None:
        reached.set()
        await asyncio.Event().wait()

    steps.before(ranks[place].client, verb, stay)
    task = asyncio.create_task(acquire_ranks(clients_of(ranks), [1, 2]))
    await reached.wait()
    assert (await ranks[0].pages()).leases == (phase == "second acquire")

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await check_nothing_held(ranks)


async def test_cancelled_while_it_releases_it_leaves_nothing(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ranks[1].client.acquire([9] * 8):
        original = rank_leases._end_all

        def end_all(leases: list[Lease]) -> Any:
            task.cancel()  # before the releases begin
            return original(leases)

        monkeypatch.setattr(rank_leases, "_end_all", end_all)
        task = asyncio.create_task(acquire_ranks(clients_of(ranks), [1, 2]))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ranks[0].pages() == Pages(free=8)


# ---------------------------------------------------------------- more than two ranks


@pytest.fixture
async def three_ranks() -> AsyncIterator[list[CacheUnderTest]]:
    """Three empty caches of eight slots each, with pages of one token."""
    caches = [CacheUnderTest.reached("local", radix_of(8), None) for _ in range(3)]
    yield caches
    for cache in caches:
        await cache.close()


async def test_all_caches_but_the_first_are_asked_concurrently(three_ranks: list[CacheUnderTest], steps: Steps) -> None:
    clients = [rank.client for rank in three_ranks]
    for rank, length in zip(three_ranks, (4, 2, 3), strict=True):
        await rank.publish(*range(length))
    both_are_asked = asyncio.Barrier(2)
    for client in clients[1:]:
        steps.before(client, "acquire", both_are_asked.wait)

    leases = await asyncio.wait_for(acquire_ranks(clients, range(5), timeout_s=0), 300)

    assert [(lease.client, lease.prefix_len) for lease in leases] == [(client, 2) for client in clients]
    await release_all(leases)


@pytest.mark.parametrize("full", range(3))
async def test_one_full_rank_of_three_refuses_for_all(three_ranks: list[CacheUnderTest], full: int) -> None:
    clients = [rank.client for rank in three_ranks]
    for _ in range(10):
        async with clients[full].acquire([9] * 8):
            with pytest.raises(PoolExhausted):
                await acquire_ranks(clients, [1, 2], timeout_s=0)
            for rank in three_ranks:  # a request on its way is cancelled, and its lease ends in the background
                await rank.until(lambda stats, rank=rank: stats.open_leases == (rank is three_ranks[full]))  # type: ignore[misc]


# ---------------------------------------------------------------- locks of all ranks


def lock(client: PrefixCacheClient) -> Coroutine[Any, Any, Lease]:
    """Lock the prefix of two tokens, and offer the lease to another client."""
    return client.lock([1, 2], offer_s=300)


async def test_offered_locks_of_all_ranks_are_adopted_or_revoked(ranks: Ranks) -> None:
    await ranks[0].publish(1, 2)
    await ranks[1].publish(1)

    leases = await lease_ranks(clients_of(ranks), lock)

    assert [(lease.client, lease.prefix_len) for lease in leases] == [(ranks[0].client, 2), (ranks[1].client, 1)]
    grants = [lease.offered for lease in leases if lease.offered is not None]
    adopted = await ranks[0].another_client().adopt(grants[0])
    await revoke_grants(clients_of(ranks), grants)  # it ends the other one alone
    assert [each.leases for each in await pages_of(ranks)] == [1, 0]
    await adopted.release()
    await check_nothing_held(ranks)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_lock_that_fails_ends_those_that_were_taken(ranks: Ranks, steps: Steps, place: int) -> None:
    for rank in ranks:
        await rank.publish(1, 2)

    async def fail() -> None:
        await ranks[1 - place].until(lambda stats: stats.open_leases == 1)
        raise CacheUnavailable("lost")

    steps.before(ranks[place].client, "lock", fail)
    with pytest.raises(CacheUnavailable, match="lost"):
        await lease_ranks(clients_of(ranks), lock)

    await check_nothing_held(ranks)


async def test_a_lock_that_fails_does_not_wait_for_a_silent_rank(ranks: Ranks, steps: Steps) -> None:
    async def fail() -> None:
        raise CacheUnavailable("lost")

    steps.before(ranks[0].client, "lock", fail)
    steps.before(ranks[1].client, "lock", asyncio.Event().wait)
    with pytest.raises(CacheUnavailable, match="lost"):
        await asyncio.wait_for(lease_ranks(clients_of(ranks), lock), 300)

    await check_nothing_held(ranks)


async def test_held_leases_end_with_a_lock_that_fails(ranks: Ranks, steps: Steps) -> None:
    held = await ranks[0].client.acquire([1, 2])

    async def fail() -> None:
        raise CacheUnavailable("lost")

    steps.before(ranks[1].client, "lock", fail)
    with pytest.raises(CacheUnavailable, match="lost"):
        await lease_ranks([ranks[1].client], lock, held=[held])

    assert held.ended
    await check_nothing_held(ranks)


async def test_locks_cancelled_after_any_number_of_ticks_leave_nothing(ranks: Ranks) -> None:
    for rank in ranks:
        await rank.publish(1, 2)
    for ticks in range(20):
        task = asyncio.create_task(lease_ranks(clients_of(ranks), lock))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            grants = [lease.offered for lease in task.result() if lease.offered is not None]
            await revoke_grants(clients_of(ranks), grants)

        await check_nothing_held(ranks)


# ---------------------------------------------------------------- a rank is lost


async def until_dead(cache: Any, client: PrefixCacheClient) -> None:
    """Kill a cache, and wait until its client gets an error."""
    ray.kill(cache)
    async with asyncio.timeout(300):
        while True:
            try:
                await client.stats()
            except CacheUnavailable:
                return
            await asyncio.sleep(0.01)


@pytest.mark.ray
@pytest.mark.parametrize("dying", [*more(0), 1], ids=["first dies", "second dies"])
@pytest.mark.parametrize(
    "phase", [*more("match"), pytest.param("first acquire", marks=pytest.mark.long), "second acquire"]
)
async def test_a_cache_that_dies_in_any_phase_leaves_nothing_at_the_other(
    running_cache: Callable[[CacheConfig], Any], steps: Steps, phase: str, dying: int
) -> None:
    living = CacheUnderTest.reached("ray", configs_of_ranks()[0], running_cache)
    cache = start_cache(small_config())
    client = PrefixCacheClient(cache)
    clients = [living.client, client] if dying else [client, living.client]
    await asyncio.gather(*(each.open() for each in clients))
    place, verb = PHASES[phase]
    place = dying if verb == "match" else place
    steps.before(clients[place], verb, lambda: until_dead(cache, client))

    asked = asyncio.wait_for(acquire_ranks(clients, [1, 2]), 300)
    if (phase, dying) == ("second acquire", 0):  # as if it died after all leases were returned
        leases = await asked
        with pytest.raises(CacheUnavailable):
            await leases[0].insert([1])
        await release_all(leases)
    else:
        with pytest.raises(CacheUnavailable):
            await asked

    assert await living.pages() == Pages(free=8)
    await client.close()
    await living.close()


async def test_a_client_closed_between_the_acquires_leaves_nothing(ranks: Ranks, steps: Steps) -> None:
    leaving = ranks[0].another_client()
    steps.before(ranks[1].client, "acquire", leaving.close)

    with pytest.raises(InvalidRequest, match="was closed"):
        await acquire_ranks([leaving, ranks[1].client], [1, 2])

    await check_nothing_held(ranks)


# ---------------------------------------------------------------- wrong arguments


WRONG: dict[str, dict[str, Any]] = {
    "tokens: at least one": {"tokens": []},
    "tokens": {"tokens": "abc"},
    "lora_id": {"lora_id": 1},
    "new_tokens": {"new_tokens": -1},
    "max_prefix_len": {"max_prefix_len": -1},
    "priority": {"priority": "high"},
    "timeout_s": {"timeout_s": -1},
    "clients must have one PrefixCacheClient per rank, but is empty": {"clients": []},
    "clients must be a list of PrefixCacheClient, one per rank, not int": {"clients": 1},
    r"clients\[0\] must be a PrefixCacheClient, not str": {"clients": ["kv-0"]},
}


@pytest.mark.parametrize("message", WRONG)
async def test_wrong_arguments_are_refused_before_anything_is_acquired(message: str) -> None:
    async with LocalPrefixCache(small_config()) as first, LocalPrefixCache(small_config()) as second:
        wrong = {"clients": [first, second], "tokens": [1]} | WRONG[message]

        with pytest.raises(InvalidRequest, match=message):
            await acquire_ranks(wrong.pop("clients"), wrong.pop("tokens"), **wrong)

        assert [(await cache.stats()).acquires for cache in (first, second)] == [0, 0]


async def test_each_rank_has_a_client_of_its_own() -> None:
    async with LocalPrefixCache(small_config()) as first, LocalPrefixCache(small_config()) as second:
        with pytest.raises(InvalidRequest, match=r"clients\[0\] and clients\[2\] are the same client"):
            await acquire_ranks([first, second, first], [1])


async def test_the_caches_have_one_page_size() -> None:
    async with LocalPrefixCache(radix(1).cache_config()) as first, LocalPrefixCache(radix(16).cache_config()) as second:
        with pytest.raises(InvalidRequest, match=r"same page_size, but in the order of clients they have \[1, 16\]"):
            await acquire_ranks([first, second], [1])
        assert [(await cache.stats()).acquires for cache in (first, second)] == [0, 0]


# ---------------------------------------------------------------- the same arguments


async def test_each_argument_of_a_shared_acquire_reaches_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "new_tokens": 1,
        "priority": 2,
        "resumed": True,
        "boundary_state": True,
        "load": False,
        "load_timeout_s": 3.0,
    }
    shared = SharedAcquire([1, 2], extra_key="a", lora_id="b", cache_salt="c", max_prefix_len=9, timeout_s=9.0, **given)
    async with LocalPrefixCache(small_config()) as cache:
        sent: list[Any] = []
        ask = cache.session.ask
        monkeypatch.setattr(cache.session, "ask", lambda request: sent.append(request) or ask(request))

        await (await shared.send(cache, max_prefix_len=1, timeout_s=0.5)).release()

    (request,) = sent
    changed = {"lease_id": request.lease_id, "max_prefix_len": 1, "timeout_s": 0.5}
    assert request == dataclasses.replace(shared.request, **changed)
    assert all(getattr(request, name) == value for name, value in given.items())
