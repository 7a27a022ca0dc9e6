"""`MambaRadixCache`, claim by claim: the end of a match, owners of states, locks, and the order of eviction."""

from collections.abc import Iterator
from contextlib import redirect_stdout
from os import devnull
from typing import Any

import pytest
import torch
from support.faults.count_queue_operations import queue_operations

from raydix.cache_core import (
    EvictResult,
    InvalidKeyError,
    LockError,
    MambaPool,
    MambaRadixCache,
    RadixKey,
    SlotError,
    StaleNodeError,
)


class Freed:
    """A pool that remembers which KV slots and which state slots it was given back."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.states: list[int] = []

    def free(self, indices: torch.Tensor) -> None:
        self.slots += indices.tolist()

    def free_track_slot(self, slot: int) -> None:
        self.states.append(slot)

    def take(self) -> tuple[list[int], list[int]]:
        """The KV slots and the states that came back since the last call."""
        taken, self.slots, self.states = (self.slots, self.states), [], []
        return taken


@pytest.fixture
def pool() -> Freed:
    return Freed()


@pytest.fixture
def cache(pool: Freed) -> Iterator[MambaRadixCache]:
    cache = MambaRadixCache(1, pool, pool)
    yield cache
    cache.check_invariants()


def key(*ids: int, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def row(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def sizes(cache: MambaRadixCache) -> tuple[int, int]:
    """Evictable and protected states."""
    return cache.mamba_evictable_size(), cache.mamba_protected_size()


def states(cache: MambaRadixCache) -> dict[int, int | None]:
    """The state of each node, by where it ends; for a cache with one path."""
    return {node.end: node.mamba_value for node in cache.parts.tree.nodes()}  # type: ignore[attr-defined]


def usable(cache: MambaRadixCache, *ids: int) -> tuple[int, int | None]:
    """Return the usable prefix of a query, and the length where a state would extend it."""
    peeked = cache.peek_prefix(key(*ids))
    found = cache.match_prefix(key(*ids))
    assert (peeked.prefix_len, peeked.mamba_branching_seqlen) == (found.prefix_len, found.mamba_branching_seqlen)
    assert len(found.indices) == found.prefix_len == found.last_node.end
    return found.prefix_len, found.mamba_branching_seqlen


# ---------------------------------------------------------------- match


def test_a_match_ends_at_the_deepest_state_and_tells_where_another_would_help() -> None:
    cache = MambaRadixCache(chunk_size=64)
    text = RadixKey(range(160))
    cache.insert(text[:64], mamba_value=1)
    cache.insert(text[:128])
    cache.insert(text)

    whole, part = cache.match_prefix(text), cache.match_prefix(text[:100])

    assert (whole.prefix_len, whole.full_prefix_len, whole.mamba_branching_seqlen) == (64, 160, 128)
    assert (part.prefix_len, part.full_prefix_len, part.mamba_branching_seqlen) == (64, 100, None)
    cache.check_invariants()


@pytest.mark.parametrize(("full", "branching"), [(70, 64), (64, 64), (63, None)])
def test_without_any_state_nothing_is_usable_and_whole_chunks_would_be(full: int, branching: int | None) -> None:
    cache = MambaRadixCache(chunk_size=64)
    cache.insert(RadixKey(range(full)))

    found = cache.match_prefix(RadixKey(range(200)))

    assert (found.prefix_len, found.last_node, found.mamba_branching_seqlen) == (0, cache.root, branching)


def test_the_branching_length_is_whole_pages_and_whole_chunks() -> None:
    cache = MambaRadixCache(4, chunk_size=6)
    cache.insert(RadixKey(range(32)))

    assert cache.peek_prefix(RadixKey(range(32))).mamba_branching_seqlen == 24


def test_a_state_is_of_no_use_before_its_nodes_last_token(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12), mamba_value=5)

    assert usable(cache, 1, 2) == (0, 2)
    assert usable(cache, 1, 2, 3, 4) == (3, None)


def test_kv_below_the_last_state_is_not_used(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)
    below = cache.insert(key(1, 2, 3, 4), row(10, 11, 12, 13)).last_node

    assert usable(cache, 1, 2, 3, 4) == (2, 4)
    assert below.hit_count == 0
    assert cache.match_prefix(key(1, 2, 3, 4)).indices.tolist() == [10, 11]


def test_a_split_leaves_the_state_on_the_child(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2, 3, 4), row(10, 11, 12, 13), mamba_value=5)

    cache.insert(key(1, 2, 9), row(10, 11, 19))

    assert usable(cache, 1, 2, 9) == (0, 3)
    assert usable(cache, 1, 2, 3, 4) == (4, None)
    assert sizes(cache) == (1, 0)


# ---------------------------------------------------------------- insert


def test_a_state_is_adopted_by_the_final_node(cache: MambaRadixCache, pool: Freed) -> None:
    result = cache.insert(key(1, 2), row(10, 11), mamba_value=5)

    assert not result.mamba_exist
    assert result.last_node.mamba_value == 5
    assert not result.last_node.mamba_tombstone
    assert (cache.total_size(), sizes(cache)) == (2, (1, 0))
    assert pool.take() == ([], [])


def test_a_state_that_exists_stays_and_the_new_one_is_the_callers(cache: MambaRadixCache, pool: Freed) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)

    result = cache.insert(key(1, 2), row(20, 21), mamba_value=6)

    assert result.mamba_exist
    assert result.last_node.mamba_value == 5
    assert result.duplicate_indices.tolist() == [20, 21]
    assert pool.take() == ([], [])
    assert sizes(cache) == (1, 0)


def test_only_the_final_node_is_asked_whether_a_state_exists(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)

    below = cache.insert(key(1, 2, 3), row(10, 11, 12), mamba_value=6)
    above = cache.insert(key(1), row(10), mamba_value=7)

    assert (below.mamba_exist, above.mamba_exist) == (False, False)
    assert states(cache) == {1: 7, 2: 5, 3: 6}


def test_a_state_exists_for_an_insert_without_one_too(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)

    assert cache.insert(key(1, 2), row(10, 11)).mamba_exist
    assert not cache.insert(key(1), row(10)).mamba_exist


def test_a_state_needs_whole_pages(pool: Freed) -> None:
    cache = MambaRadixCache(2, pool, pool)

    for ids in ([], [1], [1, 2, 3]):
        with pytest.raises(InvalidKeyError):
            cache.insert(RadixKey(ids), torch.arange(10, 14), mamba_value=5)

    assert (cache.total_size(), sizes(cache)) == (0, (0, 0))
    cache.check_invariants()


def test_a_state_is_attached_to_a_node_that_has_none(cache: MambaRadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    assert node.mamba_tombstone

    assert cache.attach_state(node, 5) is False
    assert cache.attach_state(node, 6) is True
    assert cache.attach_state(node, None) is True

    assert usable(cache, 1, 2) == (2, None)
    assert states(cache) == {2: 5}


def test_an_insert_can_go_on_from_a_node_above_or_below_the_last_state(cache: MambaRadixCache, pool: Freed) -> None:
    first = cache.insert(key(1, 2), row(10, 11), mamba_value=5).last_node

    result = cache.insert(key(1, 2, 3), row(10, 11, 12), from_node=first, mamba_value=6)
    cache.insert(key(1, 2, 3, 4), row(10, 11, 12, 13), from_node=result.last_node, mamba_value=7)

    assert states(cache) == {2: 5, 3: 6, 4: 7}


def test_namespaces_have_states_of_their_own(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2, ns="a"), row(10, 11), mamba_value=5)

    assert usable(cache, 1, 2) == (0, None)
    assert cache.match_prefix(key(1, 2, ns="a")).prefix_len == 2


@pytest.fixture
def real() -> Iterator[tuple[MambaRadixCache, MambaPool]]:
    """A cache over four states that are really handed out."""
    states = MambaPool(4)
    cache = MambaRadixCache(1, None, states)
    yield cache, states
    cache.evict(100)
    cache.check_invariants()
    states.check_invariants()


def test_a_state_that_was_not_handed_out_is_refused_before_anything_changes(real: Any) -> None:
    cache, _ = real

    for slot in (0, -1, 1, 99):
        with pytest.raises(SlotError, match="was not handed out"):
            cache.insert(key(1, 2), row(1, 2), mamba_value=slot)
    with pytest.raises(TypeError):
        cache.insert(key(1, 2), row(1, 2), mamba_value=1.5)

    assert cache.total_size() == 0


def test_a_state_that_the_tree_has_already_is_refused_for_another_node(real: Any) -> None:
    cache, states = real
    slot = states.alloc_track_slot()
    cache.insert(key(1, 2), row(1, 2), mamba_value=slot)

    with pytest.raises(SlotError, match="the tree has it already"):
        cache.insert(key(3, 4), row(3, 4), mamba_value=slot)

    assert (cache.total_size(), cache.evict(100), states.available_size()) == (2, EvictResult(2, 0, 1), 4)


def test_a_state_cannot_be_given_to_a_node_of_another_cache(real: Any) -> None:
    cache, states = real
    node = MambaRadixCache(1, None, states).insert(key(1), row(1)).last_node

    with pytest.raises(StaleNodeError, match="not in the tree"):
        cache.attach_state(node, states.alloc_track_slot())

    assert cache.mamba_evictable_size() == 0


def test_a_state_that_its_pool_refuses_raises_once_it_has_left_the_tree(real: Any) -> None:
    """A caller freed a state that was the tree's."""
    cache, states = real
    slots = [states.alloc_track_slot() for _ in range(3)]
    for token, slot in enumerate(slots):
        cache.insert(key(token), row(token + 1), mamba_value=slot)
    states.free_track_slot(slots[1])

    with pytest.raises(SlotError, match=f"refused states that were in the tree: {slots[1]}: "):
        cache.evict(100)

    assert (cache.total_size(), cache.mamba_evictable_size()) == (0, 0)
    cache.check_invariants()
    cache.evict(1)
    assert states.available_size() == 4, "the next eviction frees those after the refused one"


# ---------------------------------------------------------------- locks


def test_a_lock_holds_its_own_state_and_the_kv_up_to_the_root(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)
    leaf = cache.insert(key(1, 2, 3), row(10, 11, 12), mamba_value=6).last_node

    assert cache.inc_lock_ref(leaf) is None

    assert (cache.evictable_size(), cache.protected_size()) == (0, 3)
    assert sizes(cache) == (1, 1)
    assert [node.full_lock_ref >= node.mamba_lock_ref for node in cache.full_lru] == [True, True]
    cache.dec_lock_ref(leaf)
    assert sizes(cache) == (2, 0)


def test_a_locked_state_is_not_evicted(cache: MambaRadixCache, pool: Freed) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)
    leaf = cache.insert(key(1, 2, 3), row(10, 11, 12), mamba_value=6).last_node
    cache.inc_lock_ref(leaf)

    assert cache.evict(99, 99) == EvictResult(0, 0, 1)

    assert pool.take() == ([], [5])
    assert usable(cache, 1, 2, 3) == (3, None)


def test_a_state_is_held_until_its_last_lock_goes(cache: MambaRadixCache) -> None:
    leaf = cache.insert(key(1), row(10), mamba_value=5).last_node
    cache.inc_lock_ref(leaf)
    cache.inc_lock_ref(leaf)

    cache.dec_lock_ref(leaf)
    assert sizes(cache) == (0, 1)
    cache.dec_lock_ref(leaf, None)

    assert sizes(cache) == (1, 0)
    with pytest.raises(LockError):
        cache.dec_lock_ref(leaf)
    assert sizes(cache) == (1, 0)


def test_a_state_attached_under_a_lock_is_held_by_it(cache: MambaRadixCache) -> None:
    leaf = cache.insert(key(1), row(10)).last_node
    cache.inc_lock_ref(leaf)

    cache.attach_state(leaf, 5)

    assert sizes(cache) == (0, 1)
    cache.dec_lock_ref(leaf)
    assert sizes(cache) == (1, 0)


def test_a_split_leaves_the_state_lock_on_the_child(cache: MambaRadixCache) -> None:
    leaf = cache.insert(key(1, 2), row(10, 11), mamba_value=5).last_node
    cache.inc_lock_ref(leaf)

    cache.insert(key(1), row(10), mamba_value=6)

    assert sizes(cache) == (1, 1)
    assert cache.evict(0, 99) == EvictResult(0, 0, 1)
    assert states(cache) == {1: None, 2: 5}


def test_a_lock_of_the_root_or_without_its_receipt_changes_nothing(cache: MambaRadixCache) -> None:
    leaf = cache.insert(key(1), row(10), mamba_value=5).last_node
    cache.inc_lock_ref(leaf)

    cache.inc_lock_ref(cache.root)
    cache.dec_lock_ref(cache.root, swa_boundary_id=None)
    with pytest.raises(LockError):
        cache.dec_lock_ref(leaf, 7)

    assert (cache.protected_size(), sizes(cache)) == (1, (0, 1))


# ---------------------------------------------------------------- eviction


def test_a_leaf_goes_with_its_state(cache: MambaRadixCache, pool: Freed) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)

    assert cache.evict(1) == EvictResult(2, 0, 1)

    assert pool.take() == ([10, 11], [5])
    assert sizes(cache) == (0, 0)


def test_the_state_of_an_inner_node_goes_alone(cache: MambaRadixCache, pool: Freed) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)
    cache.insert(key(1, 2, 3), row(10, 11, 12), mamba_value=6)

    assert cache.evict(0, 1) == EvictResult(0, 0, 1)

    assert pool.take() == ([], [5])
    assert usable(cache, 1, 2) == (0, 2)
    assert usable(cache, 1, 2, 3) == (3, None)


def test_an_unlocked_leaf_whose_state_is_wanted_goes_whole(cache: MambaRadixCache, pool: Freed) -> None:
    cache.insert(key(1, 2), row(10, 11), mamba_value=5)
    cache.insert(key(3), row(12), mamba_value=6)

    assert cache.evict(0, 1) == EvictResult(2, 0, 1)
    assert pool.take() == ([10, 11], [5])


def test_the_state_of_a_node_that_is_held_from_below_goes_alone(cache: MambaRadixCache, pool: Freed) -> None:
    leaf = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.inc_lock_ref(leaf)
    cache.insert(key(1), row(10), mamba_value=6)

    assert cache.evict(0, 99) == EvictResult(0, 0, 1)
    assert pool.take() == ([], [6])


def test_states_that_full_eviction_frees_count(cache: MambaRadixCache) -> None:
    cache.insert(key(1), row(10), mamba_value=5)
    cache.insert(key(2), row(11), mamba_value=6)

    assert cache.evict(1, 1) == EvictResult(1, 0, 1)


def test_the_state_that_was_longest_unused_goes_first(cache: MambaRadixCache, pool: Freed) -> None:
    cache.insert(key(1), row(10), mamba_value=5)
    cache.insert(key(1, 2), row(10, 11), mamba_value=6)
    cache.insert(key(1, 2, 3), row(10, 11, 12), mamba_value=7)
    cache.match_prefix(key(1))
    cache.match_prefix(key(1, 2, 3))  # goes through the other two, but uses its own state alone

    assert [node.mamba_value for node in cache.mamba_lru] == [6, 5, 7]
    cache.evict(0, 2)
    assert pool.take() == ([], [6, 5])


def test_an_insert_uses_the_state_at_its_end(cache: MambaRadixCache) -> None:
    cache.insert(key(1), row(10), mamba_value=5)
    cache.insert(key(2), row(11), mamba_value=6)

    cache.insert(key(1), row(10))

    assert [node.mamba_value for node in cache.mamba_lru] == [6, 5]


def test_a_peek_uses_no_state(cache: MambaRadixCache) -> None:
    cache.insert(key(1), row(10), mamba_value=5)
    cache.insert(key(2), row(11), mamba_value=6)

    cache.peek_prefix(key(1))

    assert [node.mamba_value for node in cache.mamba_lru] == [5, 6]


def test_the_full_order_has_each_child_after_its_parent(cache: MambaRadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(3), row(12))
    cache.insert(key(1, 2, 4), row(10, 11, 13))

    order = [(node.end, tuple(node.key or ())) for node in cache.full_lru]

    assert order == [(1, (3,)), (2, (1, 2)), (3, (4,))]
    assert len(cache.full_lru) == 3


def test_evicting_states_that_are_not_there_is_no_error(cache: MambaRadixCache) -> None:
    assert cache.evict(5, 5) == EvictResult(0, 0, 0)
    cache.insert(key(1), row(10))
    assert cache.evict(0, 5) == EvictResult(0, 0, 0)


def test_each_evicted_node_is_told_once(pool: Freed) -> None:
    told: list[int] = []
    cache = MambaRadixCache(1, pool, pool, told.append)
    first = cache.insert(key(1), row(10), mamba_value=5).last_node
    second = cache.insert(key(1, 2), row(10, 11), mamba_value=6).last_node

    cache.evict(0, 1)
    assert told == []
    cache.evict(99, 99)

    assert told == [second.id, first.id]


# ---------------------------------------------------------------- reset and retire


def test_a_reset_gives_back_every_state_locked_or_not(cache: MambaRadixCache, pool: Freed) -> None:
    leaf = cache.insert(key(1), row(10), mamba_value=5).last_node
    cache.insert(key(2), row(11), mamba_value=6)
    cache.inc_lock_ref(leaf)

    cache.reset()

    assert (sorted(pool.slots), sorted(pool.states)) == ([10, 11], [5, 6])
    assert (cache.total_size(), sizes(cache), len(cache.mamba_lru)) == (0, (0, 0), 0)
    with pytest.raises(StaleNodeError):
        cache.dec_lock_ref(leaf)


def test_retired_states_go_when_nobody_holds_them(cache: MambaRadixCache, pool: Freed) -> None:
    leaf = cache.insert(key(1), row(10), mamba_value=5).last_node
    cache.inc_lock_ref(leaf)
    cache.retire_all()

    assert cache.reclaim_retired() == 0
    assert sizes(cache) == (0, 1)
    cache.dec_lock_ref(leaf)

    assert cache.reclaim_retired() == 1
    assert pool.take() == ([10], [5])


def test_a_request_works_on_its_own_copy_of_a_state() -> None:
    states = MambaPool(4, [[(2,)]])
    cache = MambaRadixCache(mamba_pool=states)
    theirs = states.alloc_track_slot()
    states.layers[0][0][theirs] = torch.tensor([1.5, -2.5])
    node = cache.insert(key(1, 2), mamba_value=theirs).last_node

    cache.inc_lock_ref(node)
    mine = states.alloc_track_slot()
    states.copy_states(node.mamba_value, mine)
    states.layers[0][0][mine] *= 2

    assert states.layers[0][0][theirs].tolist() == [1.5, -2.5]
    assert states.layers[0][0][mine].tolist() == [3.0, -5.0]
    cache.dec_lock_ref(node)
    cache.evict(0, 1)
    assert states.available_size() == 3
    states.check_invariants()


def test_chunks_have_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        MambaRadixCache(chunk_size=0)


# ---------------------------------------------------------------- what it costs


def fill(cache: MambaRadixCache, first: int, stop: int) -> list[Any]:
    """One node with a state for each token; returns them."""
    return [cache.insert(key(token), mamba_value=token + 1).last_node for token in range(first, stop)]


@pytest.mark.parametrize("num_nodes", [1_000, 10_000])
def test_the_steps_for_a_victim_do_not_grow_with_the_tree(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    cache = MambaRadixCache()
    fill(cache, 0, num_nodes)
    monkeypatch.setattr(cache.parts.tree, "nodes_below", lambda top: pytest.fail("an eviction walked the tree"))

    done = queue_operations(monkeypatch)
    cache.evict(0, 1)
    assert len(done) <= 4  # out of both queues
    done.clear()
    cache.evict(1)
    assert len(done) <= 4
    monkeypatch.undo()


def test_a_chain_of_ten_thousand_nodes_works(pool: Freed) -> None:
    deep = 10_000
    cache = MambaRadixCache(1, pool, pool)
    ids = RadixKey(range(deep))
    node: Any = cache.insert(ids, mamba_value=deep).last_node
    for length in range(deep - 1, 0, -1):
        top = cache.insert(ids[:length], mamba_value=length).last_node  # each cuts the topmost node once more
        assert top.end == length
    assert len(cache.tree_starts()) == deep

    assert cache.peek_prefix(ids).prefix_len == deep
    assert cache.match_prefix(ids).last_node is node
    cache.inc_lock_ref(node)
    assert sizes(cache) == (deep - 1, 1)
    assert cache.evict(1, deep) == EvictResult(0, 0, deep - 1)
    assert cache.match_prefix(ids).prefix_len == deep
    assert len(cache.compute_node_hash(node)) == 1
    assert len(cache.full_lru) == deep
    cache.check_invariants()
    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
        cache.pretty_print()
    cache.dec_lock_ref(node)
    assert cache.evict(0, 1) == EvictResult(1, 0, 1)
    assert cache.evict(4999).full_evicted == 4999
    cache.retire_all()
    assert cache.reclaim_retired() == 5000
    cache.check_invariants()


def test_locked_states_do_not_slow_eviction_down(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = MambaRadixCache()
    for node in fill(cache, 0, 500):
        cache.inc_lock_ref(node)
    fill(cache, 500, 520)
    done = queue_operations(monkeypatch)

    assert cache.evict(0, 10).mamba_evicted == 10

    assert len(done) <= 40


def test_a_state_is_not_attached_to_a_node_that_has_gone(cache: MambaRadixCache) -> None:
    node = cache.insert(key(1), row(10)).last_node
    cache.evict(1)

    with pytest.raises(StaleNodeError):
        cache.attach_state(node, 5)


def test_a_state_is_not_attached_to_the_root(cache: MambaRadixCache) -> None:
    with pytest.raises(InvalidKeyError):
        cache.attach_state(cache.root, 5)
