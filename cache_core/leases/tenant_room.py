"""`TenantAllocator`: a `LeaseAllocator` in which tenants have floors and caps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raydix.cache_core.base_prefix_cache import BasePrefixCache, Starts
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.eviction.tenants import Tenants
from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.leases.lease_table import LeaseRecord


class TenantAllocator(LeaseAllocator):
    """Slots are taken and given back within `Tenants.serving`: what is private is counted for that tenant."""

    def __init__(self, tenants: Tenants, tree: BasePrefixCache, *parts: Any) -> None:
        super().__init__(tree, *parts)
        self.tenants = tenants
        tree.divide(tenants)

    def check_capacity(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if so many pages can never be had."""
        tenant, needed = self.tenants.caller, num_pages * self._page_size
        if tenant is not None and tenant.cap is not None and needed > tenant.cap:
            self._refuse_beyond_cap(needed)
        super().check_capacity(num_pages)

    def check_pages(self, num_pages: int) -> None:
        """Raise OutOfSlotsError if so many private pages cannot be had now, not even by evicting. Nothing changes."""
        tenant, needed = self.tenants.caller, max(0, num_pages) * self._page_size
        if tenant is not None and tenant.excess(needed) > tenant.evictable:
            self._refuse_beyond_cap(needed)
        super().check_pages(num_pages)

    def take_pages(self, num_pages: int) -> Starts:
        """Allocate private pages, after evicting what is missing: what is beyond the tenant's cap, of its own.

        Raises:
            OutOfSlotsError: there is no room; nothing changed.
        """
        tenant = self.tenants.caller
        assert tenant is not None
        if num_pages > 0 and (excess := tenant.excess(num_pages * self._page_size)) > 0:
            self.check_pages(num_pages)
            self.history.cause = "cap"
            self._counters.tokens_evicted += self._tree.evict_own(tenant, excess)
        starts = super().take_pages(num_pages)
        tenant.private += len(starts) * self._page_size
        return starts

    def note_published(self, starts: Starts, duplicates: Starts) -> None:
        """As many private pages became the tree's, which are `starts` now; those it had already are freed."""
        self._give_up(starts)  # before the pool may refuse some
        super().note_published(starts, duplicates)

    def free_private(self, starts: Starts, state_slot: int | None) -> None:
        """Take back what a lease holds by itself."""
        self._give_up(starts)
        super().free_private(starts, state_slot)

    def _give_up(self, starts: Starts) -> None:
        assert self.tenants.caller is not None
        self.tenants.caller.private -= len(starts) * self._page_size

    def _evictable_size(self) -> int:
        return self.tenants.evictable_for(self.tenants.caller)

    def _refuse_beyond_cap(self, needed: int) -> None:
        tenant = self.tenants.caller
        assert tenant is not None and tenant.cap is not None
        raise OutOfSlotsError(needed, tenant.cap - tenant.held, tenant.evictable, tenant.cap, "slots", tenant.name)

    def check(self, leases: Iterable[LeaseRecord]) -> None:
        """Raise AssertionError unless each tenant's private slots are those of its leases, and no cap is exceeded."""
        leases = list(leases)
        super().check(leases)
        for tenant in self.tenants:
            mine = [lease for lease in leases if self.tenants.of(lease.key.extra_key) is tenant]
            private = sum(len(lease.private_starts) for lease in mine) * self._page_size
            assert tenant.private == private, f"tenant {tenant.name!r}: {tenant.private=}, but {private=} in leases"
            assert tenant.cap is None or tenant.held <= tenant.cap, f"tenant {tenant.name!r} holds {tenant.held}"
