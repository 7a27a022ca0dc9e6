"""Proof that random traffic finds faults: each rule of the states is broken once, and it must be seen."""

from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.match_end_rules import judged
from support.traffic.mamba import run_random_mamba_traffic
from support.traffic.radix import TrafficFailed

from raydix.cache_core import EvictResult, MambaRadixCache, RadixKey
from raydix.cache_core.components import recurrent_state
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.components.recurrent_state import RecurrentState
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.kernels import Victims

RUNS = [(0, 1), (1, 4), (2, 4), (3, 1)]  # seed (chunks of 1, 2, 24 and 1 tokens), page size

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


# ---------------------------------------------------------------- matches


@fault
def a_match_ends_where_no_state_is(patch: Patch) -> None:
    patch.setattr(RecurrentState, "usable", judged(lambda mamba: lambda node, length: True))


@fault
def a_match_ends_within_a_node_that_has_a_state(patch: Patch) -> None:
    patch.setattr(RecurrentState, "usable", judged(lambda mamba: lambda node, length: node.mamba_value is not None))


@fault
def a_match_ends_at_the_first_state(patch: Patch) -> None:
    def judge(mamba: RecurrentState) -> Any:
        seen: list[Any] = []

        def may_end(node: Any, length: int) -> bool:
            seen.extend([node] * (node.mamba_value is not None))
            return length == len(node) and seen == [node]

        return may_end

    patch.setattr(RecurrentState, "usable", judged(judge))


@late_fault
def the_branching_length_is_not_floored_to_chunks(patch: Patch) -> None:
    patch.setattr(
        MambaRadixCache, "_branching", lambda cache, usable, full_end: full_end if full_end > usable else None
    )


@fault
def the_branching_length_is_told_where_it_is_no_gain(patch: Patch) -> None:
    def branching(cache: MambaRadixCache, usable: int, full_end: int) -> int | None:
        return full_end - full_end % cache._branching_unit or None

    patch.setattr(MambaRadixCache, "_branching", branching)


@fault
def a_match_does_not_use_its_state(patch: Patch) -> None:
    patch.setattr(RecurrentState, "touch", lambda mamba, end, now: None)


@fault
def a_match_uses_the_states_above_as_well(patch: Patch) -> None:
    def touch(mamba: RecurrentState, end: Any, now: int) -> None:
        while end.parent is not None:
            end.mamba_access_time = now
            end = end.parent

    patch.setattr(RecurrentState, "touch", touch)


@fault
def a_peek_uses_the_state(patch: Patch) -> None:
    def peek(original: Any, cache: MambaRadixCache, key: RadixKey) -> Any:
        found = original(cache, key)
        cache.parts.states.touch(found.last_node, cache.parts.clock)
        return found

    around(patch, MambaRadixCache, "peek_prefix", peek)


# ---------------------------------------------------------------- splits and states


@fault
def a_split_moves_the_state_to_the_prefix(patch: Patch) -> None:
    def on_split(mamba: RecurrentState, above: Any, node: Any) -> None:
        if node.mamba_value is not None:
            above.mamba_value, node.mamba_value = node.mamba_value, None
            mamba._queue.discard(node)
            mamba._queue.push(above)

    patch.setattr(RecurrentState, "on_split", on_split)


@fault
def a_split_renews_the_state(patch: Patch) -> None:
    patch.setattr(RecurrentState, "on_split", lambda mamba, above, node: mamba.touch(node, 2**60))


@fault
def the_parent_is_asked_whether_a_state_exists(patch: Patch) -> None:
    def attach(original: Any, cache: MambaRadixCache, node: Any, slot: int | None) -> bool:
        original(cache, node, slot)
        return node.parent is not None and node.parent.mamba_value is not None

    around(patch, MambaRadixCache, "attach_state", attach)


@fault
def a_new_state_is_said_to_exist(patch: Patch) -> None:
    def attach(original: Any, cache: MambaRadixCache, node: Any, slot: int | None) -> bool:
        return bool(original(cache, node, slot)) or slot is not None

    around(patch, MambaRadixCache, "attach_state", attach)


@fault
def a_state_replaces_the_one_before(patch: Patch) -> None:
    def attach(original: Any, cache: MambaRadixCache, node: Any, slot: int | None) -> bool:
        if slot is not None and node.mamba_value is not None:
            node.mamba_value = slot
        return bool(original(cache, node, slot))

    around(patch, MambaRadixCache, "attach_state", attach)


@late_fault
def a_state_is_attached_within_a_page(patch: Patch) -> None:
    def insert(original: Any, cache: MambaRadixCache, key: RadixKey, *args: Any, **kwargs: Any) -> Any:
        whole = len(key) - len(key) % cache.page_size
        return original(cache, key[:whole] if whole else key, *args, **kwargs)

    around(patch, MambaRadixCache, "insert", insert)


# ---------------------------------------------------------------- locks


@fault
def a_lock_leaves_its_state_evictable(patch: Patch) -> None:
    patch.setattr(RecurrentState, "lock", lambda mamba, node: None)
    patch.setattr(RecurrentState, "unlock", lambda mamba, node, receipt: None)


@fault
def an_unlock_leaves_its_state_protected(patch: Patch) -> None:
    patch.setattr(RecurrentState, "unlock", lambda mamba, node, receipt: None)


@fault
def every_lock_of_a_node_counts_its_state_again(patch: Patch) -> None:
    def lock(mamba: RecurrentState, node: Any) -> None:
        if node.mamba_value is not None:
            mamba.evictable -= 1
            mamba.protected += 1

    patch.setattr(RecurrentState, "lock", lock)


@fault
def a_state_attached_under_a_lock_is_evictable(patch: Patch) -> None:
    def attach(original: Any, mamba: RecurrentState, node: Any, slot: int, now: int) -> None:
        locks, node.own_locks = node.own_locks, 0
        original(mamba, node, slot, now)
        node.own_locks = locks

    around(patch, RecurrentState, "attach", attach)


@fault
def a_lock_holds_the_states_above(patch: Patch) -> None:
    patch.setattr(MambaTreeNode, "mamba_lock_ref", property(lambda node: node.lock_ref))


@fault
def locked_states_are_evicted(patch: Patch) -> None:
    def lock(original: Any, mamba: RecurrentState, node: Any) -> None:
        queued = node in mamba._queue
        original(mamba, node)
        if queued:
            mamba._queue.push(node)

    around(patch, RecurrentState, "lock", lock)


# ---------------------------------------------------------------- eviction


@fault
def the_state_used_last_goes_first(patch: Patch) -> None:
    patch.setattr(recurrent_state, "_rank", lambda node: -node.mamba_access_time)


@fault
def a_match_does_not_renew_its_state(patch: Patch) -> None:
    patch.setattr(RecurrentState, "touch", lambda mamba, end, now: None)


@fault
def an_unlocked_state_never_becomes_a_candidate_again(patch: Patch) -> None:
    def unlock(original: Any, mamba: RecurrentState, node: Any, receipt: Any) -> None:
        queue, mamba._queue = mamba._queue, RecencyQueue(lambda node: 0)
        original(mamba, node, receipt)
        mamba._queue = queue

    around(patch, RecurrentState, "unlock", unlock)


@fault
def state_slots_are_freed_twice(patch: Patch) -> None:
    def drop(original: Any, mamba: RecurrentState, node: Any) -> None:
        slot = node.mamba_value
        original(mamba, node)
        mamba._pool.free_track_slot(slot)  # type: ignore[union-attr]

    around(patch, RecurrentState, "drop", drop)


@fault
def state_slots_are_never_freed(patch: Patch) -> None:
    patch.setattr(RecurrentState, "release_dropped", lambda mamba: mamba._dropped.clear())


@fault
def a_leaf_goes_without_its_state(patch: Patch) -> None:
    patch.setattr(RecurrentState, "on_remove", lambda mamba, leaf: None)


@fault
def an_unlocked_leaf_stays_without_its_state(patch: Patch) -> None:
    def evict(cache: MambaRadixCache, num_tokens: int, num_states: int = 0) -> EvictResult:
        states = cache.parts.states
        assert states is not None
        before = states.num_freed
        victims = Victims()
        cache.parts.full.evict(num_tokens, victims)
        while states.num_freed < before + num_states and (node := states.pop_victim()) is not None:
            states.drop(node)
        cache._release_victims(victims)
        return EvictResult(victims.num_tokens, 0, states.num_freed - before)

    patch.setattr(MambaRadixCache, "evict", evict)


@fault
def states_that_went_with_their_leaves_are_not_counted(patch: Patch) -> None:
    def on_remove(original: Any, mamba: RecurrentState, leaf: Any) -> None:
        before = mamba.num_freed
        original(mamba, leaf)
        mamba.num_freed = before

    around(patch, RecurrentState, "on_remove", on_remove)


@fault
def state_eviction_goes_on_when_the_target_is_met(patch: Patch) -> None:
    around(patch, MambaRadixCache, "evict", lambda original, cache, full, states=0: original(cache, full, states + 1))


@fault
def a_reset_keeps_the_states(patch: Patch) -> None:
    patch.setattr(RecurrentState, "forget", lambda mamba, node: None)


@fault
def a_reset_remembers_the_counts(patch: Patch) -> None:
    def clear(original: Any, mamba: RecurrentState) -> None:
        counts = mamba.evictable, mamba.protected
        original(mamba)
        mamba.evictable, mamba.protected = counts

    around(patch, RecurrentState, "clear", clear)


# ---------------------------------------------------------------- the proof


def run_all() -> None:
    for seed, page_size in RUNS:
        run_random_mamba_traffic(seed, page_size, num_operations=600)


def test_without_a_fault_the_traffic_passes() -> None:
    run_all()


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run_all()

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
