"""Random traffic on trees that publish events: a reader that replays them has exactly the cached pages.

Three readers replay after every operation: one from the beginning, one that periodically restarts from a snapshot,
and one that reads seldom from a feed that keeps little, so that it falls into gaps and takes a snapshot at each. Then
each rule is broken once, and one of them must see it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from support.caches.index_pool import IndexPool
from support.faults.faults import Catalogue, Fault, Patch, around
from support.faults.split_faults import after_cuts
from support.more import more
from support.reference.event_index import (
    ReplayedIndex,
    batch_after,
    groups_of,
    resident_blocks,
    resident_others,
    snapshot_of,
)

from raydix.actors.service import event_feed
from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import MambaPool, MambaRadixCache, RadixCache, RadixKey
from raydix.cache_core.radix.group_events import GroupEvents
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.radix.tree_parts import TreeParts
from raydix.cache_core.tree import page_events, page_hashes
from raydix.cache_core.tree.page_events import KVEventPublisher
from raydix.schemas import PackedEvents

NUM_STATES = 6
MAX_LOCKS = 5
MAX_TOKENS = 200  # in the tree
KEPT, MAX_BATCH = 8, 3  # events that are kept for the reader that falls behind, and events of a batch
TREES: dict[str, Callable[[int], PrefixCache]] = {
    "full": lambda page_size: RadixCache(page_size, token_to_kv_pool_allocator=IndexPool()),
    "window": lambda page_size: RadixCache(page_size, sliding_window_size=2 * page_size),
    "mamba": lambda page_size: MambaRadixCache(page_size, mamba_pool=MambaPool(NUM_STATES)),
    "both": lambda page_size: MambaRadixCache(
        page_size, mamba_pool=MambaPool(NUM_STATES), sliding_window_size=2 * page_size
    ),
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "MAX_BATCH_EVENTS", MAX_BATCH)


class TwoFeeds:
    """One sink for two feeds: one that keeps everything, one that keeps little."""

    def __init__(self, tree: PrefixCache) -> None:
        groups = groups_of(tree)
        self.long = EventFeed("e", tree.page_size, "CPU", groups=groups)
        self.short = EventFeed("e", tree.page_size, "CPU", groups=groups)
        self.short._max_events = KEPT

    def stored(self, run: Any) -> None:
        self.long.stored(run)
        self.short.stored(run)

    def removed(self, hashes: Any, group: int | None = None) -> None:
        self.long.removed(hashes, group)
        self.short.removed(hashes, group)

    def cleared(self) -> None:
        self.long.cleared()
        self.short.cleared()


class EventTraffic:
    """One caller that inserts, matches, locks, evicts and resets, and three readers of its events."""

    OPERATIONS = (
        ("insert", 40),
        ("match", 15),
        ("evict", 12),
        ("evict_others", 6),
        ("lock", 8),
        ("unlock", 8),
        ("retire_all", 0.5),
        ("retire", 0.5),
        ("reclaim_retired", 2),
        ("reset", 0.4),
    )

    def __init__(self, kind: str, page_size: int, seed: int) -> None:
        self.rng = Random(f"{kind}/{page_size}/{seed}")
        self.tree: Any = TREES[kind](page_size)
        self.feeds = TwoFeeds(self.tree)
        self.tree.publish_events_to(self.feeds)
        self.keys: list[RadixKey] = []
        self.locks: list[tuple[Any, Any]] = []
        self.first, self.late, self.slow = ReplayedIndex(), ReplayedIndex(), ReplayedIndex()
        self.num_gaps = 0
        self.num_slots = 1

    def step(self) -> None:
        """One operation; then all readers are compared with the tree."""
        names = [name for name, _ in self.OPERATIONS]
        getattr(self, self.rng.choices(names, [weight for _, weight in self.OPERATIONS])[0])()
        there = resident_blocks(self.tree), resident_others(self.tree)
        self._read(self.first)
        self._read(self.late)
        assert (self.first.blocks, self.first.others) == there
        assert (self.late.blocks, self.late.others) == there
        if self.rng.random() < 0.1:
            self.late = ReplayedIndex(snapshot_of(self.feeds.long, self.tree))
            assert (self.late.blocks, self.late.others) == there
        if self.rng.random() < 0.15:
            self._read_slowly()
            assert (self.slow.blocks, self.slow.others) == there

    def _read(self, index: ReplayedIndex) -> None:
        while (batch := batch_after(self.feeds.long, index.seq)).events:
            index.apply(batch)

    def _read_slowly(self) -> None:
        while (batch := batch_after(self.feeds.short, self.slow.seq)).events or batch.gap:
            if batch.gap:
                self.num_gaps += 1
                self.slow = ReplayedIndex(snapshot_of(self.feeds.short, self.tree))
                if self.rng.random() < 0.5:
                    return  # the reader goes on in the middle of a batch
            else:
                self.slow.apply(batch)

    # ---------------------------------------------------------------- operations

    def insert(self) -> None:
        key = self._key()
        excess = self.tree.evictable_size() + self.tree.protected_size() + len(key) - MAX_TOKENS
        if excess > 0:
            self.tree.evict(excess)
        self.keys.append(key)
        whole = len(key) and not len(key) % self.tree.page_size
        if isinstance(self.tree, MambaRadixCache) and whole and self.tree.mamba_pool.available_size():
            state = self.tree.mamba_pool.alloc_track_slot()
            if self.tree.insert(key, mamba_value=state).mamba_exist:
                self.tree.mamba_pool.free_track_slot(state)
            return
        gone = self.rng.choice([0, 0, self.rng.randint(0, len(key))])
        slots = torch.arange(self.num_slots, self.num_slots + len(key))  # fresh, so that they heal tombstones
        self.num_slots += len(key)
        self.tree.insert(key, slots, swa_evicted_seqlen=gone)

    def match(self) -> None:
        self.tree.match_prefix(self._key())

    def evict(self) -> None:
        self.tree.evict(self.rng.randint(1, 8 * self.tree.page_size))

    def evict_others(self) -> None:
        """Window KV, or states."""
        self.tree.evict(0, self.rng.randint(1, 4))

    def lock(self) -> None:
        if len(self.locks) < MAX_LOCKS:
            node = self.tree.match_prefix(self._key()).last_node
            self.locks.append((node, self.tree.inc_lock_ref(node)))

    def unlock(self) -> None:
        if self.locks:
            self.tree.dec_lock_ref(*self.locks.pop(self.rng.randrange(len(self.locks))))

    def retire_all(self) -> None:
        self.tree.retire_all()

    def retire(self) -> None:
        self.tree.retire(lambda namespace: namespace == "a")

    def reclaim_retired(self) -> None:
        self.tree.reclaim_retired()

    def reset(self) -> None:
        self.tree.reset()
        self.locks.clear()

    def _key(self) -> RadixKey:
        """A known key cut short and gone on with, of plain ids or of pairs, in some namespace."""
        namespace = self.rng.choice([None, None, "", "a", "b"])
        if not self.keys or self.rng.random() < 0.2:
            ids: list[Any] = []
        else:
            known = self.rng.choice(self.keys[-20:])
            ids, namespace = known.token_ids[: self.rng.randint(0, len(known))], known.extra_key
        pairs = isinstance(ids[0], tuple) if ids else self.rng.random() < 0.1
        more = [self.rng.choice([1, 1, 2]) for _ in range(self.rng.randint(0, 4 * self.tree.page_size))]
        if more and self.rng.random() < 0.03:
            more[-1] = 2**40
        return RadixKey((ids + [(each, 1) if pairs else each for each in more])[:40], namespace)


def run(kind: str, page_size: int, seed: int, num_operations: int) -> EventTraffic:
    """Random operations, everything compared after each."""
    traffic = EventTraffic(kind, page_size, seed)
    for _ in range(num_operations):
        traffic.step()
    return traffic


@pytest.mark.parametrize("page_size", [*more(1), 4])
@pytest.mark.parametrize("kind", ["full", "window", "mamba", *more("both")])
def test_events_replayed_are_what_is_there(kind: str, page_size: int) -> None:
    traffic = run(kind, page_size, seed=0, num_operations=3000)

    assert traffic.num_gaps > 20, "the slow reader must fall behind"
    traffic.tree.check_invariants()


@pytest.mark.long
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", TREES)
def test_events_replayed_are_what_is_there_for_long(kind: str, page_size: int) -> None:
    for seed in range(1, 11):
        run(kind, page_size, seed, num_operations=5_000)


# ---------------------------------------------------------------- planted faults

FAULTS = Catalogue()
fault = FAULTS.register


@fault
def a_split_tells_of_its_prefix_again(patch: Patch) -> None:
    def split(original: Any, parts: TreeParts, node: Any, end: int) -> Any:
        above = original(parts, node, end)
        if parts.events is not None:
            parts.events.stored(above)
        return above

    around(patch, TreeParts, "split", split)


@fault
def a_split_shares_the_hashes_out_wrongly(patch: Patch) -> None:
    def turn(above: Any, node: Any) -> None:
        above.hash_values = above.hash_values[::-1]

    after_cuts(patch, turn)


@fault
def only_the_leaf_of_an_eviction_is_told(patch: Patch) -> None:
    around(patch, KVEventPublisher, "removed", lambda original, teller, nodes: original(teller, nodes[:1]))


@fault
def parents_are_removed_before_their_children(patch: Patch) -> None:
    around(patch, KVEventPublisher, "removed", lambda original, teller, nodes: original(teller, nodes[::-1]))


@fault
def namespaces_share_an_event(patch: Patch) -> None:
    patch.setattr(page_events, "groupby", lambda nodes, key: [(nodes[0].namespace, nodes)] if nodes else [])


@fault
def the_parent_is_the_first_page_of_the_node_above(patch: Patch) -> None:
    def page_run(original: Any, node: Any, page_size: int) -> Any:
        run = original(node, page_size)
        if run.parent_hash is None:
            return run
        return run._replace(parent_hash=int(page_events.short_hashes(node.parent.hash_values[:1])[0]))

    around(patch, page_events, "page_run", page_run)


@fault
def no_parent_is_told(patch: Patch) -> None:
    around(patch, page_events, "page_run", lambda original, *args: original(*args)._replace(parent_hash=None))


@fault
def the_namespace_is_not_told(patch: Patch) -> None:
    around(patch, page_events, "page_run", lambda original, *args: original(*args)._replace(extra_key=None))


@fault
def the_second_ids_of_pairs_are_told(patch: Patch) -> None:
    def page_run(original: Any, node: Any, page_size: int) -> Any:
        run = original(node, page_size)
        return run._replace(token_ids=node.key.ids[1::2]) if node.namespace.arity else run

    around(patch, page_events, "page_run", page_run)


@fault
def hashes_are_not_seeded_by_the_namespace(patch: Patch) -> None:
    patch.setattr(page_hashes, "namespace_seed", lambda extra_key: None)


@fault
def hashes_are_unsigned_and_the_other_way_round(patch: Patch) -> None:
    around(patch, page_events, "short_hashes", lambda original, digests: original(digests).byteswap())


@fault
def a_reset_is_not_told(patch: Patch) -> None:
    patch.setattr(KVEventPublisher, "cleared", lambda teller: None)


@fault
def what_was_cleared_is_removed_once_more(patch: Patch) -> None:
    def removed(original: Any, teller: KVEventPublisher, nodes: list[Any]) -> None:
        spaces = {node.namespace for node in nodes if not node.namespace.live}
        for namespace in spaces:
            namespace.tree = object()
        original(teller, nodes)
        for namespace in spaces:
            namespace.tree = None

    around(patch, KVEventPublisher, "removed", removed)


@fault
def a_tombstone_is_told_as_removed(patch: Patch) -> None:
    from raydix.cache_core.components.window_kv import WindowKV

    def tombstone(original: Any, swa: WindowKV, node: Any) -> None:
        original(swa, node)
        told_by[0].removed([node])

    told_by: list[KVEventPublisher] = []
    around(patch, KVEventPublisher, "__init__", lambda original, *args: told_by.insert(0, args[0]) or original(*args))
    around(patch, WindowKV, "drop", tombstone)


@fault
def a_removal_takes_no_number(patch: Patch) -> None:
    def removed(original: Any, feed: EventFeed, hashes: Any, group: int | None = None) -> None:
        original(feed, hashes, group)
        feed._seq -= 1

    around(patch, EventFeed, "removed", removed)


@fault
def healed_window_kv_is_not_told(patch: Patch) -> None:
    patch.setattr(GroupEvents, "gained", lambda *_: None)


@fault
def lost_window_kv_is_not_told(patch: Patch) -> None:
    patch.setattr(GroupEvents, "lost", lambda *_: None)


@fault
def retired_window_kv_is_not_told(patch: Patch) -> None:
    patch.setattr(GroupEvents, "retired", GroupEvents.removed)


@fault
def tombstones_are_told_as_window_kv(patch: Patch) -> None:
    def has(original: Any, publisher: GroupEvents, component: Any, node: Any) -> Any:
        return component is publisher._window or original(publisher, component, node)

    around(patch, GroupEvents, "_has", has)


@fault
def an_event_that_repeats_pages_names_another_group(patch: Patch) -> None:
    def without_repeats(original: Any, events: Any) -> Any:
        packed = original(events)
        for place, event in enumerate(packed[1:], 1):
            if not len(event[1]) and event[0] == packed[place - 1][0]:
                packed[place] = (*event[:3], 0)
        return packed

    around(patch, event_feed, "_without_repeats", without_repeats)


@fault
def a_gap_is_not_marked(patch: Patch) -> None:
    def batches_after(original: Any, feed: EventFeed, after_seq: int) -> Any:
        return original(feed, max(after_seq, feed._first_seq))

    around(patch, EventFeed, "batches_after", batches_after)


@fault
def a_gap_is_marked_one_batch_late(patch: Patch) -> None:
    def batches_after(original: Any, feed: EventFeed, after_seq: int) -> Any:
        is_late = feed._first_seq - MAX_BATCH <= after_seq < feed._first_seq
        return original(feed, feed._first_seq if is_late else after_seq)

    around(patch, EventFeed, "batches_after", batches_after)


@fault
def a_reader_gets_events_that_it_has(patch: Patch) -> None:
    around(patch, PackedEvents, "unpack", lambda original, packed, after_seq=None: original(packed))


@fault
def a_snapshot_says_to_go_on_one_event_too_late(patch: Patch) -> None:
    def snapshot(original: Any, feed: EventFeed, runs: Any) -> Any:
        feed._seq += 1
        packed = original(feed, runs)
        feed._seq -= 1
        return packed

    around(patch, EventFeed, "snapshot", snapshot)


@fault
def a_snapshot_shows_retired_pages(patch: Patch) -> None:
    def resident_pages(tree: PrefixCache) -> Any:
        nodes = [node for top in tree.parts.tops() for node in tree.parts.tree.nodes_below(top)]
        return [page_events.page_run(node, tree.page_size) for node in nodes]

    patch.setattr(PrefixCache, "resident_pages", resident_pages)


@fault
def a_snapshot_shows_children_before_parents(patch: Patch) -> None:
    around(patch, PrefixCache, "resident_pages", lambda original, tree: list(original(tree))[::-1])


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_caught(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises((AssertionError, KeyError)):
        for kind in ("window", "full"):
            for page_size in (4, 1):
                run(kind, page_size, seed=0, num_operations=600)
