"""Proof that random traffic finds faults: each rule of moves between tiers is broken once, and found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.tier_faults import FAULTS_OF_MOVES
from support.traffic.eviction_order import check_order
from support.traffic.radix import TrafficFailed
from support.traffic.tiers import Shape, TiersTraffic

from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.lease_table import LeaseTable
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.radix.tree_parts import TreeParts
from raydix.cache_core.tiers import loads, writes
from raydix.cache_core.tiers.loads import Loads
from raydix.cache_core.tiers.writes import Writes

SHAPES = [Shape(2), Shape(2, window=3), Shape(1, states=12), Shape(1, host_pages=6)]
SEEDS = range(12)  # the first ones find most faults
NUM_OPERATIONS = 400

FAULTS, FAULTS_OF_ORDER = Catalogue(), Catalogue()
fault, late_fault, fault_of_order = FAULTS.register, FAULTS.register_late, FAULTS_OF_ORDER.register


# ---------------------------------------------------------------- copies


@fault
def a_middle_range_is_copied(patch: Patch) -> None:
    def new_move(original: Any, *arguments: Any) -> Any:
        move = original(*arguments)
        move.source_starts = np.roll(move.source_starts, 1)
        return move

    for module in (loads, writes):
        around(patch, module, "new_move", new_move)


@fault
def the_target_keeps_its_pages_private_after_a_failure(patch: Patch) -> None:
    def end(original: Any, self: KVCache, lease: Any, is_use: bool = False) -> None:
        lease.starts = lease.starts[: lease.num_published_pages]
        original(self, lease, is_use)

    around(patch, KVCache, "end_quietly", end)


# ---------------------------------------------------------------- counts


@late_fault
def a_request_that_begins_again_counts_twice(patch: Patch) -> None:
    def count(original: Any, self: LeasedCache, lease: Any, times: int) -> None:
        if times > 0:
            original(self, lease, times)

    around(patch, LeasedCache, "count_request", count)


# ---------------------------------------------------------------- two moves


@fault
def two_requests_load_the_same_pages(patch: Patch) -> None:
    patch.setattr(Loads, "running", lambda self, look_up: None)


@fault
def two_writes_copy_the_same_pages(patch: Patch) -> None:
    patch.setattr(Writes, "_is_being_read", lambda self, missing: False)


@fault
def a_session_gets_a_lease_while_it_is_filled(patch: Patch) -> None:
    def begin(self: LeaseTable, lease: Any) -> None:
        lease.filling_for = lease.session_id

    patch.setattr(LeaseTable, "begin_fill", begin)


# ---------------------------------------------------------------- windows and states


@fault
def window_kv_that_was_not_copied_is_published(patch: Patch) -> None:
    around(
        patch,
        KVCache,
        "publish_copy",
        lambda publish, self, lease, key, _, slot=None: publish(self, lease, key, 0, slot),
    )


@fault
def the_tree_gets_a_state_slot_that_was_not_filled(patch: Patch) -> None:
    def add_spare(original: Any, self: Loads, move: Any) -> None:
        targets = move.target_states
        original(self, move)
        move.target_states = targets

    around(patch, Loads, "_add_spare", add_spare)


@late_fault
def a_state_that_was_copied_in_vain_stays_in_the_lease(patch: Patch) -> None:
    patch.setattr(KVCache, "reload_state", lambda self, lease: None)


@fault
def window_kv_that_no_request_needs_is_written(patch: Patch) -> None:
    patch.setattr(TreeParts, "is_stop", lambda self, node: True)


# ---------------------------------------------------------------- uses


@fault_of_order
def a_demotion_refreshes_recency(patch: Patch) -> None:
    def lock_node(original: Any, self: KVCache, node: Any, path: Any) -> Any:
        self.tree.match_pages(path.key)
        return original(self, node, path)

    around(patch, KVCache, "lock_node", lock_node)


@fault_of_order
def a_demotion_stamps_the_window_at_its_end(patch: Patch) -> None:
    around(patch, KVCache, "end_quietly", lambda end, self, lease, is_use=False: end(self, lease, True))


@fault_of_order
def a_demotion_counts_as_a_request(patch: Patch) -> None:
    def lock_node(original: Any, self: KVCache, node: Any, path: Any) -> Any:
        lease = original(self, node, path)
        self.count_request(lease, 1)
        return lease

    around(patch, KVCache, "lock_node", lock_node)


@fault_of_order
def a_demotion_notifies_observers(patch: Patch) -> None:
    def lock_node(original: Any, self: KVCache, node: Any, path: Any) -> Any:
        lease = original(self, node, path)
        for observer in self.observers:
            observer.granted(lease, None)
        return lease

    around(patch, KVCache, "lock_node", lock_node)


@fault_of_order
def a_walk_takes_leaves_out_of_the_queue(patch: Patch) -> None:
    def walk(original: Any, self: PrefixCache) -> Any:
        self.parts.full._queue.pop()
        return original(self)

    around(patch, PrefixCache, "walk", walk)


@pytest.mark.parametrize("plant", [*FAULTS_OF_MOVES.cases(), *FAULTS.cases()])
def test_a_planted_fault_is_found(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed):
        for seed in SEEDS:
            for shape in SHAPES:
                TiersTraffic(seed, shape).run(NUM_OPERATIONS)


@pytest.mark.parametrize("plant", FAULTS_OF_ORDER.cases())
def test_a_fault_of_the_order_is_found(plant: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        for kind in ("radix", "window"):
            check_order(1, "lru", kind, num_requests=60)
