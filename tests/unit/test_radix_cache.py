"""`RadixCache`, claim by claim: what is found, who owns which slot, what is locked, and what goes first."""

from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from os import devnull
from typing import Any

import numpy as np
import pytest
import torch
from queue_operations import queue_operations

from raydix.cache_core import (
    BasePrefixCache,
    EvictResult,
    InvalidKeyError,
    LockError,
    RadixCache,
    RadixKey,
    StaleNodeError,
    TokenToKVPoolAllocator,
    TreeNode,
    hash_token_ids,
)
from raydix.cache_core.hashing import namespace_seed
from raydix.cache_core.tenants import Tenant, Tenants

WIDE = 2**32  # the first id that needs more than 32 bits


class FreedSlots:
    """A pool that remembers what it was given back, in order."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def free(self, indices: torch.Tensor) -> None:
        assert indices.dtype == torch.int64
        self.slots += indices.tolist()

    def take(self) -> list[int]:
        """What came back since the last call."""
        taken, self.slots = self.slots, []
        return taken


@pytest.fixture
def pool() -> FreedSlots:
    return FreedSlots()


@pytest.fixture
def make_cache(pool: FreedSlots) -> Iterator[Callable[..., RadixCache]]:
    caches: list[RadixCache] = []

    def make(page_size: int = 1, **options: Any) -> RadixCache:
        caches.append(RadixCache(page_size, token_to_kv_pool_allocator=pool, **options))
        return caches[-1]

    yield make
    for cache in caches:
        cache.check_invariants()


@pytest.fixture
def cache(make_cache: Callable[..., RadixCache]) -> RadixCache:
    return make_cache()


@pytest.fixture
def paged(make_cache: Callable[..., RadixCache]) -> RadixCache:
    """A cache with two tokens a page."""
    return make_cache(2)


def key(*ids: Any, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def row(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def edges(cache: RadixCache, ns: str | None = None) -> set[str]:
    """Every node as the runs from the root to it: {"1 2", "1 2|3 4"}."""
    return {"|".join(runs(node)) for node in cache._tree.nodes() if node.space.extra_key == ns}


def runs(node: TreeNode) -> list[str]:
    path: list[str] = []
    above: TreeNode | None = node
    while above is not None and above.key is not None:
        path.insert(0, " ".join(map(str, above.key)))
        above = above.parent
    return path


def found(cache: RadixCache, *ids: Any, ns: str | None = None) -> list[int]:
    """The slots that a lookup without effects finds."""
    result = cache.peek_prefix(key(*ids, ns=ns))
    assert result.prefix_len == len(result.indices)
    return result.indices.tolist()


def sizes(cache: RadixCache) -> tuple[int, int]:
    """Evictable and protected tokens."""
    assert cache.total_size() == cache.evictable_size() + cache.protected_size()
    return cache.evictable_size(), cache.protected_size()


def lock(cache: RadixCache, *ids: Any, ns: str | None = None) -> TreeNode:
    node: TreeNode = cache.match_prefix(key(*ids, ns=ns)).last_node
    cache.inc_lock_ref(node)
    return node


# ---------------------------------------------------------------- the cache as a whole


def test_it_is_a_prefix_cache(cache: RadixCache) -> None:
    assert isinstance(cache, BasePrefixCache)
    assert (cache.swa_evictable_size(), cache.swa_protected_size()) == (0, 0)


def test_a_new_cache_is_empty(cache: RadixCache) -> None:
    assert sizes(cache) == (0, 0)
    assert edges(cache) == set()
    assert cache.num_locks() == 0


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_has_at_least_one_token(page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RadixCache(page_size)


def test_a_sliding_window_needs_a_pool_that_can_free_window_halves(pool: FreedSlots) -> None:
    with pytest.raises(ValueError, match="free_swa"):
        RadixCache(sliding_window_size=4, token_to_kv_pool_allocator=pool)


@pytest.mark.parametrize("size", [0, -1])
def test_a_sliding_window_has_at_least_one_token(size: int) -> None:
    with pytest.raises(ValueError, match="sliding_window_size"):
        RadixCache(sliding_window_size=size)


def test_without_a_pool_slots_are_dropped() -> None:
    cache = RadixCache()
    cache.insert(key(1, 2), row(10, 11))

    assert cache.evict(2) == EvictResult(2, 0, 0)
    cache.check_invariants()


# ---------------------------------------------------------------- match


def test_an_exact_match_gives_every_slot(cache: RadixCache) -> None:
    inserted = cache.insert(key(1, 2, 3), row(10, 11, 12))

    result = cache.match_prefix(key(1, 2, 3))

    assert result.indices.tolist() == [10, 11, 12]
    assert result.indices.dtype == torch.int64
    assert result.indices.device.type == "cpu"
    assert result.prefix_len == 3
    assert result.last_node is inserted.last_node
    assert result.mamba_branching_seqlen is None


def test_a_longer_query_finds_what_is_there(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))

    assert cache.match_prefix(key(1, 2, 3)).indices.tolist() == [10, 11]
    assert edges(cache) == {"1 2"}


def test_a_shorter_query_finds_its_part_and_splits_the_node(cache: RadixCache) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    result = cache.match_prefix(key(1, 2))

    assert result.indices.tolist() == [10, 11]
    assert runs(result.last_node) == ["1 2"]
    assert edges(cache) == {"1 2", "1 2|3"}


def test_a_query_that_turns_away_finds_what_came_before(cache: RadixCache) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    assert cache.match_prefix(key(1, 2, 9, 3)).indices.tolist() == [10, 11]
    assert edges(cache) == {"1 2", "1 2|3"}


@pytest.mark.parametrize("ids", [[9], [2, 3], []])
def test_a_miss_ends_at_the_root(cache: RadixCache, ids: list[int]) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    result = cache.match_prefix(RadixKey(ids))

    assert result.indices.tolist() == []
    assert result.indices.dtype == torch.int64
    assert result.prefix_len == 0
    assert result.last_node is cache.root


def test_branches_share_what_they_have_in_common(cache: RadixCache) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(1, 2, 4), row(20, 21, 22))
    cache.insert(key(1, 5), row(30, 31))

    assert edges(cache) == {"1", "1|2", "1|2|3", "1|2|4", "1|5"}
    assert found(cache, 1, 2, 3) == [10, 11, 12]
    assert found(cache, 1, 2, 4) == [10, 11, 22]
    assert found(cache, 1, 5) == [10, 31]
    assert sizes(cache) == (5, 0)


def test_matches_never_change_the_size(cache: RadixCache) -> None:
    cache.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))

    for length in (3, 1, 2, 4):
        cache.match_prefix(key(1, 2, 3, 4)[:length])

    assert edges(cache) == {"1", "1|2", "1|2|3", "1|2|3|4"}
    assert sizes(cache) == (4, 0)


def test_long_runs_part_at_the_very_token_where_they_differ(cache: RadixCache) -> None:
    ids = np.arange(5000)
    cache.insert(RadixKey(ids))

    for at in (255, 256, 257, 1279, 1280, 4999):
        other = ids.copy()
        other[at] = 9999
        assert cache.peek_prefix(RadixKey(other)).prefix_len == at


def test_ids_that_share_bytes_but_not_values_part_where_they_differ(cache: RadixCache) -> None:
    cache.insert(key(1, 0x01020304, 5), row(10, 11, 12))

    assert found(cache, 1, 0x01020305, 5) == [10]
    assert found(cache, 1, 0x02020304, 5) == [10]


# ---------------------------------------------------------------- whole pages


def test_match_and_insert_are_floored_to_whole_pages(paged: RadixCache) -> None:
    result = paged.insert(key(1, 2, 3, 4, 5), row(10, 11, 12, 13, 14))

    assert result.prefix_len == 0
    assert edges(paged) == {"1 2 3 4"}
    assert found(paged, 1, 2, 3, 4, 5) == [10, 11, 12, 13]
    assert paged.match_prefix(key(1, 2, 3)).indices.tolist() == [10, 11]
    assert edges(paged) == {"1 2", "1 2|3 4"}


def test_less_than_a_page_is_neither_kept_nor_found(paged: RadixCache) -> None:
    result = paged.insert(key(1), row(10))
    paged.insert(key(1, 2), row(20, 21))

    assert result.last_node is paged.root
    assert paged.match_prefix(key(1)).last_node is paged.root
    assert found(paged, 1) == []


@pytest.mark.parametrize(("ids", "slots"), [([9, 2, 3, 4], []), ([1, 9, 3, 4], []), ([1, 2, 3, 9], [10, 11])])
def test_a_page_matches_wholly_or_not_at_all(paged: RadixCache, ids: list[int], slots: list[int]) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))

    assert paged.match_prefix(RadixKey(ids)).indices.tolist() == slots


def test_pages_that_share_their_first_token_are_siblings(paged: RadixCache) -> None:
    paged.insert(key(1, 2), row(10, 11))
    paged.insert(key(1, 3), row(20, 21))

    assert edges(paged) == {"1 2", "1 3"}


def test_slots_of_a_page_need_not_be_consecutive(paged: RadixCache) -> None:
    paged.insert(key(1, 2, 3, 4, 5, 6), row(17, 11, 12, 13, 19, 14))

    assert found(paged, 1, 2, 3, 4, 5, 6) == [17, 11, 12, 13, 19, 14]
    assert paged.match_prefix(key(1, 2)).indices.tolist() == [17, 11]
    assert found(paged, 1, 2, 3, 4, 5, 6) == [17, 11, 12, 13, 19, 14]


def test_scattered_and_consecutive_slots_come_back_alike(paged: RadixCache, pool: FreedSlots) -> None:
    paged.insert(key(1, 2), row(17, 11))
    paged.insert(key(1, 2, 3, 4), row(17, 11, 12, 13))

    paged.evict(4)

    assert sorted(pool.take()) == [11, 12, 13, 17]


def test_pages_in_and_out_are_the_same_as_tokens_in_and_out(paged: RadixCache) -> None:
    paged.insert(key(1, 2), row(10, 11))

    result = paged.insert_pages(key(1, 2, 3, 4, 5), np.array([20, 22]), paged.root)
    match = paged.match_pages(key(1, 2, 3, 4, 5))

    assert (result.prefix_len, result.end, result.existing.tolist()) == (2, 4, [10])
    assert runs(result.last_node) == ["1 2", "3 4"]
    assert (match.prefix_len, match.starts.tolist(), match.last_node) == (4, [10, 22], result.last_node)
    assert found(paged, 1, 2, 3, 4) == [10, 11, 22, 23]


def test_a_match_can_be_limited(paged: RadixCache) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))

    assert paged.match_pages(key(1, 2, 3, 4), limit=3).starts.tolist() == [10]
    assert paged.match_pages(key(1, 2, 3, 4), limit=1).starts.tolist() == []
    assert paged.match_pages(key(1, 2, 3, 4), limit=0).last_node is paged.root
    assert paged.match_pages(key(1, 2, 3, 4), limit=99).starts.tolist() == [10, 12]


def test_pages_are_resumed_from_a_node(paged: RadixCache) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))
    start = paged.match_prefix(key(1, 2)).last_node

    result = paged.insert_pages(key(1, 2, 3, 4, 5, 6), np.array([22, 24]), start)

    assert (result.prefix_len, result.end, result.existing.tolist()) == (4, 6, [12])
    assert found(paged, 1, 2, 3, 4, 5, 6) == [10, 11, 12, 13, 24, 25]


@pytest.mark.parametrize("other", [key(1, 2), key(1, 2, 3, 4, ns="a"), key((1, 2), (2, 3), (3, 4), (4, 5))], ids=repr)
def test_pages_are_not_resumed_from_a_node_off_their_path(paged: RadixCache, other: RadixKey) -> None:
    node = paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13)).last_node

    with pytest.raises(InvalidKeyError, match="does not end a prefix"):
        paged.insert_pages(other, np.array([22, 24]), node)

    assert edges(paged) == {"1 2 3 4"}


@pytest.mark.parametrize("ids", [(WIDE, 2, 3), (8, 9, WIDE), (1, WIDE)])
def test_a_namespace_is_not_widened_for_a_key_that_is_refused(cache: RadixCache, ids: tuple[int, ...]) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node

    with pytest.raises(InvalidKeyError, match="does not end a prefix"):
        cache.insert(key(*ids), row(20, 21, 22), from_node=node)

    assert node.space.width == 4
    assert cache.insert(key(1, 2, WIDE), row(10, 11, 12), from_node=node).prefix_len == 2
    assert node.space.width == 8


# ---------------------------------------------------------------- insert: who owns what


def test_an_insert_reports_what_was_there_and_adopts_the_rest(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))

    result = cache.insert(key(1, 2, 3), row(20, 21, 22))

    assert result.prefix_len == 2
    assert result.duplicate_indices.tolist() == [20, 21]
    assert result.duplicate_indices.dtype == torch.int64
    assert result.mamba_exist is False
    assert found(cache, 1, 2, 3) == [10, 11, 22]
    assert pool.take() == []


def test_an_insert_frees_nothing_it_is_given(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(1, 2, 3), row(20, 21, 22))
    cache.insert(key(1, 2, 3), row(10, 11, 12), prev_prefix_len=1)
    cache.insert(key(1, 4), row(30, 31))

    assert pool.take() == []


def test_slots_the_tree_holds_already_are_no_duplicates(cache: RadixCache) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    assert cache.insert(key(1, 2, 3), row(10, 11, 12)).duplicate_indices.tolist() == []
    assert cache.insert(key(1, 2, 3), row(10, 21, 12)).duplicate_indices.tolist() == [21]


@pytest.mark.parametrize(
    ("prev_prefix_len", "duplicates"),
    [(0, [20, 21, 22, 23]), (1, [21, 22, 23]), (2, [22, 23]), (3, [23]), (4, [])],
)
def test_slots_before_prev_prefix_len_are_not_the_callers(
    cache: RadixCache, prev_prefix_len: int, duplicates: list[int]
) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))  # the prefix stands in two nodes

    result = cache.insert(key(1, 2, 3, 4, 5), row(20, 21, 22, 23, 24), prev_prefix_len=prev_prefix_len)

    assert result.prefix_len == 4
    assert result.duplicate_indices.tolist() == duplicates
    assert found(cache, 1, 2, 3, 4, 5) == [10, 11, 12, 13, 24]


@pytest.mark.parametrize("prev_prefix_len", [-1, 3, 9])
def test_a_prev_prefix_len_beyond_what_is_there_is_refused(cache: RadixCache, prev_prefix_len: int) -> None:
    cache.insert(key(1, 2), row(10, 11))

    with pytest.raises(InvalidKeyError, match="2 tokens"):
        cache.insert(key(1, 2, 3), row(20, 21, 22), prev_prefix_len=prev_prefix_len)

    assert cache.total_size() == 2


def test_a_from_node_on_another_path_is_refused(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node

    with pytest.raises(InvalidKeyError, match="does not end a prefix"):
        cache.insert(key(8, 9, 3), row(20, 21, 22), from_node=node)

    assert cache.total_size() == 2


def test_a_node_of_another_cache_cannot_be_locked(cache: RadixCache) -> None:
    node = RadixCache().insert(key(7), row(1)).last_node

    with pytest.raises(StaleNodeError):
        cache.inc_lock_ref(node)

    assert node.lock_ref == 0


def test_the_tail_beyond_the_last_page_is_no_duplicate(paged: RadixCache) -> None:
    paged.insert(key(1, 2), row(10, 11))

    assert paged.insert(key(1, 2, 3), row(20, 21, 22)).duplicate_indices.tolist() == [20, 21]


def test_the_last_node_of_an_insert_is_that_of_a_match(cache: RadixCache) -> None:
    for ids in ([1, 2, 3], [1, 2], [1, 2, 9], [1, 2, 9]):
        inserted = cache.insert(RadixKey(ids))
        assert inserted.last_node is cache.match_prefix(RadixKey(ids)).last_node


def test_nothing_to_insert_changes_nothing(cache: RadixCache) -> None:
    result = cache.insert(key(), row())

    assert (result.prefix_len, result.last_node) == (0, cache.root)
    assert cache.insert(key(ns="a")).last_node is cache.root
    assert sizes(cache) == (0, 0)


def test_without_values_the_ids_are_the_slots(cache: RadixCache, paged: RadixCache) -> None:
    cache.insert(key(5, 6, 7))
    paged.insert(key(8, 3, 4))

    assert found(cache, 5, 6, 7) == [5, 6, 7]
    assert found(paged, 8, 3) == [8, 3]


def test_without_values_the_first_id_of_a_pair_is_its_slot(cache: RadixCache) -> None:
    cache.insert(key((5, 6), (6, 7)))

    assert found(cache, (5, 6), (6, 7)) == [5, 6]


@pytest.mark.parametrize(
    "value",
    [row(10), row(), torch.tensor([[10, 11]]), torch.tensor([1.0, 2.0]), torch.tensor([True, True]), torch.tensor(3)],
    ids=str,
)
def test_a_value_that_does_not_fit_its_key_is_refused_before_anything_changes(
    cache: RadixCache, value: torch.Tensor
) -> None:
    cache.insert(key(1, 2), row(10, 11))

    with pytest.raises(InvalidKeyError, match="2 tokens need 2 integer slots"):
        cache.insert(key(1, 9), value)

    assert edges(cache) == {"1 2"}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_slots_of_any_integer_type_become_int64(cache: RadixCache, dtype: torch.dtype) -> None:
    cache.insert(key(1, 2), torch.tensor([10, 11], dtype=dtype))

    assert cache.match_prefix(key(1, 2)).indices.equal(row(10, 11))


def test_an_insert_passes_over_options_of_other_caches(cache: RadixCache) -> None:
    assert cache.insert(key(1, 2), row(10, 11), mamba_value=None).prefix_len == 0


# ---------------------------------------------------------------- copies


def test_keys_and_values_are_copied_on_insert(cache: RadixCache) -> None:
    ids, slots = np.array([1, 2, 3]), row(10, 11, 12)
    cache.insert(RadixKey(ids), slots)

    ids[:], slots[:] = 9, 99

    assert found(cache, 1, 2, 3) == [10, 11, 12]
    assert found(cache, 9) == []


def test_inserted_pages_are_copied(paged: RadixCache) -> None:
    starts = np.array([10, 12])
    paged.insert_pages(key(1, 2, 3, 4), starts, paged.root)

    starts[:] = 99

    assert found(paged, 1, 2, 3, 4) == [10, 11, 12, 13]


def test_what_a_match_returns_is_the_callers(cache: RadixCache, paged: RadixCache) -> None:
    for each in (cache, paged):
        node = each.insert(key(1, 2), row(10, 11)).last_node

        each.match_prefix(key(1, 2)).indices[:] = 99
        each.peek_prefix(key(1, 2)).indices[:] = 99
        each.match_pages(key(1, 2)).starts[:] = 99
        each.insert_pages(key(1, 2), np.array([10, 11]), each.root).existing[:] = 99
        node.value[:] = 99

        assert found(each, 1, 2) == [10, 11]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_small_leaf_holds_no_large_array(make_cache: Callable[..., RadixCache], page_size: int) -> None:
    cache = make_cache(page_size)
    ids = np.arange(4096)
    cache.insert(RadixKey(ids[:4000]), torch.arange(4000))
    cache.insert(RadixKey(ids[:4004]), torch.arange(4096))
    cache.match_prefix(RadixKey(ids[:400]))

    nodes = list(cache._tree.nodes())

    assert sorted(map(len, nodes)) == [4, 400, 3600]
    for node in nodes:
        assert isinstance(node.slots, bytes)
        assert len(node.slots) == (18 if page_size == 1 else len(node) + 1)  # one run, or 4 bytes a page
        assert len(node.data) == 4 * len(node)


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_beyond_31_bits_are_kept_beside_others(
    make_cache: Callable[..., RadixCache], pool: FreedSlots, page_size: int
) -> None:
    cache = make_cache(page_size)
    ids = np.arange(24)
    slots = torch.cat((torch.arange(8), torch.arange(2**31 - 4, 2**31 + 4), torch.arange(2**40, 2**40 + 8)))
    for end in (8, 16, 24):  # a run that is narrow, one that is wide by half of it, and one that is wide
        cache.insert(RadixKey(ids[:end]), slots[:end])
    for end in (24, 20, 12, 4):
        assert cache.match_prefix(RadixKey(ids[:end])).indices.tolist() == slots[:end].tolist()

    assert cache.insert(RadixKey(ids), slots + 100).duplicate_indices.tolist() == (slots + 100).tolist()
    assert cache.evict(24).full_evicted == 24
    assert sorted(pool.slots) == slots.tolist()


# ---------------------------------------------------------------- splits


def test_two_splits_on_one_path_keep_every_value(paged: RadixCache) -> None:
    paged.insert(RadixKey(range(8)), row(*range(10, 18)))

    paged.match_prefix(RadixKey(range(6)))
    paged.match_prefix(RadixKey(range(2)))

    assert edges(paged) == {"0 1", "0 1|2 3 4 5", "0 1|2 3 4 5|6 7"}
    assert found(paged, *range(8)) == list(range(10, 18))
    assert sizes(paged) == (8, 0)


def test_the_suffix_of_a_split_keeps_its_identity(cache: RadixCache) -> None:
    leaf = cache.insert(key(1, 2, 3)).last_node

    above = cache.match_prefix(key(1)).last_node

    assert runs(leaf) == ["1", "2 3"]
    assert leaf.parent is above
    assert (above.end, leaf.end) == (1, 3)
    assert above.key == key(1)
    assert leaf.value.tolist() == [2, 3]


def test_a_split_shares_out_the_hashes(paged: RadixCache) -> None:
    leaf = paged.insert(key(1, 2, 3, 4, 5, 6)).last_node
    first, second, third = paged.compute_node_hash(leaf)

    above = paged.match_prefix(key(1, 2, 3, 4)).last_node

    assert above.hash_values == [first, second]
    assert leaf.hash_values == [third]


def test_both_halves_of_a_split_keep_the_locks(cache: RadixCache) -> None:
    leaf = lock(cache, *cache.insert(key(1, 2, 3, 4)).last_node.key)
    cache.inc_lock_ref(leaf)

    above = cache.match_prefix(key(1, 2)).last_node

    assert (above.lock_ref, leaf.lock_ref) == (2, 2)
    assert sizes(cache) == (0, 4)
    cache.dec_lock_ref(leaf)
    cache.dec_lock_ref(leaf)
    assert sizes(cache) == (4, 0)


def test_a_match_inside_a_node_renews_its_upper_half_only(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(5), row(13))
    cache.match_prefix(key(1, 2))

    cache.evict(1)
    assert pool.take() == [12]
    cache.evict(1)
    assert pool.take() == [13]
    cache.evict(1)
    assert pool.take() == [10, 11]


def test_an_insert_that_branches_renews_the_shared_part_only(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(5), row(20))
    cache.insert(key(1, 3), row(10, 30))

    cache.evict(2)

    assert pool.take() == [11, 20]
    assert edges(cache) == {"1", "1|3"}


# ---------------------------------------------------------------- namespaces


@pytest.mark.parametrize("names", [(None, ""), ("a", "b"), (None, "a"), ("a", "a\0"), ("a", "A")])
def test_namespaces_share_nothing(cache: RadixCache, names: tuple[str | None, str]) -> None:
    first, second = names
    cache.insert(key(1, 2, ns=first), row(10, 11))

    assert found(cache, 1, 2, ns=second) == []
    assert cache.insert(key(1, 2, ns=second), row(20, 21)).prefix_len == 0
    assert found(cache, 1, 2, ns=first) == [10, 11]
    assert found(cache, 1, 2, ns=second) == [20, 21]
    assert sizes(cache) == (4, 0)


def test_tuples_and_plain_ids_share_nothing(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key((1, 2)), row(20))

    assert found(cache, 1, 2) == [10, 11]
    assert found(cache, (1, 2)) == [20]
    assert found(cache, (1, 2, 3)) == []
    assert sizes(cache) == (3, 0)


def test_tuples_fill_pages_as_ids_do(paged: RadixCache) -> None:
    paged.insert(key((1, 2), (2, 3), (3, 4)), row(10, 11, 12))

    assert found(paged, (1, 2), (2, 3), (3, 4)) == [10, 11]
    assert found(paged, (1, 2), (2, 9)) == []


def test_eviction_is_by_age_across_namespaces(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, ns="a"), row(10))
    cache.insert(key(1, ns="b"), row(20))
    cache.insert(key(1), row(30))

    cache.evict(2)

    assert pool.take() == [10, 20]
    assert edges(cache) == {"1"}


def test_a_namespace_can_come_back_after_it_was_evicted(cache: RadixCache) -> None:
    cache.insert(key(1, ns="a"), row(10))
    cache.evict(1)

    assert found(cache, 1, ns="a") == []
    cache.insert(key(1, ns="a"), row(20))
    assert found(cache, 1, ns="a") == [20]


# ---------------------------------------------------------------- ids of more than 32 bits


def test_a_wide_id_keeps_every_earlier_match_of_its_namespace(paged: RadixCache) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))
    paged.insert(key(1, 2, 5, 6), row(10, 11, 22, 23))
    paged.insert(key(7, 8), row(30, 31))

    paged.insert(key(1, 2, WIDE, 4), row(10, 11, 42, 43))

    assert edges(paged) == {"1 2", "1 2|3 4", "1 2|5 6", f"1 2|{WIDE} 4", "7 8"}
    assert found(paged, 1, 2, 3, 4) == [10, 11, 12, 13]
    assert found(paged, 1, 2, 5, 6) == [10, 11, 22, 23]
    assert found(paged, 7, 8) == [30, 31]
    assert found(paged, 1, 2, WIDE, 4) == [10, 11, 42, 43]
    paged.check_invariants()
    assert paged.evict(99).full_evicted == 10


def test_narrow_keys_go_on_working_in_a_wide_namespace(cache: RadixCache) -> None:
    cache.insert(key(WIDE, 2), row(10, 11))

    cache.insert(key(1, 2, 3), row(20, 21, 22))

    assert found(cache, 1, 2) == [20, 21]
    assert cache.match_prefix(key(1, 2)).last_node.key == key(1, 2)
    assert edges(cache) == {f"{WIDE} 2", "1 2", "1 2|3"}


def test_a_wide_lookup_finds_what_comes_before_its_first_wide_id(paged: RadixCache) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))

    assert found(paged, 1, 2, 3, WIDE) == [10, 11]
    assert paged.match_prefix(key(1, 2, 3, WIDE)).indices.tolist() == [10, 11]
    assert paged.match_prefix(key(WIDE, 2)).last_node is paged.root
    assert found(paged, 1, 2, 3, 4) == [10, 11, 12, 13]


def test_a_wide_id_never_matches_the_narrow_ones_of_its_bytes(cache: RadixCache) -> None:
    cache.insert(key(5, 1), row(10, 11))  # as bytes, WIDE + 5

    assert found(cache, WIDE + 5) == []
    cache.insert(key(WIDE + 5), row(20))
    assert found(cache, 5, 1) == [10, 11]
    assert found(cache, WIDE + 5) == [20]


def test_widening_one_namespace_leaves_the_others_as_they_are(cache: RadixCache) -> None:
    cache.insert(key(1, ns="a"), row(10))
    cache.insert(key(WIDE, ns="b"), row(20))

    assert {node.space.extra_key: node.space.width for node in cache._tree.nodes()} == {"a": 4, "b": 8}


def test_nodes_and_locks_outlive_the_widening(cache: RadixCache) -> None:
    node = lock(cache, *cache.insert(key(1, 2), row(10, 11)).last_node.key)
    cache.insert(key(1, 2, WIDE), row(10, 11, 12))

    result = cache.insert(key(1, 2, 3), row(10, 11, 13), from_node=node)

    assert result.prefix_len == 2
    assert edges(cache) == {"1 2", f"1 2|{WIDE}", "1 2|3"}
    cache.dec_lock_ref(node)


# ---------------------------------------------------------------- locks


def test_a_lock_moves_the_path_from_evictable_to_protected_and_back(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(9), row(20))

    node = lock(cache, 1, 2, 3)
    assert sizes(cache) == (1, 3)
    assert cache.num_locks() == 1

    cache.dec_lock_ref(node)
    assert sizes(cache) == (4, 0)
    assert cache.num_locks() == 0


def test_what_is_locked_is_not_evicted_and_still_found(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(1, 2, 4), row(10, 11, 22))
    cache.insert(key(9), row(30))
    lock(cache, 1, 2, 3)

    assert cache.evict(99).full_evicted == 2

    assert sorted(pool.take()) == [22, 30]
    assert found(cache, 1, 2, 3) == [10, 11, 12]
    assert edges(cache) == {"1 2", "1 2|3"}


def test_a_partial_match_locks_no_more_than_it_matched(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    lock(cache, 1, 2)

    assert sizes(cache) == (1, 2)
    cache.evict(99)
    assert pool.take() == [12]


def test_every_holder_counts(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    first, second = lock(cache, 1, 2), lock(cache, 1, 2)
    assert cache.num_locks() == 2

    cache.dec_lock_ref(first)
    assert sizes(cache) == (0, 2)
    assert cache.evict(99).full_evicted == 0

    cache.dec_lock_ref(second)
    assert cache.evict(99).full_evicted == 2


def test_two_branches_lock_what_they_share_twice(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 3), row(10, 13))
    left, right = lock(cache, 1, 2), lock(cache, 1, 3)

    cache.dec_lock_ref(left)
    assert sizes(cache) == (1, 2)

    cache.dec_lock_ref(right)
    assert sizes(cache) == (3, 0)


def test_locking_the_root_is_a_no_op(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))

    cache.dec_lock_ref(cache.root)
    assert cache.inc_lock_ref(cache.root) is None
    assert cache.inc_lock_ref(cache.match_prefix(key(9)).last_node) is None

    assert sizes(cache) == (2, 0)
    assert cache.root.lock_ref == 0
    cache.dec_lock_ref(cache.root)


def test_full_attention_hands_out_no_receipts_and_takes_none_back(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    for _ in range(3):
        assert cache.inc_lock_ref(node) is None

    with pytest.raises(LockError, match="no receipts"):
        cache.dec_lock_ref(node, 7)
    with pytest.raises(LockError, match="no receipts"):
        cache.dec_lock_ref(node, swa_boundary_id=7)
    assert node.lock_ref == 3

    cache.dec_lock_ref(node)
    cache.dec_lock_ref(node, None)
    cache.dec_lock_ref(node, swa_boundary_id=None)
    assert sizes(cache) == (2, 0)


def test_unlocking_what_is_not_locked_raises_before_a_counter_moves(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    parent = lock(cache, 1, 2)
    leaf = cache.insert(key(1, 2, 3), row(10, 11, 12)).last_node

    with pytest.raises(LockError, match="not locked"):
        cache.dec_lock_ref(leaf)

    assert (parent.lock_ref, leaf.lock_ref) == (1, 0)
    assert sizes(cache) == (1, 2)


def test_a_lock_below_is_no_lock_of_ones_own(cache: RadixCache) -> None:
    parent = cache.insert(key(1), row(10)).last_node
    leaf = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.inc_lock_ref(leaf)

    with pytest.raises(LockError, match="only a node below it"):
        cache.dec_lock_ref(parent)

    assert (parent.lock_ref, leaf.lock_ref) == (1, 1)


def test_an_evicted_node_can_neither_be_locked_nor_unlocked(cache: RadixCache) -> None:
    cache.insert(key(1), row(10))
    leaf = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.evict(1)

    for change in (cache.inc_lock_ref, cache.dec_lock_ref):
        with pytest.raises(StaleNodeError, match="no longer in the tree"):
            change(leaf)

    assert sizes(cache) == (1, 0)
    assert cache.num_locks() == 0


def test_a_locked_node_without_children_becomes_a_candidate_once_unlocked(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    node = lock(cache, 1)
    cache.evict(99)
    assert pool.take() == [11]

    cache.dec_lock_ref(node)
    cache.evict(99)

    assert pool.take() == [10]


def test_a_node_passed_over_while_locked_keeps_its_age(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    node = lock(cache, 1)
    cache.insert(key(2), row(20))
    cache.insert(key(3), row(30))
    cache.evict(1)
    assert pool.take() == [20]

    cache.dec_lock_ref(node)
    cache.evict(1)

    assert pool.take() == [10]


# ---------------------------------------------------------------- eviction


def test_leaves_go_in_the_order_of_their_last_use(cache: RadixCache, pool: FreedSlots) -> None:
    for token in (1, 2, 3, 4):
        cache.insert(key(token), row(10 * token))
    cache.match_prefix(key(2))
    cache.insert(key(1), row(10))

    order = []
    while cache.evict(1).full_evicted:
        order += pool.take()

    assert order == [30, 40, 20, 10]


def test_one_call_evicts_in_the_same_order(cache: RadixCache, pool: FreedSlots) -> None:
    for token in (1, 2, 3, 4):
        cache.insert(key(token), row(10 * token))
    cache.match_prefix(key(2))

    assert cache.evict(4) == EvictResult(4, 0, 0)

    assert pool.take() == [10, 30, 40, 20]


def test_it_stops_once_the_target_is_met(cache: RadixCache, pool: FreedSlots) -> None:
    for token in (1, 2, 3, 4):
        cache.insert(key(token), row(10 * token))

    assert cache.evict(2).full_evicted == 2

    assert pool.take() == [10, 20]
    assert sizes(cache) == (2, 0)


def test_a_leaf_goes_whole_and_the_result_counts_what_really_went(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(4), row(13))

    assert cache.evict(1).full_evicted == 3

    assert pool.take() == [10, 11, 12]
    assert sizes(cache) == (1, 0)


def test_a_parent_becomes_a_candidate_when_its_last_child_has_gone(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 3), row(10, 21))
    cache.insert(key(9), row(30))

    cache.evict(1)
    assert pool.take() == [11]
    cache.evict(1)
    assert pool.take() == [21]  # its parent is as young, and a candidate only now
    cache.evict(1)
    assert pool.take() == [10]
    cache.evict(1)
    assert pool.take() == [30]


def test_a_chain_goes_from_its_end_within_one_call(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    assert cache.evict(99).full_evicted == 3

    assert pool.take() == [12, 11, 10]
    assert edges(cache) == set()


@pytest.mark.parametrize("num_tokens", [0, -5])
def test_nothing_is_evicted_for_nothing(cache: RadixCache, pool: FreedSlots, num_tokens: int) -> None:
    cache.insert(key(1), row(10))

    assert cache.evict(num_tokens) == EvictResult(0, 0, 0)
    assert pool.take() == []


def test_an_empty_cache_has_nothing_to_evict(cache: RadixCache) -> None:
    assert cache.evict(99) == EvictResult(0, 0, 0)


def test_a_full_eviction_leaves_a_cache_that_works(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    cache.evict(99)

    cache.insert(key(1, 2), row(20, 21))

    assert found(cache, 1, 2) == [20, 21]
    assert pool.take() == [10, 11]


def test_each_evicted_node_is_told_of_by_its_id_after_it_left(make_cache: Callable[..., RadixCache]) -> None:
    told: list[tuple[int, set[str]]] = []
    cache = make_cache(on_node_evict=lambda node_id: told.append((node_id, edges(cache))))
    first = cache.insert(key(1), row(10)).last_node
    second = cache.insert(key(2), row(20)).last_node
    cache.insert(key(3), row(30))

    cache.evict(2)

    assert told == [(first.id, {"3"}), (second.id, {"3"})]
    assert first.evicted
    assert first.value is None


def test_a_pool_that_takes_pages_gets_whole_pages_back() -> None:
    allocator = TokenToKVPoolAllocator(num_slots=8, page_size=2)
    cache = RadixCache(2, token_to_kv_pool_allocator=allocator)
    slots = allocator.alloc(8)
    cache.insert(key(1, 2, 3, 4), slots[:4])
    cache.insert(key(1, 2, 5, 6), torch.cat((slots[:2], slots[[5, 4]])))  # one page the other way round

    cache.evict(99)
    allocator.free(slots[6:])

    assert allocator.available_size() == 8
    allocator.check_invariants()
    cache.check_invariants()


@pytest.mark.parametrize("num_leaves", [10, 100, 10_000])
def test_the_steps_for_a_victim_do_not_grow_with_the_tree(
    cache: RadixCache, monkeypatch: pytest.MonkeyPatch, num_leaves: int
) -> None:
    for token in range(num_leaves):
        cache.insert(key(token))
    done = queue_operations(monkeypatch)
    monkeypatch.setattr(cache._tree, "nodes_below", lambda top: pytest.fail("an eviction walked the tree"))

    for _ in range(5):
        cache.evict(1)

    assert done == ["pop"] * 5
    monkeypatch.undo()


def test_uses_cost_the_next_eviction_nothing(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in range(100):
        cache.insert(key(token))
    for token in range(7):
        cache.match_prefix(key(token))
        cache.match_prefix(key(token))
    done = queue_operations(monkeypatch)

    cache.evict(1)

    assert done == ["pop"]
    assert found(cache, 7) == []


def test_the_queue_holds_the_unlocked_leaves_alone(cache: RadixCache) -> None:
    for token in range(10):
        cache.insert(key(token))
    for _ in range(100):
        node = lock(cache, 3)
        assert len(cache._full._queue) == 9
        cache.dec_lock_ref(node)
        cache.insert(key(3))

    assert len(cache._full._queue) == 10


# ---------------------------------------------------------------- reset and retire


def test_a_reset_gives_back_every_slot_locked_or_not(paged: RadixCache, pool: FreedSlots) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))
    paged.insert(key(1, 2, ns="a"), row(29, 21))
    lock(paged, 1, 2)

    paged.reset()

    assert sorted(pool.take()) == [10, 11, 12, 13, 21, 29]
    assert sizes(paged) == (0, 0)
    assert found(paged, 1, 2) == []
    assert paged.num_locks() == 0
    assert paged.evict(99).full_evicted == 0


def test_nodes_from_before_a_reset_are_stale(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    node = lock(cache, 1, 2)
    cache.reset()
    cache.insert(key(1, 2), row(20, 21))

    for use in (cache.inc_lock_ref, cache.dec_lock_ref, lambda n: cache.insert(key(1, 2, 3), from_node=n)):
        with pytest.raises(StaleNodeError):
            use(node)
    assert sizes(cache) == (2, 0)


def test_a_reset_also_takes_what_was_retired(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    lock(cache, 1)
    cache.retire_all()

    cache.reset()

    assert pool.take() == [10]
    assert cache.tree_starts() == []


def test_what_is_retired_cannot_be_found_and_takes_no_part(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.retire_all()

    assert found(cache, 1, 2) == []
    assert sizes(cache) == (2, 0)
    with pytest.raises(StaleNodeError):
        cache.inc_lock_ref(node)
    with pytest.raises(StaleNodeError):
        cache.insert(key(1, 2, 3), row(10, 11, 12), from_node=node)
    assert cache.insert(key(1, 2), row(20, 21)).prefix_len == 0
    assert found(cache, 1, 2) == [20, 21]


def test_reclaiming_frees_what_was_retired_and_nothing_else(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(2), row(20))
    cache.retire_all()
    cache.insert(key(3), row(30))

    assert cache.reclaim_retired() == 2
    assert cache.reclaim_retired() == 0

    assert sorted(pool.take()) == [10, 20]
    assert edges(cache) == {"3"}


def test_what_is_retired_is_evicted_before_all_that_can_be_found(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    node = lock(cache, 1, 2)
    cache.retire_all()
    cache.insert(key(3), row(30))
    cache.dec_lock_ref(node)

    cache.evict(2)

    assert sorted(pool.take()) == [10, 11]


def test_what_is_retired_and_locked_stays_until_it_is_unlocked(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    lock(cache, 1)
    cache.retire_all()

    assert cache.reclaim_retired() == 1

    assert pool.take() == [11]
    assert sizes(cache) == (0, 1)
    assert cache.num_locks() == 1


def test_what_is_unlocked_after_its_retirement_can_be_reclaimed(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    node = lock(cache, 1)
    cache.retire_all()
    cache.dec_lock_ref(node)

    assert cache.reclaim_retired() == 1

    assert pool.take() == [10]


def test_chains_are_reclaimed_whole(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    cache.retire_all()

    assert cache.reclaim_retired() == 2

    assert pool.take() == [11, 10]


def test_the_queue_does_not_grow_with_what_was_reclaimed(cache: RadixCache) -> None:
    for _ in range(50):
        cache.insert(key(1), row(10))
        cache.insert(key(2), row(20))
        cache.retire_all()
        cache.reclaim_retired()

    assert not len(cache._full._queue)
    assert not cache._full.retired.pending
    assert not cache._retired


# ---------------------------------------------------------------- a lookup without effects


def test_a_peek_finds_what_a_match_finds(paged: RadixCache) -> None:
    paged.insert(key(1, 2, 3, 4, 5, 6), row(10, 11, 12, 13, 14, 15))

    for ids in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7], [1, 2, 9], [9, 9]):
        peeked = paged.peek_prefix(RadixKey(ids))
        matched = paged.match_prefix(RadixKey(ids))
        assert peeked.indices.tolist() == matched.indices.tolist()
        assert peeked.prefix_len == matched.prefix_len


def test_a_peek_changes_nothing(cache: RadixCache, pool: FreedSlots) -> None:
    old = cache.insert(key(1, 2, 3), row(10, 11, 12)).last_node
    cache.insert(key(4), row(13))
    before = (old.last_access_time, old.hit_count)

    for ids in ([1, 2, 3], [1, 2], [1, 2, 3, 4], [9], [WIDE]):
        cache.peek_prefix(RadixKey(ids))

    assert edges(cache) == {"1 2 3", "4"}
    assert (old.last_access_time, old.hit_count) == before
    cache.evict(1)
    assert pool.take() == [10, 11, 12]


def test_a_peek_names_the_deepest_node_it_matched_wholly(cache: RadixCache) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2, 3), row(10, 11, 12))

    assert runs(cache.peek_prefix(key(1, 2)).last_node) == ["1"]
    assert runs(cache.peek_prefix(key(1, 2, 3)).last_node) == ["1", "2 3"]
    assert cache.peek_prefix(key(2)).last_node is cache.root


# ---------------------------------------------------------------- hits


def test_each_match_is_one_hit_on_each_node_it_went_through(cache: RadixCache) -> None:
    cache.insert(key(1), row(10))
    leaf = cache.insert(key(1, 2), row(10, 11)).last_node
    parent = leaf.parent

    cache.match_prefix(key(1, 2))
    cache.match_prefix(key(1))
    cache.match_prefix(key(1, 3))
    cache.match_prefix(key(9))

    assert (parent.hit_count, leaf.hit_count) == (3, 1)


def test_inserts_are_no_hits(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.insert(key(1, 2), row(10, 11))

    assert node.hit_count == 0


def test_a_split_hands_its_hits_to_both_halves(cache: RadixCache) -> None:
    leaf = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.match_prefix(key(1, 2))

    above = cache.match_prefix(key(1)).last_node

    assert (above.hit_count, leaf.hit_count) == (2, 1)


# ---------------------------------------------------------------- inserts that resume at a node


def test_an_insert_from_a_node_is_the_insert_from_the_root(make_cache: Callable[..., RadixCache]) -> None:
    resumed, whole = make_cache(), make_cache()
    for each in (resumed, whole):
        each.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))
    node = resumed.match_prefix(key(1, 2)).last_node
    whole.match_prefix(key(1, 2))

    here = resumed.insert(key(1, 2, 3, 9), row(10, 11, 22, 23), from_node=node)
    there = whole.insert(key(1, 2, 3, 9), row(10, 11, 22, 23))

    assert here.prefix_len == there.prefix_len == 3
    assert here.duplicate_indices.tolist() == there.duplicate_indices.tolist() == [22]
    assert runs(here.last_node) == runs(there.last_node) == ["1 2", "3", "9"]
    assert edges(resumed) == edges(whole)


def test_slots_before_the_node_are_taken_to_be_the_trees(cache: RadixCache) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    node = cache.match_prefix(key(1, 2)).last_node

    result = cache.insert(key(1, 2, 3), row(99, 99, 22), from_node=node)

    assert result.duplicate_indices.tolist() == [22]


def test_an_insert_at_the_end_of_its_key_ends_where_it_began(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node

    result = cache.insert(key(1, 2), row(10, 11), from_node=node)

    assert (result.prefix_len, result.last_node) == (2, node)
    assert result.duplicate_indices.tolist() == []


def test_the_root_is_a_node_to_resume_at(cache: RadixCache) -> None:
    miss = cache.match_prefix(key(1)).last_node

    assert cache.insert(key(1), row(10), from_node=miss).prefix_len == 0
    assert found(cache, 1) == [10]


def test_an_insert_from_a_node_renews_what_lies_above_it(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.insert(key(9), row(30))
    cache.insert(key(1, 2, 3), row(10, 11, 12), from_node=node)

    cache.evict(1)

    assert pool.take() == [30]


def test_a_node_is_valid_after_the_tree_was_split_above_it(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.insert(key(1, 5), row(10, 15))

    cache.insert(key(1, 2, 3), row(10, 11, 12), from_node=node)

    assert edges(cache) == {"1", "1|2", "1|2|3", "1|5"}


def test_an_evicted_node_cannot_be_resumed_at(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.evict(2)

    with pytest.raises(StaleNodeError, match="match again"):
        cache.insert(key(1, 2, 3), row(10, 11, 12), from_node=node)

    assert edges(cache) == set()


@pytest.mark.parametrize("other", [key(1, 2, 3, ns="a"), key((1, 2), (2, 3), (3, 4)), key(1)], ids=repr)
def test_a_node_that_cannot_lie_on_the_path_is_refused(cache: RadixCache, other: RadixKey) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node

    with pytest.raises(InvalidKeyError, match="does not end a prefix"):
        cache.insert(other, row(20, 21, 22), from_node=node)

    assert sizes(cache) == (2, 0)


# ---------------------------------------------------------------- hashes


def test_the_hashes_of_a_node_are_those_of_its_pages_chained_from_the_root(paged: RadixCache) -> None:
    paged.insert(key(1, 2), row(10, 11))
    leaf = paged.insert(key(1, 2, 3, 4, 5, 6), row(10, 11, 12, 13, 14, 15)).last_node

    first = hash_token_ids([1, 2])
    second = hash_token_ids([3, 4], first)

    assert paged.compute_node_hash(leaf) == [second, hash_token_ids([5, 6], second)]
    assert leaf.parent.hash_values == [first]
    assert paged.compute_node_hash(paged.root) == []


def test_hashes_are_made_when_they_are_asked_for(paged: RadixCache) -> None:
    leaf = paged.insert(key(1, 2), row(10, 11)).last_node
    assert leaf.hash_values is None

    hashes = paged.compute_node_hash(leaf)

    assert leaf.hash_values == hashes
    assert paged.compute_node_hash(leaf) is hashes


def test_the_order_of_hashing_does_not_matter(make_cache: Callable[..., RadixCache]) -> None:
    down, up = make_cache(), make_cache()
    chains = []
    for each in (down, up):
        each.insert(key(1))
        each.insert(key(1, 2))
        nodes = [each.insert(key(1, 2, 3)[:length]).last_node for length in (1, 2, 3)]
        for node in nodes if each is down else nodes[::-1]:
            each.compute_node_hash(node)
        chains.append([node.hash_values for node in nodes])

    assert chains[0] == chains[1]


def test_hashes_are_those_of_an_unsplit_node_after_a_split(make_cache: Callable[..., RadixCache]) -> None:
    hashed_first, split_first = make_cache(), make_cache()
    leaf = hashed_first.insert(key(1, 2, 3)).last_node
    whole = hashed_first.compute_node_hash(leaf)

    later = split_first.insert(key(1, 2, 3)).last_node
    above = split_first.match_prefix(key(1)).last_node

    assert split_first.compute_node_hash(later) == whole[1:]
    assert split_first.compute_node_hash(above) == whole[:1]


def test_hashes_come_back_with_what_was_evicted(cache: RadixCache) -> None:
    before = cache.compute_node_hash(cache.insert(key(1, 2)).last_node)
    cache.evict(2)

    assert cache.compute_node_hash(cache.insert(key(1, 2)).last_node) == before


def test_namespaces_share_no_hash(cache: RadixCache) -> None:
    nodes = [cache.insert(key(1, 2, ns=ns)).last_node for ns in (None, "", "a", "b")]

    hashes = [each for node in nodes for each in cache.compute_node_hash(node)]

    assert len(set(hashes)) == 8


def test_the_seed_of_a_namespace_goes_before_its_first_page(cache: RadixCache) -> None:
    seed = namespace_seed("a")
    assert seed is not None

    first = hash_token_ids([1], seed.hex())

    assert cache.compute_node_hash(cache.insert(key(1, 2, ns="a")).last_node) == [first, hash_token_ids([2], first)]


def test_widening_a_namespace_changes_no_hash(make_cache: Callable[..., RadixCache]) -> None:
    narrow, widened = make_cache(2), make_cache(2)
    before = narrow.compute_node_hash(narrow.insert(key(1, 2, 3, 4)).last_node)

    node = widened.insert(key(1, 2, 3, 4)).last_node
    widened.insert(key(1, 2, WIDE, 4))

    parent, leaf = widened.compute_node_hash(node.parent), widened.compute_node_hash(node)
    assert [*parent, *leaf] == before


def test_a_page_with_a_wide_id_hashes_as_it_does_alone(paged: RadixCache) -> None:
    leaf = paged.insert(key(1, 2, WIDE, 4)).last_node
    first = hash_token_ids([1, 2])

    assert paged.compute_node_hash(leaf) == [first, hash_token_ids([WIDE, 4], first)]


def test_pages_of_tuples_hash_as_tuples(paged: RadixCache) -> None:
    leaf = paged.insert(key((1, 2), (2, 3))).last_node

    assert paged.compute_node_hash(leaf) == [hash_token_ids([(1, 2), (2, 3)])]


# ---------------------------------------------------------------- nodes


def test_a_node_tells_its_tokens_its_slots_and_its_place(cache: RadixCache) -> None:
    cache.insert(key(1, ns="a"), row(10))
    leaf = cache.insert(key(1, 2, 3, ns="a"), row(10, 11, 12)).last_node

    assert leaf.key == key(2, 3, ns="a")
    assert leaf.value.tolist() == [11, 12]
    assert (len(leaf), leaf.end, leaf.evicted) == (2, 3, False)
    assert repr(leaf) == f"TreeNode(id={leaf.id}, len=2, end=3, lock_ref=0)"
    assert cache.root.key is None


def test_node_ids_are_never_used_twice(cache: RadixCache) -> None:
    ids = []
    for _ in range(3):
        ids.append(cache.insert(key(1), row(10)).last_node.id)
        cache.evict(1)

    assert len(set(ids)) == 3


def test_nodes_are_ordered_by_their_last_use(cache: RadixCache) -> None:
    old = cache.insert(key(1), row(10)).last_node
    new = cache.insert(key(2), row(20)).last_node
    assert old < new

    cache.match_prefix(key(1))

    assert new < old


def test_equal_operations_have_equal_outcomes(make_cache: Callable[..., RadixCache], pool: FreedSlots) -> None:
    orders = []
    for cache in (make_cache(), make_cache()):
        for token in (3, 1, 2):
            cache.insert(key(token, 5), row(token * 10, token * 10 + 1))
        cache.match_prefix(key(1))
        cache.evict(4)
        orders.append(pool.take())

    assert orders[0] == orders[1] == [30, 31, 11, 20, 21]


# ---------------------------------------------------------------- for people


def test_a_small_tree_prints_as_one_line_per_node(cache: RadixCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.insert(key(1, 2, 3), row(10, 11, 12))
    cache.insert(key(1, 2, 4), row(10, 11, 22))
    lock(cache, 1, 2, 4)
    cache.insert(key((5, 6), ns="a"), row(30))

    cache.pretty_print()

    assert capsys.readouterr().out == (
        "namespace None\n"
        "  [1 2] len=2 slots=[10 11] locked x1 hits=1 age=1 #3\n"
        "    [3] len=1 slots=[12] hits=0 age=3 #2\n"
        "    [4] len=1 slots=[22] locked x1 hits=1 age=1 #4\n"
        "namespace 'a', tuples of 2\n"
        "  [(5, 6)] len=1 slots=[30] hits=0 age=0 #6\n"
    )


def test_long_runs_print_their_head(cache: RadixCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.insert(RadixKey(range(9)))

    cache.pretty_print()

    assert capsys.readouterr().out == (
        "namespace None\n  [0 1 2 3 4 5 6 7 ...] len=9 slots=[0 1 2 3 4 5 6 7 ...] hits=0 age=0 #2\n"
    )


# ---------------------------------------------------------------- depth


def test_a_chain_of_ten_thousand_nodes_works(cache: RadixCache, pool: FreedSlots) -> None:
    deep = 10_000
    ids = RadixKey(range(deep))
    cache.insert(ids)
    for length in range(deep - 1, 0, -1):
        cache.match_pages(ids, limit=length)  # each cuts the topmost node once more
    assert len(cache.tree_starts()) == deep

    assert cache.peek_prefix(ids).prefix_len == deep
    leaf = cache.match_prefix(ids).last_node
    cache.inc_lock_ref(leaf)
    assert sizes(cache) == (0, deep)
    assert cache.evict(1).full_evicted == 0
    assert len(cache.compute_node_hash(leaf)) == 1
    cache.check_invariants()
    with open(devnull, "w") as nowhere, redirect_stdout(nowhere):
        cache.pretty_print()
    cache.dec_lock_ref(leaf)
    assert cache.evict(5000).full_evicted == 5000
    assert pool.take() == list(range(deep - 1, 4999, -1))
    cache.insert(RadixKey([0, WIDE]))
    cache.check_invariants()
    cache.reset()
    assert len(pool.take()) == 5001


# ---------------------------------------------------------------- retiring some namespaces


def test_retiring_some_namespaces_costs_no_walk(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in range(1000):
        cache.insert(RadixKey([token], "a"), row(2 * token))
        cache.insert(RadixKey([token]), row(2 * token + 1))
    monkeypatch.setattr(cache._tree, "nodes_below", lambda top: pytest.fail("a retirement walked the tree"))

    assert cache.retire(lambda extra_key: extra_key == "a") == 1

    assert cache.peek_prefix(RadixKey([7], "a")).prefix_len == 0
    assert cache.peek_prefix(RadixKey([7])).prefix_len == 1
    monkeypatch.undo()
    cache.check_invariants()


def test_reclaiming_stops_at_its_limit_and_goes_on_from_there(cache: RadixCache, pool: FreedSlots) -> None:
    for token in range(100):
        cache.insert(RadixKey([token], "a"), row(token))
    cache.retire(lambda extra_key: extra_key == "a")

    assert cache.reclaim_retired(30) == 30
    cache.check_invariants()
    assert cache.reclaim_retired(30) == 30
    assert cache.reclaim_retired() == 40
    assert sorted(pool.slots) == list(range(100))
    assert cache.reclaim_retired() == 0


def test_floors_of_tenants_keep_their_slots_from_a_pool_that_takes_them_one_by_one(
    cache: RadixCache, pool: FreedSlots
) -> None:
    cache.divide(Tenants([Tenant("mine", "a", floor=2)]))
    cache.insert(RadixKey([1, 2], "a"), row(10, 11))
    cache.insert(RadixKey([1, 2, 3], "b"), row(20, 21, 22))

    assert cache.evict(5) == EvictResult(3)

    assert pool.take() == [20, 21, 22]
    cache.check_invariants()


def test_a_retired_namespace_can_be_filled_anew_at_once(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(RadixKey([1, 2], "a"), row(10, 11))
    held = cache.match_prefix(RadixKey([1, 2], "a")).last_node
    cache.inc_lock_ref(held)
    cache.retire(lambda extra_key: extra_key == "a")

    cache.insert(RadixKey([1, 2], "a"), row(20, 21))

    assert cache.match_prefix(RadixKey([1, 2], "a")).indices.tolist() == [20, 21]
    assert cache.reclaim_retired() == 0
    cache.dec_lock_ref(held)
    assert cache.reclaim_retired() == 2
    assert sorted(pool.slots) == [10, 11]
    cache.check_invariants()
