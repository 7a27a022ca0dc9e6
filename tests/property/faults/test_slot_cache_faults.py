"""Proof that random traffic finds faults in the slot cache: each rule is broken once, and it must be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.checked.slot_cache import NUM_SLOTS
from support.faults.faults import Catalogue, Fault, Patch, around
from support.traffic.slots import SlotTrafficFailed, run_slot_traffic

from raydix.cache_core import PrefixCacheManager, RadixKey, SlotAllocator, SlotError
from raydix.cache_core.eviction.recency_queue import RecencyQueue
from raydix.cache_core.rows.prefix_cache_manager import Row, path_up
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
    patch.setattr(SlotMask, "lowest", lambda mask: max(filter(mask.__contains__, range(NUM_SLOTS)), default=-1))


@fault
def occupy_takes_what_is_taken(patch: Patch) -> None:
    def occupy(slots: SlotAllocator, idx: int) -> None:
        slots.check_range(idx)
        slots._free.discard(idx)

    patch.setattr(SlotAllocator, "occupy", occupy)


@fault
def occupy_frees_what_is_taken(patch: Patch) -> None:
    """The toggle of a bit, where it should be cleared."""

    def occupy(slots: SlotAllocator, idx: int) -> None:
        slots.check_range(idx)
        (slots._free.discard if idx in slots._free else slots._free.add)(idx)

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
        slots._free.add(idx)

    patch.setattr(SlotAllocator, "free", free)


@late_fault
def free_beyond_the_range_mints_slots(patch: Patch) -> None:
    def check_range(slots: SlotAllocator, idx: int) -> int:
        if idx < 0:
            raise SlotError(f"slot {idx}")
        return idx

    patch.setattr(SlotAllocator, "check_range", check_range)


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
        path, end = cache._walk(key)
        slot = next(reversed(cache._slots_at[path[-1]]), -1) if path else -1
        return (path[-1], end, cache._rows[slot]) if cache.slot_is_findable(slot) else None

    patch.setattr(PrefixCacheManager, "_locate", locate)


@fault
def the_row_recorded_first_is_found(patch: Patch) -> None:
    def locate(cache: PrefixCacheManager, key: Any) -> Any:
        path, end = cache._walk(key)
        for node in reversed(path):
            for slot in filter(cache.slot_is_findable, cache._slots_at[node]):
                return node, min(end, node.end), cache._rows[slot]
        return None

    patch.setattr(PrefixCacheManager, "_locate", locate)


@fault
def a_row_that_is_recorded_again_stays_where_it_stood(patch: Patch) -> None:
    def record(original: Any, cache: PrefixCacheManager, slot: int, version: int, node: TreeNode) -> None:
        order = {above: list(cache._slots_at[above]) for above in path_up(node)}
        original(cache, slot, version, node)
        for above, slots in order.items():
            cache._slots_at[above] = dict.fromkeys([*slots, *cache._slots_at[above]])

    around(patch, PrefixCacheManager, "_record", record)


@fault
def only_the_last_node_of_a_path_records_the_row(patch: Patch) -> None:
    def record(original: Any, cache: PrefixCacheManager, slot: int, version: int, node: TreeNode) -> None:
        held = [above for above in path_up(node) if slot in cache._slots_at[above]]
        original(cache, slot, version, node)
        for above in path_up(node):
            if above is not node and above not in held:
                del cache._slots_at[above][slot]

    around(patch, PrefixCacheManager, "_record", record)


@fault
def a_match_within_a_run_is_lost(patch: Patch) -> None:
    def walk(original: Any, cache: PrefixCacheManager, key: Any) -> Any:
        path, end = original(cache, key)
        return (path[:-1], path[-1].parent.end) if path and end < path[-1].end else (path, end)

    around(patch, PrefixCacheManager, "_walk", walk)


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
    def insert(original: Any, cache: PrefixCacheManager, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCacheManager, "_drop_overwritten", nothing)
            return original(cache, *args)

    around(patch, PrefixCacheManager, "insert", insert)


@fault
def a_copy_keeps_what_it_overwrote(patch: Patch) -> None:
    def copy_kv(original: Any, cache: PrefixCacheManager, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCacheManager, "_drop_overwritten", nothing)
            return original(cache, *args)

    around(patch, PrefixCacheManager, "copy_kv", copy_kv)


@fault
def an_insert_keeps_records_of_another_version(patch: Patch) -> None:
    def drop(original: Any, cache: PrefixCacheManager, row: Row, length: int) -> None:
        version = cache.allocator.version(row.slot) if cache.allocator else row.version + 1
        if length or row.version == version:
            original(cache, row, length)
        else:
            row.version = version

    def insert(original: Any, cache: PrefixCacheManager, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            around(inner, PrefixCacheManager, "_shorten", drop)
            return original(cache, *args)

    around(patch, PrefixCacheManager, "insert", insert)


@fault
def an_insert_of_an_old_version_is_recorded(patch: Patch) -> None:
    def insert(original: Any, cache: PrefixCacheManager, tokens: Any, slot: int, version: int) -> Any:
        return original(cache, tokens, slot, cache._rows[slot].version if slot in cache._rows else version)

    around(patch, PrefixCacheManager, "insert", insert)


@fault
def a_shorter_insert_cuts_the_record(patch: Patch) -> None:
    def drop(original: Any, cache: PrefixCacheManager, slot: int, key: Any) -> None:
        if slot in cache._rows and len(key) < cache._rows[slot].tail.end:
            cache._shorten(cache._rows[slot], len(key))
        original(cache, slot, key)

    around(patch, PrefixCacheManager, "_drop_overwritten", drop)


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
    def shorten(original: Any, cache: PrefixCacheManager, row: Row, length: int) -> None:
        pinned = [node.end for node in path_up(row.tail) if node.own_locks]
        original(cache, row, max([length, *pinned]))

    around(patch, PrefixCacheManager, "_shorten", shorten)


@fault
def an_invalidation_leaves_empty_nodes(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "_prune", nothing)


@fault
def a_forgotten_row_stays_in_the_queue(patch: Patch) -> None:
    def move_tail(cache: PrefixCacheManager, row: Row, node: TreeNode) -> None:
        row.tail = node
        if node.end:
            cache._released.push(row)
        else:
            del cache._rows[row.slot]

    patch.setattr(PrefixCacheManager, "_move_tail", move_tail)


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
    patch.setattr(PrefixCacheManager, "_touch", touch_all)


def touch_all(cache: PrefixCacheManager, node: TreeNode, end: int) -> TreeNode:
    """`_touch`, with the stamps of both halves renewed."""
    above = cache._split(node, end)
    cache._clock += 1
    above.own_access_time = node.own_access_time = cache._clock
    cache._offer(node)
    return above


@fault
def a_find_is_no_use_of_the_prefix(patch: Patch) -> None:
    def touch(cache: PrefixCacheManager, node: TreeNode, end: int) -> TreeNode:
        cache._clock += 1
        return cache._split(node, end)

    def find(original: Any, cache: PrefixCacheManager, tokens: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCacheManager, "_touch", touch)
            return original(cache, tokens)

    around(patch, PrefixCacheManager, "find", find)


@late_fault
def a_find_is_no_use_of_the_row(patch: Patch) -> None:
    def find(original: Any, cache: PrefixCacheManager, tokens: Any) -> Any:
        stamps = {slot: row.last_used for slot, row in cache._rows.items()}
        found = original(cache, tokens)
        for slot, stamp in stamps.items():
            cache._rows[slot].last_used = stamp
        return found

    around(patch, PrefixCacheManager, "find", find)


@fault
def eviction_takes_what_is_pinned(patch: Patch) -> None:
    patch.setattr("raydix.cache_core.rows.prefix_cache_manager._may_go", lambda node: not node.children)


@fault
def rows_with_pins_are_given_up(patch: Patch) -> None:
    patch.setattr(
        PrefixCacheManager, "_may_drop", lambda cache, row: cache.allocator is None or cache.allocator.is_free(row.slot)
    )


@fault
def rows_in_use_are_given_up(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "_may_drop", lambda cache, row: not row.is_pinned)


@fault
def a_row_found_in_use_is_never_given_up_again(patch: Patch) -> None:
    patch.setattr(PrefixCacheManager, "_on_free", nothing)


@fault
def a_row_whose_pin_was_released_is_never_given_up_again(patch: Patch) -> None:
    def release(original: Any, cache: PrefixCacheManager, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(cache._released, "push", nothing)
            original(cache, *args)

    around(patch, PrefixCacheManager, "release", release)


@fault
def a_parent_never_becomes_a_candidate(patch: Patch) -> None:
    parents = set[TreeNode]()

    def remove_leaf(original: Any, cache: PrefixCacheManager, leaf: TreeNode) -> None:
        parents.add(leaf.parent)
        original(cache, leaf)

    def offer(original: Any, cache: PrefixCacheManager, node: TreeNode) -> None:
        if node not in parents:
            original(cache, node)

    around(patch, PrefixCacheManager, "_remove_leaf", remove_leaf)
    around(patch, PrefixCacheManager, "_offer", offer)


@fault
def an_unpinned_leaf_never_becomes_a_candidate_again(patch: Patch) -> None:
    def release(original: Any, cache: PrefixCacheManager, tokens: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCacheManager, "_offer", nothing)
            original(cache, tokens)

    around(patch, PrefixCacheManager, "release", release)


@fault
def eviction_takes_whole_runs_where_a_tail_would_do(patch: Patch) -> None:
    def evict(original: Any, cache: PrefixCacheManager, num_tokens: int, used_before: int) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCacheManager, "_split", lambda cache, leaf, end: leaf)
            return original(cache, num_tokens, used_before)

    around(patch, PrefixCacheManager, "_evict", evict)


@fault
def eviction_stops_one_short(patch: Patch) -> None:
    def evict(original: Any, cache: PrefixCacheManager, num_tokens: int, used_before: int) -> Any:
        return original(cache, num_tokens - 1, used_before)

    around(patch, PrefixCacheManager, "_evict", evict)


@late_fault
def an_insert_evicts_its_own_path(patch: Patch) -> None:
    def evict(original: Any, cache: PrefixCacheManager, num_tokens: int, used_before: int) -> Any:
        return original(cache, num_tokens, used_before + 1)

    around(patch, PrefixCacheManager, "_evict", evict)


@fault
def an_insert_exceeds_the_capacity(patch: Patch) -> None:
    def grow(original: Any, cache: PrefixCacheManager, node: TreeNode, key: Any) -> Any:
        cache.max_capacity += 1
        try:
            return original(cache, node, key)
        finally:
            cache.max_capacity -= 1

    around(patch, PrefixCacheManager, "_grow", grow)


@fault
def rows_that_ended_at_an_evicted_leaf_are_lost(patch: Patch) -> None:
    def evict(original: Any, cache: PrefixCacheManager, *args: Any) -> int:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(PrefixCacheManager, "_move_tail", nothing)
            return original(cache, *args)

    around(patch, PrefixCacheManager, "evict", evict)


# ---------------------------------------------------------------- pins


def pin_node(cache: PrefixCacheManager, node: TreeNode) -> None:
    """Pin all that a node of the tree holds."""
    cache._num_pins += 1
    node.own_locks += 1
    for above in path_up(node):
        above.lock_ref += 1


@fault
def every_insert_takes_a_reference(patch: Patch) -> None:
    def record(original: Any, cache: PrefixCacheManager, slot: int, version: int, node: TreeNode) -> None:
        original(cache, slot, version, node)
        pin_node(cache, node)

    around(patch, PrefixCacheManager, "_record", record)


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
        path, _ = cache._walk(tokens)
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
        pin_node(cache, cache._locate_all(tokens)[0])

    patch.setattr(PrefixCacheManager, "pin", pin)


@fault
def a_pin_covers_its_own_node_only(patch: Patch) -> None:
    def pin(original: Any, cache: PrefixCacheManager, tokens: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr("raydix.cache_core.rows.prefix_cache_manager.path_up", lambda node: [node])
            original(cache, tokens)

    around(patch, PrefixCacheManager, "pin", pin)


@fault
def a_split_forgets_the_locks(patch: Patch) -> None:
    def split(original: Any, cache: PrefixCacheManager, node: TreeNode, end: int) -> Any:
        above = original(cache, node, end)
        if above is not node:
            above.lock_ref = 0
        return above

    around(patch, PrefixCacheManager, "_split", split)


@fault
def a_split_forgets_the_rows(patch: Patch) -> None:
    def split(original: Any, cache: PrefixCacheManager, node: TreeNode, end: int) -> Any:
        above = original(cache, node, end)
        if above is not node:
            cache._slots_at[above] = {}
        return above

    around(patch, PrefixCacheManager, "_split", split)


@fault
def a_split_moves_the_pins_up(patch: Patch) -> None:
    def split(original: Any, cache: PrefixCacheManager, node: TreeNode, end: int) -> Any:
        above = original(cache, node, end)
        if above is not node:
            above.own_locks, node.own_locks = node.own_locks, 0
        return above

    around(patch, PrefixCacheManager, "_split", split)


@fault
def a_reset_keeps_the_rows(patch: Patch) -> None:
    def reset(original: Any, cache: PrefixCacheManager) -> None:
        if not hasattr(cache, "_rows"):
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
