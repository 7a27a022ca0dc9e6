"""`RadixCache`: the slots that an insert moves to the tree, and the owners afterwards."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.caches.small_radix import FreedSlots, edges, found, key, row, runs, sizes

from raydix.cache_core import InvalidKeyError, RadixCache, RadixKey, StaleNodeError

# ---------------------------------------------------------------- insert: owners of slots


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


@pytest.mark.parametrize("prev_prefix_len", [-1, 1, 10**9])
@pytest.mark.parametrize("ids", [(), (1,)])
def test_a_prev_prefix_len_for_less_than_a_page_is_refused(ids: tuple[int, ...], prev_prefix_len: int) -> None:
    cache = RadixCache(2)
    cache.insert(key(1, 2), row(10, 11))

    with pytest.raises(InvalidKeyError, match=f"prev_prefix_len is {prev_prefix_len}, but 0 tokens are in the tree"):
        cache.insert(key(*ids), row(*ids), prev_prefix_len=prev_prefix_len)


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

    nodes = list(cache.parts.tree.nodes())

    assert sorted(map(len, nodes)) == [4, 400, 3600]
    for node in nodes:
        assert isinstance(node.slots, bytes)
        assert len(node.slots) == 4 * len(node) // page_size + 1  # 4 bytes a page
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
