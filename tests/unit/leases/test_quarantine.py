"""Slots of a vanished session: its locks end immediately, and slots that it may still write stay in quarantine."""

from collections.abc import Callable, Iterator

import pytest
from support.caches.invariant_fixtures import checked_after

from raydix.actors.service.core_factory import build_core
from raydix.cache_core import ExpiredLeaseError, KVCache, OutOfSlotsError, RadixKey, RowCache, UnknownLeaseError
from raydix.cache_core.leases.lease_table import EndedLeases
from raydix.schemas import CacheConfig, EvictionConfig, LeaseConfig, PoolConfig

NO_IDS = RadixKey([])


def key(*ids: int) -> RadixKey:
    return RadixKey(list(ids))


@pytest.fixture
def make() -> Iterator[Callable[..., KVCache]]:
    def make_cache(remembered: int = 4, num_state_slots: int = 0, **fields: object) -> KVCache:
        pool = PoolConfig(num_slots=8, num_state_slots=num_state_slots, device="cpu")
        config = CacheConfig(
            page_size=2,
            pool=pool,
            leases=LeaseConfig(remembered_leases=remembered),
            eviction=EvictionConfig(high_watermark=1.0),
            **fields,  # type: ignore[arg-type]
        )
        core = build_core(config, None, lambda: None)[0]
        assert isinstance(core, KVCache)
        return core

    yield from checked_after(make_cache)


@pytest.fixture
def cache(make: Callable[..., KVCache]) -> KVCache:
    return make()


def count(cache: KVCache) -> tuple[int, int, int, int]:
    """Free, private, tree and quarantined slots, after checking that all else holds too."""
    cache.check_invariants()
    counts = cache.free_slots, cache.private_slots, cache.total_size(), cache.quarantined_slots
    assert sum(counts) == cache.num_slots
    return counts


def test_private_slots_of_a_vanished_session_are_withheld_and_its_locks_go(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3, 4))
    cache.insert("l", "s", 2, NO_IDS)
    other = cache.acquire("m", "t", key(5, 6))

    assert cache.quarantine_session("s") == 1

    assert count(cache) == (2, 2, 2, 2)
    assert (cache.tree.evictable_size(), cache.tree.num_locks()) == (2, 0)
    assert list(cache.leases) == [other]


def test_withheld_slots_are_not_handed_out(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3, 4))
    cache.quarantine_session("s")

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("m", "t", key(*range(6)))
    assert (caught.value.free, caught.value.evictable) == (4, 0)

    assert cache.free_withheld("s") == 4
    cache.acquire("m", "t", key(*range(6)))
    assert count(cache) == (2, 6, 0, 0)


def test_what_was_freed_once_is_not_freed_again(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.acquire("m", "t", key(3, 4))
    cache.quarantine_session("s")
    cache.quarantine_session("t")

    assert [cache.free_withheld("s"), cache.free_withheld("s"), cache.free_withheld("never")] == [2, 0, 0]

    assert count(cache) == (6, 0, 0, 2)
    assert "t" in cache.quarantine


def test_window_halves_are_withheld_with_their_pages(make: Callable[..., KVCache]) -> None:
    cache = make(sliding_window_size=2)
    cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6))
    cache.release_window("l", "s", 6)  # the page of the window is kept, and the one before it
    assert cache.allocator.swa is not None
    held = cache.num_slots - cache.allocator.swa.available_size()

    cache.quarantine_session("s")

    assert count(cache) == (2, 0, 0, 6)
    assert held == 4
    assert cache.allocator.swa.available_size() == cache.num_slots - held
    sizes = cache.swa_sizes()
    assert sizes is not None and sizes.quarantined == held
    cache.free_withheld("s")
    assert count(cache) == (8, 0, 0, 0)
    assert cache.allocator.swa.available_size() == cache.num_slots


def test_a_leases_own_state_is_withheld(make: Callable[..., KVCache]) -> None:
    cache = make(kind="mamba", num_state_slots=2)
    cache.acquire("l", "s", key(1, 2))
    cache.lock("m", "s", key(1, 2))

    cache.quarantine_session("s")

    assert count(cache) == (6, 0, 0, 2)
    assert cache.state_sizes() == (2, 0, 0, 0, 2, 0)
    with pytest.raises(OutOfSlotsError):
        cache.lock("n", "t", key(1))
    cache.free_withheld("s")
    assert cache.state_sizes() == (2, 2, 0, 0, 0, 0)
    assert count(cache) == (8, 0, 0, 0)


# ---------------------------------------------------------------- ended ids


def test_an_expired_lease_says_so_and_a_released_one_that_it_has_ended(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.acquire("m", "s", key(1, 2))
    cache.release("m", "s")
    cache.quarantine_session("s")

    with pytest.raises(ExpiredLeaseError, match="silent for too long"):
        cache.extend("l", "s", 1)
    with pytest.raises(ExpiredLeaseError, match="silent for too long"):
        cache.insert("l", "s", 2, NO_IDS)
    with pytest.raises(UnknownLeaseError, match="has ended") as caught:
        cache.extend("m", "s", 1)
    assert not isinstance(caught.value, ExpiredLeaseError)


def test_a_late_release_of_an_expired_lease_does_nothing(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.quarantine_session("s")

    assert not cache.release("l", "s")

    assert count(cache) == (6, 0, 0, 2)
    with pytest.raises(ExpiredLeaseError):
        cache.acquire("l", "s", key(1, 2))


@pytest.mark.parametrize("verb", ["acquire", "lock"])
def test_the_id_of_an_ended_lease_is_not_granted_again(cache: KVCache, verb: str) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.release("l", "s")

    with pytest.raises(UnknownLeaseError, match="has ended"):
        getattr(cache, verb)("l", "s", key(1, 2))

    assert count(cache) == (8, 0, 0, 0)


def test_an_id_given_up_before_it_was_granted_is_not_granted(cache: KVCache) -> None:
    assert not cache.release("l", "s")

    with pytest.raises(UnknownLeaseError, match="has ended"):
        cache.acquire("l", "s", key(1, 2))
    assert cache.acquire("l", "t", key(1, 2)).session_id == "t"  # another session's id of that name is another


def test_so_many_ended_ids_are_remembered_and_no_more(make: Callable[..., KVCache]) -> None:
    cache = make(remembered=3)
    for number in range(10):
        cache.acquire(f"l{number}", "s", key(1, 2))
        cache.release(f"l{number}", "s")

    assert len(cache.leases.ended) == 3
    for number in range(7, 10):
        with pytest.raises(UnknownLeaseError):
            cache.acquire(f"l{number}", "s", key(1, 2))
    cache.acquire("l6", "s", key(1, 2))


def test_how_a_lease_ended_first_is_what_counts() -> None:
    ended = EndedLeases(2)
    ended.add("s", "l", expired=True)
    ended.add("s", "l")

    with pytest.raises(ExpiredLeaseError):
        ended.check("s", "l")
    ended.check("s", "m")


# ---------------------------------------------------------------- hand-over


def test_an_adopted_lease_is_its_adopters_with_all_it_holds(cache: KVCache) -> None:
    lease = cache.acquire("l", "s", key(1, 2, 3, 4))
    cache.insert("l", "s", 2, NO_IDS)
    cache.offer("l", "s", "o", 9.0)

    assert cache.adopt("l", "s", "t", "o") is lease

    assert count(cache) == (4, 2, 2, 0)
    with pytest.raises(UnknownLeaseError):
        cache.extend("l", "s", 1)
    assert cache.end_session("s") == 0
    cache.insert("l", "t", 4, NO_IDS)
    assert count(cache) == (4, 0, 4, 0)
    assert cache.end_session("t") == 1


@pytest.mark.parametrize("adopter", ["s", "t"])
def test_a_grant_is_good_once(cache: KVCache, adopter: str) -> None:
    cache.acquire("l", "s", key(1, 2))
    with pytest.raises(UnknownLeaseError, match="not offered"):
        cache.adopt("l", "s", adopter, "o")
    cache.offer("l", "s", "o", 9.0)
    cache.adopt("l", "s", adopter, "o")

    with pytest.raises(UnknownLeaseError):
        cache.adopt("l", "s", "u", "o")
    with pytest.raises(UnknownLeaseError):
        cache.adopt("l", "s", adopter, "o")


def test_a_lease_nobody_adopted_ends_with_its_granters_session(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.offer("l", "s", "o", 9.0)

    cache.quarantine_session("s")

    assert count(cache) == (6, 0, 0, 2)
    with pytest.raises(ExpiredLeaseError):
        cache.adopt("l", "s", "t", "o")


def test_an_offer_that_runs_out_ends_its_lease_and_frees_its_private_slots(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2, 3, 4))
    cache.insert("l", "s", 2, NO_IDS)
    cache.acquire("m", "s", key(5, 6))
    cache.offer("l", "s", "o", 9.0)

    assert cache.expire_offers(8.9) == 0
    assert count(cache) == (2, 4, 2, 0)
    assert cache.expire_offers(9.0) == 1

    assert count(cache) == (4, 2, 2, 0)
    with pytest.raises(ExpiredLeaseError):
        cache.adopt("l", "s", "t", "o")
    assert cache.expire_offers(99.0) == 0
    cache.extend("m", "s", 1)


def test_an_offer_taken_back_is_not_adopted_and_does_not_run_out(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.offer("l", "s", "o", 9.0)
    cache.take_back("l", "t", "o")  # another session's
    cache.take_back("l", "s", "p")  # another offer

    cache.take_back("l", "s", "o")

    assert cache.expire_offers(99.0) == 0
    with pytest.raises(UnknownLeaseError, match="not offered"):
        cache.adopt("l", "s", "t", "o")
    cache.extend("l", "s", 1)


def test_a_later_offer_replaces_an_earlier_one(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.offer("l", "s", "o", 9.0)
    cache.offer("l", "s", "p", 20.0)

    assert cache.expire_offers(9.0) == 0
    with pytest.raises(UnknownLeaseError, match="not offered"):
        cache.adopt("l", "s", "t", "o")
    assert not cache.revoke("l", "s", "o")
    cache.adopt("l", "s", "t", "p")


def test_only_its_granter_revokes_an_offer_and_only_while_it_stands(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.offer("l", "s", "o", 9.0)
    with pytest.raises(UnknownLeaseError, match="another session"):
        cache.revoke("l", "t", "o")

    assert cache.revoke("l", "s", "o")

    assert count(cache) == (8, 0, 0, 0)
    assert not cache.revoke("l", "s", "o")
    with pytest.raises(UnknownLeaseError, match="has ended"):
        cache.adopt("l", "s", "t", "o")
    assert not cache.revoke("never granted", "s", "o")


def test_an_adopted_lease_is_neither_revoked_nor_ended_by_its_offer(cache: KVCache) -> None:
    cache.acquire("l", "s", key(1, 2))
    cache.offer("l", "s", "o", 9.0)
    cache.adopt("l", "s", "t", "o")

    assert not cache.revoke("l", "s", "o")
    assert cache.expire_offers(99.0) == 0
    cache.extend("l", "t", 1)


# ---------------------------------------------------------------- rows


@pytest.fixture
def rows() -> Iterator[RowCache]:
    """Two rows of four slots."""
    cache = RowCache(8, 4, page_size=2, remembered_leases=4)
    yield cache
    cache.check_invariants()


def row_count(cache: RowCache) -> tuple[int, int, int, int]:
    cache.check_invariants()
    return cache.free_slots, cache.private_slots, cache.total_size(), cache.quarantined_slots


def test_the_row_of_a_vanished_session_is_withheld_though_what_it_published_can_be_copied(rows: RowCache) -> None:
    rows.acquire("l", "s", key(1, 2, 3))
    rows.insert("l", "s", 2, NO_IDS)

    rows.quarantine_session("s")
    assert row_count(rows) == (4, 0, 0, 4)
    copy = rows.acquire("m", "t", key(1, 2, 9))

    assert (copy.prefix_len, copy.starts.tolist()) == (2, [4])
    with pytest.raises(OutOfSlotsError):
        rows.acquire("n", "t", key(1, 2))
    assert rows.free_withheld("s") == 4
    assert row_count(rows) == (0, 4, 4, 0)


@pytest.mark.parametrize("how", ["reset", "retire"])
def test_a_row_in_quarantine_holds_nothing_that_was_retired(rows: RowCache, how: str) -> None:
    rows.acquire("l", "s", key(1, 2, 3))
    rows.insert("l", "s", 2, NO_IDS)
    rows.quarantine_session("s")

    rows.reset() if how == "reset" else rows.retire(lambda namespace: namespace is None)

    assert row_count(rows) == (4, 0, 0, 4)  # and every rule holds
    assert rows.match(key(1, 2)).prefix_len == 0
    assert rows.free_withheld("s") == 4
    assert row_count(rows) == (8, 0, 0, 0)


def test_a_row_in_quarantine_of_another_namespace_is_kept(rows: RowCache) -> None:
    rows.acquire("l", "s", key(1, 2, 3))
    rows.insert("l", "s", 2, NO_IDS)
    rows.quarantine_session("s")

    assert rows.retire(lambda namespace: namespace == "a") == 0

    assert row_count(rows) == (4, 0, 0, 4)
    assert rows.match(key(1, 2)).prefix_len == 2


def test_ended_leases_of_rows_are_remembered_and_offered_ones_adopted(rows: RowCache) -> None:
    lease = rows.acquire("l", "s", key(1, 2))
    rows.offer("l", "s", "o", 9.0)
    assert rows.adopt("l", "s", "t", "o") is lease
    rows.insert("l", "t", 2, NO_IDS)
    assert rows.published_len(lease) == 2
    rows.release("l", "t")

    for session in ("s", "t"):
        with pytest.raises(UnknownLeaseError, match="has ended"):
            rows.acquire("l", session, key(1, 2))
    assert row_count(rows) == (4, 0, 4, 0)
