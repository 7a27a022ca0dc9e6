"""Random leases on one `KVCache` with windows and states: each reads its own of all three, and nothing is lost.

The memory of each slot, of each window half and of each state holds a fingerprint of the prefix it stands for.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from raydix.cache_core import (
    KVCache,
    MambaPool,
    MambaRadixCache,
    OutOfSlotsError,
    RadixKey,
    SlotError,
    SWATokenToKVPoolAllocator,
)
from raydix.cache_core.components.window_kv import WindowKV
from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tree.tree_node import TreeNode

SESSIONS = ("s0", "s1")
NUM_PAGES, NUM_STATES = 48, 12
SIZES = [(1, 2), (4, 3), (4, 10), (16, 20)]  # page and window


@dataclass(eq=False)
class OpenLease:
    """A client's view of its lease."""

    session: str
    record: LeaseRecord
    tokens: list[int]  # acquired ones, then generated ones
    computed: int  # tokens with written KV; the lease's state is the one after the last of them
    told: int  # tokens that the cache has seen
    left_behind: int = 0  # tokens with a released window
    boundary: int = 0  # tokens after which the state was copied to the boundary slot


def fingerprints(tokens: list[int]) -> list[int]:
    """Return a stamp for each prefix; that of the empty prefix is 0, like a state of zeros."""
    prints = [0]
    for token in tokens:
        prints.append((prints[-1] * 1_000_003 + token) % (2**61 - 1))
    return prints


class Leases:
    """A cache, its clients, and the memory they write.

    Where it is crowded, several clients often hold one text at a time, and windows are given up and evicted more.
    """

    def __init__(self, seed: int, page_size: int, window: int, crowded: bool = False) -> None:
        self.rng = random.Random(f"{seed}/{page_size}/{window}")
        self.page_size, self.window, self.crowded = page_size, window, crowded
        num_swa_slots = NUM_PAGES * 3 // 4 * page_size
        self.allocator = SWATokenToKVPoolAllocator(NUM_PAGES * page_size, num_swa_slots, page_size)
        self.states = MambaPool(NUM_STATES, [[(1,)]], dtype=torch.int64)
        self.tree = MambaRadixCache(page_size, self.allocator, self.states, sliding_window_size=window)
        self.cache = KVCache(self.tree, self.allocator, states=self.states)
        self.full = np.zeros((NUM_PAGES + 1) * page_size, np.int64)
        self.swa = np.zeros_like(self.full)
        self.rows = self.states.layers[0][0]
        self.texts: list[list[int]] = []
        self.open: dict[str, OpenLease] = {}
        self.done: Counter[str] = Counter()
        self.next_id = 0

    def step(self) -> None:
        verbs = (self.acquire, self.generate, self.publish, self.release_window, self.release, self.evict, self.reset)
        weights = (10, 6, 12, 9, 7, 3, 0.2) if self.crowded else (10, 6, 12, 5, 9, 3, 0.2)
        verb = self.rng.choices(verbs, weights)[0]
        verb()
        self.check()

    # ---------------------------------------------------------------- verbs

    def acquire(self) -> None:
        tokens, lease_id, session = self.text(), f"l{self.next_id}", self.rng.choice(SESSIONS)
        self.next_id += 1
        found, before = self.tree.peek_prefix(RadixKey(tokens)).prefix_len, self.sizes()
        try:
            num_new, wants_boundary = self.rng.randrange(2 * self.page_size), self.rng.random() < 0.5
            record = self.cache.acquire(lease_id, session, RadixKey(tokens), num_new, boundary_state=wants_boundary)
        except OutOfSlotsError:
            assert self.sizes() == before, "a refusal changed something"
            self.done["refused"] += 1
            return
        assert record.prefix_len == found
        lease = OpenLease(session, record, tokens, record.prefix_len, len(tokens))
        self.check_memory(lease, found)
        assert not found or (self.halves(lease)[max(0, found - self.window) : found] > 0).all(), "a hole in the window"
        self.compute(lease, len(tokens))
        self.open[lease_id] = lease
        self.done["with boundary"] += record.boundary_slot is not None
        self.done["hit" if found else "miss"] += 1

    def generate(self) -> None:
        """Compute new tokens, as many as the lease has slots for, or a page more."""
        lease_id, lease = self.some_lease()
        if lease is None:
            return
        if self.rng.random() < 0.5:
            try:
                self.cache.extend(lease_id, lease.session, self.rng.randint(1, self.page_size))
            except OutOfSlotsError:
                return
        size = self.rng.randint(len(lease.tokens), lease.record.num_slots)
        lease.tokens += [self.rng.randint(1, 3) for _ in range(size - len(lease.tokens))]
        self.compute(lease, size)

    def publish(self) -> None:
        """Publish what is computed, its state as well if it ends a page."""
        lease_id, lease = self.some_lease()
        if lease is None:
            return
        size, page = lease.computed, self.page_size
        with_state = size > 0 and size % page == 0 and self.rng.random() < 0.6
        suffix = RadixKey(lease.tokens[min(lease.told, size) : size])
        before, boundary = self.sizes(), None
        if lease.record.boundary_slot is not None and lease.boundary and self.rng.random() < 0.8:
            boundary = lease.boundary
        try:
            result = self.cache.insert(lease_id, lease.session, size, suffix, with_state, boundary)
        except OutOfSlotsError:
            assert self.sizes() == before, "a refusal changed something"
            return
        lease.told = max(lease.told, size)
        self.done["published"] += 1
        if with_state and not result.retired and lease.left_behind <= max(0, size - self.window):
            assert self.tree.peek_prefix(RadixKey(lease.tokens[:size])).prefix_len == size, "it is not found"
            self.done["published with state"] += 1
        if boundary is not None and not with_state and not result.retired:
            assert lease.record.boundary_slot is None
            if lease.left_behind <= max(0, boundary - self.window):
                assert self.tree.peek_prefix(RadixKey(lease.tokens[:size])).prefix_len == boundary, "it is not found"
                self.done["boundary published"] += 1

    def release_window(self) -> None:
        lease_id, lease = self.some_lease()
        if lease is None:
            return
        page, published = self.page_size, lease.record.num_published_pages * self.page_size
        up_to = self.rng.choice([max(0, lease.computed - self.window), self.rng.randint(0, lease.computed)])
        before = self.halves(lease)
        self.cache.release_window(lease_id, lease.session, up_to)
        lease.left_behind = max(lease.left_behind, up_to)
        computed = up_to + self.window - 1
        after, kept_from = self.halves(lease), max(0, computed - computed % page - self.tree.kept_tail)
        assert (after[kept_from:] == before[kept_from:]).all(), "more was given up than was said"
        given_up = after[:kept_from] if kept_from >= published else after[:0]
        assert (given_up == 0).all(), "less was given up than was said"
        self.done["window released"] += bool((after != before).any())

    def release(self) -> None:
        lease_id, lease = self.some_lease()
        if lease is None:
            return
        if self.rng.random() < 0.9:
            del self.open[lease_id]
            assert self.cache.release(lease_id, lease.session)
        else:
            assert self.cache.end_session(lease.session) == sum(x.session == lease.session for x in self.open.values())
            self.open = {key: other for key, other in self.open.items() if other.session != lease.session}

    def evict(self) -> None:
        num = self.rng.randint(1, 3 * self.page_size)
        verb = self.rng.choice([self.cache.evict, self.cache.evict_window, self.cache.evict_states])
        evictable = {
            "evict": self.tree.evictable_size(),
            "evict_window": self.tree.swa_evictable_size(),
            "evict_states": self.tree.mamba_evictable_size(),
        }[verb.__name__]
        if self.crowded and verb == self.cache.evict_window and self.rng.random() < 0.5:
            num = evictable  # so that whatever is held comes up, and is laid aside
        assert verb(num) >= min(num, evictable)

    def reset(self) -> None:
        self.cache.reset()
        assert (self.tree.evictable_size(), self.tree.swa_evictable_size()) == (0, 0) or self.open

    # ---------------------------------------------------------------- what must hold at all times

    def check(self) -> None:
        self.cache.check_invariants()
        for lease in self.open.values():
            self.check_memory(lease, lease.computed)

    def check_memory(self, lease: OpenLease, size: int) -> None:
        """Check that the full KV, live halves and state of a lease are those of its first tokens."""
        assert lease.record.state_slot is not None
        *_, last = prints = fingerprints(lease.tokens[:size])
        assert (self.full[self.slots(lease)[:size]] == prints[1:]).all(), "foreign KV"
        halves = self.halves(lease)[:size]
        assert ((halves == 0) | (self.swa[halves] == prints[1:])).all(), "foreign window KV"
        assert self.rows[lease.record.state_slot].item() == last, "a foreign state"
        if lease.record.boundary_slot is not None and lease.boundary:
            assert self.rows[lease.record.boundary_slot].item() == prints[lease.boundary], "a foreign boundary state"

    def sizes(self) -> tuple[int, ...]:
        """Everything that a refusal must leave as it is."""
        tree, cache = self.tree, self.cache
        kept = tree.total_size(), tree.swa_evictable_size(), tree.mamba_evictable_size(), tree.num_locks()
        free = cache.free_slots, self.allocator.swa_available_size(), self.states.available_size()
        return *kept, *free, cache.private_slots

    def drain(self) -> None:
        """After the last lease all can be evicted."""
        for session in SESSIONS:
            self.cache.end_session(session)
        self.open.clear()
        self.cache.evict(10**6)
        assert self.cache.free_slots == NUM_PAGES * self.page_size
        assert self.allocator.swa_available_size() == self.allocator.num_swa_slots
        assert self.states.available_size() == NUM_STATES
        self.check()

    # ---------------------------------------------------------------- memory and choices

    def compute(self, lease: OpenLease, size: int) -> None:
        """Write the KV of the tokens up to `size`, where the lease may write, and the state after them."""
        first = lease.record.num_published_pages * self.page_size
        slots, halves = self.slots(lease)[first:size], self.halves(lease)[first:size]
        prints = np.array(fingerprints(lease.tokens[:size]))
        self.full[slots] = prints[first + 1 :]
        self.swa[halves[halves > 0]] = prints[first + 1 :][halves > 0]
        self.rows[lease.record.state_slot] = int(prints[-1])
        boundary = size - size % self.page_size
        if lease.record.boundary_slot is not None and boundary > lease.computed - lease.computed % self.page_size:
            self.rows[lease.record.boundary_slot], lease.boundary = int(prints[boundary]), boundary
        lease.computed = size

    def slots(self, lease: OpenLease) -> np.ndarray[Any, Any]:
        return self.expand(lease.record.starts)

    def halves(self, lease: OpenLease) -> np.ndarray[Any, Any]:
        starts = self.cache.swa_starts(lease.record)
        return self.expand(starts) * np.repeat(starts > 0, self.page_size)

    def expand(self, starts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        rows: np.ndarray[Any, Any] = (starts[:, None] + np.arange(self.page_size)).reshape(-1)
        return rows

    def some_lease(self) -> tuple[str, OpenLease] | tuple[str, None]:
        return self.rng.choice(list(self.open.items())) if self.open else ("", None)

    def text(self) -> list[int]:
        """As another text for a while, whole pages as often as not."""
        page = self.page_size
        if self.crowded and self.open and self.rng.random() < 0.4:  # as a running request
            return self.rng.choice(list(self.open.values())).tokens[: 8 * page]
        base = self.rng.choice(self.texts) if self.texts and self.rng.random() < 0.85 else []
        head = base[: self.rng.choice([len(base), self.rng.randint(0, len(base))])]
        size = min(8 * page, len(head) + self.rng.randint(1, 3 * page))
        size += -size % page if self.rng.random() < 0.7 else 0
        text = (head + [self.rng.randint(1, 3) for _ in range(size)])[:size]
        self.texts = [*self.texts[-7:], text]
        return text


def run(seed: int, page_size: int, window: int, num_steps: int, crowded: bool = False) -> Counter[str]:
    leases = Leases(seed, page_size, window, crowded)
    for _ in range(num_steps):
        leases.step()
    leases.drain()
    return leases.done


@pytest.mark.parametrize(("page_size", "window"), SIZES)
def test_leases_read_their_own_kv_windows_and_states_and_lose_nothing(page_size: int, window: int) -> None:
    done = run(0, page_size, window, 1500)

    verbs = {"hit", "miss", "refused", "published", "published with state", "window released"}
    verbs |= {"with boundary", "boundary published"}
    assert {verb for verb, count in done.items() if count > 10} == verbs, f"{done}"


def test_tombstones_heal_under_windows_and_nodes_laid_aside_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, revive, on_split = Counter[str](), WindowKV.revive, WindowKV.on_split

    def counted_revive(component: WindowKV, node: TreeNode) -> None:
        reached["healed under a window"] += node.swa_lock_ref > 0
        revive(component, node)

    def counted_split(component: WindowKV, above: TreeNode, node: TreeNode) -> None:
        reached["split while laid aside"] += node in component._waiting
        on_split(component, above, node)

    monkeypatch.setattr(WindowKV, "revive", counted_revive)
    monkeypatch.setattr(WindowKV, "on_split", counted_split)

    for page_size, window in ((1, 5), (1, 7), (4, 14)):
        run(0, page_size, window, 3000, crowded=True)

    assert min(reached["healed under a window"], reached["split while laid aside"]) > 2, f"{reached}"


@pytest.mark.long
@pytest.mark.parametrize(("page_size", "window"), SIZES)
def test_a_long_run_of_the_same_leases(page_size: int, window: int) -> None:
    run(1, page_size, window, 25_000)
    run(1, page_size, window, 25_000, crowded=True)


# ---------------------------------------------------------------- planted faults

Patch = pytest.MonkeyPatch


def states_are_not_copied_for_leases(patch: Patch) -> None:
    patch.setattr(LeaseAllocator, "load_state", lambda room, node, slot: None)


def states_are_published_empty(patch: Patch) -> None:
    store = LeaseAllocator.store_state

    def store_state(room: LeaseAllocator, source: int | None, slot: int, node: Any) -> None:
        store(room, source, slot, node)
        room.states.clear_state(slot)  # type: ignore[union-attr]

    patch.setattr(LeaseAllocator, "store_state", store_state)


def boundary_states_are_published_unfilled(patch: Patch) -> None:
    publish = LeaseAllocator.publish_state

    def publish_state(room: LeaseAllocator, slot: int, node: Any) -> None:
        publish(room, slot, node)
        if room.tree_has(slot):  # type: ignore[attr-defined]
            room.states.clear_state(slot)  # type: ignore[union-attr]

    patch.setattr(LeaseAllocator, "tree_has", lambda room, slot: slot in room._tree.state_slots(), raising=False)
    patch.setattr(LeaseAllocator, "publish_state", publish_state)


def boundary_states_are_published_at_another_length(patch: Patch) -> None:
    publish = LeaseAllocator.publish_state

    def publish_state(room: LeaseAllocator, slot: int, node: Any) -> None:
        other = node.parent if node.parent.data and node.parent.mamba_value is None else node
        publish(room, slot, other)

    patch.setattr(LeaseAllocator, "publish_state", publish_state)


def windows_given_up_are_not_freed(patch: Patch) -> None:
    patch.setattr(LeaseAllocator, "free_window", lambda room, starts: None)


def windows_given_up_are_published_as_live(patch: Patch) -> None:
    insert = MambaRadixCache.insert_pages

    def insert_pages(tree: MambaRadixCache, key: Any, starts: Any, node: Any, lost: int = 0, *args: Any) -> Any:
        return insert(tree, key, starts, node, 0, *args)

    patch.setattr(MambaRadixCache, "insert_pages", insert_pages)


def the_window_of_a_match_is_never_given_up(patch: Patch) -> None:
    patch.setattr(MambaRadixCache, "release_window", lambda tree, node, receipt: None)


def a_publish_gives_the_window_up(patch: Patch) -> None:
    publish = KVCache._publish

    def published(cache: KVCache, lease: LeaseRecord, *args: Any) -> Any:
        done = publish(cache, lease, *args)
        cache.tree.release_window(lease.node, lease.receipt)
        return done

    patch.setattr(KVCache, "_publish", published)


def a_refusal_evicts_a_state(patch: Patch) -> None:
    check = LeaseAllocator.check_pages

    def check_pages(room: LeaseAllocator, num_pages: int, *more: Any) -> None:
        if room.states is not None and not room.states.available_size():
            room.evict(0, 0, 1)
        check(room, num_pages, *more)

    patch.setattr(LeaseAllocator, "check_pages", check_pages)


@pytest.mark.parametrize(
    "plant",
    [
        states_are_not_copied_for_leases,
        states_are_published_empty,
        boundary_states_are_published_unfilled,
        boundary_states_are_published_at_another_length,
        windows_given_up_are_not_freed,
        windows_given_up_are_published_as_live,
        the_window_of_a_match_is_never_given_up,
        a_publish_gives_the_window_up,
        a_refusal_evicts_a_state,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)

    with pytest.raises((AssertionError, SlotError)):
        for page_size, window in SIZES:
            run(0, page_size, window, 1500)
