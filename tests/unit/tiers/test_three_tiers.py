"""Three tiers: the `Moves` of a pool, a host tier and a disk tier over the same caches."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.caches.small_kv_cache import publish
from support.tiers.two_tiers import Moves

from raydix.actors.observe.namespace_hits import NamespaceUse
from raydix.cache_core import KVCache, RadixCache, RadixKey, TokenToKVPoolAllocator
from raydix.cache_core.leases.lease_table import TIERS
from raydix.cache_core.tiers.moves import check_all
from raydix.cache_core.tiers.tier import Tier

PAGE = 2


def make_cache(num_slots: int) -> KVCache:
    allocator = TokenToKVPoolAllocator(num_slots, PAGE)
    return KVCache(RadixCache(PAGE, token_to_kv_pool_allocator=allocator), allocator)


@dataclass
class Three:
    """Three tiers, and the moves between them."""

    host: Moves
    disk: Moves
    down: Moves

    @property
    def device_cache(self) -> KVCache:
        return self.host.upper.cache

    @property
    def host_cache(self) -> KVCache:
        return self.host.lower.cache

    @property
    def disk_cache(self) -> KVCache:
        return self.disk.lower.cache

    def check(self) -> None:
        check_all((self.host.loads, self.disk.loads), (self.host.writes, self.disk.writes, self.down.writes))


@pytest.fixture
def three() -> Three:
    device, host, disk = (Tier(name, name, make_cache(64)) for name in ("device", "host", "disk"))
    return Three(Moves(device, host), Moves(device, disk, are_neighbours=False), Moves(host, disk))


def put(cache: KVCache, tokens: list[int]) -> None:
    publish(cache, *tokens)


def test_each_tier_is_retired_with_the_one_above_it_and_once(three: Three) -> None:
    for cache in (three.device_cache, three.host_cache, three.disk_cache):
        put(cache, [1, 2, 3, 4])

    assert three.device_cache.below is three.host_cache and three.host_cache.below is three.disk_cache
    three.device_cache.retire(lambda name: True)

    for cache in (three.device_cache, three.host_cache, three.disk_cache):
        assert cache.match(RadixKey([1, 2, 3, 4])).prefix_len == 0
    three.check()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_write_to_the_host_is_tried_again_when_a_write_to_the_disk_has_unlocked_its_pages(is_released: bool) -> None:
    device, host, disk = (
        Tier(name, name, make_cache(slots)) for name, slots in (("device", 64), ("host", 8), ("disk", 64))
    )
    three = Three(Moves(device, host), Moves(device, disk, are_neighbours=False), Moves(host, disk))
    put(three.host_cache, list(range(8)))
    three.down.batch_pages = 100
    (down,) = three.down.writes.prepare(8).moves
    put(three.device_cache, [20, 21])

    assert [three.host.writes.prepare(64) for _ in range(2)][-1] == ([], True)
    assert three.host.writes.counts.writes_refused == 1
    if is_released:
        three.down.writes.release_source(down)
    else:
        three.down.complete(down, down.num_pages)

    (move,) = three.host.writes.prepare(64).moves
    three.check()
    three.host.complete(move, move.num_pages)
    assert three.host.lower.longest_prefix(RadixKey([20, 21])) == 2


def test_a_lease_is_filled_from_the_host_and_then_from_the_disk(three: Three) -> None:
    tokens = list(range(1, 13))
    put(three.device_cache, tokens[:2])
    put(three.host_cache, tokens[:6])
    put(three.disk_cache, tokens[:10])

    lease = three.device_cache.acquire("a", "s", RadixKey(tokens))
    first = three.host.prepare_load(lease)
    assert first is not None and (first.first, first.stop) == (2, 6)
    three.check()
    assert three.host.complete(first, first.num_pages).lease is lease
    second = three.disk.prepare_load(lease)
    assert second is not None and (second.first, second.stop) == (6, 10)
    assert lease.session_id == TIERS and lease.filling_for == "s", "no session gets it between the two loads"
    three.check()
    assert three.disk.complete(second, second.num_pages).lease is lease

    three.check()
    assert (lease.prefix_len, lease.loaded_len, lease.session_id) == (10, 8, "s")
    counters = three.device_cache.counters
    assert (counters.acquires, counters.hits, counters.tokens_reused) == (2, 1, 10)
    assert (three.host.loads.counts.loaded, three.disk.loads.counts.loaded) == (4, 4)
    assert three.device_cache.match(RadixKey(tokens)).prefix_len == 10


def test_one_page_is_not_written_from_two_tiers(three: Three) -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    put(three.device_cache, tokens)
    put(three.host_cache, tokens)
    device_node, _ = three.device_cache.radix.locate(RadixKey(tokens), 6)
    host_node, _ = three.host_cache.radix.locate(RadixKey(tokens), 6)

    write = three.disk.writes.prepare_prefix(device_node, 9, (three.down.writes,))
    assert write is not None
    assert three.down.writes.prepare_prefix(host_node, 9, (three.disk.writes,)) is None
    three.disk.writes.release_source(write)
    assert three.down.writes.prepare_prefix(host_node, 9, (three.disk.writes,)) is None
    three.check()
    three.disk.complete(write, 3)

    assert three.down.writes.prepare_prefix(host_node, 9, (three.disk.writes,)) is None, "the disk has it"
    assert three.disk_cache.match(RadixKey(tokens)).prefix_len == 6
    three.check()


def test_the_rules_see_a_page_that_is_written_from_two_tiers(three: Three) -> None:
    tokens = [1, 2, 3, 4]
    put(three.device_cache, tokens)
    put(three.host_cache, tokens)
    three.disk.writes.prepare_prefix(three.device_cache.radix.locate(RadixKey(tokens), 4)[0], 9)
    three.down.writes.prepare_prefix(three.host_cache.radix.locate(RadixKey(tokens), 4)[0], 9)

    with pytest.raises(AssertionError, match="rule 3"):
        three.check()
    with pytest.raises(AssertionError, match="rule 2"):
        three.disk.check_invariants()


def test_a_load_that_is_given_up_goes_on_and_its_request_begins_again_under_its_id(three: Three) -> None:
    tokens = list(range(1, 9))
    put(three.disk_cache, tokens)
    lease = three.device_cache.acquire("a", "s", RadixKey(tokens))
    load = three.disk.prepare_load(lease)
    assert load is not None

    three.disk.loads.abandon(load)
    three.check()
    again = three.device_cache.acquire("a", "s", RadixKey(tokens))
    assert again is not lease and again.prefix_len == 0
    assert three.device_cache.counters.acquires == 1, "the request counts once"
    three.check()
    finished = three.disk.complete(load, 3)

    assert finished.lease is None and not finished.must_restart
    assert three.disk.loads.counts.loaded_unused == 6
    assert three.device_cache.match(RadixKey(tokens)).prefix_len == 6
    three.device_cache.release("a", "s")
    three.check()
    assert three.device_cache.free_slots == 64 - 6


def test_a_session_that_ends_after_its_load_was_given_up_leaves_nothing(three: Three) -> None:
    tokens = [1, 2, 3, 4]
    put(three.disk_cache, tokens)
    load = three.disk.prepare_load(three.device_cache.acquire("a", "s", RadixKey(tokens)))
    assert load is not None
    three.disk.loads.abandon(load)
    three.device_cache.acquire("a", "s", RadixKey(tokens))

    assert three.device_cache.end_session("s") == 1
    three.disk.complete(load, 0)

    three.check()
    assert three.device_cache.free_slots == 64 and len(three.device_cache.leases) == 0


@pytest.mark.parametrize("end", ["give up", "retire"])
def test_a_request_that_begins_again_after_its_first_load_counts_nothing_of_it(three: Three, end: str) -> None:
    tokens = list(range(1, 9))
    put(three.host_cache, tokens[:4])
    put(three.disk_cache, tokens)
    uses = NamespaceUse()
    three.device_cache.observers.append(uses)
    lease = three.device_cache.acquire("a", "s", RadixKey(tokens))
    first = three.host.prepare_load(lease)
    assert first is not None
    three.host.complete(first, first.num_pages)
    second = three.disk.prepare_load(lease)
    assert second is not None
    counters = three.device_cache.counters
    assert (counters.hits, counters.tokens_reused, three.host.loads.counts.loaded) == (1, 4, 4)

    if end == "give up":
        three.disk.loads.abandon(second)
    else:
        three.device_cache.retire(lambda name: True)
        assert three.disk.complete(second, second.num_pages).must_restart

    three.check()
    assert (counters.acquires, counters.hits, counters.tokens_requested, counters.tokens_reused) == (0, 0, 0, 0)
    assert (three.host.loads.counts.loaded, three.host.loads.counts.loaded_unused) == (0, 4)
    assert uses.tokens_loaded == 0
    assert all(stats.tokens_reused == stats.tokens_loaded == 0 for stats in uses.stats(9))
