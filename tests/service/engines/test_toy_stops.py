"""Engines that stand still in a copy until their leases have ended, and go on: no bytes of others are read or written.

The toy engine checks, for each token that it computes, that the KV of all tokens before it is theirs.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.caches.unheard_loss import expire_unheard
from support.engines.toy_caches import ToyCaches
from support.engines.toy_engine import BLOCK, ToyEngine, ToyRequest, prompts
from support.more import more
from support.tiers.demotion import ALL
from support.waiting import wait_until

from raydix.actors import Lease
from raydix.actors.client.client_session import ClientSession
from raydix.actors.engines.block_copies import PoolTarget
from raydix.actors.engines.worker_side import WorkerSide
from raydix.schemas import (
    AdoptRequest,
    EvictionConfig,
    ExtendRequest,
    InsertRequest,
    LeaseConfig,
    LockRequest,
    ReleaseRequest,
)

Patch = pytest.MonkeyPatch
MakeCaches = Callable[..., ToyCaches]

NUM_TOKENS = 12 * BLOCK  # of the pool
ON_DEMAND = EvictionConfig(high_watermark=1.0)
IMPATIENT = LeaseConfig(quarantine_grace_s=0)


@pytest.fixture
def make_caches() -> Iterator[MakeCaches]:
    """Makes caches. After the test no KV was wrong, nothing is held, and all blocks of the engines are free."""
    made: list[ToyCaches] = []

    def make(*args: Any, **options: Any) -> ToyCaches:
        made.append(ToyCaches(*args, **options))
        return made[-1]

    yield make
    for caches in made:
        for engine in caches.engines:
            assert engine.num_wrong == 0
            assert len(engine.free) == len(set(engine.free)) == engine.kv[0][0].shape[0] - 1
        for rank, cache in enumerate(caches.caches):
            wait_until(lambda caches=caches, rank=rank: holds_nothing(caches, rank))  # type: ignore[misc]
            caches.loop.run(cache.check_invariants())
        caches.close()


def holds_nothing(caches: ToyCaches, rank: int) -> bool:
    stats = caches.stats(rank)
    return (stats.open_leases, stats.private_slots, stats.quarantined_slots) == (0, 0, 0)


class Latch:
    """Holds the copies of one engine back."""

    def __init__(self, engine: ToyEngine, method: str, patch: Patch) -> None:
        self.entered, self._open = threading.Event(), threading.Event()
        copy = getattr(PoolTarget, method)
        held = {layers[0].data_ptr() for layers in engine.kv}

        def hold_back(target: PoolTarget, *args: Any) -> None:
            if target.copies.rows[0].data_ptr() in held:
                self.entered.set()
                assert self._open.wait(300)
            copy(target, *args)

        patch.setattr(PoolTarget, method, hold_back)

    def open(self) -> None:
        self._open.set()


def sessions_of(engine: ToyEngine, rank: int) -> list[ClientSession]:
    """Return the sessions of the engine's clients at the cache of a rank."""
    return [link.client.session for link in (engine.links[rank], engine.worker_links[rank])]


def stand_still(caches: ToyCaches, engine: ToyEngine) -> None:
    """Have the sessions of the engine's clients expire, and have the clients not hear of it.

    The test's thread is the engine's, and does not step it meanwhile.
    """
    for rank, cache in enumerate(caches.caches):
        caches.loop.run(expire_unheard(cache, *sessions_of(engine, rank)))


def step_until(engine: ToyEngine, is_so: Callable[[], bool]) -> None:
    def step() -> bool:
        engine.step()
        return is_so()

    wait_until(step)


def overwrite(caches: ToyCaches, by: ToyEngine, seed: int) -> list[int]:
    """Evict all, and have an engine fill the pool with the KV of another prompt, which is returned."""
    for rank, cache in enumerate(caches.caches):
        wait_until(lambda rank=rank: caches.stats(rank).open_leases == 0)  # type: ignore[misc]
        caches.loop.run(cache.evict(ALL))
    (prompt,) = prompts(1, NUM_TOKENS, seed=seed)
    by.run(prompt)
    return prompt


# -------------------------------------------------------------------- a stop in a load


@pytest.mark.parametrize("num_ranks", [1, *more(2)])
def test_an_engine_that_stood_still_in_a_load_uses_no_bytes_of_others(
    make_caches: MakeCaches, monkeypatch: Patch, num_ranks: int
) -> None:
    caches = make_caches(num_ranks, num_tokens=NUM_TOKENS, check=False, eviction=ON_DEMAND)
    one, other = caches.make_engine(load_timeout_ms=60_000), caches.make_engine()
    (prompt,) = prompts(1, 10 * BLOCK)
    other.run(prompt)
    latch = Latch(one, "load", monkeypatch)
    request = one.add(prompt, 4)
    step_until(one, latch.entered.is_set)
    pages = pages_of(caches, other)

    stand_still(caches, one)
    overwrite(caches, other, seed=1)
    assert all(bool((now != before).any(1).all()) for now, before in zip(pages_of(caches, other), pages, strict=True))
    latch.open()
    one.run_all()

    assert (request.num_hit, request.num_recomputed) == (0, 10 * BLOCK + 4)
    assert one.counts.take()["load_failures"] == num_ranks
    hits_again(one, request.tokens)


def pages_of(caches: ToyCaches, engine: ToyEngine) -> list[Any]:
    """Return copies of the pools' pages, but for the first page of each, which no lease gets."""
    pools = [link.pool for link in engine.worker_links]
    return [pool.pages[1:].clone() for pool in pools if pool is not None]


def hits_again(engine: ToyEngine, tokens: list[int]) -> None:
    """Step until the engine's requests are served from the cache again: it has another session."""
    wait_until(lambda: engine.run(tokens).num_hit > 0)


# -------------------------------------------------------------------- a stop in a save


def test_an_engine_that_stood_still_in_a_save_writes_no_slots_of_others(
    make_caches: MakeCaches, monkeypatch: Patch
) -> None:
    """The process of the engine's session is this one, which lives, so its slots are withheld after the grace."""
    caches = make_caches(num_tokens=NUM_TOKENS, leases=IMPATIENT, eviction=ON_DEMAND)
    one, other = caches.make_engine(chunk=4 * BLOCK), caches.make_engine(chunk=2 * BLOCK)
    (prompt,) = prompts(1, 4 * BLOCK)
    latch = Latch(one, "save", monkeypatch)
    request = one.add(prompt, 4)
    step_until(one, latch.entered.is_set)
    assert caches.stats().private_slots == 4 * BLOCK

    stand_still(caches, one)
    stats = caches.stats()
    assert (stats.open_leases, stats.quarantined_slots) == (0, 4 * BLOCK)
    churned = overwrite(caches, other, seed=1)
    assert caches.stats().free_slots == 0
    latch.open()
    one.run_all()

    other.counts.take()
    assert other.run(churned).num_hit == 8 * BLOCK  # all slots that are not withheld
    assert "load_failures" not in other.counts.take()  # each stamp is that of its tokens
    assert request.num_recomputed == 4 * BLOCK + 4
    wait_until(lambda: caches.stats().quarantined_slots == 0)  # its client has come back
    hits_again(one, request.tokens)


# -------------------------------------------------------------------- the answer after the copy


class Answers:
    """Holds back the answers to one engine's question whether the lease of a load is open."""

    def __init__(self, engine: ToyEngine, patch: Patch) -> None:
        self.num_asked = self.num_answered = 0
        self._loop = engine._loops[1]
        self._may_answer = asyncio.Event()
        confirm_open = Lease.confirm_open

        async def hold_back(lease: Lease) -> None:
            self.num_asked += 1
            try:
                await self._may_answer.wait()
                await confirm_open(lease)
            finally:
                self.num_answered += 1

        patch.setattr(Lease, "confirm_open", hold_back)

    def let_through(self) -> None:
        self._loop.call(self._may_answer.set)
        wait_until(lambda: self.num_answered == self.num_asked)


def record_results(patch: Patch) -> Counter[int]:
    """Count how often each block is reported as one of a failed load."""
    reported: Counter[int] = Counter()
    take_results = WorkerSide.take_results

    def take_and_count(worker: WorkerSide) -> Any:
        results = take_results(worker)
        reported.update(results[2])
        return results

    patch.setattr(WorkerSide, "take_results", take_and_count)
    return reported


def load_held_back(
    make_caches: MakeCaches, patch: Patch, load_timeout_ms: float
) -> tuple[ToyEngine, ToyRequest, Answers, Counter[int]]:
    """Return an engine whose request has loaded six blocks, and waits for the answer that its lease is open."""
    caches = make_caches()
    one, other = caches.make_engine(load_timeout_ms=load_timeout_ms), caches.make_engine()
    (prompt,) = prompts(1, 6 * BLOCK)
    other.run(prompt)
    answers, reported = Answers(one, patch), record_results(patch)
    request = one.add(prompt, 4)
    step_until(one, lambda: answers.num_asked == 1)
    return one, request, answers, reported


def test_a_load_that_is_not_confirmed_in_time_fails_and_a_late_answer_changes_nothing(
    make_caches: MakeCaches, monkeypatch: Patch
) -> None:
    one, request, answers, reported = load_held_back(make_caches, monkeypatch, load_timeout_ms=1)

    one.run_all()
    answers.let_through()
    one.step()

    assert (request.num_hit, request.num_recomputed) == (0, 6 * BLOCK + 4)
    assert (len(reported), set(reported.values())) == (6, {1})
    counts = one.counts.take()
    assert counts["load_failures"] == 1 and "loads" not in counts


def test_a_load_waits_for_its_answer_as_long_as_for_its_start(make_caches: MakeCaches, monkeypatch: Patch) -> None:
    one, request, answers, reported = load_held_back(make_caches, monkeypatch, load_timeout_ms=600_000)

    for _ in range(200):
        one.step()
    assert (request.state, one.counts.take().get("loads")) == ("loading", None)
    answers.let_through()
    one.run_all()

    assert (request.num_hit, request.num_recomputed, reported) == (6 * BLOCK, 5, {})


@pytest.mark.parametrize("how", ["abort", "reset"])
def test_a_request_that_ends_before_the_answer_gives_its_blocks_back_at_once(
    make_caches: MakeCaches, monkeypatch: Patch, how: str
) -> None:
    one, request, answers, reported = load_held_back(make_caches, monkeypatch, load_timeout_ms=600_000)

    if how == "abort":
        one.abort(request)
    else:
        one.reset()
    step_until(one, lambda: request.request_id not in one.loading)
    assert answers.num_answered == 0
    answers.let_through()
    one.run_all()

    assert request.num_recomputed == (0 if how == "abort" else 6 * BLOCK + 4)
    assert (len(reported), set(reported.values())) == (6, {1})
    counts = one.counts.take()
    assert counts["load_failures"] == 1 and "loads" not in counts


@pytest.mark.parametrize("fails", [False, True], ids=["copy ends", "copy fails"])
def test_a_request_that_ends_during_the_copy_of_its_load_asks_for_nothing(
    make_caches: MakeCaches, monkeypatch: Patch, fails: bool
) -> None:
    caches = make_caches()
    one, other = caches.make_engine(load_timeout_ms=60_000), caches.make_engine()
    (prompt,) = prompts(1, 6 * BLOCK)
    other.run(prompt)
    reported = record_results(monkeypatch)
    answers, latch = Answers(one, monkeypatch), Latch(one, "load", monkeypatch)
    request = one.add(prompt, 4)
    step_until(one, latch.entered.is_set)

    one.abort(request)
    for _ in range(3):
        one.step()
    assert request.request_id in one.loading and not reported
    if fails:
        one.worker_links[0].pool.on_lost()  # type: ignore[union-attr, misc]
    latch.open()
    one.run_all()

    assert (answers.num_asked, len(reported), set(reported.values())) == (0, 6, {1})
    assert one.counts.take()["load_failures"] == 1


# -------------------------------------------------------------------- its cost


def test_a_load_costs_one_request_more_and_a_miss_none(make_caches: MakeCaches) -> None:
    caches = make_caches()
    one, other = caches.make_engine(), caches.make_engine(chunk=8 * BLOCK)
    hit, miss = prompts(2, 6 * BLOCK + 1)
    one.run(hit)
    sent = record_requests(other)

    other.run(miss)
    wait_until(lambda: ReleaseRequest in sent)
    of_miss = sent.copy()
    sent.clear()
    assert other.run(hit).num_hit == 6 * BLOCK
    wait_until(lambda: ReleaseRequest in sent)

    assert of_miss == [LockRequest, AdoptRequest, ExtendRequest, InsertRequest, ReleaseRequest]
    assert sent == [LockRequest, AdoptRequest, ExtendRequest, ReleaseRequest]


def record_requests(engine: ToyEngine) -> list[type]:
    """Record the requests of the engine's clients, without heartbeats."""
    sent: list[type] = []
    for session in sessions_of(engine, 0):
        submit = session.transport.submit

        def submit_and_record(request: Any, *args: Any, submit: Any = submit) -> Any:
            sent.append(type(request))
            return submit(request, *args)

        session.transport.submit = submit_and_record
    return sent
