"""The same requests on a cache with writes to a lower tier and without: all else must be equal."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from support.caches.small_kv_cache import NO_IDS
from support.tiers.two_tiers import Moves

from raydix.cache_core import (
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.results import Counters
from raydix.cache_core.tiers.tier import Tier

PAGE, NUM_PAGES = 2, 24


class Notes:
    """An observer that keeps what it is notified of."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, ...]] = []

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        self.kept.append(("granted", lease.lease_id, lease.prefix_len))

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        self.kept.append(("refused", num_tokens))

    def published(self, lease: LeaseRecord) -> None:
        self.kept.append(("published", lease.lease_id, lease.num_published_pages))

    def ended(self, lease: LeaseRecord) -> None:
        self.kept.append(("ended", lease.lease_id))

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        self.kept.append(("retired",))


def make(num_pages: int, policy: str, kind: str, on_evict: Callable[[int], None] | None = None) -> KVCache:
    """Return a cache of a kind: "radix", "window" or "mamba"."""
    slots = num_pages * PAGE
    if kind == "window":
        swa = SWATokenToKVPoolAllocator(slots, slots // 2, PAGE)
        return KVCache(RadixCache(PAGE, 4, swa, on_evict, eviction_policy=policy), swa)
    allocator = TokenToKVPoolAllocator(slots, PAGE)
    if kind == "radix":
        return KVCache(RadixCache(PAGE, None, allocator, on_evict, eviction_policy=policy), allocator)
    states = MambaPool(num_pages // 2)
    return KVCache(MambaRadixCache(PAGE, allocator, states, on_evict, eviction_policy=policy), allocator, states=states)


def evictions(seed: int, policy: str, kind: str, num_requests: int, writes: bool) -> tuple[Any, ...]:
    """Serve random requests; return all that they leave behind, and the tokens written to a lower tier."""
    rng, gone, notes = Random(seed), list[int](), Notes()
    device, host = make(NUM_PAGES, policy, kind, gone.append), make(2 * NUM_PAGES, "lru", kind)
    device.observers.append(notes)
    moves = Moves(Tier("device", "GPU", device), Tier("host", "CPU", host))
    hits = []
    for number in range(num_requests):
        prompt = [rng.randrange(3) for _ in range(rng.randint(1, 4)) for _ in range(PAGE)]
        prompt = [token // 2 * 2 + index % 2 * 10 for index, token in enumerate(prompt)]
        lease_id = f"l{number}"
        try:
            lease = device.acquire(lease_id, "s", RadixKey(prompt), priority=rng.randrange(3))
            hits.append(lease.prefix_len)
            whole = len(prompt) // PAGE * PAGE
            device.insert(lease_id, "s", whole, NO_IDS, publish_state=kind == "mamba")
        except OutOfSlotsError:
            hits.append(-1)
        if rng.random() < 0.7:
            device.release(lease_id, "s")
        if rng.random() < 0.1:
            device.end_session("s")
        # An eviction has no choice among locked nodes, so each copy ends before the next request.
        if writes:
            copying = moves.writes.prepare(NUM_PAGES * PAGE).moves
            copying += (
                moves.writes.prepare_states(NUM_PAGES).moves + moves.writes.prepare_windows(NUM_PAGES * PAGE).moves
            )
            rng_of_copies = Random(number)
            rng_of_copies.shuffle(copying)
            for move in copying:
                moves.complete(move, move.num_pages)
        device.evict(rng.choice((0, 0, 2)))
        if writes and number % 8 == 0:
            moves.check_invariants()
    counters: Counters = device.counters
    return gone, hits, notes.kept, counters, device.tree.now, moves.writes.counts.written


def check_order(seed: int, policy: str, kind: str, num_requests: int = 80) -> int:
    """Raise AssertionError unless writes leave all as it was; return the tokens written."""
    *plain, _ = evictions(seed, policy, kind, num_requests, writes=False)
    *with_writes, written = evictions(seed, policy, kind, num_requests, writes=True)
    names = ("evictions", "hits", "notifications", "counters", "clock")
    for name, there, here in zip(names, plain, with_writes, strict=True):
        assert there == here, f"the {name} are others with writes"
    return int(written)
