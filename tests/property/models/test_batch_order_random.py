"""Batches of a session that arrive in any order, late, or not at all: the answers are those of an ordered channel."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from support.caches.cache_in_process import HandleInProcess
from support.more import more

from raydix.actors import LocalPrefixCache
from raydix.actors.service import cache_service
from raydix.actors.service.cache_service import CacheService
from raydix.actors.transport.ray_transport import RayTransport
from raydix.schemas import (
    AbortRequest,
    AcquireRequest,
    AdoptRequest,
    Batch,
    BatchResponse,
    CacheConfig,
    CacheUnavailable,
    EvictionConfig,
    EvictRequest,
    ExtendRequest,
    GrantRequest,
    InsertRequest,
    LockRequest,
    MatchRequest,
    Message,
    OpenSession,
    PoolConfig,
    ReleaseRequest,
    RevokeRequest,
    TakeBackRequest,
    TokenIds,
    WithdrawRequest,
)

NUM_REQUESTS = 400
NUM_GRANTS = 12
CONFIG = CacheConfig(pool=PoolConfig(num_slots=48, device="cpu"), eviction=EvictionConfig(high_watermark=1.0))
LOSSLESS, LOSSY = 0.0, 0.3


class ToyChannel(HandleInProcess):
    """Delivers each batch after a random time.

    Args:
        loss: half of this share of the batches is lost, and the other half is late. This share of the answers is lost,
            some of them before their batch arrives.
    """

    def __init__(self, cache: LocalPrefixCache, rng: Random, loss: float) -> None:
        super().__init__(cache, rng)
        self.share = loss
        self.deliveries: list[asyncio.Task[Any]] = []

    @property
    def execute(self) -> ToyChannel:
        return self

    def remote(self, *parts: bytes) -> asyncio.Future[Any]:
        self.deliveries.append(asyncio.ensure_future(self._deliver(parts)))
        self.deliveries[-1].add_done_callback(lambda done: done.cancelled() or done.exception())
        return asyncio.ensure_future(self._answer(self.deliveries[-1], self.rng.random() < self.share))

    async def _deliver(self, parts: Sequence[bytes]) -> Any:
        await turns(self.rng.randrange(6))
        if self.rng.random() < self.share:
            if self.rng.random() < 0.5:
                raise CacheUnavailable("the batch was lost")
            await turns(self.rng.randrange(60))
        return await self.actor.execute(*parts)

    async def _answer(self, delivery: asyncio.Task[Any], is_lost: bool) -> Any:
        if is_lost:
            await turns(self.rng.randrange(12))
            raise CacheUnavailable("the answer was lost")
        return await asyncio.shield(delivery)


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Requests:
    """Random requests about leases of this session, and about leases that another session offers."""

    def __init__(self, rng: Random, epoch: str) -> None:
        self.rng = rng
        self.epoch = epoch
        self.tokens: dict[str, list[int]] = {}
        self.num_made = 0

    def next(self) -> Message:
        self.num_made += 1
        rng, name = self.rng, f"l{self.num_made}"
        if len(self.tokens) < 3 or rng.random() < 0.25:
            tokens = self.tokens[name] = [rng.randrange(2) for _ in range(rng.randrange(1, 10))]
            timeout_s = rng.choice([0.0, 0.0, 600.0])
            if rng.random() < 0.2:
                return LockRequest(lease_id=name, tokens=tokens)
            return AcquireRequest(name, TokenIds.pack(tokens), new_tokens=rng.randrange(4), timeout_s=timeout_s)
        lease_id = rng.choice([*self.tokens][-8:])
        tokens = self.tokens[lease_id]
        offered = rng.randrange(NUM_GRANTS)
        match rng.randrange(13):
            case 0 | 1 | 2:
                length = rng.randrange(1, len(tokens) + 1)
                return InsertRequest(lease_id, length, TokenIds.pack(tokens[:length]), release=rng.random() < 0.4)
            case 3 | 4:
                num_slots = len(tokens) + rng.randrange(1, 6)
                timeout_s = rng.choice([0.0, 600.0])
                return ExtendRequest(lease_id=lease_id, num_slots=num_slots, known_pages=0, timeout_s=timeout_s)
            case 5:
                return ReleaseRequest(lease_id=lease_id)
            case 6:
                return AbortRequest(lease_id=lease_id)
            case 7:
                return WithdrawRequest(lease_id=lease_id)
            case 8:
                return GrantRequest(lease_id=lease_id, offer_id=f"of {lease_id}")
            case 9:
                model = rng.choice([TakeBackRequest, RevokeRequest])
                return model(lease_id=lease_id, offer_id=f"of {lease_id}")
            case 10:
                self.tokens[f"g{offered}"] = [offered]
                return AdoptRequest(
                    lease_id=f"g{offered}", granter="g", granted_epoch=self.epoch, offer_id=f"of g{offered}"
                )
            case 11:
                return EvictRequest(num_tokens=rng.randrange(8))
        return MatchRequest(tokens=tokens)


class Record:
    """The batches that a cache has executed, with their answers in order, and the numbers of those it has refused."""

    def __init__(self, service: CacheService) -> None:
        self.executed: list[tuple[Batch, BatchResponse]] = []
        self.refused: list[int] = []
        self._execute_in_turn = service.execute_in_turn
        service.execute_in_turn = self.execute_in_turn  # type: ignore[method-assign]

    async def execute_in_turn(self, batch: Batch, arrived_at: float | None = None) -> BatchResponse:
        try:
            answer = await self._execute_in_turn(batch, arrived_at)
        except CacheUnavailable:
            self.refused.append(batch.seq)
            raise
        self.executed.append((batch, answer))
        return answer


def open_sessions(service: CacheService, *session_ids: str) -> None:
    """Open sessions, and have session "g" offer leases."""
    for session_id in ("g", *session_ids):
        service.open_session(OpenSession(session_id=session_id, owner="test"))
    for number in range(NUM_GRANTS):
        acquire = AcquireRequest(f"g{number}", TokenIds.pack([number]))
        grant = GrantRequest(lease_id=acquire.lease_id, offer_id=f"of {acquire.lease_id}", timeout_s=600.0)
        service.execute("g", service.epoch, (acquire, grant))


async def run(seed: int, loss: float) -> Record:
    """Send random requests through a toy channel; check the answers, and return the record of the cache."""
    rng = Random(seed)
    async with LocalPrefixCache(CONFIG) as cache:
        service = cache._host.service
        open_sessions(service)
        record, channel = Record(service), ToyChannel(cache, rng, loss)
        transport, requests = RayTransport(channel), Requests(rng, service.epoch)  # type: ignore[arg-type]
        await transport.open(OpenSession(session_id="s", owner="test"))
        answers: list[asyncio.Future[Message]] = []
        while len(answers) < NUM_REQUESTS:
            answers += [transport.submit(requests.next()) for _ in range(rng.randrange(1, 6))]
            await turns(rng.randrange(12))
        async with asyncio.timeout(120):
            got = await asyncio.gather(*answers, return_exceptions=True)
            await asyncio.gather(*channel.deliveries, return_exceptions=True)
        check(record, service)
        service.core.check_invariants()
        assert loss or not any(isinstance(answer, CacheUnavailable) for answer in got)
    return record


def check(record: Record, service: CacheService) -> None:
    """Compare the answers with those of a cache to which the executed batches come one after the other."""
    numbers = [batch.seq for batch, _ in record.executed]
    assert numbers == sorted(set(numbers))
    ordered = CacheService(CONFIG, service.epoch)
    open_sessions(ordered, "s")
    for batch, answer in record.executed:
        expected = ordered.execute("s", ordered.epoch, batch.requests)
        assert list(map(plain, answer.responses)) == list(map(plain, expected.responses)), batch


def plain(answer: Any) -> Any:
    """Return an answer, or the error in its place, in a form that can be compared."""
    if isinstance(answer, Exception):
        return type(answer), re.sub(r"[\d.]+ m?s\b", "", str(answer))  # how long leases have been open
    return type(answer), [getattr(answer, name) for name in answer.field_names()]


@pytest.fixture
def turn_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda seconds: monkeypatch.setattr(cache_service, "_TURN_TIMEOUT_S", seconds)


@pytest.mark.parametrize("seed", [0, 1, *more(*range(2, 12))])
async def test_without_losses_no_batch_is_refused(seed: int, turn_s: Callable[[float], None]) -> None:
    turn_s(100)

    record = await run(seed, LOSSLESS)

    assert record.refused == []


@pytest.mark.parametrize("seed", [0, 1, *more(*range(2, 12))])
async def test_a_lost_or_late_batch_leaves_the_others_in_order(seed: int, turn_s: Callable[[float], None]) -> None:
    turn_s(0)

    record = await run(seed, LOSSY)

    assert len(record.executed) > 10 and record.refused


# -------------------------------------------------------------------- planted faults


async def test_a_cache_that_executes_batches_as_they_come_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def execute_at_once(self: CacheService, batch: Batch, arrived_at: float | None = None) -> BatchResponse:
        return self.execute(batch.session_id, batch.epoch, batch.requests, arrived_at)

    monkeypatch.setattr(CacheService, "execute_in_turn", execute_at_once)

    with pytest.raises(AssertionError):
        await run(0, LOSSLESS)


async def test_a_late_batch_that_is_executed_is_seen(
    monkeypatch: pytest.MonkeyPatch, turn_s: Callable[[float], None]
) -> None:
    turn_s(0)
    in_turn = CacheService.execute_in_turn

    async def execute_late_ones(self: CacheService, batch: Batch, arrived_at: float | None = None) -> BatchResponse:
        try:
            return await in_turn(self, batch, arrived_at)
        except CacheUnavailable:
            return self.execute(batch.session_id, batch.epoch, batch.requests, arrived_at)

    monkeypatch.setattr(CacheService, "execute_in_turn", execute_late_ones)

    with pytest.raises(AssertionError):
        await run(0, LOSSY)
