"""`KVCache`: floors and caps together with retirement, windows and counters."""

from collections.abc import Callable, Iterator

import pytest
from support.caches.invariant_fixtures import checked_after
from support.caches.small_kv_cache import found, key, publish

from raydix.cache_core import RadixCache, RadixKey, SlotError, SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.leases import kv_cache
from raydix.cache_core.leases.kv_cache import KVCache


@pytest.fixture
def shared() -> Iterator[Callable[..., KVCache]]:
    """Eight slots in pages of one token, with shares for these tenants; all others share the rest."""

    def make_cache(*tenants: Tenant) -> KVCache:
        allocator = TokenToKVPoolAllocator(8)
        tree = RadixCache(token_to_kv_pool_allocator=allocator)
        return KVCache(tree, allocator, tenants=Tenants(tenants))

    yield from checked_after(make_cache)


def retire_quiet(cache: KVCache) -> None:
    cache.retire(lambda extra_key: extra_key == "quiet")


# ---------------------------------------------------------------- floors


def test_what_was_retired_fills_no_floor_until_it_is_reclaimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_RECLAIMED_AT_ONCE", 0)
    allocator = SWATokenToKVPoolAllocator(20, 20, 1)
    tree, quiet = RadixCache(1, 3, allocator), Tenant("quiet", "quiet", floor=4)
    cache = KVCache(tree, allocator, tenants=Tenants([quiet]))
    publish(cache, 1, 2, 3, ns="quiet")
    cache.evict_window(3)
    retire_quiet(cache)
    publish(cache, 7, 8, 9, 10, ns="quiet")
    assert (quiet.held, quiet.dead) == (7, 3)

    cache.evict_window(4)

    assert (quiet.held, quiet.dead) == (7, 3)
    cache.check_invariants()


def test_a_lease_stays_within_a_floor_where_what_it_reuses_is_held_already(
    shared: Callable[..., KVCache],
) -> None:
    cache = shared(Tenant("quiet", "quiet", floor=3))
    publish(cache, 1, 2, ns="quiet")

    assert cache.is_within_floor(key(1, 2, 3, ns="quiet"), 3)
    assert not cache.is_within_floor(key(1, 2, 3, ns="quiet"), 4)
    assert not cache.is_within_floor(key(9, 9, ns="quiet"), 2)


# ---------------------------------------------------------------- caps and counters


def test_who_is_at_its_cap_gives_up_what_was_retired_before_what_is_found(
    shared: Callable[..., KVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_RECLAIMED_AT_ONCE", 0)
    cache = shared(Tenant("quiet", "quiet", cap=4))
    publish(cache, 1, 2, ns="quiet")
    cache.lock("reader", "s", key(1, 2, ns="quiet"))
    retire_quiet(cache)
    slots = publish(cache, 3, 4, ns="quiet")
    cache.release("reader", "s")

    cache.acquire("l", "s", key(5, 6, ns="quiet"))

    assert found(cache, 3, 4, ns="quiet") == slots


def test_what_a_cap_evicts_is_counted(shared: Callable[..., KVCache]) -> None:
    cache = shared(noisy := Tenant("noisy", "noisy", cap=3))
    publish(cache, 1, 2, 3, ns="noisy")

    cache.acquire("l", "s", key(4, 5, ns="noisy"))

    assert (cache.counters.tokens_evicted, noisy.evicted) == (3, 3)


def test_what_was_retired_does_not_count_as_evicted(shared: Callable[..., KVCache]) -> None:
    cache = shared(quiet := Tenant("quiet", "quiet", floor=3))
    publish(cache, 1, 2, 3, ns="quiet")

    retire_quiet(cache)

    assert (quiet.held, quiet.evicted) == (0, 0)


@pytest.mark.parametrize("verb", ["insert", "release"])
def test_what_the_pool_refuses_of_a_lease_is_no_longer_its_tenants(shared: Callable[..., KVCache], verb: str) -> None:
    quiet = Tenant("quiet", "quiet", cap=4)
    cache = shared(quiet)
    publish(cache, 1, 2, ns="quiet")
    lease = cache.acquire("l", "s", key(1, 2, ns="quiet"), max_prefix_len=0)
    cache.allocator.free_pages(lease.private_starts)  # a caller's mistake

    with pytest.raises(SlotError, match="free already"):
        cache.release("l", "s") if verb == "release" else cache.insert("l", "s", 2, RadixKey([], "quiet"))

    assert quiet.private == 0
    cache.check_invariants()
