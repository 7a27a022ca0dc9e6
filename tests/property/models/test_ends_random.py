"""Random traffic on caches with a window, with states, and with both: the ends that their slim events name.

A router's index follows each feed, from its first event and from snapshots. After each operation it has the ends that
the cache has published, and promises no prompt more than a match gives it. While no lease is open, the ends are those
of a model, computed from the whole tree; and of a prompt that continues a published prompt or answer the promise is
what a match gives it.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.faults.faults import Catalogue, Fault, Patch, around

from raydix.actors.service.cache_service import CacheService
from raydix.actors.service.event_feed import EventFeed
from raydix.cache_core import Applied, KVCache, OutOfSlotsError, PageIndex, RadixKey, page_hashes
from raydix.cache_core.kernels import END
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.radix.usable_ends import UsableEnds
from raydix.cache_core.tree.page_events import KVEventPublisher
from raydix.schemas import CacheConfig, PoolConfig, SlimEventBatch, SlimEventSnapshot

NUM_ROUNDS = 20
NUM_ROUNDS_LONG = 300
FRESH = 1_000  # a token of no key


class Shape(NamedTuple):
    """A cache to be tested."""

    page: int
    stride: int  # pages
    window: int | None
    has_states: bool

    def config(self) -> CacheConfig:
        return CacheConfig(
            kind="mamba" if self.has_states else "radix",
            page_size=self.page,
            sliding_window_size=self.window,
            events="slim",
            events_stride_tokens=self.page * self.stride,
            pool=PoolConfig(
                num_slots=80 * self.page,
                num_swa_slots=None if self.window is None else 60 * self.page,
                num_state_slots=24 if self.has_states else 0,
            ),
        )


SHAPES = [
    Shape(1, 3, 4, False),
    Shape(2, 1, 4, False),
    Shape(2, 4, 5, False),
    Shape(4, 2, 8, False),
    Shape(2, 3, 1, False),
    Shape(2, 3, None, True),
    Shape(1, 4, None, True),
    Shape(2, 2, 6, True),
    Shape(1, 3, 2, True),
]


class Open(NamedTuple):
    """An open lease of the model."""

    lease_id: str
    prompt: list[int]
    named: list[bool]  # one item: whether the end of its prompt is published


class Traffic:
    """One cache under random requests, the model of its stops, and a router's index."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = Random(f"{shape}/{seed}")
        self.service = CacheService(shape.config(), "e")
        assert isinstance(self.service.core, KVCache)
        self.core, self.feed = self.service.core, self.service.feeds.feed("device")
        assert isinstance(self.core.tree, PrefixCache)
        self.tree = self.core.tree
        self.index = PageIndex()
        self.column = self.index.add_column(has_ends=True)
        self.late_index = PageIndex()  # from a snapshot
        self.late_column = self.late_index.add_column()
        self.leases: dict[str, Open] = {}
        self.num_leases = 0
        # namespace and tokens of whole pages -> the tokens of them that were in the tree at the last look
        self.published: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self.stops: set[int] = set()
        self.held: set[int] = set()  # last pages of running leases whose prompt is not whole, or that decode
        self.num_equal = 0  # prompts with a promise that was compared, and is not 0

    # ---------------------------------------------------------------- operations

    def round(self) -> None:
        """Some operations with leases, and some without."""
        for _ in range(self.random.randrange(1, 6)):
            self.operate([self.acquire, self.insert, self.end, self.evict, self.look], [6, 9, 2, 2, 2])
        while self.leases:
            self.operate([self.insert, self.end, self.vanish], [3, 4, 0.1])
        for _ in range(self.random.randrange(3)):
            self.operate([self.evict, self.look, self.retire, self.reset], [8, 3, 0.4, 0.3])

    def operate(self, operations: list[Any], weights: list[float]) -> None:
        self.random.choices(operations, weights)[0]()
        self.check()

    def key(self) -> RadixKey:
        if self.published and self.random.random() < 0.6:
            extra_key, ids = self.random.choice(sorted(self.published, key=str))
            length = self.random.choice([len(ids), self.random.randrange(len(ids) + 1)])
            tokens = [*ids[:length], *self.ids(4)]
            return RadixKey(tokens[: 30 * self.shape.page], extra_key)
        return RadixKey(
            [0] * self.random.randrange(3 * self.shape.page) + self.ids(12), self.random.choice([None, "a"])
        )

    def ids(self, num_pages: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(1 + self.random.randrange(num_pages * self.shape.page))]

    def acquire(self) -> None:
        key, self.num_leases = self.key(), self.num_leases + 1
        lease_id = f"lease-{self.num_leases}"
        limit = self.random.choice([None, None, max(0, len(key) - 1)])
        try:
            if self.random.random() < 0.1:
                self.core.lock(lease_id, "s", key)
            else:
                self.core.acquire(
                    lease_id, "s", key, self.random.randrange(8 * self.shape.page), limit, boundary_state=True
                )
        except OutOfSlotsError:
            return
        self.leases[lease_id] = Open(lease_id, key.ids.tolist(), [False])

    def insert(self) -> None:
        """Publish a part of a prompt, all of it, or a longer part of the answer; with a state or without."""
        if not self.leases:
            return
        model = self.leases[self.random.choice(sorted(self.leases))]
        lease, page = self.core.leases.get(model.lease_id, "s"), self.shape.page
        known = len(lease.key)
        stop = min(
            lease.num_slots, self.random.choice([known, known, self.random.randrange(known + 1), lease.num_slots])
        )
        state = self.random.choice(["none", "own", "own", "boundary"]) if self.shape.has_states else "none"
        if state != "none":
            stop -= stop % page
        if stop <= known:
            suffix = lease.key[:stop]
        else:
            suffix = RadixKey(self.ids(stop), lease.key.extra_key)[: stop - known]
            stop = known + len(suffix)
            if state != "none" and stop % page:
                state = "none"
        before = lease.num_published_pages
        if stop // page < before or stop < page or lease.retired:
            return
        key, since = lease.key[: stop - len(suffix)] + suffix, lease.named_len
        there, aligned = self.core.match(key).full_prefix_len, stop - stop % page
        boundary = stop if state == "boundary" and lease.boundary_slot is not None else None
        try:
            self.core.insert(model.lease_id, "s", stop, suffix, state == "own", boundary)
        except OutOfSlotsError:
            return
        has_prompt = stop // page >= len(model.prompt) // page and not model.named[0]
        pages = page_hashes(key, page).tolist()
        if there < aligned:
            if there and pages[there // page - 1] not in self.held:
                self.stops.add(pages[there // page - 1])
            if not has_prompt:
                self.held.add(pages[aligned // page - 1])
        if has_prompt:
            model.named[0] = True
            self.note_stop(lease, since)
        if self.shape.window is not None and self.random.random() < 0.3:
            self.core.release_window(model.lease_id, "s", self.random.randrange(stop + 1))

    def note_stop(self, lease: Any, since: int) -> None:
        """Note that a prompt or an answer ends where the lease's published pages do, in `since` tokens and more."""
        tokens = lease.key.ids.tolist()[: lease.num_published_pages * self.shape.page]
        if tokens and not lease.retired:
            self.published[lease.key.extra_key, tuple(tokens)] = len(tokens)
            pages = page_hashes(tokens, self.shape.page, namespace=lease.key.extra_key).tolist()
            self.held.difference_update(pages[since // self.shape.page :])
            self.stops.add(pages[-1])

    def end(self) -> None:
        if self.leases:
            lease_id = self.random.choice(sorted(self.leases))
            self.note_ended(lease_id)
            self.core.release(lease_id, "s")

    def note_ended(self, lease_id: str) -> None:
        lease = self.core.leases.get(lease_id, "s")
        if lease.num_published_pages * self.shape.page > lease.prefix_len:
            self.note_stop(lease, lease.named_len)
        del self.leases[lease_id]

    def vanish(self) -> None:
        for lease_id in list(self.leases):
            self.note_ended(lease_id)
        self.core.quarantine_session("s")
        self.core.free_withheld("s")

    def evict(self) -> None:
        size = self.random.randrange(1, 12) * self.shape.page
        kinds: list[Any] = [lambda: self.core.evict(size)]
        if self.shape.window is not None:
            kinds += [lambda: self.core.evict_window(size)] * 2
        if self.shape.has_states:
            kinds += [lambda: self.core.evict_states(self.random.randrange(1, 3))] * 2
        self.random.choice(kinds)()

    def look(self) -> None:
        """Split a node where a match ends."""
        self.tree.match_prefix(self.key())

    def retire(self) -> None:
        self.core.retire(lambda extra_key: extra_key == "a")

    def reset(self) -> None:
        self.core.reset()

    # ---------------------------------------------------------------- checks

    def check(self) -> None:
        self.follow()
        ends = self.core.usable_ends()
        assert ends is not None
        snapshot = self.snapshot()
        for index, column in ((self.index, self.column), (self.late_index, self.late_column)):
            stored = set(snapshot.stored_hashes.tolist())
            assert index.pages(column)[0] == stored | {page ^ END for page in ends.tolist()}
            assert index.num_pages(column) == len(stored | index.pages(column)[1])
        named = self.model_ends()
        if not self.leases:
            assert set(ends.tolist()) == named
        for (extra_key, ids), length in list(self.published.items()):
            # Once evicted, a prompt that comes again as a part of another one is not a published prompt.
            there = self.core.match(RadixKey([*ids, FRESH], extra_key)).full_prefix_len
            if there > length:
                del self.published[extra_key, ids]
            else:
                self.published[extra_key, ids] = there
                self.compare([*ids, FRESH], extra_key, is_exact=not self.leases)
        key = self.key()
        self.compare(key.ids.tolist(), key.extra_key, is_exact=False)

    def compare(self, tokens: list[int], extra_key: str | None, is_exact: bool) -> None:
        shape = self.shape
        pages = page_hashes(tokens, shape.page, namespace=extra_key)
        runs = self.index.prefix_runs(pages[shape.stride - 1 :: shape.stride].copy(), pages, shape.stride)
        promised = runs[0][1] * shape.page if runs else 0
        found = self.core.match(RadixKey(tokens, extra_key)).prefix_len
        assert promised <= found
        if is_exact:
            assert promised == found
            self.num_equal += found > 0

    def follow(self) -> None:
        """Bring both indexes up to the present; one of them by a snapshot at times."""
        while batches := self.feed.batches_after(self.index.position(self.column)[1]).unpack():
            for batch in batches:
                assert isinstance(batch, SlimEventBatch)
                self.apply(self.index, self.column, batch)
        if self.random.random() < 0.1 or self.late_index.position(self.late_column)[0] is None:
            self.late_index.check_invariants()
            snapshot = self.snapshot()
            assert self.late_index.apply_snapshot(
                self.late_column,
                "e",
                snapshot.seq,
                snapshot.stored_hashes,
                snapshot.pending_hashes,
                snapshot.end_hashes,
            )
        for batch in self.feed.batches_after(self.late_index.position(self.late_column)[1]).unpack():
            assert isinstance(batch, SlimEventBatch)
            self.apply(self.late_index, self.late_column, batch)

    def apply(self, index: PageIndex, column: int, batch: SlimEventBatch) -> None:
        done = index.apply(column, batch.epoch, batch.seq, batch.kinds, batch.page_counts, batch.page_hashes)
        assert done is Applied.DONE and not batch.gap

    def snapshot(self) -> SlimEventSnapshot:
        core = self.core
        snapshot = self.feed.snapshot(core.resident_pages(), core.pending_pages(), core.usable_ends())
        assert isinstance(snapshot, SlimEventSnapshot)
        return snapshot

    # ---------------------------------------------------------------- the model

    def model_ends(self) -> set[int]:
        """Return the ends from their definition, node by node; and remember where prompts have parted."""
        shape, found, last_pages = self.shape, set[int](), set[int]()
        for top in self.tree.parts.tree.tops.values():
            tokens: dict[Any, list[int]] = {top: []}
            live: dict[Any, int] = {top: 0}  # the token at which the live run begins that goes on behind the node
            for node in self.tree.parts.tree.nodes_below(top):
                above = node.parent
                tokens[node] = [*tokens[above], *node.key.ids.tolist()]  # type: ignore[index, union-attr]
                live[node] = node.end if node.swa_tombstone and shape.window else live[above]
                pages = page_hashes(tokens[node], shape.page, namespace=top.namespace.extra_key).tolist()
                last_pages.add(pages[-1])
                if len(node.children) > 1:
                    self.stops.add(pages[-1])
                for end in range(above.end + shape.page, node.end + 1, shape.page):  # type: ignore[union-attr]
                    page = pages[end // shape.page - 1]
                    if self.is_usable(node, end, live[node]) and self.is_named(node, end, page):
                        found.add(page)
        self.stops &= last_pages
        self.held &= last_pages
        return found

    def is_usable(self, node: Any, end: int, start: int) -> bool:
        if self.shape.has_states and (end != node.end or node.mamba_value is None):
            return False
        return self.shape.window is None or (end > start and (start == 0 or end - start >= self.shape.window))

    def is_named(self, node: Any, end: int, page: int) -> bool:
        if self.shape.has_states or end % (self.shape.page * self.shape.stride) == 0:
            return True
        if end < node.end:
            return False
        children = node.children.values()
        return not len(children) or any(child.swa_tombstone for child in children) or page in self.stops


def run(shape: Shape, seed: int, num_rounds: int) -> Traffic:
    traffic = Traffic(shape, seed)
    for _ in range(num_rounds):
        traffic.round()
    traffic.core.check_invariants()
    traffic.index.check_invariants()
    return traffic


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_index_has_the_ends_of_the_tree(shape: Shape) -> None:
    assert run(shape, 0, NUM_ROUNDS).num_equal > 5


@pytest.mark.more
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_index_has_the_ends_of_the_tree_for_long(shape: Shape) -> None:
    run(shape, 1, NUM_ROUNDS_LONG)


# ---------------------------------------------------------------- planted faults

FAULTS = Catalogue()
fault = FAULTS.register


@fault
def lost_data_keeps_its_ends(patch: Patch) -> None:
    patch.setattr(UsableEnds, "lost", lambda *_: None)


@fault
def healed_windows_and_new_states_get_no_ends(patch: Patch) -> None:
    patch.setattr(UsableEnds, "gained", lambda *_: None)


@fault
def removed_nodes_keep_their_ends(patch: Patch) -> None:
    patch.setattr(UsableEnds, "removed", KVEventPublisher.removed)


@fault
def a_node_that_loses_its_last_child_is_forgotten(patch: Patch) -> None:
    def removed(original: Any, teller: UsableEnds, nodes: Any) -> None:
        changed = dict(teller._changed)
        original(teller, nodes)
        teller._changed = changed

    around(patch, UsableEnds, "removed", removed)


@fault
def nodes_below_a_tombstone_keep_their_ends(patch: Patch) -> None:
    patch.setattr(UsableEnds, "_affected_by", lambda teller, node: [node.parent, node])


@fault
def a_window_needs_a_page_less(patch: Patch) -> None:
    def live_up_to(original: Any, teller: UsableEnds, node: Any, runs: Any) -> int:
        return int(original(teller, node, runs)) + teller.page_size

    around(patch, UsableEnds, "_live_up_to", live_up_to)


@fault
def prompts_have_no_end(patch: Patch) -> None:
    patch.setattr(UsableEnds, "note_end", lambda *_: None)


@fault
def answers_have_no_end(patch: Patch) -> None:
    patch.setattr(KVCache, "_name_end", lambda *_: None)


@fault
def only_live_runs_end(patch: Patch) -> None:
    def flush(original: Any, teller: UsableEnds) -> None:
        teller._stops.clear()
        original(teller)

    around(patch, UsableEnds, "flush", flush)


@fault
def a_run_that_goes_on_keeps_its_last_end(patch: Patch) -> None:
    def stored(original: Any, teller: UsableEnds, leaf: Any) -> None:
        changed = dict(teller._changed)
        original(teller, leaf)
        teller._changed = changed

    around(patch, UsableEnds, "stored", stored)


@fault
def retired_pages_keep_their_ends(patch: Patch) -> None:
    patch.setattr(UsableEnds, "retired", KVEventPublisher.removed)


@fault
def a_reset_keeps_the_ends(patch: Patch) -> None:
    patch.setattr(UsableEnds, "cleared", KVEventPublisher.cleared)


@fault
def strides_are_stored_without_their_ends(patch: Patch) -> None:
    patch.setattr(EventFeed, "stored_as_ends", EventFeed.stored)


@fault
def a_snapshot_has_no_ends(patch: Patch) -> None:
    def snapshot(original: Any, feed: EventFeed, runs: Any, pending: Any, ends: Any) -> Any:
        return original(feed, runs, pending, ends[:0])

    around(patch, EventFeed, "snapshot", snapshot)


@fault
def an_end_outlives_its_page_in_the_index(patch: Patch) -> None:
    def apply(original: Any, index: PageIndex, column: int, *batch: Any) -> Any:
        before = index.pages(column)[0]
        applied = original(index, column, *batch)
        gone = {page for page in before - index.pages(column)[0] if page ^ END in before}
        index._table.add_ends(index._columns[column].holder, np.array(sorted(gone), np.int64))
        return applied

    around(patch, PageIndex, "apply", apply)


@fault
def no_end_is_looked_for_behind_the_last_stride(patch: Patch) -> None:
    def prefix_runs(original: Any, index: PageIndex, hashes: Any, pages: Any, stride: int) -> Any:
        return original(index, hashes, pages[: len(hashes) * stride], stride)

    around(patch, PageIndex, "prefix_runs", prefix_runs)


@pytest.mark.more
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises(AssertionError):
        for seed in range(10):
            for shape in SHAPES:
                run(shape, seed, 8)
