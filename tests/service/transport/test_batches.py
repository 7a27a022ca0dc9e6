"""Requests of one client are sent in batches, executed in order, and fail independently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from random import Random
from typing import Any

import pytest
from ray.exceptions import PendingCallsLimitExceeded, RaySystemError
from support.caches.cache_fixtures import over_calls
from support.caches.cache_under_test import CacheUnderTest, Pages, small_config
from support.caches.raw_calls import forged

from raydix.actors import PrefixCacheClient
from raydix.actors.service import cache_service
from raydix.actors.service.cache_service import CacheService
from raydix.actors.transport import batch_codec, ray_transport
from raydix.actors.transport.validation import checked_message
from raydix.schemas import (
    Ack,
    Batch,
    BatchResponse,
    CacheBusy,
    CacheConfig,
    CacheError,
    CacheUnavailable,
    EvictionConfig,
    MatchRequest,
    OpenSession,
    PoolConfig,
    PoolExhausted,
    SessionResponse,
    StatsRequest,
    TokenIds,
    UnknownLease,
)
from raydix.schemas.requests import MAX_REQUESTS

NUM_OPERATIONS = 2000


# ---------------------------------------------------------------- on Ray


@pytest.fixture(params=[pytest.param("socket", marks=pytest.mark.ray), pytest.param("calls", marks=pytest.mark.ray)])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Only clients of actors send batches."""
    return over_calls(monkeypatch) if request.param == "calls" else "ray"


async def num_batches(cache: CacheUnderTest) -> int:
    """Return the number of batches executed so far, including the one of this request."""
    return (await cache.client.stats()).batches


@pytest.mark.ray
async def test_two_thousand_mixed_operations_of_one_client_are_executed_in_order(
    running_cache: Callable[[CacheConfig], Any],
) -> None:
    config = CacheConfig(pool=PoolConfig(num_slots=4096, device="cpu"), eviction=EvictionConfig(high_watermark=1.0))
    rng = Random(3)
    tokens = [rng.randrange(2**32) for _ in range(4000)]
    async with PrefixCacheClient(running_cache(config)) as client:
        lease = await client.acquire(tokens)
        operations: list[Any] = []
        expected: list[int] = []
        published = 0
        for _ in range(NUM_OPERATIONS):
            kind = rng.choice(("insert", "insert", "match", "match", "stats", "lock", "evict"))
            if kind == "insert":
                published += rng.randint(1, 4)
                operations.append(lease.insert(tokens[:published]))
            elif kind == "match":
                operations.append(client.match(tokens))
            elif kind == "stats":
                operations.append(client.stats())
            elif kind == "lock":
                operations.append(client.lock(tokens[: published + 1]))
            else:
                operations.append(client.evict(1))  # all pages are locked
            expected.append(0 if kind == "evict" else published)

        answers = await asyncio.gather(*operations)

        assert [how_much(answer) for answer in answers] == expected
        stats = await client.stats()
        assert stats.batches < NUM_OPERATIONS / 10
        await client.check_invariants()


def how_much(answer: Any) -> int:
    """Return the number of tokens that had been published at the answer; for an evict, the number evicted."""
    match type(answer).__name__:
        case "InsertResponse":
            return answer.prefix_len + answer.num_inserted
        case "MatchResponse" | "Lease":
            return answer.prefix_len
        case "CacheStats":
            return answer.tree_slots
        case "EvictResponse":
            return answer.num_evicted
    raise AssertionError(answer)


async def test_what_coroutines_ask_in_one_tick_travels_in_one_batch(cache1: CacheUnderTest) -> None:
    await cache1.publish(1)
    before = await num_batches(cache1)

    answers = await asyncio.gather(*(cache1.client.match([1]) for _ in range(15)))

    assert [answer.prefix_len for answer in answers] == [1] * 15
    assert await num_batches(cache1) == before + 2


async def test_much_at_once_is_shared_between_two_batches(cache1: CacheUnderTest) -> None:
    before = await num_batches(cache1)

    await asyncio.gather(*(cache1.client.match([1]) for _ in range(200)))

    assert await num_batches(cache1) == before + 3


async def test_what_is_asked_at_once_travels_in_batches_that_a_cache_takes_and_in_order(cache1: CacheUnderTest) -> None:
    before = await num_batches(cache1)

    probes = [cache1.client.match([1]) for _ in range(2 * MAX_REQUESTS)]
    *_, stats = await asyncio.gather(*probes, cache1.client.stats())

    assert ray_transport.MAX_BATCH_REQUESTS <= MAX_REQUESTS
    assert stats.probes >= 2 * MAX_REQUESTS  # executed last
    assert await num_batches(cache1) == before + 2 * MAX_REQUESTS // ray_transport.MAX_BATCH_REQUESTS + 2


async def test_long_prompts_asked_for_at_once_do_not_all_travel_together(cache1: CacheUnderTest) -> None:
    prompt = list(range(100_000))  # 400 KB
    before = await num_batches(cache1)

    answers = await asyncio.gather(*(cache1.client.match(prompt) for _ in range(12)))

    assert [answer.prefix_len for answer in answers] == [0] * 12
    assert await num_batches(cache1) == before + 5  # of at most three prompts each


async def test_at_most_two_batches_are_on_their_way(cache1: CacheUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    await cache1.client.open()
    on_their_way: list[int] = []
    transport = cache1.client.session.transport
    land = transport._land  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> None:
        on_their_way.append(len(transport._in_flight))  # type: ignore[attr-defined]
        land(*arguments)

    monkeypatch.setattr(transport, "_land", counted)

    async def ask(number: int) -> None:
        for _ in range(5):
            await cache1.client.match([number])

    await asyncio.gather(*map(ask, range(100)))

    assert len(on_their_way) < 100  # 500 requests
    assert max(on_their_way) == 2


async def test_a_request_that_fails_in_a_batch_fails_alone(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2)
    before = await num_batches(cache1)

    first, refused, lease, last = await asyncio.gather(
        cache1.client.match([1]),
        cache1.client.acquire([1] * 9),
        cache1.client.acquire([1, 2, 3]),
        cache1.client.match([1, 2]),
        return_exceptions=True,
    )

    assert isinstance(refused, PoolExhausted)
    assert (first.prefix_len, lease.prefix_len, last.prefix_len) == (1, 2, 2)
    assert await num_batches(cache1) == before + 2  # all four in one batch
    assert await cache1.pages() == Pages(free=5, private=1, protected=2, leases=1)


async def test_long_prompts_travel_in_parts_and_arrive_whole(cache1: CacheUnderTest) -> None:
    await cache1.publish(1, 2, 3)
    prompts = [[1, 2, 3][:length] + list(range(10, 20_000)) for length in (0, 1, 2, 3)]  # 80 KB each

    answers = await asyncio.gather(*map(cache1.client.match, prompts))

    assert [answer.prefix_len for answer in answers] == [0, 1, 2, 3]


async def test_beyond_the_bound_of_its_queue_a_client_is_busy_but_leases_can_always_end(
    cache1: CacheUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await cache1.client.acquire([1, 2])
    monkeypatch.setattr(ray_transport, "MAX_QUEUED_REQUESTS", 4)

    *answers, released = await asyncio.gather(
        *(cache1.client.match([1]) for _ in range(6)), lease.release(), return_exceptions=True
    )

    assert [type(answer).__name__ for answer in answers] == ["MatchResponse"] * 4 + ["CacheBusy"] * 2
    assert "4 requests of this client wait to be sent; try again in" in str(answers[4])
    assert 0 < answers[4].retry_after_s <= 1
    assert released is None
    assert await cache1.pages() == Pages(free=8)


async def test_a_request_given_up_before_it_was_sent_is_not_sent(cache1: CacheUnderTest) -> None:
    before = await cache1.client.stats()

    tasks = [asyncio.create_task(cache1.client.match([1])) for _ in range(4)]
    await asyncio.sleep(0)
    for task in tasks[1:]:
        task.cancel()
    await asyncio.wait(tasks)

    assert (await cache1.client.stats()).probes == before.probes + 1


# ---------------------------------------------------------------- cancelled in flight


async def cancelled_on_its_way(request: Coroutine[Any, Any, Any]) -> None:
    """Send a request and cancel it before it is answered."""
    task = asyncio.create_task(request)
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def all_answered(client: Any) -> None:
    """Wait until no batch of a client is in flight."""
    async with asyncio.timeout(60):
        while getattr(client.session.transport, "_in_flight", None):  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("release", [False, True])
async def test_an_insert_cancelled_on_its_way_takes_effect_and_the_lease_knows_of_it(
    cache1: CacheUnderTest, release: bool
) -> None:
    await cache1.publish(1)
    lease = await cache1.client.acquire([1, 2], max_prefix_len=0, new_tokens=1)

    await cancelled_on_its_way(lease.insert([1, 2], release=release))
    pages = await cache1.pages()
    await all_answered(cache1.client)  # Ray may deliver a later answer first

    if release:
        assert pages == Pages(free=6, evictable=2)
        with pytest.raises(UnknownLease, match="has ended"):
            await lease.insert([1, 2])
    else:
        assert pages == Pages(free=5, private=1, protected=2, leases=1)
        assert lease.published_len == 2
        assert (await lease.insert([1, 2, 3])).num_inserted == 1
        found = await cache1.client.acquire([1, 2, 3])
        assert found.slots.tolist() == lease.slots.tolist()  # including the tree's slot of token 1


async def test_an_acquire_cancelled_on_its_way_is_undone(cache1: CacheUnderTest) -> None:
    await cache1.client.open()

    await cancelled_on_its_way(cache1.client.acquire([1, 2]))

    assert await cache1.pages() == Pages(free=8)


async def test_after_an_extend_cancelled_on_its_way_the_next_ones_slots_follow_on_each_other(
    cache1: CacheUnderTest,
) -> None:
    lease = await cache1.client.acquire([1])

    await cancelled_on_its_way(lease.extend(2))
    generated = [slot for _ in range(3) for slot in (await lease.extend(1)).tolist()]

    assert lease.slots[1:4].tolist() == generated  # insert publishes the KV of these slots


# ---------------------------------------------------------------- a handle that raises


class RefusingHandle:
    """An actor's handle on which only `handshake`, `open_session` and `heartbeat` can be called; other calls raise."""

    _actor_id = "refusing"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, method: str) -> Any:
        if method == "open_session":
            return Remote(self._open)
        if method == "handshake":
            return Remote(self._shake_hands)
        if method == "heartbeat":
            return Remote(lambda *arguments: asyncio.get_running_loop().create_future())
        return Remote(self._refuse)

    async def _shake_hands(self, row: Any) -> Any:
        return row

    async def _open(self, request: OpenSession, owner: None, row: Any) -> SessionResponse:
        return SessionResponse(epoch="e", config=small_config())

    def _refuse(self, *arguments: Any) -> Any:
        raise self._error


class Remote:
    def __init__(self, remote: Callable[..., Any]) -> None:
        self.remote = remote


REFUSALS: list[Any] = [
    pytest.param(PendingCallsLimitExceeded("1 call is pending"), CacheBusy, marks=pytest.mark.long),  # it tries again
    (RaySystemError("Ray has not been started yet"), CacheUnavailable),
]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")  # else the client's look for its actor would start Ray
@pytest.mark.parametrize(("error", "expected"), REFUSALS, ids=["pending calls", "no Ray"])
async def test_a_call_that_cannot_be_made_fails_its_requests(error: Exception, expected: type[CacheError]) -> None:
    client = PrefixCacheClient(RefusingHandle(error))
    await client.open()

    with pytest.raises(expected):
        await asyncio.wait_for(client.match([1]), 30)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")  # else the client's look for its actor would start Ray
@pytest.mark.parametrize(("error", "expected"), REFUSALS, ids=["pending calls", "no Ray"])
async def test_a_call_that_cannot_be_made_is_told_in_the_caches_terms(
    error: Exception, expected: type[CacheError]
) -> None:
    client = PrefixCacheClient(RefusingHandle(error))
    await client.open()

    with pytest.raises(expected):
        await client.attach_pool()


# ---------------------------------------------------------------- the order of numbered batches


class SlowHandle(RefusingHandle):
    """The handle of an actor that answers a batch when the test calls `answer`."""

    def __init__(self) -> None:
        super().__init__(RuntimeError("not asked for here"))
        self.batches: list[tuple[Batch, asyncio.Future[bytes]]] = []

    def __getattr__(self, method: str) -> Any:
        return Remote(self._execute) if method == "execute" else super().__getattr__(method)

    def _execute(self, *parts: bytes) -> asyncio.Future[bytes]:
        self.batches.append(
            (checked_message(Batch, batch_codec.unpack(*parts)), asyncio.get_running_loop().create_future())
        )
        return self.batches[-1][1]

    def answer(self, number: int) -> None:
        batch, answer = self.batches[number]
        answer.set_result(batch_codec.pack(BatchResponse(epoch="e", responses=tuple(Ack() for _ in batch.requests))))


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
async def test_each_batch_names_the_one_that_must_go_before_it() -> None:
    handle = SlowHandle()
    client = PrefixCacheClient(handle)
    await client.open()
    resets: list[asyncio.Task[None]] = []
    for _ in range(4):  # one per tick: two are sent, two wait until a batch is answered
        resets.append(asyncio.create_task(client.reset()))
        await turns()
    assert len(handle.batches) == 2

    handle.answer(0)
    await turns()
    handle.answer(1)
    handle.answer(2)
    await turns()

    sent = [(batch.seq, batch.after, len(batch.requests)) for batch, _ in handle.batches]
    assert sent == [(1, 0, 1), (2, 1, 1), (3, 2, 2)]
    await asyncio.wait_for(asyncio.gather(*resets), 30)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


PROBE, LOOK = MatchRequest(tokens=TokenIds.pack([1])), StatsRequest()


@pytest.fixture
async def service() -> AsyncIterator[CacheService]:
    service = CacheService(small_config(), epoch="e")
    service.open_session(OpenSession(session_id="s", owner="test"))
    yield service
    service.core.check_invariants()


def batch(service: CacheService, seq: int, after: int, *requests: Any) -> Batch:
    return Batch(session_id="s", epoch=service.epoch, requests=requests, seq=seq, after=after)


async def test_a_batch_that_arrives_early_waits_for_the_one_before_it(service: CacheService) -> None:
    late = asyncio.create_task(service.execute_in_turn(batch(service, 2, 1, LOOK, PROBE)))
    await asyncio.sleep(0)
    later_still = asyncio.create_task(service.execute_in_turn(batch(service, 3, 2, LOOK)))
    await asyncio.sleep(0)
    assert service.stats().probes == 0

    await service.execute_in_turn(batch(service, 1, 0, PROBE, PROBE))

    assert (await late).responses[0].probes == 2
    assert (await later_still).responses[0].probes == 3


async def test_a_batch_whose_predecessor_was_executed_does_not_wait(
    service: CacheService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_service, "_TURN_TIMEOUT_S", 500)
    await service.execute_in_turn(batch(service, 1, 0, PROBE))

    async with asyncio.timeout(60):  # less than `_TURN_TIMEOUT_S`
        answer = await service.execute_in_turn(batch(service, 2, 1, LOOK))

    assert answer.responses[0].probes == 1


async def test_a_batch_whose_predecessor_is_lost_is_executed_and_the_lost_one_is_refused(
    service: CacheService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_service, "_TURN_TIMEOUT_S", 0.02)

    answer = await service.execute_in_turn(batch(service, 2, 1, PROBE, LOOK))
    after = await service.execute_in_turn(batch(service, 3, 2, LOOK))
    with pytest.raises(CacheUnavailable, match="came too late, after later ones of its client: ask again"):
        await service.execute_in_turn(batch(service, 1, 0, PROBE, LOOK))
    next_one = await service.execute_in_turn(batch(service, 4, 0, PROBE, LOOK))

    answers = [answer.responses[1], after.responses[0], next_one.responses[1]]
    assert [stats.probes for stats in answers] == [1, 1, 2]


async def test_a_batch_that_fails_as_a_whole_still_ends_its_turn(
    service: CacheService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_service, "_TURN_TIMEOUT_S", 500)
    next_one = asyncio.create_task(service.execute_in_turn(batch(service, 2, 1, LOOK)))
    await asyncio.sleep(0)
    broken = forged(Batch, session_id="s", epoch=service.epoch, requests=None, seq=1, after=0)

    with pytest.raises(TypeError):
        await service.execute_in_turn(broken)

    async with asyncio.timeout(60):  # less than `_TURN_TIMEOUT_S`
        await next_one


def test_a_batch_travels_in_parts_that_ray_carries_within_the_call(service: CacheService) -> None:
    sent = batch(service, 1, 0, *[MatchRequest(tokens=range(number, 60_000)) for number in range(3)], LOOK)

    parts = batch_codec.in_parts(batch_codec.pack(sent))

    assert len(parts) == 9  # 720 KB and a few bytes
    assert max(map(len, parts)) <= batch_codec.MAX_PART_BYTES
    assert batch_codec.unpack(*parts) == sent
