"""`TieredCache`: evicted prefixes are written before they go, so a large lower tier loses nothing."""

from random import Random

import pytest
from support.caches.small_kv_cache import NO_IDS
from support.traffic.eviction_order import NUM_PAGES, PAGE, make

from raydix.cache_core import OutOfSlotsError, RadixKey
from raydix.cache_core.tiers.moves import Moves
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.tiered_cache import TieredCache


@pytest.mark.parametrize("policy", ["lru", "lfu", "2q"])
@pytest.mark.parametrize("kind", ["radix", "mamba"])
def test_with_a_large_lower_tier_each_request_finds_as_much_as_in_one_large_pool(kind: str, policy: str) -> None:
    rng = Random(5)
    large, device, host = make(2000, "lru", kind), make(NUM_PAGES, policy, kind), make(2000, policy, kind)
    moves = Moves(Tier("device", "GPU", device), Tier("host", "CPU", host))
    tiers = TieredCache(moves)
    for number in range(200):
        prompt = RadixKey([token for _ in range(rng.randint(1, 6)) for token in (rng.randrange(3), 0)])
        lease_id = f"l{number}"
        expected = large.acquire(lease_id, "s", prompt).prefix_len
        large.insert(lease_id, "s", len(prompt), NO_IDS, publish_state=kind == "mamba")
        large.release(lease_id, "s")

        lease = tiers.acquire(lease_id, "s", prompt)
        assert lease.prefix_len == expected
        device.insert(lease_id, "s", len(prompt), NO_IDS, publish_state=kind == "mamba")
        assert tiers.release(lease_id, "s")
        if kind == "mamba" and rng.random() < 0.3:
            device.evict_states(2)
        moves.check_invariants()

    counts, counters = moves.counts, device.counters
    assert counts.loaded > 0 and counts.dropped == counts.writes_refused == 0
    assert counters.tokens_reused == large.counters.tokens_reused and counters.hits == large.counters.hits
    assert counters.acquires == large.counters.acquires == 200


def test_a_window_moves_with_the_end_of_its_prefix() -> None:
    device, host = make(NUM_PAGES, "lru", "window"), make(200, "lru", "window")
    moves = Moves(Tier("device", "GPU", device), Tier("host", "CPU", host))
    tiers = TieredCache(moves)
    prompts = [RadixKey([number] * 8) for number in range(12)]
    for number, prompt in enumerate(prompts):
        tiers.acquire(f"l{number}", "s", prompt)
        tiers.insert(f"l{number}", "s", len(prompt), NO_IDS)
        tiers.release(f"l{number}", "s")

    found = [tiers.acquire(f"again{number}", "s", prompt) for number, prompt in enumerate(prompts[:3])]

    assert [lease.prefix_len for lease in found] == [8, 8, 8]
    assert [lease.loaded_len for lease in found] == [8, 8, 8]
    # The window of 4 and one page move; the window halves before them are free on both sides.
    assert [(device.swa_starts(lease) > 0).tolist() for lease in found] == [[False, True, True, True]] * 3
    moves.check_invariants()


def test_a_lease_that_locks_gets_pages_for_a_load_and_none_besides() -> None:
    device, host = make(NUM_PAGES, "lru", "radix"), make(200, "lru", "radix")
    moves = Moves(Tier("device", "GPU", device), Tier("host", "CPU", host))
    tiers, prompt = TieredCache(moves), RadixKey([1, 2, 3, 4])
    tiers.acquire("first", "s", prompt)
    tiers.insert("first", "s", 4, NO_IDS)
    tiers.release("first", "s")
    device.evict(4)

    lease = tiers.lock("lock", "s", prompt + RadixKey([5, 6]))

    assert (lease.prefix_len, lease.num_slots, len(lease.private_starts), lease.only_locks) == (4, 4, 0, True)
    assert device.private_slots == 0
    moves.check_invariants()


def test_a_load_needs_room_that_a_lock_may_not_find() -> None:
    device, host = make(NUM_PAGES, "lru", "radix"), make(200, "lru", "radix")
    moves = Moves(Tier("device", "GPU", device), Tier("host", "CPU", host))
    tiers, prompt = TieredCache(moves), RadixKey([1, 2, 3, 4])
    tiers.acquire("first", "s", prompt)
    tiers.insert("first", "s", 4, NO_IDS)
    tiers.release("first", "s")
    device.evict(4)
    device.acquire("large", "s", RadixKey([9] * NUM_PAGES * PAGE))

    with pytest.raises(OutOfSlotsError):
        tiers.lock("lock", "s", prompt)

    assert device.leases.get("lock", "s").prefix_len == 0
    moves.check_invariants()
