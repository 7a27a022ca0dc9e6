"""Random traffic of several sessions over one `KVCache`, against a model that knows what was written where.

The model stamps each slot with the namespace and the tokens of its KV: all tokens from the start to this one,
because KV depends on them all. A match may then point only to slots with the stamps of the requested tokens.
A lease may write only to slots that no other lease or match can see. Invariants and
conservation are checked after each step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from support.more import more

from raydix.cache_core import (
    ChunkCache,
    KVCache,
    LeaseRangeError,
    OutOfSlotsError,
    RadixCache,
    RadixKey,
    TokenToKVPoolAllocator,
    UnknownLeaseError,
)
from raydix.cache_core.leases.lease_table import LeaseRecord

SESSIONS = ("s0", "s1", "s2")
NAMESPACES = (None, "lora")
Stamp = tuple[str | None, tuple[int, ...]]


@dataclass
class OpenLease:
    """A client's view of its lease."""

    session: str
    namespace: str | None
    tokens: list[int]  # acquired ones, then generated ones as they are published
    record: LeaseRecord
    told: int = 0  # tokens that the cache has seen


@dataclass
class Traffic:
    """A cache, its clients, and the stamps that they wrote."""

    cache: KVCache
    rng: random.Random
    open: dict[str, OpenLease] = field(default_factory=dict)
    stamps: dict[int, Stamp] = field(default_factory=dict)
    published: set[Stamp] = field(default_factory=set)  # since the last reset
    done: dict[str, int] = field(default_factory=dict)
    next_id: int = 0

    def step(self) -> None:
        verbs = (self.acquire, self.insert, self.extend, self.release, self.match, self.lock, self.evict)
        rare = (self.reset, self.end_session, self.misuse, self.repeat)
        verb = self.rng.choices((*verbs, *rare), (12, 14, 5, 8, 4, 3, 2, 0.5, 0.5, 2, 1))[0]
        verb()
        self.done[verb.__name__] = self.done.get(verb.__name__, 0) + 1

    # ------------------------------------------------------------ verbs

    def acquire(self) -> None:
        cache, namespace, tokens = self.cache, self.some_namespace(), self.some_tokens()
        new_tokens = self.rng.randrange(6)
        limit = self.rng.choice((None, None, len(tokens) - 1))
        before = (cache.free_slots, cache.private_slots, cache.tree.total_size(), cache.tree.protected_size())
        expected = cache.tree.peek_prefix(RadixKey(tokens[:limit], namespace)).prefix_len
        lease_id, session = self.new_id(), self.rng.choice(SESSIONS)
        try:
            record = cache.acquire(lease_id, session, RadixKey(tokens, namespace), new_tokens, limit)
        except OutOfSlotsError as error:
            after = (cache.free_slots, cache.private_slots, cache.tree.total_size(), cache.tree.protected_size())
            assert after == before, "a refusal changed the counts"
            assert error.needed > error.free + error.evictable or not error.can_ever_fit
            return
        assert record.prefix_len == expected
        assert record.num_slots == len(tokens) + new_tokens
        taken = (len(record.starts) - record.num_published_pages) * cache.page_size
        assert cache.private_slots == before[1] + taken
        self.admit(lease_id, OpenLease(session, namespace, tokens, record, len(tokens)))

    def lock(self) -> None:
        namespace, tokens = self.some_namespace(), self.some_tokens()
        free = self.cache.free_slots
        lease_id, session = self.new_id(), self.rng.choice(SESSIONS)
        record = self.cache.lock(lease_id, session, RadixKey(tokens, namespace))
        assert self.cache.free_slots == free
        assert record.num_slots == record.prefix_len
        self.admit(lease_id, OpenLease(session, namespace, tokens, record, len(tokens)))

    def extend(self) -> None:
        if (choice := self.some_lease()) is None:
            return
        lease_id, lease = choice
        num_tokens, covered = self.rng.randrange(1, 9), lease.record.num_slots
        try:
            self.cache.extend(lease_id, lease.session, num_tokens)
        except OutOfSlotsError:
            assert lease.record.num_slots == covered
            return
        assert lease.record.num_slots == covered + num_tokens
        self.write(lease)

    def insert(self) -> None:
        if (choice := self.some_lease()) is None:
            return
        lease_id, lease = choice
        covered, page = lease.record.num_slots, self.cache.page_size
        while len(lease.tokens) < covered and self.rng.random() < 0.8:
            lease.tokens.append(self.rng.randrange(3))
        self.write(lease)
        num_tokens = self.rng.randint(0, min(len(lease.tokens), covered))
        num_tokens = max(num_tokens, min(lease.told, covered))
        start = self.rng.choice((min(lease.told, num_tokens), 0))
        suffix = RadixKey(lease.tokens[start:num_tokens], lease.namespace)
        free, private, tree = self.cache.free_slots, self.cache.private_slots, self.cache.tree.total_size()
        result = self.cache.insert(lease_id, lease.session, num_tokens, suffix)
        lease.told = max(lease.told, num_tokens)
        assert self.cache.free_slots == free + result.num_duplicates
        assert self.cache.private_slots == private - result.num_duplicates - result.num_inserted
        assert self.cache.tree.total_size() == tree + result.num_inserted
        if result.retired or isinstance(self.cache.tree, ChunkCache):
            assert result.num_inserted == result.num_duplicates == 0
            return
        whole = num_tokens // page * page
        assert lease.record.num_published_pages * page >= whole
        self.published.update((lease.namespace, tuple(lease.tokens[:end])) for end in range(page, whole + 1, page))
        key = RadixKey(lease.tokens[:whole], lease.namespace)
        found = self.cache.tree.peek_prefix(key)
        assert found.prefix_len == whole, "what was just published is not found"
        assert found.indices.tolist() == self.slots(lease)[:whole], "the lease does not hold the tree's slots"

    def release(self) -> None:
        if (choice := self.some_lease()) is None:
            return
        lease_id, lease = choice
        del self.open[lease_id]
        assert self.cache.release(lease_id, lease.session)
        assert not self.cache.release(lease_id, lease.session)

    def end_session(self) -> None:
        session = self.rng.choice(SESSIONS)
        mine = [lease_id for lease_id, lease in self.open.items() if lease.session == session]
        assert self.cache.end_session(session) == len(mine)
        for lease_id in mine:
            del self.open[lease_id]

    def match(self) -> None:
        namespace, tokens = self.some_namespace(), self.some_tokens()
        before = list(map(len, self.cache.tree.tree_starts()))
        result = self.cache.match(RadixKey(tokens, namespace))
        self.check_slots(namespace, tokens, result.indices.tolist())
        assert list(map(len, self.cache.tree.tree_starts())) == before, "a probe split a node"
        if result.prefix_len:
            assert (namespace, tuple(tokens[: result.prefix_len])) in self.published

    def evict(self) -> None:
        wanted, evictable = self.rng.randrange(40), self.cache.tree.evictable_size()
        free = self.cache.free_slots
        evicted = self.cache.evict(wanted)
        assert evicted >= min(wanted, evictable)
        assert self.cache.free_slots == free + evicted

    def reset(self) -> None:
        held = {slot for lease in self.open.values() for slot in lease.record.starts.tolist()}
        self.cache.reset()
        self.published.clear()
        assert self.cache.tree.evictable_size() == 0, "a reset left slots in the tree that nobody holds"
        assert self.cache.num_slots - self.cache.free_slots == len(held) * self.cache.page_size
        for namespace in NAMESPACES:
            assert self.cache.match(RadixKey(self.some_tokens(), namespace)).prefix_len == 0

    def repeat(self) -> None:
        """A retried acquire changes nothing."""
        if (choice := self.some_lease()) is None:
            return
        lease_id, lease = choice
        free = self.cache.free_slots
        assert self.cache.acquire(lease_id, lease.session, RadixKey([1, 2, 3])) is lease.record
        assert self.cache.free_slots == free

    def misuse(self) -> None:
        """Mistakes of a caller raise and change nothing."""
        if (choice := self.some_lease()) is None:
            return
        lease_id, lease = choice
        before = (self.cache.free_slots, self.cache.private_slots, self.slots(lease), len(lease.record.key))
        other = RadixKey([9] * max(lease.told, 1), lease.namespace)
        with pytest.raises(LeaseRangeError):
            self.cache.insert(lease_id, lease.session, len(other), other)
        with pytest.raises(LeaseRangeError):
            self.cache.insert(lease_id, lease.session, lease.record.num_slots + 1, other)
        if lease.record.num_slots < lease.told:
            with pytest.raises(LeaseRangeError):
                self.cache.insert(lease_id, lease.session, lease.told, other[:0])
        with pytest.raises(UnknownLeaseError):
            self.cache.insert(lease_id, "stranger", 1, other)
        with pytest.raises(UnknownLeaseError):
            self.cache.extend("never", lease.session, 1)
        assert (self.cache.free_slots, self.cache.private_slots, self.slots(lease), len(lease.record.key)) == before

    # ------------------------------------------------------------ the model

    def admit(self, lease_id: str, lease: OpenLease) -> None:
        self.open[lease_id] = lease
        self.check_slots(lease.namespace, lease.tokens, self.slots(lease)[: lease.record.prefix_len])
        self.write(lease)

    def write(self, lease: OpenLease) -> None:
        """Stamp the private slots of a lease, as a worker that computes KV would."""
        slots, published = self.slots(lease), lease.record.num_published_pages * self.cache.page_size
        for place in range(published, min(len(slots), len(lease.tokens))):
            self.stamps[slots[place]] = (lease.namespace, tuple(lease.tokens[: place + 1]))

    def check_slots(self, namespace: str | None, tokens: list[int], slots: list[int]) -> None:
        for place, slot in enumerate(slots):
            assert self.stamps[slot] == (namespace, tuple(tokens[: place + 1])), f"slot {slot} holds other KV"

    def check(self) -> None:
        cache = self.cache
        cache.check_invariants()
        assert cache.free_slots + cache.private_slots + cache.tree.total_size() == cache.num_slots
        assert {lease.lease_id for lease in cache.leases} == set(self.open)
        for lease in self.open.values():
            known = min(lease.record.num_slots, lease.told)
            self.check_slots(lease.namespace, lease.tokens, self.slots(lease)[:known])

    def slots(self, lease: OpenLease) -> list[int]:
        page = self.cache.page_size
        every = [start + at for start in lease.record.starts.tolist() for at in range(page)]
        return every[: lease.record.num_slots]

    # ------------------------------------------------------------ choices

    def new_id(self) -> str:
        self.next_id += 1
        return f"l{self.next_id}"

    def some_lease(self) -> tuple[str, OpenLease] | None:
        return self.rng.choice(list(self.open.items())) if self.open else None

    def some_namespace(self) -> str | None:
        return self.rng.choice(NAMESPACES)

    def some_tokens(self) -> list[int]:
        """Three ids, in runs as long as a page half the time, so that prefixes are shared at every depth."""
        page, length = self.cache.page_size, self.rng.randint(1, 4 * self.cache.page_size + 4)
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += [self.rng.randrange(3)] * (page if self.rng.random() < 0.8 else 1)
        wide = 2**32 if self.rng.random() < 0.02 else 0
        return [*tokens[: length - 1], tokens[length - 1] + wide]


def drive(traffic: Traffic, num_steps: int) -> None:
    for _ in range(num_steps):
        traffic.step()
        traffic.check()
    for session in SESSIONS:
        traffic.cache.end_session(session)
    traffic.open.clear()
    traffic.check()
    assert traffic.cache.private_slots + traffic.cache.protected_size() == 0
    traffic.cache.evict(traffic.cache.num_slots)
    traffic.check()
    assert traffic.cache.free_slots == traffic.cache.num_slots


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, *more(1, 2)])
def test_whatever_sessions_do_nobody_reads_or_writes_anothers_kv(page_size: int, seed: int) -> None:
    allocator = TokenToKVPoolAllocator(24 * page_size, page_size)
    tree = RadixCache(page_size, token_to_kv_pool_allocator=allocator)
    traffic = Traffic(KVCache(tree, allocator), random.Random(seed))

    drive(traffic, 2000)

    assert len(traffic.done) == 11, f"some verb was never called: {traffic.done}"
    counters = traffic.cache.counters
    assert min(counters.hits, counters.tokens_inserted, counters.tokens_duplicate, counters.tokens_evicted) > 0


def test_without_sharing_nobody_reads_or_writes_anothers_kv() -> None:
    traffic = Traffic(KVCache(ChunkCache(4), TokenToKVPoolAllocator(96, 4)), random.Random(0))

    drive(traffic, 1000)

    assert traffic.cache.counters.hits == traffic.cache.counters.tokens_inserted == 0


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_long_run_of_the_same_traffic(page_size: int) -> None:
    allocator = TokenToKVPoolAllocator(48 * page_size, page_size)
    tree = RadixCache(page_size, token_to_kv_pool_allocator=allocator)

    drive(Traffic(KVCache(tree, allocator), random.Random(page_size)), 100_000)
