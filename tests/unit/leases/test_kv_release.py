"""`KVCache`: slots freed at the end of leases and by eviction."""

import pytest
from support.caches.small_kv_cache import NO_IDS, count, found, key, publish, shape

from raydix.cache_core import KVCache, SlotError, UnknownLeaseError
from raydix.cache_core.leases.results import Published

# ---------------------------------------------------------------- release


def test_a_release_frees_what_is_private_and_keeps_what_was_inserted(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3), new_tokens=2)
    cache.insert("l", "s", 3, NO_IDS)
    assert count(cache) == (2, 4, 2)

    assert cache.release("l", "s") is True

    assert count(cache) == (6, 0, 2)
    assert found(cache, 1, 2, 3) == [2, 3]
    assert cache.private_slots + cache.protected_size() == 0
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


@pytest.mark.parametrize("verb", ["end_session", "quarantine_session"])
def test_each_lease_of_a_session_ends_though_the_pool_refuses_what_one_had_in_the_tree(
    cache: KVCache, verb: str
) -> None:
    lease = cache.acquire("l", "s", key(1, 2), new_tokens=2)
    cache.insert("l", "s", 2, NO_IDS)
    cache.acquire("m", "s", key(9))
    cache.reset()
    cache.allocator.free_pages(lease.starts[:1])  # a caller's mistake

    with pytest.raises(SlotError, match="free already"):
        getattr(cache, verb)("s")

    cache.free_withheld("s")
    assert not list(cache.leases)
    assert count(cache) == (cache.num_slots, 0, 0)


def test_what_is_withheld_comes_back_though_the_pool_refuses_what_one_lease_held(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2))
    cache.acquire("m", "s", key(9))
    cache.quarantine_session("s")
    cache.allocator.free_pages(lease.starts)  # a caller's mistake

    with pytest.raises(SlotError, match="free already"):
        cache.free_withheld("s")

    assert count(cache) == (cache.num_slots, 0, 0)
