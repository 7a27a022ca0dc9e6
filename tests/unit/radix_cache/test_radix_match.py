"""`RadixCache`: hits in whole pages, and the effects of a lookup."""

import numpy as np
import pytest
import torch
from support.caches.small_radix import FreedSlots, edges, found, key, row, runs, sizes

from raydix.cache_core import BasePrefixCache, EvictResult, InvalidKeyError, RadixCache, RadixKey

WIDE = 2**32  # the first id that needs more than 32 bits


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

    assert node.namespace.width == 4
    assert cache.insert(key(1, 2, WIDE), row(10, 11, 12), from_node=node).prefix_len == 2
    assert node.namespace.width == 8


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
