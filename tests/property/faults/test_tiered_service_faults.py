"""Proof that random requests to a service with a host tier find faults: each promise is broken once, and found."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.tier_faults import FAULTS_OF_MOVES
from support.tiers.tiered_service import TieredService, tiered_config
from support.traffic.radix import TrafficFailed
from support.traffic.tiered_service import Shape, run_traffic

from raydix.actors.sessions.admission import Admission
from raydix.actors.sessions.wait_queue import Waiter, WaitQueue
from raydix.actors.tiers.host.host_tier import HostTier
from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.cache_core import RadixKey
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.tiers.loads import Loads

SHAPES = [Shape(1, 16, 24), Shape(2, 16, 24, window=3), Shape(1, 16, 24, num_states=10)]
SEEDS = range(8)  # the first ones find most faults
NUM_OPERATIONS = 500

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


# ---------------------------------------------------------------- copies


@late_fault
def a_write_ends_while_one_of_its_pages_is_copied(patch: Patch) -> None:
    def cancel_writes(self: HostTier) -> bool:
        assert self.copier is not None
        for batch, copy in list(self._batches.items()):
            self.copier.cancel(copy)
            self._finish_write(batch, copy.result or Ended(copy.num_pages + 1, "cancelled"))
        return True

    patch.setattr(HostTier, "cancel_writes", cancel_writes)


# ---------------------------------------------------------------- retirements


@late_fault
def a_request_does_not_begin_again_after_other_weights(patch: Patch) -> None:
    def complete(original: Any, self: Loads, load: Any, num_pages: int, is_whole: bool | None = None) -> Any:
        return original(self, load, num_pages, is_whole)._replace(must_restart=False)

    around(patch, Loads, "complete", complete)


# ---------------------------------------------------------------- tickets


@fault
def a_waiter_behind_a_load_takes_slots(patch: Patch) -> None:
    def wait_behind(original: Any, self: Admission, asked: Any, *arguments: Any) -> Any:
        self._begin(asked)
        return original(self, asked, *arguments)

    around(patch, Admission, "_wait_behind", wait_behind)


@fault
def waiters_are_not_told_of_the_end_of_a_load(patch: Patch) -> None:
    patch.setattr(TierLoads, "wait_for", lambda self, move, resume: None)


@late_fault
def the_lease_of_a_ticket_that_was_given_up_stays(patch: Patch) -> None:
    def end_load(original: Any, self: Admission, asked: Any, waiter: Waiter, *ended: Any) -> None:
        if not waiter.outcome.done():
            original(self, asked, waiter, *ended)

    around(patch, Admission, "_end_load", end_load)


@fault
def those_that_wait_for_writes_are_not_told_of_their_end(patch: Patch) -> None:
    patch.setattr(HostTier, "after_writes", lambda self, resume: None)


@late_fault
def a_retry_in_the_middle_of_a_load_has_no_ticket(patch: Patch) -> None:
    def find(original: Any, self: WaitQueue, session_id: str, lease_id: str) -> Waiter | None:
        waiter: Waiter | None = original(self, session_id, lease_id)
        return waiter if waiter is None or waiter.is_queued else None

    around(patch, WaitQueue, "find", find)


@pytest.mark.parametrize("plant", [*FAULTS_OF_MOVES.cases(), *FAULTS.cases()])
def test_a_planted_fault_is_found(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed):
        for seed in SEEDS:
            for shape in SHAPES:
                run_traffic(shape, range(seed, seed + 1), NUM_OPERATIONS)


# ---------------------------------------------------------------- the order of eviction


async def check_order() -> None:
    """Evict prompt by prompt after some were written ahead: the least recently used goes first."""
    cache = TieredService(tiered_config(host={"reserve": 0.6}))
    try:
        evict_in_order(cache)
    finally:
        await cache.service.close()


def evict_in_order(cache: TieredService) -> None:
    used: list[int] = []
    rng = Random(1)
    for number in range(40):
        token = number + 1 if number < 12 else rng.randint(6, 9)  # the first ones become cold
        cache.publish([token])
        used = [other for other in used if other != token] + [token]
    for _ in range(3):  # only a part of the pool is written
        cache.tiers.write_ahead()
        for copy in cache.writes:
            cache.copier.finish(copy)
    assert cache.tiers.writes.counts.written
    before = cache.service.core.counters.acquires
    for oldest in used:
        cache.service.core.evict(1)
        left = [token for token in used if cache.tiers.writes.upper.longest_prefix(RadixKey([token]))]
        assert left == used[used.index(oldest) + 1 :]
    assert before == 40, "writes count as requests"


async def test_writes_ahead_leave_the_order_of_eviction_as_it_was() -> None:
    await check_order()


def _matches(self: KVCache, lease: Any, path: Any) -> None:
    self.tree.match_pages(path.key)


def _counts(self: KVCache, lease: Any, path: Any) -> None:
    self.count_request(lease, 1)


@pytest.mark.parametrize("also", [_matches, _counts], ids=["refreshes recency", "counts as a request"])
async def test_a_demotion_that_is_a_use_is_found(
    also: Callable[[KVCache, Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock_node(original: Any, self: KVCache, node: Any, path: Any) -> Any:
        lease = original(self, node, path)
        also(self, lease, path)
        return lease

    around(monkeypatch, KVCache, "lock_node", lock_node)

    with pytest.raises(AssertionError):
        await check_order()
