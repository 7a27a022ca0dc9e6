"""`KVCache`: published pages, and slots that stay private."""

from collections.abc import Iterator

import pytest
from support.caches.small_kv_cache import NO_IDS, count, found, key, publish, shape

from raydix.cache_core import ChunkCache, KVCache, LeaseRangeError, RadixKey, SlotError, TokenToKVPoolAllocator

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


def test_a_lock_publishes_no_more_than_it_covers_though_all_its_ids_are_known(cache: KVCache) -> None:
    publish(cache, 1, 2)
    lease = cache.lock("l", "s", key(1, 2, 3, 4))

    with pytest.raises(LeaseRangeError, match="covers 2"):
        cache.insert("l", "s", 4, NO_IDS)

    assert shape(lease) == (2, [2], 1, 2)
    assert count(cache) == (6, 0, 2)


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


def test_a_duplicate_that_its_pool_refuses_is_no_longer_the_leases(cache: KVCache) -> None:
    publish(cache, 1, 2)
    lease = cache.acquire("l", "s", key(1, 2), max_prefix_len=0)
    cache.allocator.free_pages(lease.private_starts)  # a caller's mistake

    with pytest.raises(SlotError, match="free already"):
        cache.insert("l", "s", 2, NO_IDS)

    cache.check_invariants()
    assert cache.release("l", "s")
