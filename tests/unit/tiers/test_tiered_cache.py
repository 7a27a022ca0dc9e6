"""`TieredCache`: evicted prefixes are written before they go, so a large lower tier loses nothing."""

from random import Random

import pytest
from support.caches.small_kv_cache import NO_IDS, key, publish
from support.tiers.tiered_cache import TieredCache
from support.traffic.eviction_order import NUM_PAGES, PAGE, make

from raydix.cache_core import OutOfSlotsError, RadixKey
from raydix.cache_core.tiers.tier import Tier


def make_tiers(kind: str, policy: str = "lru", host_pages: int = 2000) -> TieredCache:
    """Return a cache of `NUM_PAGES` pages above a larger one of the same kind."""
    device, host = make(NUM_PAGES, policy, kind), make(host_pages, policy, kind)
    return TieredCache(device.tree, device.allocator, lower=Tier("host", "CPU", host), states=device.pools.states)


@pytest.mark.parametrize("policy", ["lru", "lfu", "2q"])
@pytest.mark.parametrize("kind", ["radix", "mamba"])
def test_with_a_large_lower_tier_each_request_finds_as_much_as_in_one_large_pool(kind: str, policy: str) -> None:
    rng, large, tiers = Random(5), make(2000, "lru", kind), make_tiers(kind, policy)
    for number in range(200):
        prompt = RadixKey([token for _ in range(rng.randint(1, 6)) for token in (rng.randrange(3), 0)])
        lease_id = f"l{number}"
        expected, lease = (cache.acquire(lease_id, "s", prompt) for cache in (large, tiers))
        assert lease.prefix_len == expected.prefix_len
        for cache in (large, tiers):
            cache.insert(lease_id, "s", len(prompt), NO_IDS, publish_state=kind == "mamba")
            cache.release(lease_id, "s")
        if kind == "mamba" and rng.random() < 0.3:
            tiers.evict_states(2)
        tiers.moves.check_invariants()

    counts = tiers.moves.writes.counts
    assert tiers.moves.loads.counts.loaded > 0 and counts.dropped == counts.writes_refused == 0
    for name in ("acquires", "hits", "tokens_requested", "tokens_reused"):
        assert getattr(tiers.counters, name) == getattr(large.counters, name)


def test_a_window_moves_with_the_end_of_its_prefix() -> None:
    tiers = make_tiers("window")
    prompts = [[number] * 8 for number in range(12)]
    for prompt in prompts:
        publish(tiers, *prompt)

    found = [tiers.acquire(f"l{number}", "s", key(*prompt)) for number, prompt in enumerate(prompts[:3])]

    assert [(lease.prefix_len, lease.loaded_len) for lease in found] == [(8, 8)] * 3
    # The window of 4 and one page move; the window halves before them are free on both sides.
    assert [(tiers.swa_starts(lease) > 0).tolist() for lease in found] == [[False, True, True, True]] * 3
    tiers.moves.check_invariants()


def test_a_lease_that_locks_gets_pages_for_a_load_and_none_besides() -> None:
    tiers = make_tiers("radix")
    publish(tiers, 1, 2, 3, 4)
    tiers.evict(4)

    lease = tiers.lock("lock", "s", key(1, 2, 3, 4, 5, 6))

    assert (lease.prefix_len, lease.num_slots, len(lease.private_starts), lease.only_locks) == (4, 4, 0, True)
    assert tiers.private_slots == 0
    assert tiers.lock("lock", "s", key(1)) is lease
    tiers.moves.check_invariants()


def test_a_lock_without_room_loads_nothing() -> None:
    tiers = make_tiers("radix")
    publish(tiers, 1, 2, 3, 4)
    tiers.evict(4)
    tiers.acquire("large", "s", RadixKey([9] * NUM_PAGES * PAGE))

    assert tiers.lock("lock", "s", key(1, 2, 3, 4)).prefix_len == 0
    with pytest.raises(OutOfSlotsError):
        tiers.acquire("more", "s", key(1, 2, 3, 4))
    tiers.moves.check_invariants()


def test_a_retry_gets_its_lease_and_loads_nothing_more() -> None:
    tiers = make_tiers("radix")
    publish(tiers, 1, 2, 3, 4)
    tiers.evict(4)

    lease = tiers.acquire("l", "s", key(1, 2, 3, 4), max_prefix_len=2)

    assert lease.prefix_len == 2 and tiers.acquire("l", "s", key(1, 2, 3, 4)) is lease
    assert tiers.moves.loads.counts.loaded == 2


@pytest.mark.parametrize("kind", ["radix", "window", "mamba"])
def test_a_namespace_is_retired_in_both_tiers(kind: str) -> None:
    tiers = make_tiers(kind)
    for name in ("a", "b"):
        lease = tiers.acquire("l", "s", key(1, 2, 3, 4, ns=name))
        tiers.insert("l", "s", 4, RadixKey([], name), publish_state=kind == "mamba")
        tiers.release("l", "s")
        assert lease.prefix_len == 0
    tiers.evict(8)

    assert tiers.retire(lambda namespace: namespace == "a") == 0

    assert tiers.acquire("l", "s", key(1, 2, 3, 4, ns="a")).prefix_len == 0
    assert tiers.acquire("m", "s", key(1, 2, 3, 4, ns="b")).prefix_len == 4
    tiers.reset()
    assert tiers.acquire("n", "s", key(1, 2, 3, 4, ns="b")).prefix_len == 0
    tiers.moves.check_invariants()


@pytest.mark.parametrize("host_pages", [6, 20, 60])
@pytest.mark.parametrize("kind", ["radix", "window", "mamba"])
def test_any_size_of_the_lower_tier_keeps_the_rules_of_both(kind: str, host_pages: int) -> None:
    rng, tiers = Random(host_pages), make_tiers(kind, "lru", host_pages)
    host = tiers.moves.lower.cache
    for number in range(150):
        prompt = [token for _ in range(rng.randint(1, 7)) for token in (rng.randrange(3), 0)]
        below = tiers.moves.lower.longest_prefix(key(*prompt))
        try:
            lease = tiers.acquire(f"l{number}", "s", key(*prompt))
            assert lease.prefix_len >= below, "the host's prefix was not loaded"
            tiers.insert(f"l{number}", "s", len(prompt), NO_IDS, publish_state=kind == "mamba")
        except OutOfSlotsError:
            tiers.end_session("s")
        if rng.random() < 0.8:
            tiers.release(f"l{number}", "s")
        if rng.random() < 0.1:
            rng.choice((tiers.evict_states, tiers.evict_window, host.evict))(rng.randint(1, 8))
        if rng.random() < 0.05:
            rng.choice((tiers.reset, host.reset))()
        tiers.moves.check_invariants()
    assert tiers.moves.writes.counts.written > 0
