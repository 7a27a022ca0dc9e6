"""`KVCache`, verb by verb: who holds each slot after every step, in exact numbers.

The default cache has 8 slots in pages of 2: [2 3] [4 5] [6 7] [8 9]. `count(cache)` is (free, private, tree).
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raydix.cache_core import (
    ChunkCache,
    KVCache,
    LeaseRangeError,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    TokenToKVPoolAllocator,
    UnknownLeaseError,
)
from raydix.cache_core.kv_cache import Published
from raydix.cache_core.lease_table import LeaseRecord

NO_IDS = RadixKey([])


@pytest.fixture
def make() -> Iterator[Callable[..., KVCache]]:
    caches: list[KVCache] = []

    def make_cache(num_slots: int = 8, page_size: int = 2, **options: Any) -> KVCache:
        allocator = TokenToKVPoolAllocator(num_slots, page_size)
        tree = RadixCache(page_size, token_to_kv_pool_allocator=allocator)
        caches.append(KVCache(tree, allocator, **options))
        return caches[-1]

    yield make_cache
    for cache in caches:
        cache.check_invariants()


@pytest.fixture
def cache(make: Callable[..., KVCache]) -> KVCache:
    return make()


def key(*ids: Any, ns: str | None = None) -> RadixKey:
    return RadixKey(list(ids), ns)


def count(cache: KVCache) -> tuple[int, int, int]:
    """Free, private and tree slots, after checking that all else holds too."""
    cache.check_invariants()
    tree = cache.tree.total_size()
    assert cache.free_slots + cache.private_slots + tree == cache.num_slots
    return cache.free_slots, cache.private_slots, tree


def shape(lease: LeaseRecord) -> tuple[int, list[int], int, int]:
    """Prefix, page starts, published pages, slots covered."""
    return lease.prefix_len, lease.starts.tolist(), lease.num_published_pages, lease.num_slots


def publish(cache: KVCache, *ids: int, ns: str | None = None) -> list[int]:
    """Put tokens into the tree and hold nothing; returns the slots they are found at."""
    cache.acquire("publisher", "publisher", key(*ids, ns=ns))
    cache.insert("publisher", "publisher", len(ids), RadixKey([], ns))
    cache.release("publisher", "publisher")
    return found(cache, *ids, ns=ns)


def found(cache: KVCache, *ids: int, ns: str | None = None) -> list[int]:
    return cache.tree.peek_prefix(key(*ids, ns=ns)).indices.tolist()


# ---------------------------------------------------------------- match


def test_a_probe_tells_the_prefix_and_holds_nothing(cache: KVCache) -> None:
    publish(cache, 1, 2, 3, 4)

    result = cache.match(key(1, 2, 9, 9))

    assert (result.prefix_len, result.indices.tolist()) == (2, [2, 3])
    assert count(cache) == (4, 0, 4)
    assert cache.held_slots() == 0
    assert len(cache.leases) == 0
    assert cache.counters.probes == 1


def test_a_probe_keeps_nothing_alive(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4)

    cache.match(key(1, 2))
    cache.evict(1)

    assert (found(cache, 1, 2), found(cache, 3, 4)) == ([], [4, 5])


# ---------------------------------------------------------------- acquire


def test_a_miss_gets_private_slots_for_every_token_in_whole_pages(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3), new_tokens=2)

    assert shape(lease) == (0, [2, 4, 6], 0, 5)
    assert count(cache) == (2, 6, 0)
    assert cache.held_slots() == 6


def test_a_hit_holds_the_prefix_and_gets_private_slots_for_the_rest(cache: KVCache) -> None:
    publish(cache, 1, 2, 3, 4)

    lease = cache.acquire("l", "s", key(1, 2, 3, 4, 5))

    assert shape(lease) == (4, [2, 4, 6], 2, 5)
    assert lease.private_starts.tolist() == [6]
    assert count(cache) == (2, 2, 4)
    assert (cache.tree.evictable_size(), cache.tree.protected_size()) == (0, 4)
    assert cache.held_slots() == 6


def test_a_hit_inside_a_node_holds_no_more_than_it_uses(cache: KVCache) -> None:
    publish(cache, 1, 2, 3, 4)

    lease = cache.acquire("l", "s", key(1, 2, 9, 9))

    assert shape(lease) == (2, [2, 6], 1, 4)
    assert (cache.tree.evictable_size(), cache.tree.protected_size()) == (2, 2)


@pytest.mark.parametrize(("max_prefix_len", "prefix_len"), [(None, 4), (9, 4), (4, 4), (3, 2), (2, 2), (1, 0), (0, 0)])
def test_a_prefix_is_no_longer_than_asked_for(cache: KVCache, max_prefix_len: int | None, prefix_len: int) -> None:
    publish(cache, 1, 2, 3, 4)

    lease = cache.acquire("l", "s", key(1, 2, 3, 4), max_prefix_len=max_prefix_len)

    assert lease.prefix_len == prefix_len
    assert count(cache) == (prefix_len, 4 - prefix_len, 4)


def test_a_full_hit_takes_no_slots(cache: KVCache) -> None:
    publish(cache, 1, 2)

    assert shape(cache.acquire("l", "s", key(1, 2))) == (2, [2], 1, 2)
    assert count(cache) == (6, 0, 2)


def test_namespaces_do_not_reuse_each_others_prefixes(cache: KVCache) -> None:
    publish(cache, 1, 2, ns="a")

    assert cache.acquire("l", "s", key(1, 2, ns="b")).prefix_len == 0
    assert cache.acquire("m", "s", key(1, 2, ns="a")).prefix_len == 2


def test_the_same_lease_id_again_returns_the_open_lease(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3))

    assert cache.acquire("l", "s", key(1, 2, 3)) is lease
    assert cache.lock("l", "s", key(1, 2, 3)) is lease
    assert count(cache) == (4, 4, 0)
    assert cache.counters.acquires == 1


def test_a_lease_id_of_another_session_is_refused(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3))

    for verb in (cache.acquire, cache.lock):
        with pytest.raises(UnknownLeaseError):
            verb("l", "other", key(1, 2))

    assert count(cache) == (4, 4, 0)


def test_a_lease_id_can_be_used_again_after_its_release(cache: KVCache) -> None:
    first = cache.acquire("l", "s", key(1, 2))
    cache.release("l", "s")

    assert cache.acquire("l", "other", key(5, 6)) is not first
    assert count(cache) == (6, 2, 0)


# ---------------------------------------------------------------- no room


def test_only_the_shortfall_is_evicted(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4)
    publish(cache, 5, 6)

    cache.acquire("l", "s", key(7, 8, 9, 9))

    assert [found(cache, 1, 2), found(cache, 3, 4), found(cache, 5, 6)] == [[], [4, 5], [6, 7]]
    assert count(cache) == (0, 4, 4)
    assert cache.counters.tokens_evicted == 2


def test_nothing_is_evicted_while_free_slots_suffice(cache: KVCache) -> None:
    publish(cache, 1, 2)

    cache.acquire("l", "s", key(3, 4, 5, 6, 7, 8))

    assert found(cache, 1, 2) == [2, 3]
    assert count(cache) == (0, 6, 2)


def test_the_prefix_that_was_found_is_not_evicted_to_make_room_for_the_rest(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4)

    lease = cache.acquire("l", "s", key(1, 2, 5, 5, 6, 6, 7, 7))

    assert shape(lease) == (2, [2, 4, 6, 8], 1, 8)
    assert found(cache, 1, 2) == [2, 3]
    assert found(cache, 3, 4) == []
    assert count(cache) == (0, 6, 2)


def test_a_refusal_takes_nothing_and_evicts_nothing(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.acquire("holder", "s", key(3, 4, 5))

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("l", "s", key(6, 6, 7, 7, 8, 8))

    error = caught.value
    assert (error.needed, error.free, error.evictable, error.capacity) == (6, 2, 2, 8)
    assert error.can_ever_fit
    assert found(cache, 1, 2) == [2, 3]
    assert count(cache) == (2, 4, 2)
    assert cache.counters.acquires == 2  # the publisher's and the holder's
    with pytest.raises(UnknownLeaseError):
        cache.insert("l", "s", 0, NO_IDS)


def test_a_refused_hit_holds_its_prefix_no_longer(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.acquire("holder", "s", key(3, 4, 5))

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("l", "s", key(1, 2, 7, 7, 8, 8))

    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (4, 2, 0)
    assert cache.tree.num_locks() == 0
    assert count(cache) == (2, 4, 2)
    assert cache.evict(9) == 2


@pytest.mark.parametrize(("num_tokens", "new_tokens"), [(9, 0), (1, 8), (8, 1)])
def test_what_is_larger_than_the_pool_can_never_fit(cache: KVCache, num_tokens: int, new_tokens: int) -> None:
    publish(cache, 0, 1, 2, 3)

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("l", "s", RadixKey(range(num_tokens)), new_tokens)

    assert not caught.value.can_ever_fit
    assert caught.value.needed == 10
    assert count(cache) == (4, 0, 4)


def test_the_whole_pool_can_be_one_lease(cache: KVCache) -> None:
    publish(cache, 9, 9)

    cache.acquire("l", "s", key(1, 2, 3), new_tokens=5)

    assert count(cache) == (0, 8, 0)


# ---------------------------------------------------------------- lock and extend


def test_a_lock_holds_the_prefix_and_takes_no_slots(cache: KVCache) -> None:
    publish(cache, 1, 2)

    lease = cache.lock("l", "s", key(1, 2, 3, 4))

    assert shape(lease) == (2, [2], 1, 2)
    assert count(cache) == (6, 0, 2)
    assert cache.evict(9) == 0


def test_a_lock_of_nothing_is_a_lease_of_nothing(cache: KVCache) -> None:
    lease = cache.lock("l", "s", key(1, 2))

    assert shape(lease) == (0, [], 0, 0)
    assert count(cache) == (8, 0, 0)


def test_a_lock_that_is_extended_can_publish(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.lock("l", "s", key(1, 2, 3, 4))

    assert cache.extend("l", "s", 2).tolist() == [4]
    done = cache.insert("l", "s", 4, NO_IDS)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (2, 2, 0)
    assert count(cache) == (4, 0, 4)
    assert found(cache, 1, 2, 3, 4) == [2, 3, 4, 5]


def test_an_extension_uses_the_rest_of_the_last_page_first(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3))

    assert cache.extend("l", "s", 1).tolist() == []
    assert shape(lease) == (0, [2, 4], 0, 4)
    assert cache.extend("l", "s", 3).tolist() == [6, 8]
    assert shape(lease) == (0, [2, 4, 6, 8], 0, 7)
    assert count(cache) == (0, 8, 0)


def test_an_extension_evicts_its_shortfall(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4)
    cache.acquire("l", "s", key(5, 6, 7, 8))

    assert cache.extend("l", "s", 2).tolist() == [2]

    assert (found(cache, 1, 2), found(cache, 3, 4)) == ([], [4, 5])
    assert count(cache) == (0, 6, 2)


def test_a_refused_extension_changes_nothing(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3))
    cache.acquire("m", "s", key(4, 5, 6))
    before = shape(lease)

    with pytest.raises(OutOfSlotsError) as caught:
        cache.extend("l", "s", 2)
    assert (caught.value.needed, caught.value.can_ever_fit) == (2, True)

    with pytest.raises(OutOfSlotsError) as caught:
        cache.extend("l", "s", 6)
    assert not caught.value.can_ever_fit

    assert shape(lease) == before
    assert count(cache) == (0, 8, 0)


@pytest.mark.parametrize("verb", ["acquire", "extend"])
def test_a_negative_count_is_refused(cache: KVCache, verb: str) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3))

    with pytest.raises(ValueError):
        if verb == "acquire":
            cache.acquire("m", "s", key(4, 5, 6), new_tokens=-2)
        else:
            cache.extend("l", "s", -2)

    assert shape(lease) == (0, [2, 4], 0, 3)
    assert count(cache) == (4, 4, 0)


# ---------------------------------------------------------------- insert


def test_whole_pages_are_published_and_still_held(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3))

    done = cache.insert("l", "s", 3, NO_IDS)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates, done.retired) == (0, 2, 0, False)
    assert done.repointed.tolist() == []
    assert shape(lease) == (0, [2, 4], 1, 3)
    assert count(cache) == (4, 2, 2)
    assert found(cache, 1, 2, 3) == [2, 3]
    assert cache.evict(9) == 0


def test_generated_tokens_are_published_after_those_acquired(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3), new_tokens=3)

    done = cache.insert("l", "s", 6, key(7, 8, 9))

    assert done.num_inserted == 6
    assert lease.key == key(1, 2, 3, 7, 8, 9)
    assert found(cache, 1, 2, 3, 7, 8, 9) == [2, 3, 4, 5, 6, 7]
    assert count(cache) == (2, 0, 6)


def test_publishing_goes_on_where_it_stopped(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3), new_tokens=3)

    assert cache.insert("l", "s", 2, NO_IDS).num_inserted == 2
    assert cache.insert("l", "s", 5, key(4, 5)).num_inserted == 2
    assert cache.insert("l", "s", 6, key(6)).num_inserted == 2

    assert count(cache) == (2, 0, 6)
    assert found(cache, 1, 2, 3, 4, 5, 6) == [2, 3, 4, 5, 6, 7]


def test_the_suffix_may_repeat_what_the_cache_knows(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3), new_tokens=1)

    assert cache.insert("l", "s", 4, key(1, 2, 3, 4)).num_inserted == 4
    assert found(cache, 1, 2, 3, 4) == [2, 3, 4, 5]


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_less_than_a_page_publishes_nothing(cache: KVCache, num_tokens: int) -> None:
    cache.acquire("l", "s", key(1, 2, 3))

    done = cache.insert("l", "s", num_tokens, NO_IDS)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates, done.retired) == (0, 0, 0, False)
    assert count(cache) == (4, 4, 0)


def test_publishing_twice_publishes_once(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3, 4))
    cache.insert("l", "s", 4, NO_IDS)

    again = cache.insert("l", "s", 4, NO_IDS)

    assert (again.prefix_len, again.num_inserted, again.num_duplicates) == (4, 0, 0)
    assert count(cache) == (4, 0, 4)
    assert cache.tree.num_locks() == 1


def test_duplicates_are_freed_and_the_lease_points_to_the_trees_slots(cache: KVCache) -> None:
    first = cache.acquire("first", "s", key(1, 2, 3, 4))
    second = cache.acquire("second", "s", key(1, 2, 5, 6))
    assert count(cache) == (0, 8, 0)

    assert cache.insert("first", "s", 4, NO_IDS).num_inserted == 4
    assert count(cache) == (0, 4, 4)
    done = cache.insert("second", "s", 4, NO_IDS)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (2, 2, 2)
    assert done.repointed.tolist() == [2]
    assert shape(second) == (0, [2, 8], 2, 4)
    assert shape(first) == (0, [2, 4], 2, 4)
    assert count(cache) == (2, 0, 6)
    assert found(cache, 1, 2, 5, 6) == [2, 3, 8, 9]


def test_a_lease_of_nothing_but_duplicates_keeps_the_trees_slots_alive(cache: KVCache) -> None:
    cache.acquire("first", "s", key(1, 2, 3, 4))
    second = cache.acquire("second", "s", key(1, 2, 3, 4))
    cache.insert("first", "s", 4, NO_IDS)

    done = cache.insert("second", "s", 4, NO_IDS)
    cache.release("first", "s")

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (4, 0, 4)
    assert second.starts.tolist() == [2, 4]
    assert cache.evict(9) == 0
    assert count(cache) == (4, 0, 4)
    cache.release("second", "s")
    assert cache.evict(9) == 4


def test_duplicates_after_a_held_prefix_are_only_those_beyond_it(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.acquire("first", "s", key(1, 2, 3, 4))
    second = cache.acquire("second", "s", key(1, 2, 3, 4))
    cache.insert("first", "s", 4, NO_IDS)

    done = cache.insert("second", "s", 4, NO_IDS)

    assert (done.prefix_len, done.num_inserted, done.num_duplicates) == (4, 0, 2)
    assert done.repointed.tolist() == [4]
    assert shape(second) == (2, [2, 4], 2, 4)
    assert count(cache) == (4, 0, 4)


def test_the_prefix_of_a_lease_never_changes(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3, 4))

    cache.insert("l", "s", 4, NO_IDS)

    assert lease.prefix_len == 0


@pytest.mark.parametrize(
    ("num_tokens", "suffix", "message"),
    [
        (6, key(4, 5, 6), "covers 5"),
        (9, key(4), "covers 5"),
        (5, key(5), "up to 4 are missing"),
        (5, key(), "up to 5 are missing"),
        (1, key(1, 2), "missing"),
        (-1, key(), "missing"),
        (3, key(9), "differ"),
        (5, key(9, 4, 5), "differ"),
        (2, key(1, 9), "differ"),
        (4, key(1, 2, 9, 4), "differ"),
        (5, key(4, 5, ns="a"), "namespaces"),
        (3, key(3, ns="a"), "differ"),
        (5, key((4, 5), (5, 6)), "namespaces"),
    ],
)
def test_an_insert_that_is_not_the_leases_is_refused_before_anything_changes(
    cache: KVCache, num_tokens: int, suffix: RadixKey, message: str
) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3), new_tokens=2)
    before = shape(lease)

    with pytest.raises(LeaseRangeError, match=message):
        cache.insert("l", "s", num_tokens, suffix)

    assert shape(lease) == before
    assert lease.key == key(1, 2, 3)
    assert count(cache) == (2, 6, 0)
    assert cache.tree.total_size() == 0


def test_a_lease_can_go_on_after_a_refused_insert(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3), new_tokens=1)
    with pytest.raises(LeaseRangeError):
        cache.insert("l", "s", 4, key(9, 4))

    assert cache.insert("l", "s", 4, key(4)).num_inserted == 4
    assert found(cache, 1, 2, 3, 4) == [2, 3, 4, 5]


def test_tokens_published_once_cannot_be_replaced(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2), new_tokens=2)
    cache.insert("l", "s", 4, key(3, 4))

    with pytest.raises(LeaseRangeError, match="differ"):
        cache.insert("l", "s", 4, key(3, 5))

    assert found(cache, 1, 2, 3, 4) == [2, 3, 4, 5]


def test_wide_ids_can_be_published_after_narrow_ones(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.acquire("l", "s", key(1, 2, 3), new_tokens=1)

    cache.insert("l", "s", 4, key(2**32))

    assert found(cache, 1, 2, 3, 2**32) == [2, 3, 4, 5]


# ---------------------------------------------------------------- release


def test_a_release_frees_what_is_private_and_keeps_what_was_inserted(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3), new_tokens=2)
    cache.insert("l", "s", 3, NO_IDS)
    assert count(cache) == (2, 4, 2)

    assert cache.release("l", "s") is True

    assert count(cache) == (6, 0, 2)
    assert found(cache, 1, 2, 3) == [2, 3]
    assert cache.held_slots() == 0
    assert cache.evict(9) == 2
    assert count(cache) == (8, 0, 0)


def test_a_release_of_what_has_ended_is_no_error_and_does_nothing(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3))
    cache.release("l", "s")

    assert cache.release("l", "s") is False
    assert cache.release("never", "s") is False
    assert count(cache) == (8, 0, 0)


def test_a_release_leaves_a_prefix_that_others_hold(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.lock("l", "s", key(1, 2))
    cache.lock("m", "t", key(1, 2))

    cache.release("l", "s")

    assert cache.evict(9) == 0
    assert found(cache, 1, 2) == [2, 3]


def test_another_session_can_do_nothing_with_a_lease(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3))
    before = shape(lease)

    for verb in (
        lambda: cache.insert("l", "other", 2, NO_IDS),
        lambda: cache.extend("l", "other", 1),
        lambda: cache.release("l", "other"),
    ):
        with pytest.raises(UnknownLeaseError):
            verb()

    assert shape(lease) == before
    assert count(cache) == (4, 4, 0)


def test_a_lease_that_has_ended_can_do_nothing(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3))
    cache.release("l", "s")

    with pytest.raises(UnknownLeaseError):
        cache.insert("l", "s", 2, NO_IDS)
    with pytest.raises(UnknownLeaseError):
        cache.extend("l", "s", 1)

    assert count(cache) == (8, 0, 0)


def test_the_end_of_a_session_ends_its_leases_and_no_others(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.acquire("m", "s", key(3, 4))
    other = cache.acquire("n", "t", key(5, 6))
    cache.insert("l", "s", 2, NO_IDS)

    assert cache.end_session("s") == 2
    assert cache.end_session("s") == 0

    assert count(cache) == (4, 2, 2)
    assert list(cache.leases) == [other]
    assert cache.tree.num_locks() == 0


# ---------------------------------------------------------------- evict and reset


def test_evict_tells_what_it_freed(cache: KVCache) -> None:
    publish(cache, 1, 2, 3, 4)
    publish(cache, 5, 6)

    assert cache.evict(1) == 4
    assert count(cache) == (6, 0, 2)
    assert cache.evict(9) == 2
    assert cache.evict(9) == 0
    assert cache.counters.tokens_evicted == 6


def test_a_reset_forgets_everything_and_frees_what_nobody_holds(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 3, 4, ns="a")

    cache.reset()

    assert found(cache, 1, 2) == []
    assert found(cache, 3, 4, ns="a") == []
    assert count(cache) == (8, 0, 0)


def test_leases_keep_their_slots_through_a_reset_but_publish_no_more(cache: KVCache) -> None:
    publish(cache, 1, 2)
    lease = cache.acquire("l", "s", key(1, 2, 3, 4), new_tokens=1)
    cache.reset()
    assert count(cache) == (2, 4, 2)

    done = cache.insert("l", "s", 4, NO_IDS)

    assert isinstance(done, Published)
    assert (done.num_inserted, done.num_duplicates, done.retired) == (0, 0, True)
    assert shape(lease) == (2, [2, 4, 6], 1, 5)
    assert found(cache, 1, 2, 3, 4) == []
    assert count(cache) == (2, 4, 2)
    assert cache.evict(9) == 0


def test_leases_can_be_extended_through_a_reset(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.reset()

    assert cache.extend("l", "s", 2).tolist() == [4]
    assert cache.release("l", "s") is True
    assert count(cache) == (8, 0, 0)


def test_after_a_reset_new_leases_start_afresh_beside_the_old(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.lock("old", "s", key(1, 2))
    cache.reset()

    new = cache.acquire("new", "s", key(1, 2))
    assert new.prefix_len == 0
    assert cache.insert("new", "s", 2, NO_IDS).num_inserted == 2
    assert count(cache) == (4, 0, 4)

    assert found(cache, 1, 2) == [4, 5]


def test_the_last_release_of_a_reset_prefix_frees_it(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.lock("l", "s", key(1, 2))
    cache.lock("m", "s", key(1, 2))
    cache.reset()

    cache.release("l", "s")
    assert count(cache) == (6, 0, 2)
    cache.release("m", "s")

    assert count(cache) == (8, 0, 0)


def test_a_reset_frees_what_was_published_step_by_step(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 1, 2, 3, 4)

    cache.reset()

    assert count(cache) == (8, 0, 0)


def test_what_a_reset_left_in_the_tree_gives_way_before_all_else(cache: KVCache) -> None:
    publish(cache, 1, 2)
    publish(cache, 1, 2, 3, 4)
    cache.reset()
    publish(cache, 5, 6)

    cache.acquire("l", "s", key(7, 7, 8, 8, 9, 9))

    assert found(cache, 5, 6) != []
    assert count(cache) == (0, 6, 2)


# ---------------------------------------------------------------- without sharing


@pytest.fixture
def chunks() -> Iterator[KVCache]:
    cache = KVCache(ChunkCache(2), TokenToKVPoolAllocator(8, 2))
    yield cache
    cache.check_invariants()


def test_a_chunk_cache_publishes_nothing_and_slots_stay_private(chunks: KVCache) -> None:
    lease = chunks.acquire("l", "s", key(1, 2, 3), new_tokens=1)

    done = chunks.insert("l", "s", 4, key(4))

    assert (done.prefix_len, done.num_inserted, done.num_duplicates, done.retired) == (0, 0, 0, False)
    assert shape(lease) == (0, [2, 4], 0, 4)
    assert count(chunks) == (4, 4, 0)
    assert chunks.acquire("m", "s", key(1, 2)).prefix_len == 0


def test_a_chunk_cache_still_checks_what_is_inserted(chunks: KVCache) -> None:
    chunks.acquire("l", "s", key(1, 2, 3))

    with pytest.raises(LeaseRangeError):
        chunks.insert("l", "s", 3, key(9))


def test_a_chunk_cache_frees_everything_at_the_end(chunks: KVCache) -> None:
    chunks.acquire("l", "s", key(1, 2, 3))
    chunks.lock("m", "s", key(1, 2))
    chunks.extend("m", "s", 2)
    chunks.insert("l", "s", 2, NO_IDS)
    assert chunks.match(key(1, 2)).prefix_len == 0
    assert chunks.evict(9) == 0

    chunks.reset()
    chunks.end_session("s")

    assert count(chunks) == (8, 0, 0)


# ---------------------------------------------------------------- pressure


def test_pressure_is_told_of_when_free_slots_fall_below_the_floor(make: Callable[..., KVCache]) -> None:
    told: list[int] = []
    cache = make(pressure_floor=4, on_pressure=lambda: told.append(cache.free_slots))

    cache.acquire("l", "s", key(1, 2, 3, 4))
    assert told == []  # 4 are free: at the floor, not below
    cache.acquire("m", "s", key(5))
    assert told == [2]
    cache.extend("m", "s", 2)
    assert told == [2, 0]


def test_pressure_is_told_of_once_the_slots_are_taken(make: Callable[..., KVCache]) -> None:
    told: list[tuple[int, int]] = []
    cache = make(pressure_floor=8, on_pressure=lambda: told.append((cache.free_slots, cache.private_slots)))

    cache.acquire("l", "s", key(1, 2, 3))

    assert told == [(4, 4)]


def test_operations_that_take_no_slots_press_on_nobody(make: Callable[..., KVCache]) -> None:
    told: list[None] = []
    cache = make(pressure_floor=8, on_pressure=lambda: told.append(None))
    cache.acquire("l", "s", key(1, 2))
    told.clear()

    cache.match(key(1, 2))
    cache.insert("l", "s", 2, NO_IDS)
    cache.lock("m", "s", key(1, 2))
    cache.evict(9)
    with pytest.raises(OutOfSlotsError):
        cache.acquire("n", "s", RadixKey(range(9)))

    assert told == []


def test_a_release_tells_of_pressure_because_more_can_be_evicted_now(make: Callable[..., KVCache]) -> None:
    told: list[None] = []
    cache = make(pressure_floor=8, on_pressure=lambda: told.append(None))
    cache.acquire("l", "s", key(1, 2))
    told.clear()

    cache.release("l", "s")

    assert len(told) == (cache.free_slots < 8)


# ---------------------------------------------------------------- counters


def test_counters_tell_what_happened_in_tokens(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3))
    cache.acquire("m", "s", key(1, 2, 3))
    cache.insert("l", "s", 3, NO_IDS)
    cache.insert("m", "s", 3, NO_IDS)
    cache.acquire("n", "s", key(1, 2))
    cache.match(key(1, 2))

    counters = cache.counters
    assert (counters.acquires, counters.hits, counters.probes) == (3, 1, 1)
    assert (counters.tokens_requested, counters.tokens_reused) == (8, 2)
    assert (counters.tokens_inserted, counters.tokens_duplicate, cache.counters.tokens_evicted) == (2, 2, 0)


def test_counters_do_not_count_what_was_retired(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.reset()
    cache.insert("l", "s", 2, NO_IDS)

    assert cache.counters.tokens_inserted == 0


# ---------------------------------------------------------------- the checks themselves


def test_the_checks_find_a_page_with_two_owners() -> None:
    cache = KVCache(ChunkCache(), TokenToKVPoolAllocator(4))
    first = cache.acquire("l", "s", key(1))
    second = cache.acquire("m", "s", key(2))
    second.starts[:] = first.starts

    with pytest.raises(AssertionError, match="rule 1"):
        cache.check_invariants()


def test_the_checks_find_a_lost_page() -> None:
    cache = KVCache(ChunkCache(), TokenToKVPoolAllocator(4))
    lease = cache.acquire("l", "s", key(1, 2))
    lease.starts = lease.starts[:1]

    with pytest.raises(AssertionError, match="rule 1"):
        cache.check_invariants()


def test_the_checks_find_a_lock_without_a_lease() -> None:
    allocator = TokenToKVPoolAllocator(4)
    cache = KVCache(RadixCache(token_to_kv_pool_allocator=allocator), allocator)
    publish(cache, 1)
    cache.tree.inc_lock_ref(cache.tree.match_prefix(key(1)).last_node)

    with pytest.raises(AssertionError, match="rule 3"):
        cache.check_invariants()
