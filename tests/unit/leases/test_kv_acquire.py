"""`KVCache`: the slots of a new lease, and refusals without free slots."""

import pytest
from support.caches.small_kv_cache import NO_IDS, count, found, key, publish, shape

from raydix.cache_core import (
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixKey,
    SlotError,
    TokenToKVPoolAllocator,
    UnknownLeaseError,
)

# ---------------------------------------------------------------- match


def test_a_probe_tells_the_prefix_and_holds_nothing(cache: KVCache) -> None:
    publish(cache, 1, 2, 3, 4)

    result = cache.match(key(1, 2, 9, 9))

    assert (result.prefix_len, result.indices.tolist()) == (2, [2, 3])
    assert count(cache) == (4, 0, 4)
    assert cache.private_slots + cache.protected_size() == 0
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
    assert cache.private_slots + cache.protected_size() == 6


def test_a_hit_holds_the_prefix_and_gets_private_slots_for_the_rest(cache: KVCache) -> None:
    publish(cache, 1, 2, 3, 4)

    lease = cache.acquire("l", "s", key(1, 2, 3, 4, 5))

    assert shape(lease) == (4, [2, 4, 6], 2, 5)
    assert lease.private_starts.tolist() == [6]
    assert count(cache) == (2, 2, 4)
    assert (cache.tree.evictable_size(), cache.tree.protected_size()) == (0, 4)
    assert cache.private_slots + cache.protected_size() == 6


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


def test_an_acquire_that_fails_as_it_evicts_holds_nothing() -> None:
    allocator, states = TokenToKVPoolAllocator(8), MambaPool(4)
    tree = MambaRadixCache(1, allocator, states)
    cache = KVCache(tree, allocator, states=states)
    for lease_id, ids in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])):
        cache.acquire(lease_id, "s", RadixKey(ids))
        cache.insert(lease_id, "s", 4, RadixKey([]), publish_state=True)
        cache.release(lease_id, "s")
    allocator.free(tree.match_prefix(RadixKey([5, 6, 7, 8])).indices[1:2])  # a caller's mistake

    with pytest.raises(SlotError, match="refused slots that were in the tree"):
        cache.acquire("c", "s", RadixKey([1, 2, 3, 4]), 4)

    assert tree.num_locks() == 0
    assert states.available_size() == 3
    tree.check_invariants()
    states.check_invariants()
