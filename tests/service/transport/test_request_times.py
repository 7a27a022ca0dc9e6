"""Histograms of the verbs' latencies, wait times and batch sizes, by a clock that the test sets."""

from __future__ import annotations

import asyncio

import pytest
from support.caches.clocked_sessions import Scene

from raydix.schemas import (
    AcquireRequest,
    Batch,
    CacheStats,
    ExtendRequest,
    InsertRequest,
    InvalidRequest,
    LeaseResponse,
    LockRequest,
    Message,
    PoolExhausted,
    ReleaseRequest,
    WaitingResponse,
    WithdrawRequest,
)


@pytest.fixture
async def scene() -> Scene:
    """A cache of eight slots, with two sessions."""
    scene = Scene()
    scene.open("a")
    scene.open("b")
    return scene


def acquire(lease_id: str, num_tokens: int, timeout_s: float | None = None) -> AcquireRequest:
    return AcquireRequest(lease_id=lease_id, tokens=[num_tokens] * num_tokens, timeout_s=timeout_s)


def counts(stats: CacheStats) -> tuple[tuple[int, float], tuple[int, float], int]:
    """Return count and sum (s) of acquire latencies, count and sum (s) of waits, and the requests that have waited."""
    latency, wait = stats.acquire_latency, stats.wait_time
    return (latency.count, latency.sum), (wait.count, wait.sum), stats.waited


async def test_an_acquire_is_counted_with_its_answer_and_with_its_wait(scene: Scene) -> None:
    assert isinstance(scene.execute("a", acquire("first", 8)), LeaseResponse)
    assert counts(scene.service.stats()) == ((1, 0.0), (0, 0.0), 0)

    assert isinstance(scene.execute("b", acquire("second", 4)), WaitingResponse)
    assert isinstance(scene.execute("b", acquire("second", 4)), WaitingResponse)  # a retry
    scene.clock.now += 3.0
    assert counts(scene.service.stats()) == ((1, 0.0), (0, 0.0), 1)
    scene.execute("a", ReleaseRequest(lease_id="first"))

    assert counts(scene.service.stats()) == ((2, 3.0), (1, 3.0), 1)
    assert scene.service.stats().wait_time.quantile(1.0) == 5.0  # upper bound of the bucket from 2.5 to 5 s


async def test_a_refusal_is_an_answer_and_a_withdrawal_is_none(scene: Scene) -> None:
    scene.execute("a", acquire("first", 8))

    assert isinstance(scene.execute("b", acquire("at once", 4, timeout_s=0)), PoolExhausted)
    assert isinstance(scene.execute("b", acquire("never", 9)), PoolExhausted)
    assert isinstance(scene.execute("b", ExtendRequest(lease_id="none", num_slots=1, known_pages=0)), Exception)
    assert counts(scene.service.stats()) == ((3, 0.0), (0, 0.0), 0)

    scene.execute("b", acquire("given up", 4))
    scene.clock.now += 2.0
    scene.execute("b", WithdrawRequest(lease_id="given up"))
    assert counts(scene.service.stats()) == ((3, 0.0), (1, 2.0), 1)

    scene.execute("b", acquire("late", 4, timeout_s=0.001))
    scene.clock.now += 4.0
    while scene.service.stats().waiters:  # noqa: ASYNC110 -- until the loop's timer fires
        await asyncio.sleep(0.001)
    assert counts(scene.service.stats()) == ((4, 4.0), (2, 6.0), 2)


async def test_a_lease_that_waits_to_grow_counts_as_a_wait_and_not_as_an_acquire(scene: Scene) -> None:
    scene.execute("a", acquire("first", 4))
    scene.execute("a", acquire("second", 3))
    scene.execute("a", ExtendRequest(lease_id="first", num_slots=6, known_pages=4))

    scene.clock.now += 1.0
    scene.execute("a", ReleaseRequest(lease_id="second"))

    assert counts(scene.service.stats()) == ((2, 0.0), (1, 1.0), 1)


async def test_the_time_that_a_batch_waits_for_the_one_before_it_counts(scene: Scene) -> None:
    def batch(seq: int, after: int) -> Batch:
        return Batch(session_id="a", epoch="e", requests=(acquire(str(seq), 2),), seq=seq, after=after)

    late = asyncio.create_task(scene.service.execute_in_turn(batch(2, after=1)))
    await asyncio.sleep(0)
    scene.clock.now += 2.0
    await scene.service.execute_in_turn(batch(1, after=0))
    await late

    assert counts(scene.service.stats())[0] == (2, 2.0)


async def test_locks_and_inserts_are_counted_from_their_arrival(scene: Scene) -> None:
    tokens = [1, 2]

    def execute(*requests: Message) -> None:
        scene.service.execute("a", "e", requests, arrived_at=scene.clock.now - 0.5)

    execute(acquire("first", 2), InsertRequest(lease_id="first", num_tokens=2, suffix=[]))
    execute(LockRequest(lease_id="second", tokens=tokens), LockRequest(lease_id="third", tokens=tokens))
    execute(InsertRequest(lease_id="none", num_tokens=2, suffix=[]))  # is refused
    execute(ReleaseRequest(lease_id="first"))

    stats = scene.service.stats()
    assert (stats.acquire_latency.count, stats.acquire_latency.sum) == (1, 0.5)
    assert (stats.lock_latency.count, stats.lock_latency.sum) == (2, 1.0)
    assert (stats.insert_latency.count, stats.insert_latency.sum) == (2, 1.0)


async def test_batches_are_counted_by_their_size(scene: Scene) -> None:
    scene.service.execute("a", "e", tuple(acquire(str(number), 2) for number in range(3)))
    scene.execute("a", ReleaseRequest(lease_id="0"))

    stats = scene.service.stats()

    assert stats.batch_size.counts[:3] == (1, 0, 1)  # buckets up to 1, 2 and 4
    assert (stats.batches, stats.requests) == (stats.batch_size.count, stats.batch_size.sum) == (2, 4)
    assert stats.acquire_latency.count == 3
    with pytest.raises(InvalidRequest):
        scene.service.execute("unknown", "e", (acquire("x", 2),))
    assert scene.service.stats().batches == 2
