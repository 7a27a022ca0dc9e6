"""Proof that random traffic finds faults: each rule of the sliding window is broken once, and it must be seen."""

from collections.abc import Callable
from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.match_end_rules import judged, window_judge
from support.traffic.radix import TrafficFailed
from support.traffic.swa import run_random_swa_traffic

from raydix.cache_core import EvictResult, RadixCache, RadixKey
from raydix.cache_core.components import window_kv
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.components.window_kv import WindowKV, WindowReceipt
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.kernels import Victims
from raydix.cache_core.radix.prefix_cache import PrefixCache

RUNS = [(0, 1, 3), (1, 4, 10), (2, 1, 1), (4, 4, 4), (3, 1, 3), (7, 4, 4)]  # seed, page size, window

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


def with_tail(patch: Patch, name: str, change: Callable[[int, int], int]) -> None:
    """Let one function of the component work with another tail, made of the right one and the page size."""

    def changed(original: Any, swa: WindowKV, *args: Any) -> Any:
        tail, swa.tail = swa.tail, change(swa.tail, swa._page_size)
        try:
            return original(swa, *args)
        finally:
            swa.tail = tail

    around(patch, WindowKV, name, changed)


# ---------------------------------------------------------------- matches


@fault
def a_tombstone_counts_as_live(patch: Patch) -> None:
    patch.setattr(WindowKV, "usable", judged(lambda swa: lambda node, length: True))


@fault
def the_count_goes_on_after_a_hole(patch: Patch) -> None:
    def judge(swa: WindowKV) -> Any:
        live = [float("inf")]

        def may_end(node: Any, length: int) -> bool:
            if not node.swa_tombstone:
                live[0] += length
            return not node.swa_tombstone and live[0] >= swa.window

        return may_end

    patch.setattr(WindowKV, "usable", judged(judge))


@fault
def a_hole_spoils_all_that_lies_below(patch: Patch) -> None:
    def judge(swa: WindowKV) -> Any:
        holes: list[Any] = []

        def may_end(node: Any, length: int) -> bool:
            holes.extend([node] * node.swa_tombstone)
            return not holes

        return may_end

    patch.setattr(WindowKV, "usable", judged(judge))


@fault
def a_prefix_shorter_than_the_window_is_not_used(patch: Patch) -> None:
    def judge(swa: WindowKV) -> Any:
        may_end = window_judge(swa)
        return lambda node, length: may_end(node, length) and node.end >= swa.window

    patch.setattr(WindowKV, "usable", judged(judge))


@late_fault
def a_run_that_matches_in_part_counts_whole(patch: Patch) -> None:
    def judge(swa: WindowKV) -> Any:
        may_end = window_judge(swa)
        return lambda node, length: may_end(node, len(node))

    patch.setattr(WindowKV, "usable", judged(judge))


@fault
def a_peek_does_not_see_holes(patch: Patch) -> None:
    def peek(original: Any, cache: RadixCache, key: RadixKey) -> Any:
        aux, cache.parts.components = cache.parts.components, ()
        found = original(cache, key)
        cache.parts.components = aux
        return found

    around(patch, RadixCache, "peek_prefix", peek)


@fault
def the_longer_full_prefix_is_not_told(patch: Patch) -> None:
    patch.setattr(PrefixCache, "_branching", lambda cache, usable, full_end: None)


# ---------------------------------------------------------------- recency


@fault
def a_match_uses_the_windows_of_all_ancestors(patch: Patch) -> None:
    with_tail(patch, "touch", lambda tail, page: 10**9)


@fault
def a_match_uses_its_last_node_alone(patch: Patch) -> None:
    with_tail(patch, "touch", lambda tail, page: 1)


@fault
def a_match_uses_its_window_and_no_page_more(patch: Patch) -> None:
    with_tail(patch, "touch", lambda tail, page: tail - max(page, 2))


@fault
def a_new_leaf_was_used_before_any_use(patch: Patch) -> None:
    def add(original: Any, swa: WindowKV, leaf: Any, live: bool) -> None:
        now = leaf.swa_access_time
        original(swa, leaf, live)
        leaf.swa_access_time = now
        if live:
            swa._queue.push(leaf)

    around(patch, WindowKV, "add", add)


@fault
def a_match_uses_no_window(patch: Patch) -> None:
    patch.setattr(WindowKV, "touch", lambda swa, end, now: None)


@fault
def a_split_renews_the_window(patch: Patch) -> None:
    def on_split(original: Any, swa: WindowKV, above: Any, node: Any) -> None:
        node.swa_access_time = 10**9
        original(swa, above, node)

    around(patch, WindowKV, "on_split", on_split)


# ---------------------------------------------------------------- locks


@fault
def a_lock_holds_a_page_less_than_the_window(patch: Patch) -> None:
    with_tail(patch, "lock", lambda tail, page: tail // 2)


@fault
def a_lock_holds_a_page_more_than_the_window(patch: Patch) -> None:
    with_tail(patch, "lock", lambda tail, page: tail + 1)


@fault
def a_lock_holds_its_window_and_no_page_more(patch: Patch) -> None:
    with_tail(patch, "lock", lambda tail, page: tail - max(page, 2))


@fault
def a_lock_does_not_count_tombstones(patch: Patch) -> None:
    def lock(original: Any, swa: WindowKV, node: Any) -> WindowReceipt:
        receipt: WindowReceipt = original(swa, node)
        while node.data and node.end > receipt.start:
            node.swa_lock_ref -= node.swa_tombstone
            node = node.parent
        return receipt

    around(patch, WindowKV, "lock", lock)


@fault
def an_unlock_goes_up_to_the_root(patch: Patch) -> None:
    def unlock(swa: WindowKV, node: Any, receipt: WindowReceipt) -> None:
        while node.data and not receipt.released:
            if node.swa_lock_ref == 1 and not node.swa_tombstone:
                swa.evictable += len(node)
                swa.protected -= len(node)
                swa._queue.push(node)
            node.swa_lock_ref = max(0, node.swa_lock_ref - 1)
            node = node.parent
        receipt.released = True

    patch.setattr(WindowKV, "release", unlock)


@fault
def an_unlock_leaves_the_window_protected(patch: Patch) -> None:
    def unlock(original: Any, swa: WindowKV, *args: Any) -> None:
        sizes = swa.evictable, swa.protected
        original(swa, *args)
        swa.evictable, swa.protected = sizes

    around(patch, WindowKV, "unlock", unlock)


@fault
def what_was_unlocked_is_never_a_candidate_again(patch: Patch) -> None:
    def unlock(original: Any, swa: WindowKV, *args: Any) -> None:
        queue, swa._queue = swa._queue, RecencyQueue(lambda node: 0)
        original(swa, *args)
        swa._queue = queue

    around(patch, WindowKV, "unlock", unlock)


@fault
def a_split_forgets_the_locks_of_the_prefix(patch: Patch) -> None:
    def on_split(original: Any, swa: WindowKV, above: Any, node: Any) -> None:
        original(swa, above, node)
        above.swa_lock_ref = 0

    around(patch, WindowKV, "on_split", on_split)


@fault
def a_split_brings_the_prefix_to_life(patch: Patch) -> None:
    def on_split(original: Any, swa: WindowKV, above: Any, node: Any) -> None:
        original(swa, above, node)
        above.swa_tombstone = False

    around(patch, WindowKV, "on_split", on_split)


@late_fault
def a_receipt_is_good_for_more_than_once(patch: Patch) -> None:
    def dec_lock_ref(original: Any, cache: RadixCache, node: Any, receipt: Any = None, **kwargs: Any) -> None:
        original(cache, node, receipt, **kwargs)
        given = kwargs.get("swa_boundary_id") if receipt is None else receipt
        given.used = False

    around(patch, RadixCache, "dec_lock_ref", dec_lock_ref)


@fault
def the_receipt_of_another_lock_is_taken(patch: Patch) -> None:
    def dec_lock_ref(original: Any, cache: RadixCache, node: Any, receipt: Any = None, **kwargs: Any) -> None:
        if isinstance(receipt, WindowReceipt) and node is not cache.root and not node.evicted and node.own_locks:
            receipt.node = node
        original(cache, node, receipt, **kwargs)

    around(patch, RadixCache, "dec_lock_ref", dec_lock_ref)


@fault
def an_unlock_needs_no_receipt(patch: Patch) -> None:
    def with_receipt(original: Any, owner: Any, node: Any, receipt: Any) -> None:
        if receipt is not None:
            original(owner, node, receipt)

    around(patch, RadixCache, "_check_receipt", with_receipt)
    around(patch, WindowKV, "unlock", with_receipt)


@late_fault
def a_window_can_be_released_again(patch: Patch) -> None:
    def release(original: Any, swa: WindowKV, node: Any, receipt: WindowReceipt) -> None:
        if node.swa_lock_ref:
            receipt.released = False
        original(swa, node, receipt)

    around(patch, WindowKV, "release", release)


def unqueued(patch: Patch, change: Callable[[WindowKV, Any], object]) -> None:
    """Have what was laid aside taken out of the queue when it is let go, and `change` done with it."""

    def release(original: Any, swa: WindowKV, node: Any, receipt: WindowReceipt) -> None:
        waiting = set(swa._waiting)
        original(swa, node, receipt)
        for each in waiting - swa._waiting:
            swa._queue.discard(each)
            change(swa, each)

    around(patch, WindowKV, "release", release)


@fault
def what_an_eviction_laid_aside_is_not_queued_again(patch: Patch) -> None:
    unqueued(patch, lambda swa, node: None)


@fault
def what_an_eviction_laid_aside_is_laid_aside_for_good(patch: Patch) -> None:
    unqueued(patch, lambda swa, node: swa._waiting.add(node))


@fault
def the_upper_half_of_what_was_laid_aside_is_lost(patch: Patch) -> None:
    def on_split(original: Any, swa: WindowKV, above: Any, node: Any) -> None:
        original(swa, above, node)
        swa._waiting.discard(above)

    around(patch, WindowKV, "on_split", on_split)


@fault
def what_is_held_is_evicted(patch: Patch) -> None:
    patch.setattr(WindowKV, "pop_victim", lambda swa: swa._queue.pop())


@fault
def an_early_release_unlocks_the_full_kv(patch: Patch) -> None:
    def release(original: Any, cache: RadixCache, node: Any, receipt: WindowReceipt) -> None:
        if node is not cache.root and node.own_locks and not receipt.released:
            cache.parts.full.unlock(node)
        original(cache, node, receipt)

    around(patch, RadixCache, "release_window", release)


# ---------------------------------------------------------------- inserts


@fault
def all_that_is_inserted_is_live(patch: Patch) -> None:
    def insert(original: Any, cache: RadixCache, *args: Any, swa_evicted_seqlen: int = 0, **kwargs: Any) -> Any:
        return original(cache, *args, **kwargs)

    around(patch, RadixCache, "insert", insert)


@fault
def a_leaf_with_a_live_end_is_live_from_its_beginning(patch: Patch) -> None:
    def spans(original: Any, swa: WindowKV, start: int, stop: int, fresh_from: int) -> Any:
        return original(swa, start, stop, fresh_from if fresh_from >= stop else 0)

    around(patch, WindowKV, "split_spans", spans)


@fault
def a_leaf_is_as_long_as_its_key(patch: Patch) -> None:
    def spans(swa: WindowKV, start: int, stop: int, fresh_from: int) -> Any:
        edge = min(max(start, fresh_from), stop)
        return [span for span in [(start, edge, False), (edge, stop, True)] if span[0] < span[1]]

    patch.setattr(WindowKV, "split_spans", spans)


@fault
def a_leaf_is_one_window_and_no_page_more(patch: Patch) -> None:
    with_tail(patch, "split_spans", lambda tail, page: tail - max(page, 2))


@fault
def a_leaf_is_cut_within_a_page(patch: Patch) -> None:
    def init(original: Any, swa: WindowKV, window: int, *args: Any) -> None:
        original(swa, window, *args)
        swa.tail = window

    around(patch, WindowKV, "__init__", init)
    patch.setattr(
        "raydix.cache_core.radix.insertion.pack_slots",
        lambda slots, start, stop, _: slots[start:stop].numpy().tobytes(),
    )


@fault
def tombstones_never_heal(patch: Patch) -> None:
    patch.setattr(WindowKV, "absorb", lambda swa, path, *rest: path)


@fault
def tombstones_heal_by_slots_without_halves(patch: Patch) -> None:
    around(patch, WindowKV, "absorb", lambda original, swa, path, _, *rest: original(swa, path, 0, *rest))


@fault
def a_locked_tombstone_takes_the_incoming_slots(patch: Patch) -> None:
    def heal(original: Any, swa: WindowKV, node: Any, fresh: Any) -> None:
        locks, node.lock_ref = node.lock_ref, 0
        original(swa, node, fresh)
        node.lock_ref = locks

    around(patch, WindowKV, "heal", heal)


@fault
def a_heal_frees_the_incoming_slots(patch: Patch) -> None:
    def heal(original: Any, swa: WindowKV, node: Any, fresh: Any) -> None:
        old = node.slots
        original(swa, node, fresh)
        node.slots = old

    around(patch, WindowKV, "heal", heal)


@fault
def a_heal_takes_the_trees_own_slots(patch: Patch) -> None:
    patch.setattr(window_kv, "meet", lambda row, other, num_tokens: False)


@fault
def a_heal_frees_nothing(patch: Patch) -> None:
    patch.setattr(WindowKV, "release_replaced", lambda swa: setattr(swa, "_replaced", Victims()))


@fault
def a_heal_under_a_lock_moves_nothing(patch: Patch) -> None:
    def heal(original: Any, swa: WindowKV, node: Any, fresh: Any) -> None:
        if swa.transfer_swa is not None:
            swa.transfer_swa = lambda src, dst: None
        original(swa, node, fresh)

    around(patch, WindowKV, "heal", heal)


@fault
def a_heal_under_a_lock_moves_the_wrong_way(patch: Patch) -> None:
    def heal(original: Any, swa: WindowKV, node: Any, fresh: Any) -> None:
        transfer = swa.transfer_swa
        if transfer is not None:
            swa.transfer_swa = lambda src, dst: transfer(dst, src)
        original(swa, node, fresh)
        swa.transfer_swa = transfer

    around(patch, WindowKV, "heal", heal)


@fault
def a_heal_is_credited_to_nothing(patch: Patch) -> None:
    def revive(original: Any, swa: WindowKV, node: Any) -> None:
        sizes = swa.evictable, swa.protected
        original(swa, node)
        swa.evictable, swa.protected = sizes

    around(patch, WindowKV, "revive", revive)


@fault
def a_heal_in_a_held_window_is_evictable(patch: Patch) -> None:
    def revive(original: Any, swa: WindowKV, node: Any) -> None:
        held, node.swa_lock_ref = node.swa_lock_ref, 0
        original(swa, node)
        node.swa_lock_ref = held

    around(patch, WindowKV, "revive", revive)


# ---------------------------------------------------------------- eviction


@fault
def held_windows_become_tombstones(patch: Patch) -> None:
    def pop_victim(original: Any, swa: WindowKV) -> Any:
        victim = original(swa)
        while victim is not None and victim.parent.data and victim.parent.swa_lock_ref:
            victim = victim.parent  # held, so it has no entry that counts
        return victim

    def drop(swa: WindowKV, node: Any) -> None:
        swa.evictable -= 0 if node.swa_tombstone or node.swa_lock_ref else len(node)
        swa.protected -= len(node) if node.swa_lock_ref and not node.swa_tombstone else 0
        swa.num_freed += len(node)
        swa._dropped.add(node, node.slots, len(node))
        node.swa_tombstone = True

    around(patch, WindowKV, "pop_victim", pop_victim)
    patch.setattr(WindowKV, "drop", drop)


@fault
def the_window_used_last_goes_first(patch: Patch) -> None:
    patch.setattr(window_kv, "_rank", lambda node: -node.swa_access_time << 40 | node.end)


@fault
def of_one_window_the_lower_node_goes_first(patch: Patch) -> None:
    patch.setattr(window_kv, "_rank", lambda node: (node.swa_access_time << 40) + 2**39 - node.end)


@fault
def an_unlocked_leaf_stays_as_a_tombstone(patch: Patch) -> None:
    def evict(cache: RadixCache, num_tokens: int, swa_num_tokens: int = 0) -> EvictResult:
        swa = cache.parts.window
        assert swa is not None
        before = swa.num_freed
        victims = Victims()
        cache.parts.full.evict(num_tokens, victims)
        while swa.num_freed - before < swa_num_tokens and (node := swa.pop_victim()) is not None:
            swa.drop(node)
        cache._release_victims(victims)
        return EvictResult(victims.num_tokens, swa.num_freed - before)

    patch.setattr(RadixCache, "evict", evict)


@fault
def tombstones_keep_their_halves(patch: Patch) -> None:
    patch.setattr(WindowKV, "release_dropped", lambda swa: setattr(swa, "_dropped", Victims()))


@fault
def what_goes_whole_is_not_counted(patch: Patch) -> None:
    def on_remove(original: Any, swa: WindowKV, leaf: Any) -> None:
        num_freed = swa.num_freed
        original(swa, leaf)
        swa.num_freed = num_freed

    around(patch, WindowKV, "on_remove", on_remove)


@fault
def a_tombstone_loses_its_full_kv(patch: Patch) -> None:
    def take_out(original: Any, full: FullKV, leaf: Any, victims: Any) -> None:
        parent = leaf.parent
        original(full, leaf, victims)
        if parent.data and parent.swa_tombstone and not parent.children and not parent.lock_ref:
            original(full, parent, victims)

    around(patch, FullKV, "take_out", take_out)


@fault
def window_eviction_goes_on_when_the_target_is_met(patch: Patch) -> None:
    around(patch, RadixCache, "evict", lambda original, cache, full, swa=0: original(cache, full, swa + bool(swa)))


@late_fault
def a_reset_remembers_window_sizes(patch: Patch) -> None:
    patch.setattr(WindowKV, "clear", lambda swa: swa._queue.clear())


# ---------------------------------------------------------------- the proof


def run_all() -> None:
    for seed, page_size, window in RUNS:
        run_random_swa_traffic(seed, page_size, window, num_operations=600)


def test_without_a_fault_the_traffic_passes() -> None:
    run_all()


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run_all()

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
