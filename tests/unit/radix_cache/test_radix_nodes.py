"""`RadixCache`: nodes after a split, values of nodes, and deep trees."""

from collections.abc import Callable
from contextlib import redirect_stdout
from os import devnull

import pytest
from support.caches.small_radix import FreedSlots, edges, found, key, lock, row, runs, sizes

from raydix.cache_core import RadixCache, RadixKey

WIDE = 2**32  # the first id that needs more than 32 bits


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
