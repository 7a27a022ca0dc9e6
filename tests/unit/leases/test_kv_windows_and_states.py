"""`KVCache` over window slots and states: requests that can never fit, and refusals when these run short."""

from collections.abc import Callable, Iterator

import pytest
from support.caches.invariant_fixtures import checked_after
from support.caches.small_kv_cache import NO_IDS, key, publish

from raydix.cache_core import (
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixCache,
    SlotError,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)


@pytest.fixture
def windowed() -> Iterator[Callable[..., KVCache]]:
    """16 slots, eight of them with window KV at a time."""

    def make_cache(page_size: int = 1, window: int = 4) -> KVCache:
        allocator = SWATokenToKVPoolAllocator(16, 8, page_size)
        return KVCache(RadixCache(page_size, window, allocator), allocator)

    yield from checked_after(make_cache)


@pytest.fixture
def with_states() -> Iterator[Callable[..., KVCache]]:
    """Eight slots and three states."""

    def make_cache(**options: object) -> KVCache:
        allocator, states = TokenToKVPoolAllocator(8), MambaPool(3)
        return KVCache(MambaRadixCache(1, allocator, states), allocator, states=states, **options)  # type: ignore[arg-type]

    yield from checked_after(make_cache)


# ---------------------------------------------------------------- what can never be had


def test_an_extension_beyond_the_window_slots_can_never_fit(windowed: Callable[..., KVCache]) -> None:
    cache = windowed()
    cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6))

    with pytest.raises(OutOfSlotsError) as caught:
        cache.extend("l", "s", 3)

    assert (caught.value.needed, caught.value.capacity, caught.value.can_ever_fit) == (9, 8, False)


def test_a_rest_that_does_not_fit_beside_the_window_of_its_prefix_never_will(
    windowed: Callable[..., KVCache],
) -> None:
    cache = windowed()
    publish(cache, 1, 2, 3, 4)

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6, 7, 8, 9))

    assert (caught.value.needed, caught.value.capacity, caught.value.can_ever_fit) == (9, 8, False)


def test_a_prefix_shorter_than_the_window_holds_no_more_than_itself(windowed: Callable[..., KVCache]) -> None:
    cache = windowed(window=8)
    publish(cache, 1, 2)
    cache.acquire("holder", "s", key(9))

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6, 7, 8))

    assert (caught.value.needed, caught.value.can_ever_fit) == (6, True)


def test_a_window_that_is_no_whole_number_of_pages_holds_all_pages_it_touches(
    windowed: Callable[..., KVCache],
) -> None:
    cache = windowed(page_size=2, window=3)
    publish(cache, 1, 2, 3, 4)

    with pytest.raises(OutOfSlotsError) as caught:
        cache.acquire("l", "s", key(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))

    assert (caught.value.needed, caught.value.can_ever_fit) == (10, False)


def test_what_is_cached_needs_window_slots_for_its_tail_alone(windowed: Callable[..., KVCache]) -> None:
    cache = windowed()
    publish(cache, 1, 2, 3, 4, 5, 6)

    cache.check_len(8, key(1, 2, 3, 4, 5, 6, 7, 8))  # 2 more, and a tail of 6
    with pytest.raises(OutOfSlotsError):
        cache.check_len(9, key(1, 2, 3, 4, 5, 6, 7, 8, 9))


def test_the_last_window_slot_can_be_had(windowed: Callable[..., KVCache]) -> None:
    cache = windowed()

    assert len(cache.acquire("l", "s", key(*range(8))).starts) == 8


# ---------------------------------------------------------------- pressure


def test_pressure_is_told_of_when_free_states_fall_below_their_floor(with_states: Callable[..., KVCache]) -> None:
    told: list[int] = []
    cache = with_states(state_pressure_floor=2, on_pressure=lambda: told.append(cache.state_sizes().free))  # type: ignore[union-attr]
    cache.acquire("l", "s", key(1))
    assert told == []  # 2 are free: at the floor, not below

    cache.lock("m", "s", key(2))  # takes a state, and no slots

    assert told == [1]


def test_a_state_that_was_to_be_published_is_free_again_if_the_pool_refuses_the_duplicates(
    with_states: Callable[..., KVCache],
) -> None:
    cache = with_states()
    cache.acquire("l", "s", key(1, 2))
    publish(cache, 1, 2)
    lease = cache.leases.get("l", "s")
    cache.allocator.free_pages(lease.private_starts)  # a caller's mistake

    with pytest.raises(SlotError, match="free already"):
        cache.insert("l", "s", 2, NO_IDS, publish_state=True)

    cache.check_invariants()
    assert cache.release("l", "s")


def test_the_state_of_a_lease_is_free_again_though_the_pool_refuses_its_slots(
    with_states: Callable[..., KVCache],
) -> None:
    cache = with_states()
    lease = cache.acquire("l", "s", key(1, 2))
    cache.allocator.free_pages(lease.private_starts)  # a caller's mistake

    with pytest.raises(SlotError, match="free already"):
        cache.release("l", "s")

    cache.check_invariants()
