"""Sliding windows in `RadixCache`, claim by claim: usable prefixes, locks, healing, and eviction."""

from contextlib import redirect_stdout
from os import devnull
from typing import Any, cast

import pytest
import torch
from support.faults.count_queue_operations import queue_operations

from raydix.cache_core import (
    EvictResult,
    InvalidKeyError,
    LockError,
    MambaRadixCache,
    RadixCache,
    RadixKey,
    SlotError,
    StaleNodeError,
    SWATokenToKVPoolAllocator,
    TreeNode,
)


class BothHalves:
    """A pool that records freed slots, freed window halves, and moved halves."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.halves: list[int] = []
        self.moved: list[tuple[list[int], list[int]]] = []

    def free(self, indices: torch.Tensor) -> None:
        self.slots += indices.tolist()

    def free_swa(self, indices: torch.Tensor) -> None:
        self.halves += indices.tolist()

    def transfer_swa(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.moved.append((src.tolist(), dst.tolist()))

    def take(self) -> tuple[list[int], list[int]]:
        """The slots and the halves that came back since the last call."""
        taken, self.slots, self.halves = (self.slots, self.halves), [], []
        return taken


@pytest.fixture
def pool() -> BothHalves:
    return BothHalves()


@pytest.fixture
def cache(pool: BothHalves) -> Any:
    """A window of four tokens, one token a page."""
    cache = RadixCache(1, 4, pool)
    yield cache
    cache.check_invariants()


def key(*ids: int, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def row(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def picture(cache: RadixCache) -> str:
    """The one path of a cache as in the examples: "t4 l3"."""
    nodes = sorted(cache.parts.tree.nodes(), key=lambda node: node.end)
    return " ".join(f"{'t' if node.swa_tombstone else 'l'}{len(node)}" for node in nodes)


def build(cache: RadixCache, shape: str) -> TreeNode:
    """A path of nodes like "t4 l3" over tokens 1, 2, ... in slots 10, 11, ...; returns its end."""
    end, node = 0, cache.root
    for run in shape.split():
        start, end = end, end + int(run[1:])
        lost = end if run[0] == "t" else start
        slots = torch.arange(10, 10 + end)
        node = cache.insert(RadixKey(range(1, end + 1)), slots, from_node=node, swa_evicted_seqlen=lost).last_node
    assert picture(cache) == shape, "no run may be longer than a tail"
    return node


def hit(cache: RadixCache, length: int) -> int:
    """How much of a query of that many tokens can be used."""
    ids = RadixKey(list(range(1, length + 1)))
    peeked = cache.peek_prefix(ids).prefix_len
    assert cache.match_prefix(ids).prefix_len == peeked
    return peeked


def sizes(cache: RadixCache) -> tuple[int, int]:
    return cache.swa_evictable_size(), cache.swa_protected_size()


# ---------------------------------------------------------------- match


@pytest.mark.parametrize(
    ("shape", "query", "usable"),
    [
        ("t4 l3", 7, 0),
        ("t4 l4", 8, 8),
        ("l2", 2, 2),
        ("l1 t1", 2, 1),
        ("l4 t2 l2", 8, 4),
        ("l4 t2 l4 l1", 11, 11),
        ("l4 t2 l4 l1", 9, 4),
        ("t2 l4 l2", 5, 0),
        ("t2 l4 l2", 6, 6),
        ("l1 l1 l1", 3, 3),
        ("t1", 1, 0),
    ],
)
def test_a_match_ends_where_its_last_window_is_live(shape: str, query: int, usable: int) -> None:
    cache = RadixCache(1, 4)
    build(cache, shape)

    assert hit(cache, query) == usable
    cache.check_invariants()


def test_a_match_tells_how_long_the_full_prefix_is(cache: RadixCache) -> None:
    build(cache, "l4 t2 l2")

    found = cache.match_prefix(RadixKey(list(range(1, 9))))

    assert found.indices.tolist() == [10, 11, 12, 13]
    assert (found.prefix_len, found.full_prefix_len, found.mamba_branching_seqlen) == (4, 8, 8)


def test_a_match_that_reaches_the_full_prefix_has_nothing_to_add(cache: RadixCache) -> None:
    build(cache, "t4 l4")

    found = cache.match_prefix(RadixKey(list(range(1, 9))))

    assert (found.full_prefix_len, found.mamba_branching_seqlen) == (8, None)


def test_a_window_within_a_page_needs_the_page() -> None:
    cache = RadixCache(4, 2)
    build(cache, "t4 l4")

    assert hit(cache, 8) == 8
    assert hit(cache, 7) == 0


def test_what_is_inserted_is_found_up_to_its_last_page(pool: BothHalves) -> None:
    cache = RadixCache(4, 6, pool)
    cache.insert(RadixKey(range(18)), torch.arange(100, 118), swa_evicted_seqlen=8)

    assert cache.peek_prefix(RadixKey(range(18))).prefix_len == 16
    cache.check_invariants()


# ---------------------------------------------------------------- insert: tombstones and the leaf cap


@pytest.mark.parametrize(
    ("page_size", "window", "length", "runs"),
    [
        (1, 4, 3, [3]),
        (1, 4, 6, [6]),
        (1, 4, 10, [4, 6]),
        (2, 4, 10, [4, 6]),
        (4, 4, 12, [4, 8]),
        (4, 6, 20, [8, 12]),
        (4, 3, 12, [4, 8]),
        (16, 5, 48, [16, 32]),
    ],
)
def test_a_new_leaf_is_at_most_one_window_and_the_pages_of_two_tokens_long(
    page_size: int, window: int, length: int, runs: list[int]
) -> None:
    cache = RadixCache(page_size, window)

    leaf = cache.insert(RadixKey(range(length))).last_node

    assert [len(node) for node in sorted(cache.parts.tree.nodes(), key=lambda node: node.end)] == runs
    cache.inc_lock_ref(leaf)
    assert sizes(cache) == (length - runs[-1], runs[-1])
    cache.check_invariants()


def test_what_lost_its_window_before_the_insert_is_a_tombstone(cache: RadixCache) -> None:
    cache.insert(RadixKey(range(1, 13)), torch.arange(10, 22), swa_evicted_seqlen=5)

    assert picture(cache) == "t5 l1 l6"
    assert hit(cache, 12) == 12


def test_a_leaf_without_any_window_is_a_tombstone_with_full_kv(cache: RadixCache, pool: BothHalves) -> None:
    result = cache.insert(RadixKey(range(1, 7)), torch.arange(10, 16), swa_evicted_seqlen=99)

    assert picture(cache) == "t6"
    assert result.duplicate_indices.tolist() == []
    assert (cache.total_size(), sizes(cache)) == (6, (0, 0))
    assert pool.take() == ([], [])


def test_the_length_without_window_is_rounded_up_to_pages() -> None:
    cache = RadixCache(4, 4)
    cache.insert(RadixKey(range(12)), swa_evicted_seqlen=5)

    assert picture(cache) == "t8 l4"


# ---------------------------------------------------------------- insert: healing


def test_an_unlocked_tombstone_takes_the_incoming_slots_and_frees_its_own(cache: RadixCache, pool: BothHalves) -> None:
    build(cache, "t4 l4")

    result = cache.insert(RadixKey(range(1, 9)), torch.arange(20, 28))

    assert picture(cache) == "l4 l4"
    assert pool.take() == ([10, 11, 12, 13], [])
    assert result.duplicate_indices.tolist() == [24, 25, 26, 27]
    assert cache.peek_prefix(RadixKey(range(1, 9))).indices.tolist() == [20, 21, 22, 23, 14, 15, 16, 17]
    assert sizes(cache) == (8, 0)


def test_an_insert_raises_once_a_tombstone_has_healed_if_the_pool_refuses_its_old_slots() -> None:
    pool = SWATokenToKVPoolAllocator(32, 32)
    cache = RadixCache(1, 4, pool)
    old = pool.alloc(8)
    cache.insert(RadixKey(range(4)), old[:4])
    cache.insert(RadixKey(range(8)), old)
    cache.evict(0, 4)
    assert picture(cache) == "t4 l4"
    fresh = pool.alloc(8)
    pool.free(old[1:2])  # a caller's mistake

    with pytest.raises(
        SlotError, match=r"refused slots that were in the tree: 1, 2, 3, 4: freed slots must be allocated"
    ):
        cache.insert(RadixKey(range(8)), fresh)

    assert picture(cache) == "l4 l4"
    assert cache.peek_prefix(RadixKey(range(4))).indices.tolist() == fresh[:4].tolist()
    cache.check_invariants()
    assert cache.evict(8, 8) == EvictResult(8, 8)


def test_a_locked_tombstone_keeps_its_slots_and_takes_the_window_halves(cache: RadixCache, pool: BothHalves) -> None:
    leaf = build(cache, "t4 l6")
    cache.inc_lock_ref(leaf)

    result = cache.insert(RadixKey(range(1, 11)), torch.arange(20, 30))

    assert picture(cache) == "l4 l6"
    assert pool.moved == [([20, 21, 22, 23], [10, 11, 12, 13])]
    assert pool.take() == ([], [])
    assert result.duplicate_indices.tolist() == list(range(20, 30))
    assert sizes(cache) == (4, 6)


@pytest.mark.parametrize("kind", [RadixCache, MambaRadixCache])
@pytest.mark.parametrize("in_pages", [False, True])
def test_a_pool_may_evict_and_insert_while_it_takes_back_what_a_tombstone_had(kind: Any, in_pages: bool) -> None:
    class Woken(SWATokenToKVPoolAllocator):
        woken: Any = None

        def free(self, indices: torch.Tensor) -> None:
            super().free(indices)
            woken, self.woken = self.woken, None
            if woken is not None:
                woken()

    pool = Woken(32, 32)
    cache = kind(1, token_to_kv_pool_allocator=pool, sliding_window_size=4)
    cache.insert(RadixKey(range(4)), old := pool.alloc(4))
    cache.insert(RadixKey(range(8)), torch.cat((old, pool.alloc(4))), prev_prefix_len=4)
    cache.evict(0, 4)
    assert picture(cache) == "t4 l4"
    fresh = pool.alloc(12)

    def wake() -> None:
        assert picture(cache) == "l4 l4 l4"
        cache.evict(99)
        cache.insert(RadixKey(range(8)), pool.alloc(8))

    pool.woken = wake
    if in_pages:
        pages = cache.insert_pages(RadixKey(range(12)), fresh.numpy(), cache.root)
        duplicates = torch.from_numpy(fresh.numpy()[:8][fresh.numpy()[:8] != pages.existing])
    else:
        state = {"mamba_value": 7} if kind is MambaRadixCache else {}
        duplicates = cache.insert(RadixKey(range(12)), fresh, **state).duplicate_indices

    assert duplicates.tolist() == fresh[4:8].tolist()
    pool.free(duplicates)
    cache.check_invariants()
    assert pool.available_size() + cache.total_size() == 32
    cache.reset()
    assert (pool.available_size(), pool.swa_available_size()) == (32, 32)


@pytest.mark.parametrize(("page", "tail"), [(1, 3), (4, 8)])
def test_a_pool_whose_own_class_frees_by_slots_is_handed_slots(page: int, tail: int) -> None:
    class Watched(SWATokenToKVPoolAllocator):
        def free(self, indices: torch.Tensor) -> None:
            told.append(("slots", len(indices)))
            super().free(indices)

        def free_swa(self, indices: torch.Tensor) -> None:
            told.append(("window halves", len(indices)))
            super().free_swa(indices)

    told: list[tuple[str, int]] = []
    pool = Watched(8 * page, 8 * page, page)
    cache = RadixCache(page, page, pool)
    cache.insert(RadixKey(range(4 * page)), pool.alloc(4 * page))

    cache.evict(0, page)
    cache.evict(page)

    assert told == [("window halves", 4 * page - tail), ("slots", tail)]


def test_what_a_tombstone_had_is_freed_though_its_insert_is_cut_short(cache: RadixCache, pool: BothHalves) -> None:
    class Sink:
        def stored(self, run: Any) -> None:
            raise KeyboardInterrupt

    build(cache, "t4 l4")
    cache.publish_events_to(cast(Any, Sink()))

    with pytest.raises(KeyboardInterrupt):
        cache.insert(RadixKey(range(1, 13)), torch.arange(20, 32))

    assert pool.take() == ([10, 11, 12, 13], [])
    assert picture(cache).startswith("l4 l4")


def test_what_several_tombstones_had_is_freed_in_one_call(cache: RadixCache, pool: BothHalves) -> None:
    build(cache, "t2 l4 t4 l4")
    freed: list[list[int]] = []
    vars(pool)["free"] = lambda indices: freed.append(indices.tolist())

    cache.insert(RadixKey(range(1, 15)), torch.arange(30, 44))

    assert freed == [[10, 11, 16, 17, 18, 19]]


@pytest.mark.parametrize("error", [SlotError("not moved"), ValueError("not moved"), KeyError("not moved")], ids=repr)
def test_an_insert_raises_and_a_locked_tombstone_stays_one_if_the_pool_refuses_to_move_halves(
    cache: RadixCache, pool: BothHalves, error: Exception
) -> None:
    def refuse(src: torch.Tensor, dst: torch.Tensor) -> None:
        raise error

    leaf = build(cache, "t4 l4")
    receipt = cache.inc_lock_ref(leaf)
    assert cache.parts.window is not None
    cache.parts.window.transfer_swa = refuse

    with pytest.raises(SlotError, match=r"to move window halves to slots that are in the tree: 10, 11, .*not moved"):
        cache.insert(RadixKey(range(1, 10)), torch.arange(20, 29))

    assert picture(cache) == "t4 l4"
    assert sizes(cache) == (0, 4)
    cache.check_invariants()
    cache.dec_lock_ref(leaf, receipt)
    assert cache.evict(0, 1) == EvictResult(4, 4, 0)


def test_a_state_that_cannot_be_is_no_refusal_to_move_halves(cache: RadixCache) -> None:
    def fail(src: torch.Tensor, dst: torch.Tensor) -> None:
        raise AssertionError("a page is lost")

    cache.inc_lock_ref(build(cache, "t4 l4"))
    assert cache.parts.window is not None
    cache.parts.window.transfer_swa = fail

    with pytest.raises(AssertionError, match="lost"):
        cache.insert(RadixKey(range(1, 9)), torch.arange(20, 28))

    assert picture(cache) == "t4 l4"


def test_a_tombstone_in_a_held_window_is_held_once_it_is_healed(cache: RadixCache) -> None:
    leaf = build(cache, "l4 t2")
    receipt = cache.inc_lock_ref(leaf)
    assert sizes(cache) == (0, 4)

    cache.insert(RadixKey(range(1, 7)), torch.arange(20, 26))

    assert sizes(cache) == (0, 6)
    cache.dec_lock_ref(leaf, receipt)
    assert sizes(cache) == (6, 0)


def test_a_locked_tombstone_stays_one_if_the_pool_cannot_move_halves(pool: BothHalves) -> None:
    vars(pool)["transfer_swa"] = None
    cache = RadixCache(1, 4, pool)
    cache.inc_lock_ref(build(cache, "t4 l4"))

    result = cache.insert(RadixKey(range(1, 9)), torch.arange(20, 28))

    assert picture(cache) == "t4 l4"
    assert result.duplicate_indices.tolist() == list(range(20, 28))
    cache.check_invariants()


def test_a_tombstone_heals_from_where_the_window_was_kept(cache: RadixCache, pool: BothHalves) -> None:
    build(cache, "t4 l4")

    cache.insert(RadixKey(range(1, 9)), torch.arange(20, 28), swa_evicted_seqlen=3)

    assert picture(cache) == "t3 l1 l4"
    assert pool.take() == ([13], [])


@pytest.mark.parametrize("argument", ["prev_prefix_len", "swa_evicted_seqlen"])
def test_a_tombstone_does_not_heal_by_what_brings_no_window(cache: RadixCache, pool: BothHalves, argument: str) -> None:
    build(cache, "t4 l4")

    cache.insert(RadixKey(range(1, 9)), torch.arange(20, 28), **{argument: 4})  # type: ignore[arg-type]

    assert picture(cache) == "t4 l4"
    assert pool.take() == ([], [])


def test_the_trees_own_slots_heal_nothing(cache: RadixCache, pool: BothHalves) -> None:
    build(cache, "t4 l4")

    result = cache.insert(RadixKey(range(1, 10)), torch.arange(10, 19))

    assert picture(cache) == "t4 l4 l1"
    assert result.duplicate_indices.tolist() == []
    assert pool.take() == ([], [])


def test_a_healed_page_outlives_the_page_that_healed_it() -> None:
    allocator = SWATokenToKVPoolAllocator(32, 32, 4)
    cache = RadixCache(4, 4, allocator)
    text = RadixKey(range(12))
    leaf = cache.insert(text, allocator.alloc(12)).last_node
    cache.evict(0, 4)
    receipt = cache.inc_lock_ref(leaf)

    result = cache.insert(text, allocator.alloc(12))
    allocator.free(result.duplicate_indices)

    assert len(result.duplicate_indices) == 12
    assert bool((allocator.swa_slots(cache.peek_prefix(text).indices) > 0).all())
    cache.dec_lock_ref(leaf, receipt)
    cache.evict(99)
    assert (allocator.available_size(), allocator.swa_available_size()) == (32, 32)
    allocator.check_invariants()


# ---------------------------------------------------------------- locks


def test_a_lock_holds_the_nodes_of_the_tail_and_no_more(cache: RadixCache) -> None:
    leaf = build(cache, "l3 l3 l3")

    cache.inc_lock_ref(leaf)

    assert (cache.evictable_size(), cache.protected_size()) == (0, 9)
    assert sizes(cache) == (3, 6)


def test_a_tail_counts_tombstones_by_position(cache: RadixCache) -> None:
    leaf = build(cache, "l3 t5 l1")

    cache.inc_lock_ref(leaf)

    assert sizes(cache) == (3, 1)


def test_a_locked_tail_is_never_made_a_tombstone(cache: RadixCache, pool: BothHalves) -> None:
    leaf = build(cache, "l3 l3 l3")
    cache.inc_lock_ref(leaf)

    assert cache.evict(99, 99) == EvictResult(0, 3, 0)
    assert picture(cache) == "t3 l3 l3"
    assert pool.take() == ([], [10, 11, 12])
    assert [hit(cache, length) for length in (9, 8, 7)] == [9, 8, 7]


def test_a_split_within_a_held_window_holds_both_halves(cache: RadixCache) -> None:
    leaf = cache.insert(key(1, 2, 3, 4), row(10, 11, 12, 13)).last_node
    receipt = cache.inc_lock_ref(leaf)
    cache.match_prefix(key(1, 2))

    assert cache.evict(99, 99) == EvictResult(0, 0, 0)
    assert sizes(cache) == (0, 4)
    cache.dec_lock_ref(leaf, receipt)
    assert sizes(cache) == (4, 0)


def test_an_unlock_leaves_the_windows_of_others(cache: RadixCache) -> None:
    leaf = build(cache, "l4 l4")
    above = leaf.parent
    assert above is not None
    first, second = cache.inc_lock_ref(leaf), cache.inc_lock_ref(above)
    assert sizes(cache) == (0, 8)

    cache.dec_lock_ref(leaf, first)

    assert sizes(cache) == (4, 4)
    cache.dec_lock_ref(above, second)
    assert sizes(cache) == (8, 0)


def test_a_lock_gives_a_receipt_also_where_its_window_reaches_the_root(cache: RadixCache) -> None:
    leaf = build(cache, "l2")

    receipt = cache.inc_lock_ref(leaf)

    assert receipt is not None
    cache.dec_lock_ref(leaf, receipt)


def test_a_receipt_may_be_handed_back_by_name(cache: RadixCache) -> None:
    leaf = build(cache, "l2")

    cache.dec_lock_ref(leaf, swa_boundary_id=cache.inc_lock_ref(leaf))

    assert cache.protected_size() == 0


def test_the_root_can_be_locked_to_no_effect(cache: RadixCache) -> None:
    receipt = cache.inc_lock_ref(cache.root)
    cache.dec_lock_ref(cache.root, receipt)

    with pytest.raises(LockError):
        cache.dec_lock_ref(cache.root, receipt)


def test_an_unlock_without_its_own_unused_receipt_changes_nothing(cache: RadixCache) -> None:
    leaf = build(cache, "l4 l4")
    receipt, other = cache.inc_lock_ref(leaf), cache.inc_lock_ref(leaf.parent)  # type: ignore[arg-type]
    used = cache.inc_lock_ref(leaf)
    cache.dec_lock_ref(leaf, used)

    for wrong in (None, used, other, 7, (0, None)):
        with pytest.raises(LockError):
            cache.dec_lock_ref(leaf, wrong)

    assert (cache.protected_size(), sizes(cache)) == (8, (0, 8))
    cache.dec_lock_ref(leaf, receipt)


def test_without_a_window_there_is_no_receipt() -> None:
    cache = RadixCache()
    leaf = cache.insert(key(1)).last_node

    assert cache.inc_lock_ref(leaf) is None
    cache.dec_lock_ref(leaf, swa_boundary_id=None)
    assert not cache.supports_swa


def test_stale_nodes_are_neither_locked_nor_unlocked(cache: RadixCache) -> None:
    leaf = build(cache, "l4")
    receipt = cache.inc_lock_ref(leaf)
    cache.reset()

    with pytest.raises(StaleNodeError):
        cache.inc_lock_ref(leaf)
    with pytest.raises(StaleNodeError):
        cache.dec_lock_ref(leaf, receipt)
    assert sizes(cache) == (0, 0)


def test_a_window_can_be_given_up_before_its_lock(cache: RadixCache, pool: BothHalves) -> None:
    leaf = build(cache, "l4 l4")
    receipt = cache.inc_lock_ref(leaf)
    assert receipt is not None

    cache.release_window(leaf, receipt)
    cache.release_window(leaf, receipt)

    assert (cache.protected_size(), sizes(cache)) == (8, (8, 0))
    assert cache.evict(0, 99) == EvictResult(0, 8, 0)
    assert picture(cache) == "t4 t4"
    assert pool.take() == ([], [10, 11, 12, 13, 14, 15, 16, 17])
    cache.dec_lock_ref(leaf, receipt)
    assert cache.evictable_size() == 8


def test_a_window_is_given_up_in_its_own_cache(cache: RadixCache, pool: BothHalves) -> None:
    other = RadixCache(1, 4, pool)
    node = build(other, "l4")
    receipt = other.inc_lock_ref(node)

    with pytest.raises(StaleNodeError, match="not in the tree"):
        cache.release_window(node, receipt)
    with pytest.raises(LockError, match="of another cache"):
        cache.dec_lock_ref(node, receipt)

    assert (sizes(cache), sizes(other)) == ((0, 0), (0, 4))


# ---------------------------------------------------------------- eviction


def test_window_eviction_makes_tombstones_of_inner_nodes_and_takes_leaves_whole(
    cache: RadixCache, pool: BothHalves
) -> None:
    build(cache, "l4 l4")

    assert cache.evict(0, 1) == EvictResult(0, 4, 0)
    assert pool.take() == ([], [10, 11, 12, 13])
    assert cache.evict(0, 1) == EvictResult(4, 4, 0)
    assert pool.take() == ([14, 15, 16, 17], [])
    assert picture(cache) == "t4"
    assert cache.evict(99, 99) == EvictResult(4, 0, 0)


def test_windows_that_full_eviction_frees_count(cache: RadixCache) -> None:
    build(cache, "l4 l4")

    assert cache.evict(1, 4) == EvictResult(4, 4, 0)
    assert picture(cache) == "l4"


def test_window_eviction_is_by_the_last_tail_a_node_was_in(cache: RadixCache, pool: BothHalves) -> None:
    cache.insert(RadixKey(range(1, 11)), torch.arange(10, 20))
    cache.insert(RadixKey(range(21, 31)), torch.arange(20, 30))
    cache.match_prefix(key(1, 2, 3, 4))  # uses the upper four of the first
    cache.match_prefix(RadixKey(range(21, 31)))  # uses the lower six, though it goes through the upper

    went = []
    while cache.evict(0, 1).swa_evicted:
        went.append(pool.take())

    assert went == [
        ([], [20, 21, 22, 23]),  # in no tail
        ([14, 15, 16, 17, 18, 19], []),  # in the tail of the first insert, and a leaf
        ([10, 11, 12, 13], []),
        ([24, 25, 26, 27, 28, 29], []),
    ]


def test_window_kv_that_no_tail_had_goes_before_the_tails_of_idle_prefixes(cache: RadixCache, pool: BothHalves) -> None:
    cache.insert(RadixKey(range(6)), torch.arange(10, 16))
    for first in (100, 200):
        cache.insert(RadixKey(range(first, first + 20)), torch.arange(first, first + 20))

    assert cache.evict(0, 28) == EvictResult(0, 28, 0)

    assert sorted(pool.take()[1]) == [*range(100, 114), *range(200, 214)]
    assert cache.match_prefix(RadixKey(range(6))).prefix_len == 6


def test_a_match_refreshes_its_tail_only(cache: RadixCache, pool: BothHalves) -> None:
    build(cache, "l4 l6")
    cache.insert(key(50, 51), row(50, 51))
    cache.match_prefix(RadixKey(range(1, 11)))

    cache.evict(0, 1)
    assert pool.take() == ([], [10, 11, 12, 13])
    cache.evict(0, 1)
    assert pool.take() == ([50, 51], [])


def test_a_reset_gives_back_tombstones_by_their_full_half(cache: RadixCache, pool: BothHalves) -> None:
    build(cache, "l4 l4")
    cache.evict(0, 1)
    pool.take()

    cache.reset()

    assert (sorted(pool.slots), pool.halves) == (list(range(10, 18)), [])
    assert (cache.total_size(), sizes(cache)) == (0, (0, 0))


def test_retired_windows_can_be_evicted_and_reclaimed(cache: RadixCache, pool: BothHalves) -> None:
    leaf = build(cache, "l4 l6")
    receipt = cache.inc_lock_ref(leaf)
    cache.retire_all()

    assert cache.evict(0, 99).swa_evicted == 4
    cache.dec_lock_ref(leaf, receipt)
    assert cache.reclaim_retired() == 10
    assert pool.take() == ([14, 15, 16, 17, 18, 19, 10, 11, 12, 13], [10, 11, 12, 13])
    assert sizes(cache) == (0, 0)


# ---------------------------------------------------------------- what it costs


@pytest.mark.parametrize("num_nodes", [1_000, 10_000])
def test_the_steps_for_a_victim_do_not_grow_with_the_tree(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    cache = RadixCache(1, 4)
    for token in range(num_nodes // 2):
        cache.insert(RadixKey([token, 1, 2, 3, 4, 5, 6]))  # two nodes
    monkeypatch.setattr(cache.parts.tree, "nodes_below", lambda top: pytest.fail("an eviction walked the tree"))
    done = queue_operations(monkeypatch)

    cache.evict(0, 1)  # an inner node
    assert done == ["pop", "discard"]
    done.clear()
    cache.evict(0, 4)  # a leaf, whole; the node above it is a candidate then
    assert len(done) <= 10
    done.clear()
    cache.evict(4)
    assert len(done) <= 10
    monkeypatch.undo()


def test_a_chain_of_ten_thousand_nodes_works(pool: BothHalves) -> None:
    deep = 10_000
    cache = RadixCache(1, 4, pool)
    ids = RadixKey(range(deep))
    cache.insert(ids)
    for length in range(deep - 1, 0, -1):
        cache.match_pages(ids, limit=length)  # each cuts the topmost node once more
    assert len(cache.tree_starts()) == deep

    leaf = cache.match_prefix(ids).last_node
    receipt = cache.inc_lock_ref(leaf)
    assert sizes(cache) == (deep - 6, 6)
    assert cache.evict(1, deep) == EvictResult(0, deep - 6, 0)
    assert len(pool.take()[1]) == deep - 6
    assert cache.peek_prefix(ids).prefix_len == deep
    cache.insert(ids, torch.arange(deep, 2 * deep))
    assert sizes(cache) == (deep - 6, 6)
    assert len(cache.compute_node_hash(leaf)) == 1
    cache.check_invariants()
    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
        cache.pretty_print()
    cache.dec_lock_ref(leaf, receipt)
    assert cache.evict(5000).full_evicted == 5000
    cache.retire_all()
    assert cache.reclaim_retired() == 5000
    cache.check_invariants()


# ---------------------------------------------------------------- what others got wrong


def owned_once(cache: RadixCache, allocator: SWATokenToKVPoolAllocator, private: torch.Tensor) -> bool:
    """Whether each page is free, the tree's or the caller's, once."""
    pages = {int(start) for row in cache.tree_starts() for start in row // allocator.page_size}
    mine = set((private // allocator.page_size).tolist())
    free = set((allocator.free_starts() // allocator.page_size).tolist())
    together = len(pages) + len(mine) + len(free)
    return together == len(pages | mine | free) == allocator.num_slots // allocator.page_size


def test_a_tombstone_for_which_some_of_its_own_slots_come_back_loses_none() -> None:
    allocator = SWATokenToKVPoolAllocator(16, 16)
    cache = RadixCache(1, 4, allocator)
    old = allocator.alloc(8)
    cache.insert(RadixKey(range(8)), old)
    cache.evict(0, 4)
    new = allocator.alloc(6)

    result = cache.insert(RadixKey(range(8)), torch.cat((old[:2], new)))

    assert owned_once(cache, allocator, result.duplicate_indices)
    allocator.check_invariants()


def test_the_trees_own_slots_heal_nothing_however_they_are_kept(pool: BothHalves) -> None:
    cache = RadixCache(2, 4, pool)
    slots = row(10, 11, 13, 15, 20, 21, 22, 23)  # the second page is no run
    cache.insert(key(1, 2, 3, 4), slots[:4])
    cache.match_prefix(key(1, 2))
    cache.insert(key(1, 2, 3, 4, 5, 6, 7, 8), slots)
    cache.evict(0, 4)
    pool.take()

    cache.insert(key(1, 2, 3, 4, 5, 6, 7, 8), slots)

    assert pool.take() == ([], [])


def test_a_known_prefix_that_ends_within_a_page_of_a_tombstone_is_allowed() -> None:
    cache = RadixCache(4, 4, BothHalves())
    cache.insert(RadixKey(range(12)), torch.arange(8, 20))
    cache.evict(0, 4)

    cache.insert(RadixKey(range(12)), torch.arange(20, 32), prev_prefix_len=2)

    cache.check_invariants()


def test_a_window_released_after_a_reset_changes_nothing(cache: RadixCache) -> None:
    leaf = build(cache, "l4")
    receipt = cache.inc_lock_ref(leaf)
    assert receipt is not None
    cache.reset()

    with pytest.raises(StaleNodeError):
        cache.release_window(leaf, receipt)
    assert sizes(cache) == (0, 0)


def test_a_window_is_released_with_the_receipt_of_this_very_lock(cache: RadixCache) -> None:
    first, second = build(cache, "l4"), cache.insert(key(9)).last_node
    receipt = cache.inc_lock_ref(first)
    cache.inc_lock_ref(second)
    assert receipt is not None

    with pytest.raises(LockError):
        cache.release_window(second, receipt)
    assert sizes(cache) == (0, 5)


def test_the_window_queue_holds_what_is_in_the_tree_alone() -> None:
    cache = RadixCache(1, 4)
    for token in range(2000):
        cache.insert(key(token))
        cache.evict(1)

    assert not len(cache.parts.window._queue)  # type: ignore[union-attr]


def test_a_refused_insert_leaves_no_trace(cache: RadixCache) -> None:
    fresh = RadixCache(1, 4)

    with pytest.raises(InvalidKeyError):
        fresh.insert(key(1), row(10), prev_prefix_len=1)

    fresh.check_invariants()
