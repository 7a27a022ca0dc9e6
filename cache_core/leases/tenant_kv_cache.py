"""`TenantKVCache`: a `KVCache` whose slots tenants share, with floors and caps: `tenants` has the rules."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from raydix.cache_core.base_prefix_cache import BasePrefixCache, RadixKey, Starts
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.leases.cache_facts import PoolSizes
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.leased_cache import Published
from raydix.cache_core.leases.tenant_room import TenantAllocator
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.tree.radix_key import check_key


class TenantKVCache(KVCache):
    """Prefix reuse with leases over a pool that tenants share: each verb serves the tenant of its key's namespace.

    Args:
        tree: the empty cache that maps prefixes to pages; it must free to `allocator`.
        allocator: the slots.
        options: those of `KVCache`.
        tenants: who shares them. Floors add up to no more than there are.
    """

    def __init__(
        self, tree: BasePrefixCache, allocator: TokenToKVPoolAllocator, *options: Any, tenants: Tenants, **more: Any
    ) -> None:
        self.tenants: Tenants = tenants
        super().__init__(tree, allocator, *options, **more)

    def _make_room(self, *parts: Any) -> LeaseAllocator:
        return TenantAllocator(self.tenants, *parts)

    # ---------------------------------------------------------------- sizes

    def tenant_of(self, extra_key: str | None) -> str | None:
        """The tenant whose namespace that is; None: the rest."""
        return self.tenants.of(extra_key).name

    def sizes_of(self, pool: str, extra_key: str | None = None) -> PoolSizes:
        """The pool that an `OutOfSlotsError` names, as far as a request of that namespace can have it."""
        sizes = super().sizes_of(pool, extra_key)
        if pool != "slots":
            return sizes
        evictable = self.tenants.evictable_for(self.tenants.of(extra_key))
        return sizes._replace(evictable=evictable, kept=sizes.evictable - evictable)

    def share_of(self, name: str) -> PoolSizes:
        """The share of a tenant that has a cap, as if it were a pool of that size."""
        tenant = next(tenant for tenant in self.tenants if tenant.name == name)
        assert tenant.cap is not None, f"tenant {name!r} has no cap"
        return PoolSizes(tenant.cap, tenant.cap - tenant.held, tenant.evictable, tenant.cached - tenant.evictable)

    def is_within_floor(self, key: RadixKey, num_tokens: int) -> bool:
        """Whether the tenant of `key` holds no more than its floor with a lease over so many tokens."""
        tenant = self.tenants.of(key.extra_key)
        if not tenant.floor:
            return False
        new_tokens = num_tokens - self.tree.peek_prefix(self._tree_key(key)).prefix_len
        return tenant.held + -(-new_tokens // self.page_size) * self.page_size <= tenant.floor

    # ---------------------------------------------------------------- verbs, each for a tenant

    def check_len(self, num_tokens: int, key: RadixKey) -> None:
        """Raise OutOfSlotsError if the pool, or the tenant's cap, is smaller than so many tokens need."""
        with self._serving(key):
            super().check_len(num_tokens, key)

    def acquire(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        priority: int = 0,
    ) -> LeaseRecord:
        """As `KVCache.acquire`, within floors and caps."""
        with self._serving(key):
            return super().acquire(lease_id, session_id, key, new_tokens, max_prefix_len, priority)

    def lock(self, lease_id: str, session_id: str, key: RadixKey, priority: int = 0) -> LeaseRecord:
        """As `KVCache.lock`."""
        with self._serving(key):
            return super().lock(lease_id, session_id, key, priority)

    def extend(self, lease_id: str, session_id: str, num_tokens: int) -> Starts:
        """As `KVCache.extend`, within floors and caps."""
        with self.tenants.serving(self.leases.get(lease_id, session_id).key.extra_key):
            return super().extend(lease_id, session_id, num_tokens)

    def insert(
        self, lease_id: str, session_id: str, num_tokens: int, suffix: RadixKey, publish_state: bool = False
    ) -> Published:
        """As `KVCache.insert`."""
        with self.tenants.serving(self.leases.get(lease_id, session_id).key.extra_key):
            return super().insert(lease_id, session_id, num_tokens, suffix, publish_state)

    def _serving(self, key: RadixKey) -> AbstractContextManager[Tenant]:
        try:
            return self.tenants.serving(key.extra_key)
        except AttributeError:
            check_key(key)
            raise

    def _free_private(self, lease: LeaseRecord) -> None:
        with self.tenants.serving(lease.key.extra_key):
            super()._free_private(lease)
