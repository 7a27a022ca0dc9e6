"""`LeaseAllocator`: taking slots and states for leases, evicting what is missing, and giving them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from raydix.cache_core.base_prefix_cache import BasePrefixCache, EvictResult, Starts
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.leases.cache_facts import PoolSizes
from raydix.cache_core.leases.counters import Counters
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_checks import PoolChecks


class LeaseAllocator:
    """The pools as leases draw on them. Per pool, `free + private + tree` is all there is."""

    def __init__(
        self,
        tree: BasePrefixCache,
        allocator: TokenToKVPoolAllocator,
        states: MambaPool | None,
        counters: Counters,
        is_pressed: Callable[[], bool],
        on_pressure: Callable[[], None] | None,
    ) -> None:
        self.private_pages = 0
        self.private_states = 0
        self._counters = counters
        self.states = states
        self.history = EvictionHistory()
        self._tree = tree
        self._allocator = allocator
        self._swa = allocator.swa  # of the window slots
        self._page_size = allocator.page_size
        self.checks: PoolChecks | None = None  # of what the slots hold
        self._is_pressed = is_pressed
        self._on_pressure = on_pressure

    def swa_sizes(self) -> PoolSizes | None:
        """The window slots, if there are any."""
        if self._swa is None:
            return None
        evictable, protected = self._tree.swa_evictable_size(), self._tree.swa_protected_size()
        return PoolSizes(self._swa.num_slots, self._swa.available_size(), evictable, protected)

    def state_sizes(self) -> PoolSizes | None:
        """The recurrent states, if there are any."""
        if self.states is None:
            return None
        evictable, protected = self._tree.mamba_evictable_size(), self._tree.mamba_protected_size()
        return PoolSizes(self.states.num_slots, self.states.available_size(), evictable, protected)

    def check_capacity(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if so many pages can never be had."""
        if num_pages * self._page_size > self._allocator.num_slots:
            self._refuse(num_pages)

    def exceeds_window(self, num_pages: int) -> bool:
        """Whether so many pages are more than there are window slots for."""
        return self._swa is not None and num_pages * self._page_size > self._swa.num_slots

    def check_window_capacity(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if so many pages with window slots can never be had."""
        if self.exceeds_window(num_pages):
            self._refuse(num_pages, window=True)

    def check_pages(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if so many private pages cannot be had now, not even by evicting. Nothing changes."""
        needed = max(0, num_pages) * self._page_size
        if self._swa is not None and needed > self._swa.available_size() + self._tree.swa_evictable_size():
            self._refuse(num_pages, window=True)
        free = self._allocator.available_size()
        if needed > free and needed > free + self._evictable_size():  # which, with tenants, is a sum over all of them
            self._refuse(num_pages)

    def held_by_prefix(self, pool: str, prefix_len: int) -> int:
        """Window slots that whoever hits a prefix holds with it, at least: so many are not left for the rest."""
        if pool != "window slots":
            return 0
        window = min(prefix_len, self._tree.sliding_window_size or 0)
        return -(-window // self._page_size) * self._page_size

    def take_pages(self, num_pages: int) -> Starts:
        """Allocate private pages, after evicting what is missing.

        Raises:
            OutOfSlotsError: there is no room; nothing changed.
        """
        if num_pages <= 0:
            return np.empty(0, np.int64)
        self.check_pages(num_pages)
        needed = num_pages * self._page_size
        shortfall = needed - self._allocator.available_size()
        swa_shortfall = 0 if self._swa is None else needed - self._swa.available_size()
        if shortfall > 0 or swa_shortfall > 0:
            self.evict(max(0, shortfall), max(0, swa_shortfall))
        starts = self._allocator.alloc_pages(num_pages)
        self.private_pages += num_pages
        self.notify_pressure()
        return starts

    def take_state(self) -> int | None:
        """A state slot of one's own, after evicting one if need be; None if the cache keeps no states.

        Raises:
            OutOfSlotsError: none is free and none can be evicted; nothing changed.
        """
        if self.states is None:
            return None
        if not self.states.available_size():
            if not self._tree.mamba_evictable_size():
                raise OutOfSlotsError(1, 0, 0, self.states.num_slots, "states")
            self.evict(0, num_states=1)
        slot = self.states.alloc_track_slot()
        self.private_states += 1
        self.notify_pressure()
        return slot

    def verify(self, starts: Starts, node: Any) -> None:
        """Raise ContentError if somebody wrote to these pages of the tree, or to the state at a node; if checked."""
        if self.checks is not None:
            self.checks.verify(starts)
            if (state_slot := self._tree.state_at(node)) is not None:
                self.checks.states.verify(np.array([state_slot]))

    def load_state(self, node: Any, state_slot: int) -> None:
        """Fill a lease's own state slot with the state at a node, or zeros."""
        assert self.states is not None
        source = self._tree.state_at(node)
        if source is None:
            self.states.clear_state(state_slot)
        else:
            self.states.copy_states(source, state_slot)

    def store_state(self, source: int | None, state_slot: int, node: Any) -> None:
        """Publish a copy of the state in `source` at a node, in a slot taken for it; freed if the node has one."""
        assert self.states is not None and source is not None
        self.states.copy_states(source, state_slot)
        self.private_states -= 1
        if self.checks is not None:
            self.checks.states.publish(np.array([state_slot]))
        if self._tree.attach_state(node, state_slot):
            self.states.free_track_slot(state_slot)

    def note_published(self, starts: Starts, duplicates: Starts) -> None:
        """As many private pages became the tree's, which are `starts` now; those it had already are freed."""
        self.private_pages -= len(starts)
        if len(duplicates):
            self._allocator.free_pages(duplicates)
        if self.checks is not None:
            self.checks.publish(starts)

    def free_private(self, starts: Starts, state_slot: int | None) -> None:
        """Take back what a lease holds by itself."""
        self.private_pages -= len(starts)  # whatever the pool says of them
        try:
            if len(starts):
                self._allocator.free_pages(starts)
        finally:
            if state_slot is not None:
                self._free_state(state_slot)

    def free_window(self, starts: Starts) -> None:
        """Take back the window halves of private pages."""
        self._allocator.free_swa_pages(starts)

    def evict(
        self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0, cause: str = "shortfall"
    ) -> EvictResult:
        """Evict from the tree; returns what went of each."""
        self.history.cause = cause
        result = self._tree.evict(num_tokens, swa_num_tokens, num_states)
        self._counters.tokens_evicted += result.full_evicted
        return result

    def notify_pressure(self) -> None:
        """Tell whoever listens if slots run short."""
        if self._on_pressure is not None and self._is_pressed():
            self._on_pressure()

    def _free_state(self, state_slot: int) -> None:
        assert self.states is not None
        self.states.free_track_slot(state_slot)
        self.private_states -= 1

    def _refuse(self, num_pages: int, window: bool = False) -> None:
        needed = num_pages * self._page_size
        if window and self._swa is not None:
            free, evictable = self._swa.available_size(), self._tree.swa_evictable_size()
            raise OutOfSlotsError(needed, free, evictable, self._swa.num_slots, "window slots")
        raise OutOfSlotsError(
            needed, self._allocator.available_size(), self._evictable_size(), self._allocator.num_slots
        )

    def _evictable_size(self) -> int:
        """Slots that can be evicted for whoever asks."""
        return self._tree.evictable_size()

    def check(self, leases: Iterable[LeaseRecord]) -> None:
        """Raise AssertionError unless every window half and every state is free, private or in the tree, once. O(n)."""
        leases = list(leases)
        if self._swa is not None:
            private = sum(int((self._allocator.swa_starts(lease.private_starts) > 0).sum()) for lease in leases)
            tree = self._tree.swa_evictable_size() + self._tree.swa_protected_size()
            held = private * self._page_size + tree
            assert held + self._swa.available_size() == self._swa.num_slots, f"window halves: {held=}"
        if self.states is not None:
            own = [lease.state_slot for lease in leases if lease.state_slot is not None]
            assert len(own) == self.private_states, f"states: {self.private_states=}, but leases hold {len(own)}"
            everyone = [*own, *self.states.free_slots(), *self._tree.state_slots()]
            assert len(set(everyone)) == len(everyone) == self.states.num_slots, "states: not each once"
            self.states.check_invariants()
