"""`LeaseAllocator`: slots and states for leases, within the floors and caps of tenants: `tenants` has the rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np

from raydix.cache_core.base_prefix_cache import BasePrefixCache, EvictResult, Starts
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.leases.cache_facts import PoolSizes
from raydix.cache_core.leases.counters import Counters
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_checks import PoolChecks


class LeaseAllocator:
    """The allocator of private pages and states for leases. Per pool, `free + private + tree` is all there is.

    Each private slot counts for the tenant of its lease. Where slots are short, the allocator evicts the shortfall.

    Attributes:
        history: the evictions, for `explain`.
        states: the state slots; None for a cache without states.
        checks: of the content of the slots; None without checks.
        private_states: the number of states that leases hold.
    """

    def __init__(
        self,
        tree: BasePrefixCache,
        allocator: TokenToKVPoolAllocator,
        states: MambaPool | None,
        tenants: Tenants,
        counters: Counters,
        is_pressed: Callable[[], bool],
        on_pressure: Callable[[], None] | None,
    ) -> None:
        self.private_states = 0
        self.states = states
        self.history = EvictionHistory()
        self.checks: PoolChecks | None = None
        self._tenants = tenants
        self._counters = counters
        self._tree = tree
        self._allocator = allocator
        self._swa = allocator.swa  # of the window slots
        self._page_size = allocator.page_size
        self._is_pressed = is_pressed
        self._on_pressure = on_pressure
        tree.keep_history(self.history)
        if tenants.configured:
            tree.divide(tenants)

    @property
    def private_slots(self) -> int:
        """The slots of leases that are not in the tree, in whole pages. O(tenants)."""
        return sum(tenant.private for tenant in self._tenants)

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

    def check_capacity(self, num_pages: int, tenant: Tenant) -> None:
        """Raise OutOfSlotsError if a tenant can never have so many pages: the pool or its cap is smaller."""
        needed = num_pages * self._page_size
        if tenant.cap is not None and needed > tenant.cap:
            self._refuse_beyond_cap(needed, tenant)
        if needed > self._allocator.num_slots:
            self._refuse(num_pages, tenant)

    def exceeds_window(self, num_pages: int) -> bool:
        """Whether so many pages are more than there are window slots for."""
        return self._swa is not None and num_pages * self._page_size > self._swa.num_slots

    def check_window_capacity(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if so many pages are more than there are window slots for."""
        if self.exceeds_window(num_pages):
            self._refuse_window(num_pages)

    def check_pages(self, num_pages: int, tenant: Tenant) -> None:
        """Raise OutOfSlotsError if a tenant cannot have so many private pages now, even by evicting."""
        needed = max(0, num_pages) * self._page_size
        if tenant.excess(needed) > tenant.evictable:
            self._refuse_beyond_cap(needed, tenant)
        if self._swa is not None and needed > self._swa.available_size() + self._tree.swa_evictable_size():
            self._refuse_window(num_pages)
        free = self._allocator.available_size()
        if needed > free and needed > free + self.evictable_for(tenant):
            self._refuse(num_pages, tenant)

    def held_by_prefix(self, pool: str, prefix_len: int) -> int:
        """Window slots that whoever hits a prefix holds with it, at least: so many are not left for the rest."""
        if pool != "window slots":
            return 0
        window = min(prefix_len, self._tree.sliding_window_size or 0)
        return -(-window // self._page_size) * self._page_size

    def evictable_for(self, tenant: Tenant) -> int:
        """Return the number of slots that can be evicted for a tenant: those that no floor keeps. O(tenants)."""
        return self._tree.evictable_size() - self._tenants.kept_from(tenant)

    def take_pages(self, num_pages: int, tenant: Tenant) -> Starts:
        """Allocate private pages. Evict the pages beyond the tenant's cap from its own, then the shortfall.

        Raises:
            OutOfSlotsError: too few pages are free or evictable; nothing changed.
        """
        if num_pages <= 0:
            return np.empty(0, np.int64)
        self.check_pages(num_pages, tenant)
        needed = num_pages * self._page_size
        if (excess := tenant.excess(needed)) > 0:
            self._evict_own(tenant, excess)
        shortfall = needed - self._allocator.available_size()
        swa_shortfall = 0 if self._swa is None else needed - self._swa.available_size()
        if shortfall > 0 or swa_shortfall > 0:
            self.evict(max(0, shortfall), max(0, swa_shortfall), tenant=tenant)
        starts = self._allocator.alloc_pages(num_pages)
        tenant.private += needed
        self.notify_pressure()
        return starts

    def take_state(self, tenant: Tenant) -> int | None:
        """Allocate a state slot, and evict one if none is free; None for a cache without states.

        Raises:
            OutOfSlotsError: none is free and none can be evicted; nothing changed.
        """
        if self.states is None:
            return None
        if not self.states.available_size():
            if not self._tree.mamba_evictable_size():
                raise OutOfSlotsError(1, 0, 0, self.states.num_slots, "states")
            self.evict(0, num_states=1, tenant=tenant)
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

    def note_published(self, starts: Starts, duplicates: Starts, tenant: Tenant) -> None:
        """Move private pages to the tree, which holds them as `starts` now; free the pages that it had already."""
        tenant.private -= len(starts) * self._page_size  # before the pool may raise
        if len(duplicates):
            self._allocator.free_pages(duplicates)
        if self.checks is not None:
            self.checks.publish(starts)

    def free_private(self, starts: Starts, state_slot: int | None, tenant: Tenant) -> None:
        """Free the private pages and the state of a lease."""
        tenant.private -= len(starts) * self._page_size  # before the pool may raise
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
        self,
        num_tokens: int,
        swa_num_tokens: int = 0,
        num_states: int = 0,
        cause: str = "shortfall",
        tenant: Tenant | None = None,
    ) -> EvictResult:
        """Evict from the tree, for a tenant: its own floor keeps nothing from it. None: every floor keeps its pages."""
        self.history.cause = cause
        self._tenants.caller = tenant
        try:
            result = self._tree.evict(num_tokens, swa_num_tokens, num_states)
        finally:
            self._tenants.caller = None
        self._counters.tokens_evicted += result.full_evicted
        return result

    def _evict_own(self, tenant: Tenant, num_tokens: int) -> None:
        self.history.cause = "cap"
        self._tenants.caller = tenant
        try:
            self._counters.tokens_evicted += self._tree.evict_own(tenant, num_tokens)
        finally:
            self._tenants.caller = None

    def notify_pressure(self) -> None:
        """Tell whoever listens if slots run short."""
        if self._on_pressure is not None and self._is_pressed():
            self._on_pressure()

    def _free_state(self, state_slot: int) -> None:
        assert self.states is not None
        self.states.free_track_slot(state_slot)
        self.private_states -= 1

    def _refuse(self, num_pages: int, tenant: Tenant) -> NoReturn:
        needed, free = num_pages * self._page_size, self._allocator.available_size()
        raise OutOfSlotsError(needed, free, self.evictable_for(tenant), self._allocator.num_slots)

    def _refuse_window(self, num_pages: int) -> NoReturn:
        assert self._swa is not None
        needed, free, evictable = (
            num_pages * self._page_size,
            self._swa.available_size(),
            self._tree.swa_evictable_size(),
        )
        raise OutOfSlotsError(needed, free, evictable, self._swa.num_slots, "window slots")

    def _refuse_beyond_cap(self, needed: int, tenant: Tenant) -> NoReturn:
        assert tenant.cap is not None
        raise OutOfSlotsError(needed, tenant.cap - tenant.held, tenant.evictable, tenant.cap, "slots", tenant.name)

    def check(self, leases: Iterable[LeaseRecord]) -> None:
        """Raise AssertionError if a page, a window half or a state is not free, private or in the tree, once. O(n)."""
        leases = list(leases)
        for tenant in self._tenants:
            mine = [lease for lease in leases if self._tenants.of(lease.key.extra_key) is tenant]
            private = sum(len(lease.private_starts) for lease in mine) * self._page_size
            assert tenant.private == private, f"rule 1 at tenant {tenant.name!r}: {tenant.private=}, not {private}"
            assert tenant.cap is None or tenant.held <= tenant.cap, f"tenant {tenant.name!r} holds {tenant.held}"
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
