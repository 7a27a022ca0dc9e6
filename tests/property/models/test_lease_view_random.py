"""Verbs on one lease with late or lost responses: its client has the state of the cache, or reports that it has
lost it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from support.caches.cache_in_process import HandleInProcess
from support.faults.faults import Catalogue, Fault, Patch, around

from raydix.actors import Lease, LocalPrefixCache, PrefixCacheClient
from raydix.actors.client.lease_slots import LeaseSlots
from raydix.schemas import CacheConfig, CacheError, CacheUnavailable, InvalidRequest, PoolConfig, WindowResponse

PAGE_SIZE = 2
NUM_PAGES = 64
NUM_SEEDS = 60
NUM_LEASES = 12
NUM_ROUNDS = 2

FAULTS = Catalogue()
fault = FAULTS.register


class Courier(HandleInProcess):
    """A handle with responses that overtake each other or are lost."""

    lost = 0.0  # the share of answers

    def __getattr__(self, method: str) -> Any:
        answering = super().__getattr__(method)
        return _Late(answering, self) if method in ("execute", "wait") else answering


class _Late:
    def __init__(self, method: Any, courier: Courier) -> None:
        self._method = method
        self._courier = courier

    async def remote(self, *arguments: Any) -> Any:
        """Call, and be answered late or not at all."""
        courier, answer = self._courier, await self._method.remote(*arguments)
        for _ in range(courier.rng.randrange(30)):
            await asyncio.sleep(0)
        if courier.rng.random() < courier.lost:
            raise CacheUnavailable("the answer was lost")
        return answer


class Holder:
    """A client that runs several verbs on one lease, while others publish the same tokens."""

    def __init__(
        self, rng: Random, cache: LocalPrefixCache, client: PrefixCacheClient, lease: Lease, text: list[int]
    ) -> None:
        self.rng = rng
        self.text = text
        self.cache = cache
        self.client = client
        self.lease = lease

    async def act(self, verb: str) -> None:
        """Do it, and perhaps give it up before its answer."""
        await self.let_pass()
        match verb:
            case "insert":
                doing: Any = self.lease.insert(self.text[: self.rng.randint(1, len(self.lease))])
            case "extend":
                doing = self.lease.extend(self.rng.randint(1, 2 * PAGE_SIZE))
            case _:
                doing = self.lease.release_window(self.rng.randint(1, len(self.lease)))
        task = asyncio.create_task(doing)
        if self.rng.random() < 0.2:
            await self.let_pass()
            task.cancel()
        with suppress(CacheError, asyncio.CancelledError):
            await task

    async def compete(self) -> None:
        """Publish a part of the text, and hold what room there is for a while."""
        with suppress(CacheError):
            text = self.text[: len(self.lease)]
            other = await self.cache.acquire(text, timeout_s=0)
            await other.insert(text, release=True)
        free = self.cache._host.service.core.free_slots
        with suppress(CacheError):
            other = await self.cache.acquire([99], new_tokens=max(0, free - PAGE_SIZE), timeout_s=0)
            await self.let_pass()
            await other.release()

    async def let_pass(self) -> None:
        for _ in range(self.rng.randrange(20)):
            await asyncio.sleep(0)

    async def play_round(self) -> None:
        """Run several verbs concurrently, and wait for all responses."""
        verbs = self.rng.sample(("insert", "insert", "extend", "window"), 3)
        await asyncio.gather(self.compete(), *map(self.act, verbs))
        transport: Any = self.client.session.transport
        while transport._queue or transport._in_flight:  # noqa: ASYNC110 -- there is no event for it
            await asyncio.sleep(0)

    def check(self) -> None:
        """Check the lease's slots against the cache."""
        core, session_id = self.cache._host.service.core, self.lease.transport.session_id
        record = core.leases.get(self.lease.lease_id, session_id)
        assert self.lease.published_len <= core.published_len(record)
        with suppress(CacheUnavailable):
            assert self.lease.slots.tolist() == spread(record.starts)[: len(self.lease)], "slots"
        with suppress(CacheUnavailable, InvalidRequest):  # not every cache has a window
            pairs = zip(self.lease.swa_slots.tolist(), spread(core.swa_starts(record)), strict=False)
            assert all(told in (0, slot) for told, slot in pairs), "window"  # others may publish it again


def spread(starts: Any) -> list[int]:
    rows = (starts[:, None] + np.arange(PAGE_SIZE)) * (starts > 0)[:, None]
    return [int(slot) for slot in rows.reshape(-1)]


async def play(seed: int) -> None:
    """Run rounds of verbs with lost responses, and one at the end that returns the whole state."""
    rng = Random(seed)
    pool = PoolConfig(num_slots=NUM_PAGES * PAGE_SIZE, device="cpu")
    config = CacheConfig(page_size=PAGE_SIZE, sliding_window_size=3 if seed % 2 else None, pool=pool)
    async with LocalPrefixCache(config) as cache:
        courier = Courier(cache, rng)
        async with PrefixCacheClient(courier) as client:
            for number in range(NUM_LEASES):
                text = [number] * (NUM_PAGES * PAGE_SIZE)
                lease = await client.acquire(text[: 6 * PAGE_SIZE])
                holder = Holder(rng, cache, client, lease, text)
                courier.lost = 0.3
                for _ in range(NUM_ROUNDS):
                    await holder.play_round()
                    holder.check()

                courier.lost = 0.0
                await lease.insert(text[: len(lease)])
                assert len(lease.slots) == len(lease if config.sliding_window_size is None else lease.swa_slots)
                holder.check()
                await lease.release()
            await cache.check_invariants()
            stats = await cache.stats()
            assert (stats.open_leases, stats.private_slots, stats.waiters) == (0, 0, 0)


async def play_all() -> None:
    for seed in range(NUM_SEEDS):
        try:
            await play(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# ---------------------------------------------------------------- faults


@fault
def a_growth_tells_of_new_pages_alone_unless_an_answer_is_known_to_be_lost(patch: Patch) -> None:
    @contextmanager
    def guard_extend(original: Any, lease: Lease) -> Iterator[tuple[int, int, int]]:
        with original(lease) as (covered, known_pages, number):
            in_doubt = lease._unanswered > lease._answered
            yield covered, known_pages if in_doubt else len(lease._held.starts), number

    around(patch, Lease, "_guard_extend", guard_extend)


@fault
def a_late_growth_overwrites_what_was_repointed_meanwhile(patch: Patch) -> None:
    def repoint(original: Any, slots: LeaseSlots, *told: Any) -> None:
        original(slots, *told)
        slots._settled = 0

    around(patch, LeaseSlots, "repoint", repoint)


@fault
def a_release_of_the_window_that_was_not_answered_leaves_no_doubt(patch: Patch) -> None:
    def note(original: Any, lease: Lease, asked: Any, outcome: Any) -> None:
        if isinstance(outcome, WindowResponse):
            original(lease, asked, outcome)

    around(patch, Lease, "_on_window_release", note)


async def test_a_client_knows_its_lease_as_the_cache_does_or_says_that_it_does_not() -> None:
    await play_all()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
async def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError, match=r"slots|window"):
        await play_all()
