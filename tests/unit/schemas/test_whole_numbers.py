"""Where an int is wanted, whatever stands for one is taken as it; a float is refused before anything changes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydix.cache_core import (
    BasePrefixCache,
    ChunkCache,
    KVCache,
    LeasedCache,
    MambaPool,
    MambaRadixCache,
    PrefixCacheManager,
    RadixCache,
    RadixKey,
    RadixTrie,
    RowCache,
    SlotAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.trie_prefix_cache import TriePrefixCache


class Five:
    """No number, but it says which one it stands for."""

    def __index__(self) -> int:
        return 5


Form = Callable[[int], Any]
FORMS = [np.int64, np.uint8, torch.tensor]
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)


def window_cache(pool: SWATokenToKVPoolAllocator, page_size: Any = 1, window: Any = 2) -> RadixCache:
    return RadixCache(page_size, window, pool)


# ---------------------------------------------------------------- allocators


@forms
def test_an_allocator_of_pages_counts_in_plain_ints(form: Form) -> None:
    pool = TokenToKVPoolAllocator(form(8), form(2))

    assert pool.can_alloc(form(8)) and not pool.can_alloc(form(9))
    pool.free(pool.alloc(form(3)))
    pool.alloc_pages(form(2))

    assert pool.available_size() == 4
    assert type(pool.available_size()) is type(pool.num_slots) is int
    pool.check_invariants()


@forms
def test_an_allocator_of_window_halves_counts_in_plain_ints(form: Form) -> None:
    pool = SWATokenToKVPoolAllocator(form(8), form(4), form(2))

    pool.free(pool.alloc(form(3)))
    pool.alloc_pages(form(1))

    assert (pool.available_size(), pool.swa_available_size()) == (6, 2)
    assert type(pool.num_swa_slots) is type(pool.swa_available_size()) is int
    pool.check_invariants()


@pytest.mark.parametrize("verb", ["alloc", "alloc_pages", "can_alloc"])
def test_no_part_of_a_slot_is_allocated(verb: str) -> None:
    pool = TokenToKVPoolAllocator(8)

    with pytest.raises(TypeError):
        getattr(pool, verb)(1.5)

    assert pool.available_size() == 8
    pool.check_invariants()


@forms
def test_rows_are_taken_and_given_back_by_any_integer(form: Form) -> None:
    rows = SlotAllocator(form(200))

    rows.alloc_at(form(130))
    rows.occupy(form(131))

    assert not rows.is_free(form(130)) and not rows.is_free(131)
    assert rows.version(form(130)) == 1
    rows.free(form(130))
    assert rows.is_free(130) and rows.free_count == 199
    rows.check_invariants()


@forms
def test_a_state_slot_is_given_back_by_any_integer(form: Form) -> None:
    states = MambaPool(form(2))
    slot = states.alloc_track_slot()

    states.free_track_slot(form(slot))

    assert all(type(each) is int for each in states.free_slots())
    states.check_invariants()


# ---------------------------------------------------------------- trees


@forms
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_radix_cache_of_any_integer_works(form: Form, page_size: int) -> None:
    pool = TokenToKVPoolAllocator(64, page_size)
    cache = RadixCache(form(page_size), token_to_kv_pool_allocator=pool)
    key = RadixKey(range(8))

    cache.insert(key, pool.alloc(8), priority=form(3))
    assert cache.insert(key, cache.match_prefix(key).indices, prev_prefix_len=form(4)).prefix_len == 8
    assert cache.match_prefix(key, priority=form(7)).prefix_len == 8
    assert cache.match_pages(key, form(4)).prefix_len == 4

    priorities = {node.priority for node in cache.parts.tree.nodes()}
    assert priorities == {7} and type(priorities.pop()) is int
    assert cache.evict(form(8)).full_evicted == 8
    cache.check_invariants()


@forms
def test_a_window_of_any_integer_works(form: Form) -> None:
    pool = SWATokenToKVPoolAllocator(64, 64, 2)
    cache = window_cache(pool, form(2), form(3))
    key = RadixKey(range(12))

    cache.insert(key, pool.alloc(12), swa_evicted_seqlen=form(3))
    cache.insert(key, pool.alloc(12), prev_prefix_len=form(2), swa_evicted_seqlen=form(2))

    assert cache.sliding_window_size == 3 and type(cache.sliding_window_size) is int
    assert cache.evict(form(0), form(2)).swa_evicted >= 2
    assert cache.evict(form(12)).full_evicted == 12
    cache.check_invariants()


@forms
def test_a_cache_of_states_of_any_integer_works(form: Form) -> None:
    pool, states = TokenToKVPoolAllocator(64, 2), MambaPool(4)
    cache = MambaRadixCache(form(2), pool, states, chunk_size=form(4))
    key = RadixKey(range(8))

    cache.insert(key, pool.alloc(8), mamba_value=form(states.alloc_track_slot()))

    assert type(cache.match_prefix(key).last_node.mamba_value) is int
    assert cache.evict(form(0), form(0), form(1)).mamba_evicted == 1
    cache.check_invariants()


@forms
def test_caches_without_a_tree_take_any_integer(form: Form) -> None:
    pool = TokenToKVPoolAllocator(64, 2)
    trie = TriePrefixCache(form(2), pool)
    trie.insert(RadixKey(range(8)), pool.alloc(8))

    assert trie.match_pages(RadixKey(range(8)), form(4)).prefix_len == 4
    assert trie.evict(form(3)) == trie.evict(form(4))
    assert ChunkCache(form(2)).evict(form(3)).full_evicted == 0
    trie.check_invariants()


@forms
def test_a_trie_of_any_integer_works(form: Form) -> None:
    trie = RadixTrie(form(2))
    trie.insert([1, 2, 3, 4], ["a", "b"])

    assert trie.evict_blocks(form(1)) == ["b"]
    trie.check_invariants()


def tree_with(tokens: int) -> RadixCache:
    cache = RadixCache()
    cache.insert(RadixKey(range(tokens)))
    return cache


def retired_tree_with(tokens: int) -> RadixCache:
    cache = tree_with(tokens)
    cache.retire_all()
    return cache


def window_tree_with(tokens: int) -> RadixCache:
    pool = SWATokenToKVPoolAllocator(8, 8)
    cache = window_cache(pool)
    cache.insert(RadixKey(range(tokens)), pool.alloc(tokens))
    return cache


def states_with(tokens: int) -> MambaRadixCache:
    cache = MambaRadixCache()
    cache.insert(RadixKey(range(tokens)), mamba_value=1)
    return cache


def trie_with(tokens: int) -> TriePrefixCache:
    cache = TriePrefixCache()
    cache.insert(RadixKey(range(tokens)), torch.arange(tokens))
    return cache


@pytest.mark.parametrize("numbers", [(1.5,), (np.float64(1),), ("1",), (None,)], ids=repr)
@pytest.mark.parametrize(
    "filled", [tree_with, retired_tree_with, window_tree_with, states_with, trie_with, lambda tokens: ChunkCache()]
)
def test_no_cache_evicts_what_is_no_integer(filled: Callable[[int], BasePrefixCache], numbers: tuple[Any]) -> None:
    cache = filled(4)
    size = cache.total_size()

    with pytest.raises(TypeError):
        cache.evict(*numbers)

    assert cache.total_size() == size
    cache.check_invariants()


@pytest.mark.parametrize(("filled", "numbers"), [(window_tree_with, (4, 0.5)), (states_with, (4, 0, 0.5))])
def test_nothing_is_evicted_if_one_of_the_numbers_is_none(
    filled: Callable[[int], BasePrefixCache], numbers: tuple[Any, ...]
) -> None:
    cache = filled(4)

    with pytest.raises(TypeError):
        cache.evict(*numbers)

    assert cache.total_size() == 4
    cache.check_invariants()


@pytest.mark.parametrize("filled", [tree_with, window_tree_with, states_with])
def test_an_insert_that_is_told_no_number_of_known_tokens_changes_nothing(filled: Callable[[int], Any]) -> None:
    """None would have its `from_node` trusted, whatever leads there."""
    cache = filled(4)
    node = cache.match_prefix(RadixKey(range(4))).last_node

    for key, resumed in ((RadixKey([7, 8, 9, 10, 11]), node), (RadixKey(range(6)), None)):
        with pytest.raises(TypeError):
            cache.insert(key, torch.arange(len(key)), prev_prefix_len=None, from_node=resumed)

    assert cache.total_size() == 4
    cache.check_invariants()


@pytest.mark.parametrize("name", ["priority", "prev_prefix_len", "swa_evicted_seqlen"])
def test_an_insert_with_a_fraction_of_a_number_changes_nothing(name: str) -> None:
    cache = window_tree_with(4)
    before, options = cache.parts.clock, dict[str, Any]({name: 0.5})

    with pytest.raises(TypeError):
        cache.insert(RadixKey(range(6)), torch.arange(6), **options)

    assert (cache.total_size(), cache.parts.clock) == (4, before)
    cache.check_invariants()


@pytest.mark.parametrize(
    "make",
    [
        lambda size: RadixCache(size),
        lambda size: RadixCache(1, size),
        lambda size: MambaRadixCache(size),
        lambda size: MambaRadixCache(chunk_size=size),
        lambda size: ChunkCache(size),
        lambda size: TriePrefixCache(size),
        lambda size: RadixTrie(size),
        lambda size: PrefixCacheManager(size),
        lambda size: SlotAllocator(size),
        lambda size: TokenToKVPoolAllocator(size),
        lambda size: TokenToKVPoolAllocator(4, size),
        lambda size: SWATokenToKVPoolAllocator(4, size),
        lambda size: MambaPool(size),
        lambda size: RowCache(4, size),
    ],
)
def test_a_size_is_an_integer(make: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError):
        make(2.0)


def test_what_has_an_index_is_a_size() -> None:
    assert type(RadixCache(Five()).page_size) is int  # type: ignore[arg-type]
    assert RadixCache(Five()).page_size == 5  # type: ignore[arg-type]


# ---------------------------------------------------------------- rows


@forms
def test_a_row_is_named_by_any_integer(form: Form) -> None:
    rows = SlotAllocator(4)
    rows.alloc_at(2)
    cache = PrefixCacheManager(form(100), rows)

    assert cache.insert([1, 2, 3], form(2), form(1)) == 3
    found = cache.find([1, 2, 3])
    assert found == (3, 2, 1) and all(type(each) is int for each in found)
    kv = (torch.zeros(4, 3, 1), torch.zeros(4, 3, 1))
    rows.alloc_at(3)
    assert cache.copy_kv([1, 2], form(3), kv, form(1)) == 2
    cache.invalidate(form(2), form(2))
    assert cache.recorded_len(2) == 2
    assert cache.evict(form(1)) == 1
    cache.forget(form(2))
    assert cache.num_rows == 0
    cache.check_invariants()


@forms
def test_without_an_allocator_a_row_is_named_by_any_integer(form: Form) -> None:
    cache = PrefixCacheManager()

    cache.insert([1, 2], form(0), form(0))

    assert all(type(each) is int for each in cache.find([1, 2]))


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.evict(1.5),
        lambda cache: cache.insert([1, 2, 3], 0.0, 0),
        lambda cache: cache.insert([1, 2, 3], 0, 1.0),
        lambda cache: cache.invalidate(0, 0.5),
        lambda cache: cache.forget(0.0),
        lambda cache: cache.copy_kv([1], 1, (torch.zeros(2, 2, 1),) * 2, 0.5),
    ],
)
def test_what_is_recorded_of_rows_stays_if_a_number_is_no_integer(call: Callable[[Any], object]) -> None:
    cache = PrefixCacheManager()
    cache.insert([1, 2], 0, 0)
    before = cache.pretty_format()

    with pytest.raises(TypeError):
        call(cache)

    assert cache.pretty_format() == before
    cache.check_invariants()


# ---------------------------------------------------------------- leases


def paged_leases(form: Form) -> LeasedCache:
    pool = TokenToKVPoolAllocator(form(16), form(2))
    return KVCache(RadixCache(form(2), token_to_kv_pool_allocator=pool), pool)


def row_leases(form: Form) -> LeasedCache:
    return RowCache(form(16), form(8), form(2))


@forms
@pytest.mark.parametrize("leases", [paged_leases, row_leases])
def test_leases_are_counted_in_plain_ints(leases: Callable[[Form], LeasedCache], form: Form) -> None:
    cache, key = leases(form), RadixKey([1, 2, 3, 4])

    lease = cache.acquire("l", "s", key, form(1), form(2), form(3))
    cache.extend("l", "s", form(1))
    cache.insert("l", "s", form(4), RadixKey([]))
    cache.release_window("l", "s", form(2))

    assert (lease.num_slots, lease.priority) == (6, 3)
    assert type(lease.num_slots) is type(lease.priority) is int
    assert type(cache.lock("m", "s", key, form(3)).priority) is int
    cache.end_session("s")
    assert cache.evict(form(2)) >= 2
    cache.check_invariants()


@pytest.mark.parametrize("leases", [paged_leases, row_leases])
@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.acquire("m", "s", RadixKey([1, 2]), 0.5),
        lambda cache: cache.acquire("m", "s", RadixKey([1, 2]), 0, 0.5),
        lambda cache: cache.acquire("m", "s", RadixKey([1, 2]), 0, 0, 0.5),
        lambda cache: cache.lock("m", "s", RadixKey([1, 2]), 0.5),
        lambda cache: cache.extend("l", "s", 0.5),
        lambda cache: cache.insert("l", "s", 2.0, RadixKey([])),
        lambda cache: cache.release_window("l", "s", 0.5),
        lambda cache: cache.evict(0.5),
    ],
)
def test_leases_stay_as_they_are_if_a_number_is_no_integer(
    leases: Callable[[Form], LeasedCache], call: Callable[[Any], object]
) -> None:
    cache = leases(int)
    lease = cache.acquire("l", "s", RadixKey([1, 2]))
    cache.insert("l", "s", 2, RadixKey([]))
    before = cache.free_slots, cache.private_slots, lease.num_slots, cache.counters

    with pytest.raises(TypeError):
        call(cache)

    assert (cache.free_slots, cache.private_slots, lease.num_slots, cache.counters) == before
    assert len(list(cache.leases)) == 1
    cache.check_invariants()
