"""`ChunkCache`: the contract of a prefix cache, kept by holding nothing."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from raydix.cache_core import BasePrefixCache, ChunkCache, EvictResult, RadixKey


@pytest.fixture
def cache() -> Iterator[ChunkCache]:
    cache = ChunkCache(page_size=2)
    yield cache
    cache.check_invariants()
    assert (cache.evictable_size(), cache.protected_size(), cache.total_size()) == (0, 0, 0)


def test_it_is_a_prefix_cache(cache: ChunkCache) -> None:
    assert isinstance(cache, BasePrefixCache)
    assert cache.page_size == 2


def test_what_was_inserted_is_never_found(cache: ChunkCache) -> None:
    cache.insert(RadixKey([1, 2]), torch.tensor([10, 11]))

    for result in (cache.match_prefix(RadixKey([1, 2])), cache.peek_prefix(RadixKey([1, 2]))):
        assert result.prefix_len == 0
        assert result.last_node is None
        assert result.indices.tolist() == []
        assert result.indices.dtype == torch.int64


def test_an_insert_takes_nothing_over_and_names_no_duplicates(cache: ChunkCache) -> None:
    result = cache.insert(RadixKey([1, 2]), torch.tensor([10, 11]), prev_prefix_len=0, swa_evicted_seqlen=0)

    assert result.prefix_len == 0
    assert result.duplicate_indices.tolist() == []


def test_pages_are_no_different(cache: ChunkCache) -> None:
    inserted = cache.insert_pages(RadixKey([1, 2]), np.array([10]), None)
    matched = cache.match_pages(RadixKey([1, 2]), limit=2)

    assert (inserted.prefix_len, inserted.end, inserted.last_node, inserted.existing.tolist()) == (
        0,
        0,
        None,
        [],
    )
    assert (matched.prefix_len, matched.last_node, matched.starts.tolist()) == (0, None, [])


def test_nothing_is_there_to_evict(cache: ChunkCache) -> None:
    cache.insert(RadixKey([1, 2]), torch.tensor([10, 11]))

    assert cache.evict(99) == EvictResult(0, 0, 0)
    assert cache.tree_starts() == []


def test_locks_and_resets_are_no_ops(cache: ChunkCache) -> None:
    cache.inc_lock_ref(None)
    cache.dec_lock_ref(None)
    cache.dec_lock_ref(None, None)
    cache.dec_lock_ref(None, swa_boundary_id=None)
    cache.retire_all()
    cache.reset()

    assert cache.num_locks() == 0
    assert cache.reclaim_retired() == 0
