"""Free slots hold NaN, from the start and after every way of freeing; published pages are checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.caches.pool_layers import layer_shapes

from raydix.actors.memory.pool_shapes import layout_of
from raydix.actors.service.core_factory import build_core
from raydix.cache_core import KVCache, KVPool, LeasedCache, RadixKey, RowCache
from raydix.cache_core.errors import ContentError
from raydix.schemas import CacheConfig, EvictionConfig, PoolConfig

PAGE = 2
SHAPE = {"layers": layer_shapes(("full", "full")), "device": "cpu", "dtype": "bfloat16"}


def make(pool: dict[str, Any] | None = None, **fields: Any) -> tuple[LeasedCache, KVPool]:
    """A checked cache of eight pages, and its pool; every slot holds KV, so that new NaNs are visible."""
    cache, tensors = make_fresh(pool, **fields)
    for each in (*tensors.k, *tensors.v):
        each.fill_(1)
    return cache, tensors


def make_fresh(pool: dict[str, Any] | None = None, **fields: Any) -> tuple[LeasedCache, KVPool]:
    """A checked cache of eight pages, and its unused pool."""
    config = CacheConfig(
        page_size=PAGE,
        pool=PoolConfig(**{"num_slots": 16, **SHAPE, **(pool or {})}),
        eviction=EvictionConfig(high_watermark=1.0),
        **{"validate": True, **fields},
    )
    tensors = KVPool(layout_of(config))
    return build_core(config, tensors, lambda: None)[0], tensors


def key(*ids: int) -> RadixKey:
    return RadixKey(list(ids))


def poisoned(pool: KVPool, layer: int = 0) -> list[int]:
    """The slots of a layer that are poison in K and V."""
    both = pool.k[layer].isnan().all(-1).all(-1) & pool.v[layer].isnan().all(-1).all(-1)
    return both.nonzero().flatten().tolist()


def slots(starts: np.ndarray) -> list[int]:
    return sorted(slot for start in starts.tolist() for slot in range(start, start + PAGE))


def test_a_fresh_pool_is_poisoned_but_for_its_padding() -> None:
    _, pool = make_fresh({"layers": layer_shapes(("full", "swa")), "num_swa_slots": 12}, sliding_window_size=2)

    assert poisoned(pool, 0) == list(range(PAGE, 16 + PAGE))
    assert poisoned(pool, 1) == list(range(PAGE, 12 + PAGE))
    assert not any(each[:PAGE].any() for each in (*pool.k, *pool.v))


def test_a_fresh_pool_of_rows_is_poisoned_whole() -> None:
    _, pool = make_fresh(kind="slots", max_seq_len=8)

    assert poisoned(pool, 0) == poisoned(pool, 1) == list(range(16))


def test_fresh_states_are_poisoned_but_for_the_reserved_one_and_a_lease_begins_with_zeros() -> None:
    states = {"layers": layer_shapes(("full", "state")), "num_state_slots": 3}
    cache, pool = make_fresh(states, kind="mamba")

    for tensor in pool.state(1):
        assert tensor.isnan().flatten(1).all(1).tolist() == [False, True, True, True]
        assert not tensor[0].any()
    slot = cache.acquire("l", "s", key(1, 2)).state_slot
    assert slot is not None
    assert not any(tensor[slot].any() for tensor in pool.state(1))


def test_without_the_switch_a_fresh_pool_is_zeros() -> None:
    _, pool = make_fresh(validate=False)
    assert not any(each.any() for each in (*pool.k, *pool.v))


def test_what_a_vanished_session_may_still_write_is_poisoned_when_the_quarantine_is_over() -> None:
    cache, pool = make()
    lease = cache.acquire("l", "s", key(1, 2, 3, 4, 5))
    cache.insert("l", "s", 2, key())
    private = slots(lease.starts[1:])

    cache.quarantine_session("s")
    assert poisoned(pool) == []
    cache.free_withheld("s")

    assert poisoned(pool) == poisoned(pool, 1) == private
    cache.evict(16)
    assert poisoned(pool) == slots(lease.starts)


def test_a_quarantined_row_is_poisoned_behind_what_was_published_in_it() -> None:
    cache, pool = make(kind="slots", max_seq_len=8)
    assert isinstance(cache, RowCache)
    cache.acquire("l", "s", key(1, 2, 3))
    cache.insert("l", "s", 3, key())
    cache.quarantine_session("s")
    assert poisoned(pool) == []
    cache.free_withheld("s")
    assert poisoned(pool) == [2, 3, 4, 5, 6, 7]
    assert cache.retire(lambda namespace: namespace is None) == 1
    assert poisoned(pool) == list(range(8))


def test_a_leased_row_that_was_retired_is_poisoned_when_its_lease_ends() -> None:
    cache, pool = make(kind="slots", max_seq_len=8)
    cache.acquire("l", "s", key(1, 2, 3))
    cache.insert("l", "s", 3, key())
    cache.reset()
    assert poisoned(pool) == [8, 9, 10, 11, 12, 13, 14, 15]  # the row without a lease
    cache.release("l", "s")
    assert poisoned(pool) == list(range(16))


def test_retired_pages_are_poisoned_once_the_last_lease_lets_go() -> None:
    cache, pool = make()
    lease = cache.acquire("l", "s", key(1, 2, 3, 4))
    cache.insert("l", "s", 4, key())
    held = slots(lease.starts)
    cache.reset()
    assert poisoned(pool) == []
    cache.release("l", "s")
    assert poisoned(pool) == held


def test_window_slots_are_poisoned_as_the_window_moves_on_and_full_ones_are_not() -> None:
    swa = {"layers": layer_shapes(("full", "swa")), "num_swa_slots": 12}
    cache, pool = make(swa, sliding_window_size=2)
    assert isinstance(cache, KVCache)
    lease = cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6, 7, 8))
    halves = cache.swa_starts(lease)

    cache.release_window("l", "s", 6)

    assert poisoned(pool, 1) == slots(halves[:1])
    assert poisoned(pool, 0) == []


def test_a_window_that_is_brought_again_is_watched_again() -> None:
    """Its half moves behind a page of the tree that had lost its own."""
    swa = {"layers": layer_shapes(("full", "swa")), "num_swa_slots": 12}
    cache, pool = make(swa, sliding_window_size=2)
    assert isinstance(cache, KVCache)
    for lease_id in ("l", "m"):
        lease = cache.acquire(lease_id, "s", key(1, 2, 3, 4), max_prefix_len=0)
        cache.insert(lease_id, "s", 4, key())
        halves = cache.swa_starts(lease)
        cache.release(lease_id, "s")
        if lease_id == "l":
            cache.evict_window(2)
    assert cache.match(key(1, 2, 3, 4)).prefix_len == 4
    cache.lock("n", "s", key(1, 2, 3, 4))

    pool.v[1][halves[-1]] += 1

    with pytest.raises(ContentError, match="V of layer 1"):
        cache.lock("o", "s", key(1, 2, 3, 4))
    cache.release("n", "s")
    cache.check_invariants()
