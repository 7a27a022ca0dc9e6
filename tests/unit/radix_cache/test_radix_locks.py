"""`RadixCache`: locked nodes are not evicted, and only locked nodes can be unlocked."""

from collections.abc import Callable

import pytest
from support.caches.small_radix import FreedSlots, edges, found, key, lock, row, sizes

from raydix.cache_core import LockError, RadixCache, StaleNodeError


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


def test_a_node_of_another_cache_cannot_be_unlocked(cache: RadixCache, make_cache: Callable[..., RadixCache]) -> None:
    """As where a process has a cache for each rank."""
    other = make_cache()
    other.insert(key(1, 2))
    node = lock(other, 1, 2)

    with pytest.raises(LockError, match="of another cache"):
        cache.dec_lock_ref(node)

    assert (sizes(cache), sizes(other)) == ((0, 0), (0, 2))
    other.retire_all()
    with pytest.raises(LockError, match="of another cache"):
        cache.dec_lock_ref(node)
    other.dec_lock_ref(node)
