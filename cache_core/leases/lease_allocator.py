"""`LeaseAllocator`: allocates slots and states for leases, within the floors and caps of tenants.

`eviction.tenants` has the rules of floors and caps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from raydix.cache_core.base_prefix_cache import BasePrefixCache, EvictResult
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.leases.results import Counters
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_checks import PoolChecks
from raydix.cache_core.pool.swa_page_allocator import SWATokenToKVPoolAllocator
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts


class LeaseAllocator:
    """The allocator of private pages and states for leases. Each slot of a pool is free, private or in the tree.

    A private slot counts for the tenant of its lease. If too few slots are free, the allocator evicts the shortfall.

    Args:
        tree: the cache to evict from; it must free to `allocator` and `states`.
        allocator: allocates the slots.
        states: the state slots; None for a cache without states.
        tenants: the tenants that share the slots and the tree.
        counters: counts the evicted tokens.
        pressure_floors: the floors of free slots, window slots and states.
        on_pressure: called without arguments after an operation that leaves fewer free than a floor. None: not called.
        checks: checks of the slots' content, or None.

    Attributes:
        states: as given.
        history: the evictions, for `explain`.
    """

    def __init__(
        self,
        tree: BasePrefixCache,
        allocator: TokenToKVPoolAllocator,
        states: MambaPool | None,
        tenants: Tenants,
        counters: Counters,
        pressure_floors: tuple[int, int, int],
        on_pressure: Callable[[], None] | None,
        checks: PoolChecks | None,
    ) -> None:
        self.states = states
        self.history = EvictionHistory()
        self._tree = tree
        self._allocator = allocator
        self._swa = allocator.swa  # allocates the window slots
        self._page_size = allocator.page_size
        self._tenants = tenants
        self._counters = counters
        self._pressure_floors = pressure_floors
        self._on_pressure = on_pressure
        self._checks = checks
        tree.keep_history(self.history)
        if tenants.configured:
            tree.divide(tenants)

    def check_capacity(self, num_pages: int, tenant: Tenant) -> None:
        """Raise OutOfSlotsError if `num_pages` pages exceed the pool or the tenant's cap."""
        needed = num_pages * self._page_size
        if tenant.cap is not None and needed > tenant.cap:
            self._refuse_beyond_cap(needed, tenant)
        if needed > self._allocator.num_slots:
            self._refuse(num_pages, tenant)

    def exceeds_window(self, num_pages: int) -> bool:
        """Return whether `num_pages` pages need more window slots than the pool has."""
        return self._swa is not None and num_pages * self._page_size > self._swa.num_slots

    def check_window_capacity(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if `num_pages` pages need more window slots than the pool has."""
        if self.exceeds_window(num_pages):
            self._refuse_window(num_pages)

    def check_pages(self, num_pages: int, tenant: Tenant, num_windows: int | None = None) -> None:
        """Raise OutOfSlotsError if a tenant cannot get `num_pages` private pages now, even after evictions.

        Args:
            num_windows: of these, the pages with window halves; None: all.
        """
        needed = max(0, num_pages) * self._page_size
        num_windows = num_pages if num_windows is None else num_windows
        if tenant.cap is not None and tenant.excess(needed) > tenant.evictable:
            self._refuse_beyond_cap(needed, tenant)
        swa = self._swa
        if swa is not None and num_windows * self._page_size > swa.available_size() + self._swa_evictable():
            self._refuse_window(num_windows)
        free = self._allocator.available_size()
        if needed > free and needed > free + self.evictable_for(tenant):
            self._refuse(num_pages, tenant)

    def held_by_prefix(self, pool: str, prefix_len: int) -> int:
        """Return the least number of window slots that a lease locks with a prefix; 0 for other pools."""
        if pool != "window slots":
            return 0
        return min(prefix_len, self._tree.kept_tail)

    def evictable_for(self, tenant: Tenant) -> int:
        """Return the number of slots that can be evicted for a tenant: the others are locked or kept by floors.

        It is 0 if the pool has a keeper, which takes over evicted slots. O(tenants).
        """
        if self._allocator.keeper is not None:
            return 0
        kept = self._tenants.kept_from(tenant) if self._tenants.configured else 0
        return self._tree.evictable_size() - kept

    def _swa_evictable(self) -> int:
        """Return the number of window slots that can be evicted for a lease."""
        assert self._swa is not None
        return self._tree.swa_evictable_size() if self._swa.keeper is None else 0

    def take_pages(self, num_pages: int, tenant: Tenant, num_windows: int | None = None) -> Starts:
        """Allocate private pages; evict if needed.

        If the tenant would exceed its cap, its own pages are evicted first. Then the shortfall of the pool is evicted.

        Args:
            num_windows: only so many pages, the last ones, get window halves; None: all do.

        Raises:
            OutOfSlotsError: too few pages are free or evictable; nothing changed.
        """
        if num_pages <= 0:
            return NO_STARTS
        self.check_pages(num_pages, tenant, num_windows)
        num_windows = num_pages if num_windows is None else num_windows
        needed = num_pages * self._page_size
        if tenant.cap is not None and (excess := tenant.excess(needed)) > 0:
            self._evict_own(tenant, excess)
        shortfall = needed - self._allocator.available_size()
        swa_shortfall = 0 if self._swa is None else num_windows * self._page_size - self._swa.available_size()
        if shortfall > 0 or swa_shortfall > 0:
            self.evict(max(0, shortfall), max(0, swa_shortfall), tenant=tenant)
        if num_windows == num_pages:
            starts = self._allocator.alloc_pages(num_pages)
        else:
            assert isinstance(self._allocator, SWATokenToKVPoolAllocator), "there are no window slots"
            starts = self._allocator.alloc_pages(num_pages, num_windows)
        tenant.private += needed
        self.notify_pressure()
        return starts

    def take_state(self, tenant: Tenant) -> int | None:
        """Allocate a state slot; if none is free, evict one. Return None for a cache without states.

        Raises:
            OutOfSlotsError: no state slot is free or evictable; nothing changed.
        """
        if self.states is None:
            return None
        if not self.states.available_size():
            if not self._tree.mamba_evictable_size() or self.states.keeper is not None:
                raise OutOfSlotsError(1, 0, 0, self.states.num_slots, "states")
            self.evict(0, num_states=1, tenant=tenant)
        slot = self.states.alloc_track_slot()
        self.notify_pressure()
        return slot

    def verify(self, starts: Starts, node: Any) -> None:
        """Raise ContentError if matched pages, or the state at a node, were written after they were published."""
        if self._checks is not None:
            self._checks.verify(starts)
            if (state_slot := self._tree.state_at(node)) is not None:
                self._checks.states.verify(np.array([state_slot]))

    def load_state(self, node: Any, state_slot: int) -> None:
        """Copy the state at a node into a lease's state slot. If the node has none, fill the slot with zeros."""
        assert self.states is not None
        source = self._tree.state_at(node)
        if source is None:
            self.states.clear_state(state_slot)
        else:
            self.states.copy_states(source, state_slot)

    def store_state(self, source: int | None, state_slot: int, node: Any) -> None:
        """Copy the state in `source` into `state_slot`, and publish that at a node."""
        assert self.states is not None and source is not None
        self.states.copy_states(source, state_slot)
        self.publish_state(state_slot, node)

    def publish_state(self, state_slot: int, node: Any) -> None:
        """Give a node the state in a private slot, with the slot. If the node has a state, free the slot."""
        assert self.states is not None
        if self._checks is not None:
            self._checks.states.publish(np.array([state_slot]))
        if self._tree.attach_state(node, state_slot):
            self.states.free_track_slot(state_slot)

    def note_published(self, starts: Starts, duplicates: Starts, tenant: Tenant) -> None:
        """Count private pages as pages of the tree, and free the duplicates. `starts` are the pages in the tree now."""
        tenant.private -= len(starts) * self._page_size  # first: the pool may raise below
        if len(duplicates):
            self._allocator.free_pages(duplicates)
        if self._checks is not None:
            self._checks.publish(starts)

    def free_private(self, starts: Starts, state_slots: Iterable[int | None], tenant: Tenant) -> None:
        """Free the private pages and the states of a lease; a slot that is None is none."""
        tenant.private -= len(starts) * self._page_size  # first: the pool may raise below
        try:
            if len(starts):
                self._allocator.free_pages(starts)
        finally:
            for state_slot in state_slots:
                if state_slot is not None:
                    assert self.states is not None
                    self.states.free_track_slot(state_slot)

    def free_window(self, starts: Starts) -> None:
        """Free the window halves of private pages."""
        self._allocator.free_swa_pages(starts)

    def evict(
        self,
        num_tokens: int,
        swa_num_tokens: int = 0,
        num_states: int = 0,
        cause: str = "shortfall",
        tenant: Tenant | None = None,
    ) -> EvictResult:
        """Evict from the tree for a tenant. Its own floor is ignored; with None, all floors keep their pages."""
        self.history.cause = cause
        self._tenants.caller = tenant
        try:
            result = self._tree.evict(num_tokens, swa_num_tokens, num_states)
        finally:
            self._tenants.caller = None
        counters = self._counters
        counters.tokens_evicted += result.full_evicted
        counters.window_slots_evicted += result.swa_evicted
        counters.states_evicted += result.mamba_evicted
        return result

    def _evict_own(self, tenant: Tenant, num_tokens: int) -> None:
        self.history.cause = "cap"
        self._tenants.caller = tenant
        try:
            self._counters.tokens_evicted += self._tree.evict_own(tenant, num_tokens)
        finally:
            self._tenants.caller = None

    def notify_pressure(self) -> None:
        """Call `on_pressure` if fewer slots, window slots or states are free than their floor."""
        if self._on_pressure is not None and self._is_pressed():
            self._on_pressure()

    def _is_pressed(self) -> bool:
        (floor, swa_floor, state_floor), swa, states = self._pressure_floors, self._swa, self.states
        return (
            self._allocator.available_size() < floor
            or (swa is not None and swa.available_size() < swa_floor)
            or (states is not None and states.available_size() < state_floor)
        )

    def _refuse(self, num_pages: int, tenant: Tenant) -> NoReturn:
        needed, free = num_pages * self._page_size, self._allocator.available_size()
        raise OutOfSlotsError(needed, free, self.evictable_for(tenant), self._allocator.num_slots)

    def _refuse_window(self, num_pages: int) -> NoReturn:
        assert self._swa is not None
        free, evictable = self._swa.available_size(), self._swa_evictable()
        raise OutOfSlotsError(num_pages * self._page_size, free, evictable, self._swa.num_slots, "window slots")

    def _refuse_beyond_cap(self, needed: int, tenant: Tenant) -> NoReturn:
        assert tenant.cap is not None
        raise OutOfSlotsError(needed, tenant.cap - tenant.held, tenant.evictable, tenant.cap, "slots", tenant.name)
