"""Proof that random traffic finds faults: each rule of `RadixCache` is broken once, and the comparison must see it."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.split_faults import after_cuts, walk_and_split
from support.traffic.radix import TrafficFailed, run_random_traffic

from raydix.cache_core import EvictResult, RadixCache, RadixKey
from raydix.cache_core.components.full_kv import FullKV
from raydix.cache_core.eviction.policy import LRU
from raydix.cache_core.eviction.queue import EvictionQueue
from raydix.cache_core.eviction.tenants import Tenants
from raydix.cache_core.radix import insertion, lookup, prefix_cache
from raydix.cache_core.radix.tree_parts import TreeParts
from raydix.cache_core.tree import page_hashes, radix_tree
from raydix.cache_core.tree.radix_tree import RadixTree

RUNS = [(seed, page_size) for seed in range(4) for page_size in (4, 1)]

FAULTS = Catalogue()
fault, late_fault = FAULTS.register, FAULTS.register_late


# ---------------------------------------------------------------- recency and eviction


@fault
def a_split_renews_the_suffix_that_was_not_matched(patch: Patch) -> None:
    def renew(above: Any, node: Any) -> None:
        node.own_access_time += 1

    after_cuts(patch, renew)


@fault
def a_match_does_not_renew_what_it_finds(patch: Patch) -> None:
    def match(original: Any, cache: RadixCache, key: RadixKey) -> Any:
        stamps = {node: node.own_access_time for node in cache.parts.tree.nodes()}
        found = original(cache, key)
        for node in cache.parts.tree.nodes():
            node.own_access_time = stamps.get(node, 0)  # a node made by a split has the stamp of its suffix
        return found

    around(patch, RadixCache, "match_prefix", match)


@fault
def a_peek_renews_what_it_finds(patch: Patch) -> None:
    def peek(original: Any, cache: RadixCache, key: RadixKey) -> Any:
        found = original(cache, key)
        cache.parts.clock += 1
        node = found.last_node
        while node is not None:
            node.own_access_time = cache.parts.clock
            node = node.parent
        return found

    around(patch, RadixCache, "peek_prefix", peek)


@fault
def a_peek_splits(patch: Patch) -> None:
    around(patch, RadixCache, "peek_prefix", lambda _, cache, key: cache.match_prefix(key))


def removed_without(patch: Patch, use: str) -> None:
    """Have leaves leave the tree without telling their parents of this use."""

    def evict_leaves(original: Any, full: FullKV, num_tokens: int, victims: Any) -> None:
        known = {node: getattr(node, use) for top in full._tree.tops.values() for node in top.subtree()}
        original(full, num_tokens, victims)
        for node in victims.nodes:
            setattr(node.parent, use, known.get(node.parent, 0))

    around(patch, FullKV, "evict_leaves", evict_leaves)


@fault
def what_is_evicted_takes_its_age_with_it(patch: Patch) -> None:
    removed_without(patch, "own_access_time")


@fault
def what_is_evicted_takes_its_hits_with_it(patch: Patch) -> None:
    removed_without(patch, "own_hits")


@fault
def the_most_recently_used_goes_first(patch: Patch) -> None:
    patch.setattr(LRU, "rank", lambda lru, node: -node.own_access_time)


@fault
def the_oldest_goes_first_used_or_not(patch: Patch) -> None:
    patch.setattr(LRU, "rank", lambda lru, node: node.id)


@fault
def a_long_leaf_goes_whole(patch: Patch) -> None:
    patch.setattr(FullKV, "_spare_head", lambda full, leaf, num_tokens: None)


@fault
def eviction_takes_locked_leaves(patch: Patch) -> None:
    def lock(original: Any, full: FullKV, node: Any) -> None:
        queued = node in full._queue
        original(full, node)
        if queued:
            full._queue.push(node)

    around(patch, FullKV, "lock", lock)


@fault
def a_use_does_not_move_a_leaf(patch: Patch) -> None:
    patch.setattr(EvictionQueue, "touch", lambda queue, node: None)


@fault
def a_leaf_that_got_a_child_stays_a_candidate(patch: Patch) -> None:
    def add(original: Any, full: FullKV, leaf: Any) -> None:
        queued = leaf.parent in full._queue
        original(full, leaf)
        if queued:
            full._queue.push(leaf.parent)

    around(patch, FullKV, "add", add)


@fault
def what_comes_late_goes_last(patch: Patch) -> None:
    push_late = EvictionQueue._push_late
    patch.setattr(EvictionQueue, "_push_late", lambda queue, node, rank: push_late(queue, node, rank + 2**40))


@fault
def a_parent_never_becomes_a_candidate(patch: Patch) -> None:
    def left_bare(original: Any, full: FullKV, node: Any) -> None:
        if not node.data:
            original(full, node)

    around(patch, FullKV, "_on_last_child_removed", left_bare)


@fault
def an_unlocked_leaf_never_becomes_a_candidate_again(patch: Patch) -> None:
    def unlock(original: Any, full: FullKV, node: Any) -> Any:
        offer, full._add_candidate = full._add_candidate, lambda parent: None  # type: ignore[method-assign]
        was_locked = original(full, node)
        full._add_candidate = offer  # type: ignore[method-assign]
        return was_locked

    around(patch, FullKV, "unlock", unlock)


@fault
def eviction_goes_on_when_the_target_is_met(patch: Patch) -> None:
    around(patch, RadixCache, "evict", lambda original, cache, num_tokens: original(cache, num_tokens + 1))


@fault
def eviction_counts_what_was_asked_for(patch: Patch) -> None:
    def evict(original: Any, cache: RadixCache, num_tokens: int) -> EvictResult:
        return EvictResult(min(original(cache, num_tokens).full_evicted, num_tokens))

    around(patch, RadixCache, "evict", evict)


@fault
def eviction_tells_nobody(patch: Patch) -> None:
    patch.setattr(RadixCache, "_publish_evicted", lambda cache, victims: None)


@fault
def leaves_go_before_what_is_retired(patch: Patch) -> None:
    def evict(original: Any, cache: RadixCache, num_tokens: int) -> EvictResult:
        retired = cache.parts.full.tenants.rest.retired
        known, retired.pending = retired.pending, []
        try:
            result: EvictResult = original(cache, num_tokens)
        finally:
            retired.pending[:0] = known
        return result

    around(patch, RadixCache, "evict", evict)


@fault
def what_is_retired_keeps_its_place_in_the_queue(patch: Patch) -> None:
    patch.setattr(Tenants, "retire", lambda tenants, top: None)


@fault
def a_retirement_takes_all_namespaces(patch: Patch) -> None:
    around(patch, RadixCache, "retire", lambda original, cache, is_meant: original(cache, lambda extra_key: True))


@fault
def a_retirement_spares_the_default_namespace(patch: Patch) -> None:
    def retire(original: Any, cache: RadixCache, is_meant: Any) -> Any:
        return original(cache, lambda extra_key: extra_key is not None and is_meant(extra_key))

    around(patch, RadixCache, "retire", retire)


@fault
def a_retired_namespace_can_still_be_matched(patch: Patch) -> None:
    def detach(original: Any, tree: RadixTree, top: Any) -> None:
        original(tree, top)
        tree.tops[top.namespace.extra_key, top.namespace.arity] = top

    around(patch, RadixTree, "detach", detach)


@fault
def what_is_unlocked_after_its_retirement_is_forgotten(patch: Patch) -> None:
    def offer(original: Any, full: FullKV, leaf: Any) -> None:
        if leaf.namespace.live:
            original(full, leaf)

    around(patch, FullKV, "_add_candidate", offer)


# ---------------------------------------------------------------- pages, keys and namespaces


@fault
def a_match_ends_within_a_page(patch: Patch) -> None:
    def walk(original: Any, *args: Any) -> Any:
        path, end, rest = original(*args)
        return (path, end + 3, rest - 3) if rest > 3 else (path, end, rest)  # three tokens more than there are

    for module in (lookup, insertion):
        around(patch, module, "walk", walk)
    patch.setattr(lookup, "walk_and_split", walk_and_split)


@fault
def an_insert_keeps_the_tail_that_is_no_page(patch: Patch) -> None:
    def add_leaf(original: Any, tree: RadixTree, parent: Any, key: RadixKey, stop: int, *rest: Any) -> Any:
        return original(tree, parent, key, key.num_tokens, *rest)

    around(patch, RadixTree, "add_leaf", add_leaf)


def rename_all(patch: Patch, rename: Callable[[RadixKey], RadixKey]) -> None:
    around(patch, RadixTree, "find_namespace", lambda original, tree, key: original(tree, rename(key)))
    around(patch, RadixTree, "ensure_namespace", lambda original, tree, key, now: original(tree, rename(key), now))


@fault
def namespaces_are_ignored(patch: Patch) -> None:
    rename_all(patch, lambda key: RadixKey.from_packed(key.data, key.width, None, key.arity))


@fault
def the_empty_name_is_the_default_namespace(patch: Patch) -> None:
    rename_all(patch, lambda key: RadixKey.from_packed(key.data, key.width, key.extra_key or None, key.arity))


@fault
def wide_ids_lose_their_upper_half(patch: Patch) -> None:
    def narrow(key: RadixKey) -> RadixKey:
        return RadixKey.from_packed(key.ids.astype(np.uint32).tobytes(), 4, key.extra_key, key.arity)

    rename_all(patch, narrow)


@fault
def tuples_are_the_ids_they_begin_with(patch: Patch) -> None:
    def first_ids(key: RadixKey) -> RadixKey:
        return RadixKey(key.ids[:: key.arity or 1], key.extra_key)

    rename_all(patch, first_ids)


@fault
def a_widened_namespace_keeps_its_old_children_keys(patch: Patch) -> None:
    patch.setattr(radix_tree, "rekey_children", lambda node, page_bytes: None)


# ---------------------------------------------------------------- owners of slots


@fault
def duplicates_are_not_reported(patch: Patch) -> None:
    patch.setattr(insertion, "duplicates", lambda *_: torch.empty(0, dtype=torch.int64))


@fault
def the_slots_that_the_tree_holds_are_reported_as_duplicates(patch: Patch) -> None:
    def duplicates(parts: TreeParts, slots: torch.Tensor, start: int, stop: int, found: Any) -> torch.Tensor:
        return slots[start:stop].clone()

    patch.setattr(insertion, "duplicates", duplicates)


@fault
def duplicates_are_reported_from_the_beginning(patch: Patch) -> None:
    def insert(original: Any, cache: RadixCache, *args: Any, prev_prefix_len: int = 0, **kwargs: Any) -> Any:
        return original(cache, *args, **kwargs)

    around(patch, RadixCache, "insert", insert)


@fault
def an_insert_frees_its_duplicates(patch: Patch) -> None:
    def insert(original: Any, cache: RadixCache, *args: Any, **kwargs: Any) -> Any:
        result = original(cache, *args, **kwargs)
        if cache.pool is not None:
            cache.pool.free(result.duplicate_indices)
        return result

    around(patch, RadixCache, "insert", insert)


@fault
def slots_are_adopted_without_a_copy(patch: Patch) -> None:
    adopted: dict[int, tuple[bytes, torch.Tensor]] = {}  # a row for a caller's tensor, and the adopted part

    def pack_slots(original: Any, slots: Any, page_size: int, start: int, stop: int) -> bytes:
        row: bytes = original(slots, page_size, start, stop)
        adopted[id(row)] = row, slots[start:stop]
        return row

    def gather(original: Any, path: list[Any], *rest: Any) -> Any:
        for node in path:
            if id(node.slots) in adopted:
                node.slots = adopted[id(node.slots)][1].numpy().tobytes()
        return original(path, *rest)

    around(patch, insertion, "pack_slots", pack_slots)
    around(patch, prefix_cache, "gather", gather)


@fault
def a_match_hands_out_the_slots_of_the_tree_itself(patch: Patch) -> None:
    def gather(original: Any, path: list[Any], *rest: Any) -> torch.Tensor:
        if len(path) > 1:
            return original(path, *rest)
        with warnings.catch_warnings(action="ignore"):  # that it cannot be written to is no obstacle
            return torch.frombuffer(path[0].slots, dtype=torch.int64)

    patch.setattr(insertion, "pack_slots", lambda slots, _, start, stop: slots[start:stop].numpy().tobytes())
    around(patch, prefix_cache, "gather", gather)


@fault
def slots_are_freed_twice(patch: Patch) -> None:
    def release(original: Any, cache: RadixCache, victims: Any) -> None:
        original(cache, victims)
        original(cache, victims)

    around(patch, RadixCache, "_release_victims", release)


@fault
def slots_of_leaves_are_freed_twice(patch: Patch) -> None:
    def free_leaves(original: Any, full: FullKV, num_tokens: int, page_size: int, free: Any, each: Any) -> Any:
        return original(full, num_tokens, page_size, lambda slots: [free(slots), free(slots)], each)

    around(patch, FullKV, "free_leaves", free_leaves)


@fault
def slots_of_the_first_leaf_alone_are_freed(patch: Patch) -> None:
    def free_leaves(original: Any, full: FullKV, num_tokens: int, page_size: int, free: Any, each: Any) -> Any:
        first, freed = full._queue.first(), []
        num_freed = original(full, num_tokens, page_size, freed.append, each)
        if freed:
            assert first is not None
            free(freed[0][: len(first[2])])
        return num_freed

    around(patch, FullKV, "free_leaves", free_leaves)


@fault
def a_reset_frees_nothing(patch: Patch) -> None:
    def reset(original: Any, cache: RadixCache) -> None:
        pool, cache.pool = cache.pool, None
        original(cache)
        cache.pool = pool

    around(patch, RadixCache, "reset", reset)


# ---------------------------------------------------------------- locks and nodes


@fault
def a_lock_holds_the_node_alone(patch: Patch) -> None:
    def lock(full: FullKV, node: Any) -> None:
        if not node.lock_ref:
            full.evictable -= len(node)
            full.protected += len(node)
        node.own_locks += 1
        node.lock_ref += 1

    patch.setattr(FullKV, "lock", lock)


@fault
def an_unlock_leaves_its_tokens_protected(patch: Patch) -> None:
    def unlock(original: Any, full: FullKV, node: Any) -> Any:
        sizes = full.evictable, full.protected
        was_locked = original(full, node)
        full.evictable, full.protected = sizes
        return was_locked

    around(patch, FullKV, "unlock", unlock)


@fault
def an_unlock_of_what_is_not_locked_is_passed_over(patch: Patch) -> None:
    def dec_lock_ref(original: Any, cache: RadixCache, node: Any, *receipt: Any) -> None:
        if node is cache.root or node.evicted or node.own_locks:
            original(cache, node, *receipt)

    around(patch, RadixCache, "dec_lock_ref", dec_lock_ref)


@late_fault
def an_unlock_takes_the_lock_of_a_node_below(patch: Patch) -> None:
    def dec_lock_ref(original: Any, cache: RadixCache, node: Any, *receipt: Any) -> None:
        while node.lock_ref and not node.own_locks and node.children:
            node = max(node.children.values(), key=lambda child: child.lock_ref)
        original(cache, node, *receipt)

    around(patch, RadixCache, "dec_lock_ref", dec_lock_ref)


@fault
def a_split_loses_the_locks_of_the_prefix(patch: Patch) -> None:
    def lose(above: Any, node: Any) -> None:
        above.lock_ref = 0

    after_cuts(patch, lose)


@fault
def a_split_moves_the_locks_to_the_prefix(patch: Patch) -> None:
    def move(above: Any, node: Any) -> None:
        above.own_locks, node.own_locks, node.lock_ref = node.own_locks, 0, node.lock_ref - node.own_locks

    after_cuts(patch, move)


@fault
def a_split_forgets_the_hits(patch: Patch) -> None:
    def forget(above: Any, node: Any) -> None:
        node.own_hits = 0

    after_cuts(patch, forget)


@fault
def stale_nodes_are_accepted(patch: Patch) -> None:
    patch.setattr(TreeParts, "check_live", lambda parts, node: None)


@fault
def nodes_of_other_namespaces_are_resumed_at(patch: Patch) -> None:
    def resumed(original: Any, parts: TreeParts, key: RadixKey, node: Any, is_trusted: bool) -> RadixKey:
        renamed = RadixKey.from_packed(key.data, key.width, node.namespace.extra_key, node.namespace.arity)
        there: RadixKey = original(parts, renamed, node, is_trusted)
        return there

    around(patch, insertion, "resumed_key", resumed)


@fault
def a_miss_ends_at_the_top_of_its_namespace(patch: Patch) -> None:
    def match(original: Any, cache: RadixCache, key: RadixKey) -> Any:
        found = original(cache, key)
        if found.last_node is cache.root:
            found.last_node = cache.parts.tree.tops.get((key.extra_key, key.arity), cache.root)
        return found

    around(patch, RadixCache, "match_prefix", match)


# ---------------------------------------------------------------- hashes


@fault
def hashes_are_not_seeded_by_the_namespace(patch: Patch) -> None:
    patch.setattr(page_hashes, "namespace_seed", lambda extra_key: None)


@fault
def pages_are_hashed_each_by_itself(patch: Patch) -> None:
    around(patch, page_hashes, "hash_page", lambda original, ids, width, arity, _: original(ids, width, arity, None))


@fault
def a_split_gives_the_hashes_of_the_suffix_to_the_prefix(patch: Patch) -> None:
    def swap(above: Any, node: Any) -> None:
        if above.hash_values is not None and len(above.hash_values) == len(node.hash_values):
            above.hash_values, node.hash_values = node.hash_values, above.hash_values

    after_cuts(patch, swap)


# ---------------------------------------------------------------- the proof


def run_all() -> None:
    for seed, page_size in RUNS:
        run_random_traffic(seed, page_size, num_operations=800)


def test_without_a_fault_the_traffic_passes() -> None:
    run_all()


@pytest.mark.parametrize("plant", FAULTS.cases())
def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(TrafficFailed) as failure:
        run_all()

    assert isinstance(failure.value.__cause__, AssertionError), "a comparison or an invariant has to find it"
