"""`free + private + tree + quarantined == num_slots` after every operation, cancellation, crash.

Workers share a small cache, with their coroutines in any order. Operations are cancelled at any of their awaits,
messages are lost, and clients fall silent for good. `validate` checks each slot after every batch, and at the end all
slots are free or in the tree. Processes are killed in `test_5_the_dead_hold_nothing.py` and `tests/chaos`.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, TypeVar

import pytest
from support.caches.cache_in_process import HandleInProcess
from support.caches.cache_kinds import TIGHT_STATES, KindUnderTest, hybrid, radix, slots
from support.more import more
from support.processes.cancelled_workers import OF_A_LEASE, OTHERS, Floor
from support.processes.shuffled_loop import ShuffledLoop

from raydix.actors import LocalPrefixCache
from raydix.actors.client.client_session import ClientSession
from raydix.actors.service.cache_service import CacheService
from raydix.cache_core import KVCache, LeasedCache
from raydix.schemas import EvictionConfig, LeaseConfig

LEASES = LeaseConfig(session_ttl_s=6, quarantine_grace_s=8, acquire_timeout_s=5, grant_timeout_s=4, max_waiters=3)
TIGHT_ROWS = replace(slots(4), pool={"num_slots": 3 * 32})  # fewer rows than leases
KINDS = (radix(1), radix(4), TIGHT_STATES, hybrid(4, 6), TIGHT_ROWS)
SEEDS = {  # of the schedules of each kind and transport
    "10": range(10),
    "30": pytest.param(range(10, 40), marks=pytest.mark.more),
    "160": pytest.param(range(40, 200), marks=pytest.mark.long),
}
LOSSES = {"local": None, "remote": 0.0, "lossy": 0.03}

T = TypeVar("T")
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Exclude the objects of imports from garbage collections."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def floor_of(kind: KindUnderTest, way: str, rng: Random, loop: ShuffledLoop) -> Floor:
    """Return a cache on the loop's clock, for clients in its process or with a handle."""
    config = kind.cache_config().model_copy(update={"leases": LEASES})
    if rng.random() < 0.5:
        config = config.model_copy(update={"eviction": EvictionConfig(high_watermark=0.6, low_watermark=0.4)})
    cache = LocalPrefixCache(config)
    host = cache._host
    host.service = CacheService(config, host.service.epoch, host.exported.pool, clock=loop.time)
    loss = LOSSES[way]
    return Floor(cache, cache if loss is None else HandleInProcess(cache, rng, loss), kind, rng)


def run_shuffled(
    kind: KindUnderTest, way: str, seed: int, schedule: Callable[[Floor], Awaitable[T]]
) -> tuple[T, Floor]:
    """Return the result of one schedule, and its floor."""
    loop = ShuffledLoop(seed)
    try:
        floor = floor_of(kind, way, Random(seed), loop)
        result = loop.run_until_complete(schedule(floor))
        floor.workers.clear()
        gc.collect()
        assert not loop.complaints, loop.complaints
    except BaseException as error:
        error.add_note(f"kind {kind}, {way}, seed {seed}")
        end_tasks(loop)
        raise
    finally:
        loop.close()
    return result, floor


def end_tasks(loop: ShuffledLoop) -> None:
    """Cancel tasks that still run: their garbage collection would log errors during another test."""
    while tasks := asyncio.all_tasks(loop):
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


@pytest.mark.figures
@pytest.mark.parametrize("seeds", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("way", ["local", "lossy"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nothing_is_lost_in_any_order_with_operations_cancelled(kind: KindUnderTest, way: str, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        _, floor = run_shuffled(kind, way, seed, lambda floor: floor.run(num_operations=8))
        counts += Counter(floor.counts)

    print(f"{kind} {way}: {len(seeds)} schedules, {dict(counts)}")
    fewest = len(seeds) // (4 if len(seeds) == 10 else 2)  # ten schedules differ more among themselves
    assert min(counts[outcome] for outcome in ("done", "refused", "cancelled")) > fewest


@pytest.mark.parametrize("kind", [radix(1), *more(TIGHT_STATES, TIGHT_ROWS)], ids=str)
@pytest.mark.parametrize("verb", OF_A_LEASE + OTHERS)
def test_nothing_is_lost_wherever_an_operation_is_cancelled(kind: KindUnderTest, verb: str) -> None:
    num_schedules = num_cancelled = 0
    for seed, crowded in product(range(2), (False, True)):
        num_awaits, _ = run_shuffled(kind, "remote", seed, lambda floor, c=crowded: floor.run_one(verb, 0, c))
        assert num_awaits > 0
        for at in range(1, num_awaits + 1):
            _, floor = run_shuffled(kind, "remote", seed, lambda floor, k=at, c=crowded: floor.run_one(verb, k, c))
            num_schedules, num_cancelled = num_schedules + 1, num_cancelled + floor.counts["cancelled"]

    print(f"{kind}: {verb} cancelled at each of its awaits, {num_cancelled} times in {num_schedules} schedules")
    assert num_cancelled >= num_schedules / 4  # sometimes the answer arrives before the cancellation


# ---------------------------------------------------------------- planted faults


def what_is_given_up_is_not_given_back(patch: Patch) -> None:
    patch.setattr(ClientSession, "_undo", lambda session, request: None)


def what_was_withheld_is_forgotten(patch: Patch) -> None:
    patch.setattr(LeasedCache, "free_withheld", lambda core, session_id: len(core.quarantine.take(session_id)))


def a_release_forgets_the_last_page(patch: Patch) -> None:
    private = KVCache._free_private

    def forget(core: KVCache, lease: Any) -> None:
        lease.starts = lease.starts[: max(len(lease.starts) - 1, lease.num_published_pages)]
        private(core, lease)

    patch.setattr(KVCache, "_free_private", forget)


@pytest.mark.parametrize(
    "plant",
    [what_is_given_up_is_not_given_back, what_was_withheld_is_forgotten, a_release_forgets_the_last_page],
    ids=lambda plant: plant.__name__,
)
def test_a_slot_that_is_lost_is_seen(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        for seed in range(100):
            run_shuffled(radix(4), "remote", seed, lambda floor: floor.run(num_operations=8))
