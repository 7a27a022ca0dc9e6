"""`RadixCache`: a tree emptied, and namespaces that are taken out of it."""

import pytest
from support.caches.small_radix import FreedSlots, edges, found, key, lock, row, sizes

from raydix.cache_core import EvictResult, RadixCache, RadixKey, StaleNodeError
from raydix.cache_core.eviction.tenants import Tenant, Tenants

# ---------------------------------------------------------------- reset and retire


def test_a_reset_gives_back_every_slot_locked_or_not(paged: RadixCache, pool: FreedSlots) -> None:
    paged.insert(key(1, 2, 3, 4), row(10, 11, 12, 13))
    paged.insert(key(1, 2, ns="a"), row(29, 21))
    lock(paged, 1, 2)

    paged.reset()

    assert sorted(pool.take()) == [10, 11, 12, 13, 21, 29]
    assert sizes(paged) == (0, 0)
    assert found(paged, 1, 2) == []
    assert paged.num_locks() == 0
    assert paged.evict(99).full_evicted == 0


def test_nodes_from_before_a_reset_are_stale(cache: RadixCache) -> None:
    cache.insert(key(1, 2), row(10, 11))
    node = lock(cache, 1, 2)
    cache.reset()
    cache.insert(key(1, 2), row(20, 21))

    for use in (cache.inc_lock_ref, cache.dec_lock_ref, lambda n: cache.insert(key(1, 2, 3), from_node=n)):
        with pytest.raises(StaleNodeError):
            use(node)
    assert sizes(cache) == (2, 0)


def test_a_reset_also_takes_what_was_retired(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    lock(cache, 1)
    cache.retire_all()

    cache.reset()

    assert pool.take() == [10]
    assert cache.tree_starts() == []


def test_what_is_retired_cannot_be_found_and_takes_no_part(cache: RadixCache) -> None:
    node = cache.insert(key(1, 2), row(10, 11)).last_node
    cache.retire_all()

    assert found(cache, 1, 2) == []
    assert sizes(cache) == (2, 0)
    with pytest.raises(StaleNodeError):
        cache.inc_lock_ref(node)
    with pytest.raises(StaleNodeError):
        cache.insert(key(1, 2, 3), row(10, 11, 12), from_node=node)
    assert cache.insert(key(1, 2), row(20, 21)).prefix_len == 0
    assert found(cache, 1, 2) == [20, 21]


def test_reclaiming_frees_what_was_retired_and_nothing_else(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(2), row(20))
    cache.retire_all()
    cache.insert(key(3), row(30))

    assert cache.reclaim_retired() == 2
    assert cache.reclaim_retired() == 0

    assert sorted(pool.take()) == [10, 20]
    assert edges(cache) == {"3"}


def test_what_is_retired_is_evicted_before_all_that_can_be_found(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    node = lock(cache, 1, 2)
    cache.retire_all()
    cache.insert(key(3), row(30))
    cache.dec_lock_ref(node)

    cache.evict(2)

    assert sorted(pool.take()) == [10, 11]


def test_what_is_retired_and_locked_stays_until_it_is_unlocked(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1, 2), row(10, 11))
    lock(cache, 1)
    cache.retire_all()

    assert cache.reclaim_retired() == 1

    assert pool.take() == [11]
    assert sizes(cache) == (0, 1)
    assert cache.num_locks() == 1


def test_what_is_unlocked_after_its_retirement_can_be_reclaimed(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    node = lock(cache, 1)
    cache.retire_all()
    cache.dec_lock_ref(node)

    assert cache.reclaim_retired() == 1

    assert pool.take() == [10]


def test_chains_are_reclaimed_whole(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(key(1), row(10))
    cache.insert(key(1, 2), row(10, 11))
    cache.retire_all()

    assert cache.reclaim_retired() == 2

    assert pool.take() == [11, 10]


@pytest.mark.parametrize("verb", ["reclaim_retired", "evict", "reset"])
def test_nothing_is_kept_of_what_was_retired_and_has_gone(cache: RadixCache, verb: str) -> None:
    for _ in range(50):
        cache.insert(key(1), row(10))
        node = cache.insert(key(2), row(20)).last_node
        cache.inc_lock_ref(node)
        cache.retire_all()
        cache.evict(1)
        if verb != "reset":
            cache.dec_lock_ref(node)
        cache.evict(1) if verb == "evict" else getattr(cache, verb)()

    assert not len(cache.parts.full._queue)
    assert not cache.parts.full.tenants.has_retired
    assert not cache.parts.tree.detached


# ---------------------------------------------------------------- retiring some namespaces


def test_retiring_some_namespaces_costs_no_walk(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    for token in range(1000):
        cache.insert(RadixKey([token], "a"), row(2 * token))
        cache.insert(RadixKey([token]), row(2 * token + 1))
    monkeypatch.setattr(cache.parts.tree, "nodes_below", lambda top: pytest.fail("a retirement walked the tree"))

    assert cache.retire(lambda extra_key: extra_key == "a") == 1

    assert cache.peek_prefix(RadixKey([7], "a")).prefix_len == 0
    assert cache.peek_prefix(RadixKey([7])).prefix_len == 1
    monkeypatch.undo()
    cache.check_invariants()


def test_reclaiming_stops_at_its_limit_and_goes_on_from_there(cache: RadixCache, pool: FreedSlots) -> None:
    for token in range(100):
        cache.insert(RadixKey([token], "a"), row(token))
    cache.retire(lambda extra_key: extra_key == "a")

    assert cache.reclaim_retired(30) == 30
    cache.check_invariants()
    assert cache.reclaim_retired(30) == 30
    assert cache.reclaim_retired() == 40
    assert sorted(pool.slots) == list(range(100))
    assert cache.reclaim_retired() == 0


def test_floors_of_tenants_keep_their_slots_from_a_pool_that_takes_them_one_by_one(
    cache: RadixCache, pool: FreedSlots
) -> None:
    cache.divide(Tenants([Tenant("mine", "a", floor=2)]))
    cache.insert(RadixKey([1, 2], "a"), row(10, 11))
    cache.insert(RadixKey([1, 2, 3], "b"), row(20, 21, 22))

    assert cache.evict(5) == EvictResult(3)

    assert pool.take() == [20, 21, 22]
    cache.check_invariants()


def test_a_retired_namespace_can_be_filled_anew_at_once(cache: RadixCache, pool: FreedSlots) -> None:
    cache.insert(RadixKey([1, 2], "a"), row(10, 11))
    held = cache.match_prefix(RadixKey([1, 2], "a")).last_node
    cache.inc_lock_ref(held)
    cache.retire(lambda extra_key: extra_key == "a")

    cache.insert(RadixKey([1, 2], "a"), row(20, 21))

    assert cache.match_prefix(RadixKey([1, 2], "a")).indices.tolist() == [20, 21]
    assert cache.reclaim_retired() == 0
    cache.dec_lock_ref(held)
    assert cache.reclaim_retired() == 2
    assert sorted(pool.slots) == [10, 11]
    cache.check_invariants()
