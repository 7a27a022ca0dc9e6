"""Proof that random traffic finds faults in the slot cache: each rule is broken once, and it must be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.traffic.slots import SlotTrafficFailed, run_slot_traffic

from raydix.cache_core import PrefixCacheManager, RadixKey, SlotAllocator, SlotError
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.rows.row_eviction import RowEviction
from raydix.cache_core.rows.row_index import RowIndex
from raydix.cache_core.rows.row_tree import Row, RowTree, path_up
from raydix.cache_core.rows.slot_allocator import SlotMask
from raydix.cache_core.tree.radix_tree import RadixTree
from raydix.cache_core.tree.tree_node import TreeNode

RUNS = [(seed, with_allocator) for seed in range(4) for with_allocator in (True, False)]

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


def nothing(*args: Any, **kwargs: Any) -> None:
    """A part that the fault leaves out."""


# ---------------------------------------------------------------- slots


@fault
def alloc_takes_the_highest_free_slot(patch: Patch) -> None:
    patch.setattr(SlotMask, "lowest", lambda mask: max(mask.common(mask), default=-1))


@fault
def occupy_takes_what_is_taken(patch: Patch) -> None:
    def occupy(slots: SlotAllocator, idx: int) -> None:
        slots.check_range(idx)
        slots.free_mask.discard(idx)

    patch.setattr(SlotAllocator, "occupy", occupy)


@fault
def occupy_frees_what_is_taken(patch: Patch) -> None:
    """The toggle of a bit, where it should be cleared."""

    def occupy(slots: SlotAllocator, idx: int) -> None:
        slots.check_range(idx)
        (slots.free_mask.discard if idx in slots.free_mask else slots.free_mask.add)(idx)

    patch.setattr(SlotAllocator, "occupy", occupy)


@fault
def occupy_raises_the_version(patch: Patch) -> None:
    def occupy(original: Any, slots: SlotAllocator, idx: int) -> None:
        original(slots, idx)
        slots._versions[idx] += 1

    around(patch, SlotAllocator, "occupy", occupy)


@fault
def free_raises_the_version(patch: Patch) -> None:
    def free(original: Any, slots: SlotAllocator, idx: int) -> None:
        original(slots, idx)
        slots._versions[idx] += 1

    around(patch, SlotAllocator, "free", free)


@fault
def alloc_leaves_the_version(patch: Patch) -> None:
    patch.setattr(SlotAllocator, "alloc_at", SlotAllocator.occupy)


@fault
def free_takes_what_is_free(patch: Patch) -> None:
    def free(slots: SlotAllocator, idx: int) -> None:
        slots.check_range(idx)
        slots.free_mask.add(idx)

    patch.setattr(SlotAllocator, "free", free)


@late_fault
def free_beyond_the_range_mints_slots(patch: Patch) -> None:
    def check_range(slots: SlotAllocator, idx: int) -> int:
        if idx < 0:
            raise SlotError(f"slot {idx}")
        return idx

    patch.setattr(SlotAllocator, "check_range", check_range)


@fault
def a_mask_counts_what_is_there_already(patch: Patch) -> None:
    def discard(original: Any, mask: SlotMask, slot: int) -> None:
        mask.count -= slot not in mask
        original(mask, slot)

    around(patch, SlotMask, "discard", discard)


@fault
def the_summary_of_a_mask_keeps_empty_words(patch: Patch) -> None:
    def discard(original: Any, mask: SlotMask, slot: int) -> None:
        summary = mask._summary
        original(mask, slot)
        mask._summary = summary

    around(patch, SlotMask, "discard", discard)


# ---------------------------------------------------------------- what is found


@fault
def old_versions_are_found(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "_is_current", lambda cache, slot, version: True)


@fault
def an_old_row_hides_the_current_one_beside_it(patch: Patch) -> None:
    def locate(cache: PrefixCacheManager, key: Any) -> Any:
        path, end = cache._index.tree.walk(key)
        slot = next(reversed(cache._index.tree.rows[path[-1]]), -1) if path else -1
        return (path[-1], end, cache._index.rows[slot]) if cache.slot_is_findable(slot) else None

    patch.setattr(PrefixCacheManager, "_locate", locate)


@fault
def the_row_recorded_first_is_found(patch: Patch) -> None:
    def locate(cache: PrefixCacheManager, key: Any) -> Any:
        path, end = cache._index.tree.walk(key)
        for node in reversed(path):
            for slot in filter(cache.slot_is_findable, cache._index.tree.rows[node]):
                return node, min(end, node.end), cache._index.rows[slot]
        return None

    patch.setattr(PrefixCacheManager, "_locate", locate)


@fault
def a_row_that_is_recorded_again_stays_where_it_stood(patch: Patch) -> None:
    def record(original: Any, index: RowIndex, slot: int, version: int, node: TreeNode) -> None:
        order = {above: list(index.tree.rows[above]) for above in path_up(node)}
        original(index, slot, version, node)
        for above, slots in order.items():
            index.tree.rows[above] = dict.fromkeys([*slots, *index.tree.rows[above]])

    around(patch, RowIndex, "_record", record)


@fault
def only_the_last_node_of_a_path_records_the_row(patch: Patch) -> None:
    def record(original: Any, index: RowIndex, slot: int, version: int, node: TreeNode) -> None:
        held = [above for above in path_up(node) if slot in index.tree.rows[above]]
        original(index, slot, version, node)
        for above in path_up(node):
            if above is not node and above not in held:
                del index.tree.rows[above][slot]

    around(patch, RowIndex, "_record", record)


@fault
def a_match_within_a_run_is_lost(patch: Patch) -> None:
    def walk(original: Any, tree: RowTree, key: Any) -> Any:
        path, end = original(tree, key)
        return (path[:-1], path[-1].parent.end) if path and end < path[-1].end else (path, end)

    around(patch, RowTree, "walk", walk)


@fault
def a_match_within_a_run_claims_all_of_it(patch: Patch) -> None:
    def locate(original: Any, cache: PrefixCacheManager, key: Any) -> Any:
        found = original(cache, key)
        return found and (found[0], found[0].end, found[2])

    around(patch, PrefixCacheManager, "_locate", locate)


@fault
def namespaces_are_one(patch: Patch) -> None:
    def in_one(original: Any, tree: RadixTree, key: RadixKey, *args: Any) -> Any:
        return original(tree, RadixKey.from_packed(key.data, key.width), *args)

    around(patch, RadixTree, "find_namespace", in_one)
    around(patch, RadixTree, "ensure_namespace", in_one)


@fault
def ids_lose_their_upper_half(patch: Patch) -> None:
    def narrow(original: Any, tree: RadixTree, key: RadixKey, *args: Any) -> Any:
        return original(tree, key.with_width(4), *args)

    around(patch, RadixTree, "find_namespace", narrow)
    around(patch, RadixTree, "ensure_namespace", narrow)


@late_fault
def a_peek_is_a_use(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "peek", PrefixCacheManager.find)


# ---------------------------------------------------------------- what a slot holds


@fault
def an_insert_keeps_what_it_overwrote(patch: Patch) -> None:
    def write(original: Any, index: RowIndex, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowIndex, "drop_overwritten", nothing)
            return original(index, *args)

    around(patch, RowIndex, "write", write)


@fault
def a_copy_keeps_what_it_overwrote(patch: Patch) -> None:
    def copy_kv(original: Any, cache: PrefixCacheManager, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowIndex, "drop_overwritten", nothing)
            return original(cache, *args)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def an_insert_keeps_records_of_another_version(patch: Patch) -> None:
    def write(original: Any, index: RowIndex, key: Any, slot: int, version: int) -> Any:
        if slot in index.rows:
            index.rows[slot].version = version
        return original(index, key, slot, version)

    around(patch, RowIndex, "write", write)


@fault
def an_insert_of_an_old_version_is_recorded(patch: Patch) -> None:
    def insert(original: Any, cache: PrefixCacheManager, tokens: Any, slot: int, version: int) -> Any:
        return original(cache, tokens, slot, cache._index.rows[slot].version if slot in cache._index.rows else version)

    around(patch, PrefixCacheManager, "insert", insert)


@fault
def a_shorter_insert_cuts_the_record(patch: Patch) -> None:
    def write(original: Any, index: RowIndex, key: Any, slot: int, version: int) -> Any:
        if slot in index.rows and len(key) < index.rows[slot].tail.end:
            index.shorten(index.rows[slot], len(key))
        return original(index, key, slot, version)

    around(patch, RowIndex, "write", write)


@fault
def an_invalidation_leaves_one_token_too_many(patch: Patch) -> None:
    around(
        patch,
        PrefixCacheManager,
        "invalidate",
        lambda original, cache, slot, valid_len: original(cache, slot, valid_len + 1),
    )


@fault
def an_invalidation_takes_the_whole_record(patch: Patch) -> None:
    around(patch, PrefixCacheManager, "invalidate", lambda original, cache, slot, valid_len: original(cache, slot, 0))


@fault
def an_invalidation_spares_what_is_pinned(patch: Patch) -> None:
    def shorten(original: Any, index: RowIndex, row: Row, length: int) -> None:
        pinned = [node.end for node in path_up(row.tail) if node.own_locks]
        original(index, row, max([length, *pinned]))

    around(patch, RowIndex, "shorten", shorten)


@fault
def an_invalidation_leaves_empty_nodes(patch: Patch) -> None:
    patch.setattr(RowTree, "prune", nothing)


@fault
def a_forgotten_row_stays_in_the_index_of_slots(patch: Patch) -> None:
    patch.setattr(RowEviction, "discard", lambda rows, row: rows._queue.discard(row))


# ---------------------------------------------------------------- copies


@fault
def a_copy_takes_one_position_too_few(patch: Patch) -> None:
    copy_with(patch, lambda key, layers: (key[: len(key) - 1] if len(key) > 1 else key, layers))


@fault
def a_copy_takes_a_layer_too_many(patch: Patch) -> None:
    copy_with(patch, lambda key, layers: (key, layers + 1))


def copy_with(patch: Patch, change: Callable[[Any, int], tuple[Any, int]]) -> None:
    """Copies of something else than was asked for."""

    def copy_kv(original: Any, cache: PrefixCacheManager, key: Any, target: int, kv: Any, layers: int) -> Any:
        key_then, layers_then = change(key, layers)
        original(cache, key_then, target, kv, layers_then)
        return len(key)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def a_copy_leaves_the_values(patch: Patch) -> None:
    def copy_kv(original: Any, cache: PrefixCacheManager, key: Any, target: int, kv: Any, layers: int) -> Any:
        return original(cache, key, target, (kv[0], kv[1].copy()), layers)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def a_copy_takes_what_is_left_of_a_stale_prefix(patch: Patch) -> None:
    def copy_kv(original: Any, cache: PrefixCacheManager, key: Any, target: int, kv: Any, layers: int) -> Any:
        return original(cache, key[: cache.peek(key).prefix_len], target, kv, layers)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


# ---------------------------------------------------------------- recency and eviction


@fault
def the_most_recently_used_goes_first(patch: Patch) -> None:
    def pop(queue: RecencyQueue[Any], is_candidate: Any) -> Any:
        for item in sorted([*queue._recent, *queue._late], key=queue._last_use, reverse=True):
            queue.discard(item)
            if is_candidate(item):
                return item
        return None

    patch.setattr(RecencyQueue, "pop", pop)


@fault
def a_use_is_not_noticed_by_the_queue(patch: Patch) -> None:
    def push(original: Any, queue: RecencyQueue[Any], item: Any) -> None:
        if item not in queue:
            original(queue, item)

    def pop(original: Any, queue: RecencyQueue[Any], is_candidate: Any) -> Any:
        ticks = {item: tick for tick, _, item in queue._heap} | queue._recent
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(queue, "_last_use", ticks.__getitem__)
            return original(queue, is_candidate)

    around(patch, RecencyQueue, "push", push)
    around(patch, RecencyQueue, "pop", pop)


@late_fault
def a_use_renews_the_rest_of_the_run_too(patch: Patch) -> None:
    patch.setattr(RowIndex, "touch", touch_all)


def touch_all(index: RowIndex, node: TreeNode, end: int) -> TreeNode:
    """`touch`, with the stamps of both halves renewed."""
    above = index.tree.split(node, end)
    index.clock += 1
    above.own_access_time = node.own_access_time = index.clock
    index.tree.offer(node)
    return above


@fault
def a_find_is_no_use_of_the_prefix(patch: Patch) -> None:
    def touch(index: RowIndex, node: TreeNode, end: int) -> TreeNode:
        index.clock += 1
        return index.tree.split(node, end)

    def find(original: Any, cache: PrefixCacheManager, tokens: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowIndex, "touch", touch)
            return original(cache, tokens)

    around(patch, PrefixCacheManager, "find", find)


@late_fault
def a_find_is_no_use_of_the_row(patch: Patch) -> None:
    def find(original: Any, cache: PrefixCacheManager, tokens: Any) -> Any:
        stamps = {slot: row.last_used for slot, row in cache._index.rows.items()}
        found = original(cache, tokens)
        for slot, stamp in stamps.items():
            cache._index.rows[slot].last_used = stamp
        return found

    around(patch, PrefixCacheManager, "find", find)


@fault
def eviction_takes_what_is_pinned(patch: Patch) -> None:
    patch.setattr("raydix.cache_core.rows.row_tree._may_go", lambda node: not node.children)


@fault
def rows_with_pins_are_given_up(patch: Patch) -> None:
    patch.setattr(
        RowEviction, "_may_go", lambda rows, row: rows._allocator is None or rows._allocator.is_free(row.slot)
    )


@fault
def rows_in_use_are_given_up(patch: Patch) -> None:
    around(patch, RowEviction, "_may_go", lambda original, rows, row: not row.is_pinned)


@fault
def a_row_found_in_use_is_never_given_up_again(patch: Patch) -> None:
    patch.setattr(RowEviction, "pop", lambda released, rows: released._queue.pop(released._may_go))


@fault
def a_row_whose_pin_was_released_is_never_given_up_again(patch: Patch) -> None:
    patch.setattr(RowEviction, "requeue", nothing)


@fault
def a_parent_never_becomes_a_candidate(patch: Patch) -> None:
    parents = set[TreeNode]()

    def remove_leaf(original: Any, tree: RowTree, leaf: TreeNode) -> None:
        parents.add(leaf.parent)
        original(tree, leaf)

    def offer(original: Any, tree: RowTree, node: TreeNode) -> None:
        if node not in parents:
            original(tree, node)

    around(patch, RowTree, "_remove_leaf", remove_leaf)
    around(patch, RowTree, "offer", offer)


@fault
def an_unpinned_leaf_never_becomes_a_candidate_again(patch: Patch) -> None:
    def unpin(original: Any, tree: RowTree, node: TreeNode) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowTree, "offer", nothing)
            original(tree, node)

    around(patch, RowTree, "unpin", unpin)


@fault
def eviction_takes_whole_runs_where_a_tail_would_do(patch: Patch) -> None:
    def evict(original: Any, tree: RowTree, num_tokens: int, used_before: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RowTree, "split", lambda tree, leaf, end: leaf)
            return original(tree, num_tokens, used_before)

    around(patch, RowTree, "evict", evict)


@fault
def eviction_stops_one_short(patch: Patch) -> None:
    around(patch, RowTree, "evict", lambda original, tree, num, used_before: original(tree, num - 1, used_before))


@late_fault
def an_insert_evicts_its_own_path(patch: Patch) -> None:
    around(patch, RowTree, "evict", lambda original, tree, num, used_before: original(tree, num, used_before + 1))


@fault
def an_insert_exceeds_the_capacity(patch: Patch) -> None:
    def grow(original: Any, index: RowIndex, node: TreeNode, key: Any) -> Any:
        index.max_tokens += 1
        try:
            return original(index, node, key)
        finally:
            index.max_tokens -= 1

    around(patch, RowIndex, "_grow", grow)


@fault
def rows_that_ended_at_an_evicted_leaf_are_lost(patch: Patch) -> None:
    def evict(index: RowIndex, num_tokens: int, used_before: int) -> int:
        return sum(len(leaf) for leaf, _ in index.tree.evict(num_tokens, used_before))

    patch.setattr(RowIndex, "evict", evict)


# ---------------------------------------------------------------- pins


@fault
def every_insert_takes_a_reference(patch: Patch) -> None:
    def record(original: Any, index: RowIndex, slot: int, version: int, node: TreeNode) -> None:
        original(index, slot, version, node)
        index.tree.pin(node)

    around(patch, RowIndex, "_record", record)


@fault
def a_release_drops_what_was_recorded(patch: Patch) -> None:
    def release(original: Any, cache: PrefixCacheManager, tokens: Any) -> None:
        original(cache, tokens)
        for slot in cache.peek_slots(tokens)[1]:
            cache.forget(slot)

    around(patch, PrefixCacheManager, "release", release)


@fault
def a_release_without_a_pin_is_let_through(patch: Patch) -> None:
    def release(original: Any, cache: PrefixCacheManager, tokens: Any) -> None:
        path, _ = cache._index.tree.walk(tokens)
        if path and path[-1].own_locks:
            original(cache, tokens)

    around(patch, PrefixCacheManager, "release", release)


@fault
def a_pin_of_what_is_not_there_is_let_through(patch: Patch) -> None:
    def pin(original: Any, cache: PrefixCacheManager, tokens: Any) -> None:
        if cache.peek(tokens).prefix_len == len(tokens) > 0:
            original(cache, tokens)

    around(patch, PrefixCacheManager, "pin", pin)


@fault
def a_pin_covers_the_whole_run(patch: Patch) -> None:
    def pin(cache: PrefixCacheManager, tokens: Any) -> None:
        cache._index.tree.pin(cache._locate_all(tokens)[0])

    patch.setattr(PrefixCacheManager, "pin", pin)


@fault
def a_pin_covers_its_own_node_only(patch: Patch) -> None:
    def pin(tree: RowTree, node: TreeNode) -> None:
        tree.num_pins += 1
        node.own_locks += 1
        node.lock_ref += 1

    patch.setattr(RowTree, "pin", pin)


@fault
def a_split_forgets_the_locks(patch: Patch) -> None:
    def split(original: Any, tree: RowTree, node: TreeNode, end: int) -> Any:
        above = original(tree, node, end)
        if above is not node:
            above.lock_ref = 0
        return above

    around(patch, RowTree, "split", split)


@fault
def a_split_forgets_the_rows(patch: Patch) -> None:
    def split(original: Any, tree: RowTree, node: TreeNode, end: int) -> Any:
        above = original(tree, node, end)
        if above is not node:
            tree.rows[above] = {}
        return above

    around(patch, RowTree, "split", split)


@fault
def a_split_moves_the_pins_up(patch: Patch) -> None:
    def split(original: Any, tree: RowTree, node: TreeNode, end: int) -> Any:
        above = original(tree, node, end)
        if above is not node:
            above.own_locks, node.own_locks = node.own_locks, 0
        return above

    around(patch, RowTree, "split", split)


@fault
def a_reset_keeps_the_rows(patch: Patch) -> None:
    def reset(original: Any, cache: PrefixCacheManager) -> None:
        if not hasattr(cache, "_index"):
            original(cache)

    around(patch, PrefixCacheManager, "reset", reset)


# ---------------------------------------------------------------- the proof


def run_all() -> None:
    for seed, with_allocator in RUNS:
        run_slot_traffic(seed, with_allocator, num_operations=800)


def test_without_a_fault_the_traffic_passes() -> None:
    run_all()


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(SlotTrafficFailed) as failure:
        run_all()

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
