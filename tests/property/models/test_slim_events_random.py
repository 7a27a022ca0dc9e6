"""Random traffic on caches with slim events: after any interleaving of batches, repeats, gaps and snapshots, a router's
index equals the union of the caches' snapshots. The snapshots equal the contents of the trees and of the leases.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from support.faults.faults import around
from support.reference.event_index import resident_blocks

from raydix.actors.service import event_feed
from raydix.actors.service.cache_service import CacheService
from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import Applied, KVCache, OutOfSlotsError, PageIndex, RadixKey, page_hashes
from raydix.cache_core.leases.pending_pages import PendingPages
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.page_events import KVEventPublisher
from raydix.schemas import CacheConfig, PoolConfig, SlimEventBatch, SlimEventSnapshot

PAGE, STRIDE, NUM_SLOTS = 2, 6, 240
NUM_OPERATIONS = 400
NUM_OPERATIONS_LONG = 20_000


class Cache:
    """A cache without a service around its core, under random requests, and its lives."""

    def __init__(self, random: Random, name: int) -> None:
        self.random = random
        self.name = name
        self.num_lives = self.num_leases = 0
        self.restart()

    def restart(self) -> None:
        self.num_lives += 1
        config = CacheConfig(
            page_size=PAGE, events="slim", events_stride_tokens=STRIDE, pool=PoolConfig(num_slots=NUM_SLOTS)
        )
        self.service = CacheService(config, f"{self.name}-{self.num_lives}")
        assert isinstance(self.service.core, KVCache)
        self.core, self.feed = self.service.core, self.service.feeds.feed("device")
        self.feed._max_bytes = 4_000
        self.leases: dict[str, RadixKey] = {}

    def step(self) -> None:
        operation = self.random.choices(
            [self.acquire, self.insert, self.release, self.evict, self.retire, self.reset, self.vanish],
            [10, 8, 6, 2, 0.3, 0.1, 0.2],
        )[0]
        operation()

    def acquire(self) -> None:
        ids = [self.random.randrange(2) for _ in range(self.random.randrange(1, 12))]
        tokens = [token for each in ids for token in [each] * 4]  # of few different prefixes
        key = RadixKey(tokens[: self.random.randrange(len(tokens)) + 1], self.random.choice([None, "a"]))
        self.num_leases += 1
        lease_id, limit = f"lease-{self.num_leases}", self.random.choice([None, None, 4])
        try:
            if self.random.random() < 0.1:
                self.core.lock(lease_id, "s", key)
            else:
                self.core.acquire(lease_id, "s", key, max_prefix_len=limit)
        except OutOfSlotsError:
            return
        self.leases[lease_id] = key

    def insert(self) -> None:
        if not self.leases:
            return
        lease_id = self.random.choice(sorted(self.leases))
        lease = self.core.leases.get(lease_id, "s")
        stop = min(lease.num_slots, self.random.randrange(len(lease.key) + 1))
        self.core.insert(lease_id, "s", stop, lease.key[:stop])

    def release(self) -> None:
        if self.leases:
            lease_id = self.random.choice(sorted(self.leases))
            del self.leases[lease_id]
            self.core.release(lease_id, "s")

    def evict(self) -> None:
        self.core.evict(self.random.randrange(NUM_SLOTS // 2))

    def retire(self) -> None:
        self.core.retire(lambda extra_key: extra_key == "a")

    def reset(self) -> None:
        self.core.reset()

    def vanish(self) -> None:
        self.core.quarantine_session("s")
        self.core.free_withheld("s")
        self.leases.clear()

    def snapshot(self) -> SlimEventSnapshot:
        snapshot = self.feed.snapshot(self.core.resident_pages(), self.core.pending_pages())
        assert isinstance(snapshot, SlimEventSnapshot)
        return snapshot

    def batches_after(self, seq: int) -> list[SlimEventBatch]:
        return [batch for batch in self.feed.batches_after(seq).unpack() if isinstance(batch, SlimEventBatch)]

    def stored(self) -> set[int]:
        """Return the strided pages that can be matched, from the tokens in the tree."""
        assert isinstance(self.core.tree, PrefixCache)
        blocks = resident_blocks(self.core.tree)
        depths: dict[int, int] = {}
        for block in blocks:
            depth, at = 0, block
            path = []
            while at is not None and at not in depths:
                path.append(at)
                at = blocks[at].parent  # type: ignore[assignment]
            depth = 0 if at is None else depths[at]
            for each in reversed(path):
                depth += 1
                depths[each] = depth
        return {block for block, depth in depths.items() if depth * PAGE % STRIDE == 0}

    def pending(self) -> set[int]:
        """Return the strided pages that open leases will publish, from their tokens."""
        found: set[int] = set()
        for lease_id in self.leases:
            lease = self.core.leases.get(lease_id, "s")
            if not lease.only_locks and not lease.retired:
                hashes = page_hashes(lease.key, PAGE, STRIDE).tolist()
                found |= set(hashes[lease.num_published_pages * PAGE // STRIDE :])
        return found


class Router:
    """An index of all caches. Batches reach it late, twice, in another order, or not at all."""

    def __init__(self, random: Random, caches: list[Cache]) -> None:
        self.random = random
        self.caches = caches
        self.index = PageIndex()
        self.columns = [self.index.add_column() for _ in caches]
        self.late: list[tuple[int, SlimEventBatch]] = []

    def step(self, number: int) -> None:
        """Read one answer of a cache, which may be lost, and apply some of the batches that arrived."""
        cache, column = self.caches[number], self.columns[number]
        epoch, seq = self.index.position(column)
        after = seq if epoch == cache.service.epoch else 0
        if self.random.random() < 0.3:
            after = max(0, after - self.random.randrange(4))
        batches = cache.batches_after(after)
        self.late += [(number, each) for each in batches if self.random.random() < 0.8]
        self.late += [(number, each) for each in batches if self.random.random() < 0.1]
        if self.random.random() < 0.3:
            self.random.shuffle(self.late)
        while self.late and self.random.random() < 0.7:
            self.apply(*self.late.pop(0))

    def apply(self, number: int, batch: SlimEventBatch) -> None:
        column = self.columns[number]
        applied = self.index.apply(column, batch.epoch, batch.seq, batch.kinds, batch.page_counts, batch.page_hashes)
        if applied is Applied.NEEDS_SNAPSHOT and self.random.random() < 0.5:
            self.take_snapshot(number)

    def take_snapshot(self, number: int) -> None:
        snapshot = self.caches[number].snapshot()
        self.index.apply_snapshot(
            self.columns[number], snapshot.epoch, snapshot.seq, snapshot.stored_hashes, snapshot.pending_hashes
        )

    def catch_up(self) -> None:
        """Read on as a reader does whose batches arrive, with a snapshot wherever one is needed."""
        self.late.clear()
        for number, cache in enumerate(self.caches):
            while True:
                epoch, seq = self.index.position(self.columns[number])
                if epoch != cache.service.epoch:
                    self.take_snapshot(number)
                    continue
                batches = cache.batches_after(seq)
                for batch in batches:
                    applied = self.index.apply(
                        self.columns[number], batch.epoch, batch.seq, batch.kinds, batch.page_counts, batch.page_hashes
                    )
                    if batch.gap or applied is Applied.NEEDS_SNAPSHOT:
                        assert batch.gap, "a reader that loses nothing has gaps where the cache says so alone"
                        self.take_snapshot(number)
                if not batches:
                    break

    def check(self) -> None:
        self.catch_up()
        self.index.check_invariants()
        for column, cache in zip(self.columns, self.caches, strict=True):
            snapshot = cache.snapshot()
            stored, pending, _ = self.index.pages(column)
            assert self.index.position(column) == (snapshot.epoch, snapshot.seq)
            assert stored == set(snapshot.stored_hashes.tolist()) == cache.stored()
            assert len(stored) == len(snapshot.stored_hashes)
            assert pending == set(snapshot.pending_hashes.tolist()) == cache.pending()
            assert len(pending) == len(snapshot.pending_hashes)


def run(seed: int, num_operations: int) -> None:
    random = Random(seed)
    caches = [Cache(random, name) for name in range(3)]
    routers = [Router(random, caches) for _ in range(2)]
    for number in range(num_operations):
        cache = random.randrange(len(caches))
        if random.random() < 0.005:
            caches[cache].restart()
        caches[cache].step()
        if random.random() < 0.4:
            random.choice(routers).step(cache)
        if number % 50 == 49:
            random.choice(routers).check()
    for router in routers:
        router.check()
    for each in caches:
        each.core.check_invariants()
        each.vanish()
        assert len(each.core.pending_pages()) == 0


@pytest.mark.parametrize("seed", range(6))
def test_an_index_equals_the_union_of_the_snapshots(seed: int) -> None:
    run(seed, NUM_OPERATIONS)


@pytest.mark.long
def test_an_index_equals_the_union_of_the_snapshots_for_long() -> None:
    run(99, NUM_OPERATIONS_LONG)


# ---------------------------------------------------------------- planted faults


def start_strides_at_each_node(patch: pytest.MonkeyPatch) -> None:
    from raydix.cache_core.tree import page_events

    def strided_run(original: Any, node: Any, page_size: int, stride: int) -> Any:
        run = page_events.page_run(node, page_size)
        return run._replace(hashes=run.hashes[stride - 1 :: stride])

    around(patch, page_events, "strided_run", strided_run)


def forget_a_removal(patch: pytest.MonkeyPatch) -> None:
    around(patch, KVEventPublisher, "removed", lambda original, teller, nodes: original(teller, list(nodes)[1:]))


def keep_the_pages_of_ended_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingPages, "ended", lambda *_: None)


def keep_published_pages_pending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingPages, "published", lambda *_: None)


def keep_retired_pages_pending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PendingPages, "retired", lambda *_: None)


def end_a_page_with_its_first_lease(patch: pytest.MonkeyPatch) -> None:
    def end(original: Any, self: Any, hashes: list[int]) -> None:
        self._counts.update({each: 1 for each in hashes if each in self._counts})
        original(self, [each for each in dict.fromkeys(hashes) if each in self._counts])

    around(patch, PendingPages, "_end", end)


def promise_what_is_locked(patch: pytest.MonkeyPatch) -> None:
    def granted(original: Any, self: Any, lease: Any, max_prefix_len: int | None) -> None:
        only_locks, lease.only_locks = lease.only_locks, False
        original(self, lease, max_prefix_len)
        lease.only_locks = only_locks

    around(patch, PendingPages, "granted", granted)


def number_a_batch_wrongly(patch: pytest.MonkeyPatch) -> None:
    def pack_batch(original: Any, batch: SlimEventBatch) -> bytes:
        return bytes(original(batch if len(batch.kinds) < 3 else _renumbered(batch)))

    around(patch, event_feed, "pack_batch", pack_batch)


def _renumbered(batch: SlimEventBatch) -> SlimEventBatch:
    *values, load, gap = batch._values()
    values[1] += 1
    return SlimEventBatch(*values, load, gap)


def give_a_snapshot_the_number_of_the_next_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventFeed, "seq", property(lambda self: self._seq + len(self._events) + 1))


@pytest.mark.parametrize(
    "fault",
    [
        start_strides_at_each_node,
        forget_a_removal,
        keep_the_pages_of_ended_leases,
        keep_published_pages_pending,
        keep_retired_pages_pending,
        end_a_page_with_its_first_lease,
        promise_what_is_locked,
        number_a_batch_wrongly,
        give_a_snapshot_the_number_of_the_next_event,
    ],
)
def test_a_planted_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)

    with pytest.raises((AssertionError, KeyError)):
        for seed in range(6):
            run(seed, NUM_OPERATIONS)
