"""`KVCache`: pressure, counters, and the checks that hold them."""

from collections.abc import Callable

import pytest
from support.caches.small_kv_cache import NO_IDS, key, publish

from raydix.cache_core import ChunkCache, KVCache, OutOfSlotsError, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.leases.lease_table import LeaseRecord

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
    told: list[int] = []
    cache = make(pressure_floor=8, on_pressure=lambda: told.append(cache.evictable_size()))
    cache.acquire("l", "s", key(1, 2))
    cache.insert("l", "s", 2, NO_IDS)
    told.clear()

    cache.release("l", "s")

    assert told == [2]


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


# ---------------------------------------------------------------- observers


def test_what_went_is_remembered_with_its_cause(cache: KVCache) -> None:
    publish(cache, 1, 2)
    cache.evict(2)
    publish(cache, 3, 4)
    cache.evict(2, "watermark")
    publish(cache, 5, 6)
    cache.acquire("l", "s", RadixKey(range(8)))

    assert [gone.cause for gone in cache.evictions()] == ["request", "watermark", "shortfall"]


class Watch:
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        self.told.append(f"{lease.lease_id} granted, {max_prefix_len} at most")

    def published(self, lease: LeaseRecord) -> None:
        self.told.append(f"{lease.lease_id} published, {lease.num_published_pages} in all")

    def ended(self, lease: LeaseRecord) -> None:
        self.told.append(f"{lease.lease_id} ended")

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        self.told.append(f"retired {[name for name in ('a', None) if is_meant(name)]}")


def test_a_watch_is_told_of_grants_publications_ends_and_retirements(cache: KVCache) -> None:
    cache.observers.append(watch := Watch())

    cache.acquire("l", "s", key(1, 2), max_prefix_len=1)
    cache.insert("l", "s", 2, NO_IDS)
    cache.release("l", "s")
    cache.acquire("m", "s", key(3))
    cache.quarantine_session("s")
    cache.retire(lambda extra_key: extra_key == "a")
    cache.reset()

    assert watch.told == [
        "l granted, 1 at most",
        "l published, 1 in all",
        "l ended",
        "m granted, None at most",
        "m ended",
        "retired ['a']",
        "retired ['a', None]",
    ]
    cache.free_withheld("s")


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
