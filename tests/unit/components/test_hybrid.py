"""Windows and states in one cache, claim by claim: their interaction."""

from collections.abc import Iterator

import pytest
import torch

from raydix.cache_core import (
    EvictResult,
    KVCache,
    LockError,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TreeNode,
)


class ThreePools:
    """A pool that remembers what it was given back: whole slots, window halves, states."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.halves: list[int] = []
        self.states: list[int] = []

    def free(self, indices: torch.Tensor) -> None:
        self.slots += indices.tolist()

    def free_swa(self, indices: torch.Tensor) -> None:
        self.halves += indices.tolist()

    def transfer_swa(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Move halves to the tree's slots; these tests do not check their owners."""

    def free_track_slot(self, slot: int) -> None:
        self.states.append(slot)

    def take(self) -> tuple[list[int], list[int], list[int]]:
        """Return the slots freed since the last call."""
        taken = self.slots, self.halves, self.states
        self.slots, self.halves, self.states = [], [], []
        return taken


@pytest.fixture
def pool() -> ThreePools:
    return ThreePools()


@pytest.fixture
def cache(pool: ThreePools) -> Iterator[MambaRadixCache]:
    """A window of four tokens, one token a page."""
    cache = MambaRadixCache(1, pool, pool, sliding_window_size=4)
    yield cache
    cache.check_invariants()


def text(length: int) -> RadixKey:
    return RadixKey(range(1, length + 1))


def slots(length: int, first: int = 10) -> torch.Tensor:
    return torch.arange(first, first + length)


def picture(cache: MambaRadixCache) -> str:
    """The one path of a cache: "t4 l3*" is a tombstone of four tokens and a live run of three with a state."""
    nodes = sorted(cache.parts.tree.nodes(), key=lambda node: node.end)
    marks = ["" if node.mamba_value is None else "*" for node in nodes]  # type: ignore[attr-defined]
    runs = [f"{'t' if node.swa_tombstone else 'l'}{len(node)}" for node in nodes]
    return " ".join(run + mark for run, mark in zip(runs, marks, strict=True))


def build(cache: MambaRadixCache, shape: str) -> list[TreeNode]:
    """A path like "t4 l3*" over tokens 1, 2, ... in slots 10, 11, ..., each state in the slot of its node's end."""
    end, nodes = 0, [cache.root]
    for run in shape.split():
        start, end = end, end + int(run[1:].rstrip("*"))
        state, lost = end if "*" in run else None, end if run[0] == "t" else start
        done = cache.insert(text(end), slots(end), mamba_value=state, from_node=nodes[-1], swa_evicted_seqlen=lost)
        nodes.append(done.last_node)
    assert picture(cache) == shape, "no run may be longer than a tail"
    return nodes[1:]


def hit(cache: MambaRadixCache, length: int) -> int:
    """How much of a query of that many tokens can be used."""
    peeked = cache.peek_prefix(text(length))
    found = cache.match_prefix(text(length))
    assert (found.prefix_len, found.mamba_branching_seqlen) == (peeked.prefix_len, peeked.mamba_branching_seqlen)
    assert found.last_node.end == len(found.indices) == found.prefix_len
    return found.prefix_len


def sizes(cache: MambaRadixCache) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Evictable and protected: tokens, tokens with window KV, states."""
    return (
        (cache.evictable_size(), cache.protected_size()),
        (cache.swa_evictable_size(), cache.swa_protected_size()),
        (cache.mamba_evictable_size(), cache.mamba_protected_size()),
    )


# ---------------------------------------------------------------- match


@pytest.mark.parametrize(
    ("shape", "query", "usable"),
    [
        ("t4 l3*", 7, 0),
        ("t4 l4*", 8, 8),
        ("t4 l4", 8, 0),
        ("l2*", 2, 2),
        ("l1* t1*", 2, 1),
        ("l4* t2* l2*", 8, 4),
        ("l4 t2* l4", 10, 0),  # the window allows 4 and 10, the state 6
        ("l4* t2 l4 l1*", 11, 11),
        ("l4* t2 l4 l1*", 10, 4),
        ("l4* t2* l4* l1", 11, 10),
        ("l4* t2 l2* l4", 12, 4),
        ("t2 l4* l2*", 7, 6),
        ("t2 l4* l2*", 5, 0),
        ("l4 l4*", 7, 0),
        ("l3* l1 l4", 8, 3),
        ("t1* l1* l3*", 5, 5),  # the window counts what lies above the last state
        ("t1* l1* l2*", 4, 0),
    ],
)
def test_a_match_ends_at_the_deepest_state_with_a_live_window(shape: str, query: int, usable: int) -> None:
    cache = MambaRadixCache(sliding_window_size=4)
    build(cache, shape)

    assert hit(cache, query) == usable
    cache.check_invariants()


def test_the_branching_length_is_whole_chunks_beyond_what_both_allow() -> None:
    cache = MambaRadixCache(chunk_size=64, sliding_window_size=32)
    key = RadixKey(range(160))
    for length, state in ((64, 1), (128, None), (160, None)):
        cache.insert(key[:length], mamba_value=state)

    def found(length: int) -> tuple[int, int, int | None]:
        match = cache.peek_prefix(key[:length])
        return match.prefix_len, match.full_prefix_len, match.mamba_branching_seqlen

    assert [found(160), found(100)] == [(64, 160, 128), (64, 100, None)]
    cache.evict(0, 61)  # the two runs of 30 that were in no tail, and the oldest tail
    assert [found(160), found(100), found(63)] == [(0, 160, 128), (0, 100, 64), (0, 63, None)]
    cache.check_invariants()


def test_in_pages_a_window_needs_whole_pages_and_a_state_stands_at_their_end() -> None:
    cache = MambaRadixCache(4, sliding_window_size=5)
    cache.insert(text(16), mamba_value=1, swa_evicted_seqlen=6)  # rounded up to 8

    assert picture(cache) == "t8 l8*"
    assert [hit(cache, length) for length in (12, 15, 16, 18)] == [0, 0, 16, 16]
    cache.check_invariants()


# ---------------------------------------------------------------- inserts


def test_a_state_stands_on_the_last_window_of_what_is_inserted(cache: MambaRadixCache) -> None:
    done = cache.insert(text(12), slots(12), mamba_value=5, swa_evicted_seqlen=3)

    assert picture(cache) == "t3 l3 l6*"
    assert (done.last_node.end, done.mamba_exist) == (12, False)
    assert hit(cache, 12) == 12


def test_a_state_may_come_before_the_window_it_needs(cache: MambaRadixCache, pool: ThreePools) -> None:
    (leaf,) = build(cache, "t4")
    assert not cache.attach_state(leaf, 7)
    assert hit(cache, 4) == 0

    done = cache.insert(text(4), slots(4, 20))

    assert (picture(cache), done.mamba_exist) == ("l4*", True)
    assert hit(cache, 4) == 4
    assert pool.take() == ([10, 11, 12, 13], [], [])


def test_a_heal_leaves_the_state_where_it_is(cache: MambaRadixCache, pool: ThreePools) -> None:
    build(cache, "t4*")

    done = cache.insert(text(4), slots(4, 20), mamba_value=9)

    assert (picture(cache), done.mamba_exist) == ("l4*", True)
    assert done.last_node.mamba_value == 4, "the state that came is the caller's to free"
    assert cache.match_prefix(text(4)).indices.tolist() == [20, 21, 22, 23]
    assert pool.take() == ([10, 11, 12, 13], [], [])


def test_a_heal_in_part_leaves_the_state_at_the_end(cache: MambaRadixCache) -> None:
    build(cache, "t6*")

    cache.insert(text(6), slots(6, 20), swa_evicted_seqlen=2)

    assert picture(cache) == "t2 l4*"
    assert hit(cache, 6) == 6


def test_a_heal_under_a_lock_keeps_slots_state_and_lock(cache: MambaRadixCache, pool: ThreePools) -> None:
    (leaf,) = build(cache, "t4*")
    receipt = cache.inc_lock_ref(leaf)

    done = cache.insert(text(4), slots(4, 20))

    assert picture(cache) == "l4*"
    assert sizes(cache) == ((0, 4), (0, 4), (0, 1))
    assert done.duplicate_indices.tolist() == [20, 21, 22, 23]
    assert pool.take() == ([], [], [])
    cache.dec_lock_ref(leaf, receipt)
    assert sizes(cache) == ((4, 0), (4, 0), (1, 0))


def test_pages_come_with_windows_and_states_as_tokens_do() -> None:
    allocator = SWATokenToKVPoolAllocator(32, 32, 4)
    states = MambaPool(4, [[(1,)]])
    cache = MambaRadixCache(4, allocator, states, sliding_window_size=6)
    pages = allocator.alloc_pages(6)
    allocator.free_swa_pages(pages[:2])

    done = cache.insert_pages(text(24), pages, cache.root, swa_evicted_seqlen=8)
    cache.attach_state(done.last_node, states.alloc_track_slot())

    assert picture(cache) == "t8 l4 l12*"
    found = cache.match_pages(text(26))
    assert (found.prefix_len, found.starts.tolist(), found.branching_len) == (24, pages.tolist(), None)
    assert cache.evict(0, 0, 1) == EvictResult(12, 12, 1)
    assert cache.evict(99) == EvictResult(12, 4, 0)
    assert (allocator.available_size(), allocator.swa_available_size(), states.available_size()) == (32, 32, 4)
    allocator.check_invariants()


# ---------------------------------------------------------------- locks


def test_a_lock_holds_the_kv_up_to_the_root_a_window_and_its_own_state(
    cache: MambaRadixCache, pool: ThreePools
) -> None:
    leaf = build(cache, "l3* l3* l3*")[-1]

    receipt = cache.inc_lock_ref(leaf)

    assert sizes(cache) == ((0, 9), (3, 6), (2, 1))
    assert cache.evict(99, 99, 99) == EvictResult(0, 3, 2)
    assert pool.take() == ([], [10, 11, 12], [3, 6])
    assert picture(cache) == "t3 l3 l3*"
    assert hit(cache, 9) == 9
    cache.dec_lock_ref(leaf, receipt)
    assert sizes(cache) == ((9, 0), (6, 0), (1, 0))
    assert cache.evict(99) == EvictResult(9, 6, 1)


def test_an_unlock_needs_its_own_unused_receipt(cache: MambaRadixCache) -> None:
    upper, lower = build(cache, "l3* l3*")
    first, second = cache.inc_lock_ref(upper), cache.inc_lock_ref(lower)
    before = sizes(cache)

    for receipt in (None, second):
        with pytest.raises(LockError):
            cache.dec_lock_ref(upper, receipt)
    assert sizes(cache) == before

    cache.dec_lock_ref(upper, first)
    cache.dec_lock_ref(lower, swa_boundary_id=second)
    with pytest.raises(LockError):
        cache.dec_lock_ref(lower, second)
    assert sizes(cache) == ((6, 0), (6, 0), (2, 0))


def test_a_window_given_up_early_leaves_its_state_held(cache: MambaRadixCache, pool: ThreePools) -> None:
    leaf = build(cache, "l3* l4*")[-1]
    receipt = cache.inc_lock_ref(leaf)

    cache.release_window(leaf, receipt)

    assert sizes(cache) == ((0, 7), (7, 0), (1, 1))
    assert cache.evict(99, 99, 99) == EvictResult(0, 7, 1)
    assert pool.take() == ([], [10, 11, 12, 13, 14, 15, 16], [3])
    assert picture(cache) == "t3 t4*"
    cache.dec_lock_ref(leaf, receipt)
    assert sizes(cache) == ((7, 0), (0, 0), (1, 0))


def test_a_state_that_outlived_its_window_under_a_lock_is_of_use_once_healed(
    cache: MambaRadixCache, pool: ThreePools
) -> None:
    leaf = build(cache, "l4*")[-1]
    receipt = cache.inc_lock_ref(leaf)
    cache.release_window(leaf, receipt)
    cache.evict(0, 1)
    assert (picture(cache), hit(cache, 4)) == ("t4*", 0)
    cache.dec_lock_ref(leaf, receipt)

    cache.insert(text(4), slots(4, 20))

    assert (picture(cache), hit(cache, 4)) == ("l4*", 4)
    assert cache.evict(0, 0, 1) == EvictResult(4, 4, 1)


# ---------------------------------------------------------------- eviction


def test_a_state_goes_with_the_window_that_it_is_of_no_use_without(cache: MambaRadixCache, pool: ThreePools) -> None:
    build(cache, "l3* l3* l2*")

    assert cache.evict(0, 1) == EvictResult(0, 3, 1)

    assert picture(cache) == "t3 l3* l2*"
    assert pool.take() == ([], [10, 11, 12], [3])
    assert sizes(cache) == ((8, 0), (5, 0), (2, 0))


def test_a_window_stays_when_its_state_goes(cache: MambaRadixCache, pool: ThreePools) -> None:
    build(cache, "l3* l3* l2*")

    assert cache.evict(0, 0, 1) == EvictResult(0, 0, 1)

    assert picture(cache) == "l3 l3* l2*"
    assert pool.take() == ([], [], [3])
    assert hit(cache, 8) == 8


def test_a_leaf_goes_with_window_and_state_whichever_is_wanted() -> None:
    for wanted in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        cache = MambaRadixCache(sliding_window_size=4)
        build(cache, "l3*")

        assert cache.evict(*wanted) == EvictResult(3, 3, 1)
        assert sizes(cache) == ((0, 0), (0, 0), (0, 0))


@pytest.mark.parametrize(
    ("wanted", "gone", "left"),
    [
        ((0, 3, 1), (0, 3, 1), "t3 l3* l2*"),  # the state went with the window
        ((0, 3, 2), (0, 3, 2), "t3 l3 l2*"),
        ((0, 4, 2), (0, 6, 2), "t3 t3 l2*"),
        ((1, 3, 2), (2, 5, 2), "t3 l3*"),  # the leaf counts for all three
        ((2, 2, 1), (2, 2, 1), "l3* l3*"),
        ((3, 0, 2), (5, 5, 2), "l3*"),
        ((0, 7, 0), (2, 8, 3), "t3 t3"),
        ((0, 0, 3), (2, 2, 3), "l3 l3"),
        ((0, 0, 9), (2, 2, 3), "l3 l3"),
    ],
)
def test_what_goes_for_one_counts_for_the_others(
    cache: MambaRadixCache, wanted: tuple[int, int, int], gone: tuple[int, int, int], left: str
) -> None:
    build(cache, "l3* l3* l2*")

    assert cache.evict(*wanted) == EvictResult(*gone)
    assert picture(cache) == left


def test_a_match_refreshes_its_window_and_its_own_state(cache: MambaRadixCache, pool: ThreePools) -> None:
    build(cache, "l4* l4* l2*")
    cache.insert(RadixKey([8, 9]), slots(2, 40), mamba_value=40)
    assert hit(cache, 10) == 10

    assert cache.evict(0, 0, 1).mamba_evicted == 1
    assert pool.take() == ([], [], [4])
    assert cache.evict(0, 1) == EvictResult(0, 4, 0)
    assert cache.evict(0, 0, 1) == EvictResult(0, 0, 1)
    assert pool.take() == ([], [10, 11, 12, 13], [8])
    assert cache.evict(0, 1) == EvictResult(2, 2, 1), "the other text was used before this match"
    assert pool.take() == ([40, 41], [], [40])
    assert picture(cache) == "t4 l4 l2*"


def test_a_state_of_a_tombstone_can_be_evicted(cache: MambaRadixCache, pool: ThreePools) -> None:
    build(cache, "t2* l4")

    assert cache.evict(0, 0, 1) == EvictResult(0, 0, 1)
    assert pool.take() == ([], [], [2])


def test_a_reset_gives_everything_back_once_locked_or_not(cache: MambaRadixCache, pool: ThreePools) -> None:
    nodes = build(cache, "t2* l4* l1*")
    cache.inc_lock_ref(nodes[1])

    cache.reset()

    freed, halves, states = pool.take()
    assert (sorted(freed), halves, sorted(states)) == (list(range(10, 17)), [], [2, 6, 7])
    assert sizes(cache) == ((0, 0), (0, 0), (0, 0))


def test_what_is_retired_goes_with_windows_and_states_once_unlocked(cache: MambaRadixCache, pool: ThreePools) -> None:
    leaf = build(cache, "l3* l2*")[-1]
    receipt = cache.inc_lock_ref(leaf)
    cache.retire_all()

    assert hit(cache, 5) == 0
    assert cache.reclaim_retired() == 0
    assert cache.evict(0, 99, 99) == EvictResult(0, 0, 1), "the state above is nobody's"
    cache.dec_lock_ref(leaf, receipt)
    assert cache.reclaim_retired() == 5
    freed, halves, states = pool.take()
    assert (sorted(freed), halves, states) == ([10, 11, 12, 13, 14], [], [3, 5])


# ---------------------------------------------------------------- leases


def test_a_lease_that_is_refused_its_slots_evicts_no_state() -> None:
    allocator, states = SWATokenToKVPoolAllocator(8, 8, 1), MambaPool(3, [[(1,)]])
    tree = MambaRadixCache(1, allocator, states, sliding_window_size=4)
    cache = KVCache(tree, allocator, states=states)
    cache.acquire("first", "s", text(4))
    cache.insert("first", "s", 4, RadixKey([]), publish_state=True)
    cache.release("first", "s")
    for lease_id in ("second", "third"):  # each has a state of its own, and slots for one token
        cache.acquire(lease_id, "s", RadixKey([9]))
    assert (states.available_size(), tree.mamba_evictable_size()) == (0, 1)

    with pytest.raises(OutOfSlotsError):
        cache.acquire("fourth", "s", RadixKey([7] * 7))

    assert cache.match(text(4)).prefix_len == 4
    cache.check_invariants()
