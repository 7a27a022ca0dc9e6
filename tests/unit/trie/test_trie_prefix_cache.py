"""`TriePrefixCache`, its additions to the trie: pages, locks with receipts, and retirement of namespaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raydix.cache_core import LockError, RadixKey, SlotError, TokenToKVPoolAllocator
from raydix.cache_core.trie_prefix_cache import TriePrefixCache


class FreedPages:
    """A pool that remembers what it was given back."""

    def __init__(self) -> None:
        self.starts: list[int] = []

    def free_pages(self, starts: np.ndarray) -> None:
        self.starts += starts.tolist()


@pytest.fixture
def pool() -> FreedPages:
    return FreedPages()


@pytest.fixture
def cache(pool: FreedPages) -> TriePrefixCache:
    return TriePrefixCache(2, pool)


def insert(cache: TriePrefixCache, *tokens: int, first: int, extra_key: str | None = None) -> None:
    slots = torch.arange(first, first + len(tokens))
    assert not len(cache.insert(RadixKey(tokens, extra_key), slots).duplicate_indices)


def found(cache: TriePrefixCache, *tokens: int, extra_key: str | None = None) -> list[int]:
    return cache.peek_prefix(RadixKey(tokens, extra_key)).indices.tolist()


def test_namespaces_share_nothing(cache: TriePrefixCache) -> None:
    insert(cache, 1, 2, first=2)
    insert(cache, 1, 2, first=4, extra_key="a")

    assert found(cache, 1, 2) == [2, 3]
    assert found(cache, 1, 2, extra_key="a") == [4, 5]
    assert found(cache, 1, 2, extra_key="b") == []


@pytest.mark.parametrize("meant", [None, "a"])
def test_a_retired_namespace_starts_anew_and_the_others_go_on(
    cache: TriePrefixCache, pool: FreedPages, meant: str | None
) -> None:
    other = "a" if meant is None else None
    insert(cache, 1, 2, first=2, extra_key=meant)
    insert(cache, 1, 2, first=4, extra_key=other)

    for times in range(3):
        assert cache.retire(lambda extra_key: extra_key == meant) == 1
        assert found(cache, 1, 2, extra_key=meant) == []
        assert found(cache, 1, 2, extra_key=other) == [4, 5]
        insert(cache, 1, 2, first=6 + 2 * times, extra_key=meant)
        assert found(cache, 1, 2, extra_key=meant) == [6 + 2 * times, 7 + 2 * times]

    cache.check_invariants()
    assert cache.total_size() == 10
    assert cache.evict(10).full_evicted == 10
    assert sorted(pool.starts) == [2, 4, 6, 8, 10]


def test_what_holds_nothing_cannot_be_retired(cache: TriePrefixCache) -> None:
    assert cache.retire(lambda extra_key: True) == 0
    insert(cache, 1, 2, first=2)
    assert cache.retire(lambda extra_key: extra_key == "a") == 0
    assert cache.retire(lambda extra_key: True) == 1
    assert cache.retire(lambda extra_key: True) == 0


def test_what_is_retired_and_gone_is_forgotten(cache: TriePrefixCache) -> None:
    for number in range(50):
        insert(cache, 1, 2, first=2, extra_key=f"adapter {number}")
        cache.retire(lambda extra_key: True)
        cache.evict(2)

    assert len(cache._times_retired) <= 2
    insert(cache, 1, 2, first=2, extra_key="adapter 0")
    assert found(cache, 1, 2, extra_key="adapter 0") == [2, 3]


def test_what_a_sequence_uses_outlives_the_retirement(cache: TriePrefixCache, pool: FreedPages) -> None:
    insert(cache, 1, 2, first=2, extra_key="a")
    node = cache.match_prefix(RadixKey([1, 2], "a")).last_node
    receipt = cache.inc_lock_ref(node)

    cache.retire(lambda extra_key: extra_key == "a")

    assert cache.evict(2).full_evicted == 0
    assert cache.protected_size() == 2
    cache.dec_lock_ref(node, receipt)
    assert cache.evict(2).full_evicted == 2
    assert pool.starts == [2]


def test_pairs_and_namespaces_are_told_apart(cache: TriePrefixCache) -> None:
    cache.insert(RadixKey([(1, 2), (2, 3)]), torch.tensor([2, 3]))
    cache.retire(lambda extra_key: extra_key == "a")
    assert cache.peek_prefix(RadixKey([(1, 2), (2, 3)])).prefix_len == 2
    assert cache.retire(lambda extra_key: extra_key is None) == 1
    assert cache.peek_prefix(RadixKey([(1, 2), (2, 3)])).prefix_len == 0


def test_reclaiming_stops_near_its_limit(cache: TriePrefixCache) -> None:
    for at in range(10):
        insert(cache, at, at, first=2 + 2 * at)
    cache.retire_all()

    assert 4 <= cache.reclaim_retired(4) <= 6
    assert cache.reclaim_retired() >= 14
    assert cache.total_size() == 0


def test_an_unlock_needs_its_own_receipt(cache: TriePrefixCache) -> None:
    insert(cache, 1, 2, first=2)
    node = cache.match_prefix(RadixKey([1, 2])).last_node
    receipt = cache.inc_lock_ref(node)

    for wrong in (None, receipt + 1):
        with pytest.raises(LockError):
            cache.dec_lock_ref(node, wrong)
    cache.dec_lock_ref(node, receipt)
    with pytest.raises(LockError):
        cache.dec_lock_ref(node, receipt)


# ---------------------------------------------------------------- pools that refuse


@pytest.mark.parametrize("verb", ["evict", "reset", "reclaim_retired"])
def test_what_a_pool_refuses_raises_once_it_has_left_the_trie(verb: str) -> None:
    pool = TokenToKVPoolAllocator(16, 2)
    cache: Any = TriePrefixCache(2, pool)
    slots = pool.alloc(8)
    cache.insert(RadixKey(range(8)), slots)
    pool.free(slots[2:4])  # a caller's mistake
    if verb == "reclaim_retired":
        cache.retire_all()

    with pytest.raises(SlotError, match=r"refused slots that were in the tree: .*: freed slots must be allocated"):
        cache.evict(8) if verb == "evict" else getattr(cache, verb)()

    assert cache.total_size() == 0
    cache.reset()
    cache.check_invariants()


def test_an_insert_raises_once_the_trie_has_its_pages_if_the_pool_refuses_displaced_ones() -> None:
    pool = TokenToKVPoolAllocator(16)
    cache = TriePrefixCache(1, pool)
    first, second = pool.alloc(4), pool.alloc(4)
    cache.insert(RadixKey([1, 2, 3, 4]), first)
    pool.free(first[:1])  # a caller's mistake

    with pytest.raises(SlotError, match=r"refused slots that were in the tree: 1, 2, 3, 4: "):
        cache.insert(RadixKey([1, 2, 3, 4]), second)

    assert found(cache, 1, 2, 3, 4) == second.tolist()
    cache.check_invariants()
    assert cache.evict(5).full_evicted == 4
