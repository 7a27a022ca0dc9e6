"""`RadixCache`: namespaces, and ids of any width, share nothing."""

import pytest
from support.caches.small_radix import FreedSlots, edges, found, key, lock, row, sizes

from raydix.cache_core import RadixCache

WIDE = 2**32  # the first id that needs more than 32 bits


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

    assert {node.namespace.extra_key: node.namespace.width for node in cache.parts.tree.nodes()} == {"a": 4, "b": 8}


def test_nodes_and_locks_outlive_the_widening(cache: RadixCache) -> None:
    node = lock(cache, *cache.insert(key(1, 2), row(10, 11)).last_node.key)
    cache.insert(key(1, 2, WIDE), row(10, 11, 12))

    result = cache.insert(key(1, 2, 3), row(10, 11, 13), from_node=node)

    assert result.prefix_len == 2
    assert edges(cache) == {"1 2", f"1 2|{WIDE}", "1 2|3"}
    cache.dec_lock_ref(node)
