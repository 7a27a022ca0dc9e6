"""Random traffic on caches with a host tier and a disk: a reader of each tier has exactly the pages of that tier.

The readers ask the service as clients do, for full and for slim events. One begins with the first event, one often
begins again with a snapshot, and one with a snapshot that is made in slices while the traffic goes on. Then each rule
is broken once, and one of them must see it.
"""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.faults.faults import Catalogue, Fault, Patch, around
from support.more import more
from support.reference.event_index import ReplayedIndex, resident_blocks, resident_others
from support.tiers.settled_tiers import quick_disk, service_of, tiers_settled, whole_host

from raydix.actors.service import sliced_snapshot
from raydix.actors.service.event_feed import EventFeed
from raydix.actors.service.sliced_snapshot import _Changes
from raydix.actors.service.tier_feeds import TierFeeds
from raydix.cache_core import PageIndex
from raydix.cache_core.kernels import END
from raydix.schemas import (
    AcquireRequest,
    BlockStored,
    CacheConfig,
    CacheError,
    CacheLoad,
    EventSnapshotRequest,
    EvictRequest,
    InsertRequest,
    LeaseResponse,
    LockRequest,
    Message,
    NextEvents,
    OpenSession,
    PackedEvents,
    ReleaseRequest,
    ResetRequest,
    RetireRequest,
    SlimEventBatch,
    SlimEventSnapshot,
    TokenIds,
    WaitingResponse,
    WaitRequest,
    frame_namespace,
)

PAGE = 4
NUM_OPERATIONS = 150
TIERS = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
POOL: dict[str, Any] = {"num_slots": 16 * PAGE, "format": "opaque", "slot_bytes": 4, "device": "cpu"}
WINDOW, STATES = {"swa_slot_bytes": 4}, {"num_state_slots": 6, "state_bytes": 4}
POOLS: dict[str, dict[str, Any]] = {
    "full": {"pool": POOL},
    "window": {"pool": POOL | WINDOW, "sliding_window_size": 2 * PAGE},
    "mamba": {"kind": "mamba", "pool": POOL | STATES},
    "both": {"kind": "mamba", "pool": POOL | WINDOW | STATES, "sliding_window_size": 2 * PAGE},
}


@pytest.fixture(autouse=True)
def _a_slice_for_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced_snapshot, "SLICE_S", 0.0)


class TierTraffic:
    """One client that publishes, evicts, retires and resets, and the readers of both tiers."""

    OPERATIONS = (("publish", 30), ("lock", 6), ("evict", 6), ("retire", 0.5), ("reset", 0.3))

    def __init__(self, kind: str, events: str, seed: int, path: Path) -> None:
        self.rng = Random(f"{kind}/{events}/{seed}")
        fields = {
            "page_size": PAGE,
            "events": events,
            "host": whole_host(40 * PAGE),
            "disk": quick_disk(path, 60 * PAGE),
            "fingerprint": "m",
        }
        stride = {"events_stride_tokens": PAGE} if events == "slim" else {}
        config = CacheConfig.model_validate(fields | stride | POOLS[kind])
        self.service = service_of(config, name=f"{kind}-{events}-{seed}")
        for name in ("worker", "reader"):
            self.service.open_session(OpenSession(session_id=name, owner=name))
        self.has_states = self.service.config.kind == "mamba"
        self.num_leases = self.num_loaded = 0
        self.held = "none"  # lease id
        reader_type = FullReader if events == "full" else SlimReader
        self.first = {tier: reader_type(self, tier) for tier in TIERS}
        self.late = {tier: reader_type(self, tier) for tier in TIERS}
        self.slow = {tier: reader_type(self, tier) for tier in TIERS if tier != "device"}

    def ask(self, *requests: Message) -> list[Any]:
        """Return the responses to a batch of the worker."""
        return list(self.service.execute("worker", "e", requests).responses)

    async def step(self) -> None:
        """Run one operation; then compare all readers with the tiers."""
        names, weights = zip(*self.OPERATIONS, strict=True)
        name = self.rng.choices(names, weights)[0]
        if (done := getattr(self, name)()) is not None:
            await done
        if name == "publish":
            await tiers_settled(self.service)
        for tier in TIERS:
            if self.rng.random() < 0.1:
                self.late[tier].join()
            for reader in (self.first[tier], self.late[tier]):
                await reader.read()
                reader.check()
        for reader in self.slow.values():
            has_joined = await reader.join_slowly()
            await reader.read()
            if has_joined or self.rng.random() < 0.1:
                reader.check()

    async def publish(self) -> None:
        """Acquire a lease of some pages, publish a part of them, and release it."""
        rng, lease_id = self.rng, f"lease-{self.num_leases}"
        self.num_leases += 1
        lora_id = rng.choice([None, None, "a"])
        ids = [token for page in self.some_pages() for token in [page] * PAGE]
        tokens = TokenIds.pack(ids)
        namespace = None if lora_id is None else frame_namespace(None, lora_id, None)
        (lease,) = self.ask(AcquireRequest(lease_id=lease_id, tokens=tokens, namespace=namespace, timeout_s=0))
        if isinstance(lease, WaitingResponse):
            lease = await self.service.wait(WaitRequest(session_id="worker", epoch="e", ticket=lease.ticket))
        if isinstance(lease, CacheError):
            return
        assert isinstance(lease, LeaseResponse)
        self.num_loaded += lease.loaded_len
        stop = rng.randint(lease.prefix_len, len(ids))
        if stop > lease.prefix_len:
            self.ask(
                InsertRequest(
                    lease_id=lease_id,
                    num_tokens=stop,
                    suffix=TokenIds.pack(ids[:stop]),
                    publish_state=self.has_states and rng.random() < 0.8,
                )
            )
        self.ask(ReleaseRequest(lease_id=lease_id))

    def lock(self) -> None:
        """Hold another path, so that the cache has a load."""
        lease_id = f"lock-{self.num_leases}"
        tokens = TokenIds.pack([token for page in self.some_pages() for token in [page] * PAGE])
        self.ask(ReleaseRequest(lease_id=self.held), LockRequest(lease_id=lease_id, tokens=tokens))
        self.held = lease_id

    def some_pages(self) -> list[int]:
        """Return a path of pages: early ones are shared by many paths."""
        return [
            self.rng.randint(1, 3) if place < 2 else self.rng.randint(1, 9) for place in range(self.rng.randint(1, 8))
        ]

    def evict(self) -> None:
        """Evict some pages of one tier."""
        self.ask(EvictRequest(num_tokens=PAGE * self.rng.randint(1, 6), tier=self.rng.choice(list(TIERS))))

    def retire(self) -> None:
        """Retire a namespace, in all tiers."""
        self.ask(RetireRequest(lora_id="a"))

    def reset(self) -> None:
        """Clear all tiers."""
        self.ask(ResetRequest())


class TierReader:
    """A reader of one tier."""

    def __init__(self, traffic: TierTraffic, tier: str) -> None:
        self.service, self.traffic, self.tier = traffic.service, traffic, tier
        self.tree: Any = self.service._handlers._caches[tier].tree  # type: ignore[attr-defined]
        self.seq = self.num_joins = self.num_slices = 0
        self.joining: asyncio.Task[Any] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin without pages."""
        raise NotImplementedError

    def join(self) -> None:
        """Begin again with a snapshot."""
        (snapshot,) = self.service.execute("reader", "e", [EventSnapshotRequest(tier=self.tier)]).responses
        self.start(snapshot)

    async def join_slowly(self) -> bool:
        """Begin again with a snapshot of which a few slices are made in each step; return whether it has begun."""
        if self.joining is None:
            self.joining = asyncio.ensure_future(self.service.feeds.sliced_snapshot(self.tier))
            self.num_slices = 0
        for _ in range(self.traffic.rng.randint(0, 5)):
            self.num_slices += 1
            await asyncio.sleep(0)
        if not self.joining.done():
            return False
        self.start(self.joining.result())
        self.num_joins += self.num_slices > 6
        self.joining = None
        return True

    def start(self, snapshot: Any) -> None:
        """Begin with a snapshot."""
        raise NotImplementedError

    async def read(self) -> None:
        """Take in all events until now."""
        while True:
            question = NextEvents(session_id="reader", epoch="e", after_seq=self.seq, tier=self.tier, timeout_s=0)
            batches = (await self.service.next_events(question)).unpack(self.seq)
            if not batches:
                return
            for batch in batches:
                self.take(batch)
                self.seq = batch.seq

    def take(self, batch: Any) -> None:
        """Take in one batch."""
        raise NotImplementedError

    def check(self) -> None:
        """Compare the pages with those of the tier."""
        raise NotImplementedError


class FullReader(TierReader):
    """A reader of full events."""

    def begin(self) -> None:
        self.index = ReplayedIndex()

    def start(self, snapshot: Any) -> None:
        assert isinstance(snapshot, PackedEvents)
        self.index = ReplayedIndex(snapshot.snapshot())
        self.seq = self.index.seq

    def take(self, batch: Any) -> None:
        media = {event.medium for event in batch.events if isinstance(event, BlockStored)}
        assert media <= {TIERS[self.tier]}
        self.index.apply(batch)

    def check(self) -> None:
        assert self.index.blocks == resident_blocks(self.tree)
        assert self.index.others == resident_others(self.tree)


class SlimReader(TierReader):
    """A reader of slim events, with an index as a router has it."""

    def begin(self) -> None:
        self.index = PageIndex()
        self.column = self.index.add_column()

    def start(self, snapshot: Any) -> None:
        assert isinstance(snapshot, SlimEventSnapshot)
        assert self.tier == "device" or (snapshot.load == CacheLoad() and not snapshot.pending)
        ends = snapshot.end_hashes
        self.index.drop_column(self.column)
        self.column = self.index.add_column()
        assert self.index.apply_snapshot(
            self.column, "e", snapshot.seq, snapshot.stored_hashes, snapshot.pending_hashes, ends
        )
        self.seq = snapshot.seq

    def take(self, batch: Any) -> None:
        assert isinstance(batch, SlimEventBatch)
        assert self.tier == "device" or batch.load == CacheLoad()
        self.index.apply(self.column, "e", batch.seq, batch.kinds, batch.page_counts, batch.page_hashes)

    def check(self) -> None:
        stored, pending, _ = self.index.pages(self.column)
        assert not pending
        ends = self.tree.usable_ends()
        marks = set() if ends is None else {page ^ END for page in ends.tolist()}
        assert stored == set(resident_blocks(self.tree)) | marks


async def run(kind: str, events: str, seed: int, num_operations: int, path: Path) -> TierTraffic:
    """Run so many operations."""
    traffic = TierTraffic(kind, events, seed, path)
    try:
        for _ in range(num_operations):
            await traffic.step()
        traffic.service.tiers.check_invariants()
    finally:
        for reader in traffic.slow.values():
            if reader.joining is not None:
                reader.joining.cancel()
        await traffic.service.close()
    return traffic


@pytest.mark.parametrize("seed", [0, *more(*range(1, 12))])
@pytest.mark.parametrize("events", ["full", "slim"])
@pytest.mark.parametrize("kind", POOLS)
async def test_readers_have_the_pages_of_their_tier(kind: str, events: str, seed: int, tmp_path: Path) -> None:
    traffic = await run(kind, events, seed, NUM_OPERATIONS, tmp_path)

    assert traffic.num_loaded or seed  # a few of the others load nothing
    seqs = [traffic.first[tier].seq for tier in TIERS]
    assert min(seqs) and (seed or len(set(seqs)) == 3)
    num_joins = [reader.num_joins for reader in traffic.slow.values()]
    assert max(num_joins) and (seed or min(num_joins) > 3)  # in a few of the others a reader is never too slow


# ---------------------------------------------------------------- planted faults

FAULTS = Catalogue()
fault = FAULTS.register


@fault
def a_question_for_the_host_is_answered_by_the_pool(patch: Patch) -> None:
    def next_events(original: Any, feeds: TierFeeds, request: NextEvents) -> Any:
        return original(feeds, request.model_copy(update={"tier": "device"}))

    around(patch, TierFeeds, "next_events", next_events)


@fault
def a_snapshot_of_the_pool_has_the_pages_of_the_host(patch: Patch) -> None:
    around(patch, TierFeeds, "snapshot", lambda original, feeds, tier: original(feeds, "host"))


@fault
def a_snapshot_has_the_pages_of_one_tier_and_the_number_of_the_other(patch: Patch) -> None:
    def snapshot(feeds: TierFeeds, tier: str) -> Any:
        cache, feed = feeds._tier(tier).cache, feeds._tier("device").feed
        return feed.snapshot(cache.resident_pages(), cache.pending_pages(), cache.usable_ends())

    patch.setattr(TierFeeds, "snapshot", snapshot)


@fault
def both_tiers_publish_to_one_feed(patch: Patch) -> None:
    def add(original: Any, feeds: TierFeeds, name: str, medium: str, cache: Any) -> None:
        original(feeds, name, medium, cache)
        feeds._tiers[name] = tier = feeds._tiers[name]._replace(feed=feeds._tiers["device"].feed)
        publish = cache.publish_events_to if feeds._config.events == "full" else cache.publish_slim_events_to
        publish(tier.feed, *([1] if feeds._config.events == "slim" else []))

    around(patch, TierFeeds, "add", add)


@fault
def both_tiers_have_the_medium_of_the_pool(patch: Patch) -> None:
    around(patch, TierFeeds, "add", lambda original, feeds, name, medium, cache: original(feeds, name, "GPU", cache))


@fault
def the_host_does_not_publish_that_it_was_cleared(patch: Patch) -> None:
    def cleared(original: Any, feed: EventFeed) -> None:
        if feed._medium == "GPU":
            original(feed)

    around(patch, EventFeed, "cleared", cleared)


@fault
def events_between_the_slices_of_a_snapshot_are_forgotten(patch: Patch) -> None:
    around(patch, _Changes, "__init__", lambda original, changes, events: original(changes, ()))


@fault
def pages_that_come_between_the_slices_are_twice_in_a_snapshot(patch: Patch) -> None:
    patch.setattr(sliced_snapshot, "_unchanged", lambda runs, changes, page_size: runs)


@fault
def a_tier_that_is_cleared_between_the_slices_keeps_its_pages(patch: Patch) -> None:
    patch.setattr(EventFeed, "clears", staticmethod(lambda event: False))


@fault
def a_sliced_snapshot_has_the_number_of_its_first_slice(patch: Patch) -> None:
    async def snapshot(original: Any, feeds: TierFeeds, tier: str) -> Any:
        seq = feeds.feed(tier).seq
        found = await original(feeds, tier)
        if isinstance(found, SlimEventSnapshot):
            return replace(found, seq=seq)
        batches = [pickle.loads(packed) for packed in found.batches]
        return PackedEvents(tuple(pickle.dumps((batch[0], seq, *batch[2:])) for batch in batches))

    around(patch, TierFeeds, "sliced_snapshot", snapshot)


@fault
def the_load_of_the_cache_is_in_the_events_of_the_host(patch: Patch) -> None:
    def add(original: Any, feeds: TierFeeds, name: str, medium: str, cache: Any) -> None:
        feeds._first = None
        original(feeds, name, medium, cache)

    around(patch, TierFeeds, "add", add)


@pytest.mark.parametrize("plant", FAULTS.cases())
async def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch, tmp_path: Path) -> None:
    plant(monkeypatch)

    with pytest.raises((AssertionError, KeyError)):
        for events in ("full", "slim"):
            for seed in range(3):
                await run("full", events, seed, NUM_OPERATIONS, tmp_path)
