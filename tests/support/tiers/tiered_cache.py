"""`TieredCache`: a core and a tier below it, between which moves take no time, as admission makes them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from support.tiers.two_tiers import Moves

from raydix.cache_core.base_prefix_cache import BasePrefixCache
from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tree.radix_key import RadixKey


class TieredCache(KVCache):
    """A `KVCache` that writes each node to the tier below before it evicts it, and loads prefixes from there.

    A lease begins with the prefix of either tier. `lock` loads if there is room.

    Args:
        tree, allocator, options: as for `KVCache`.
        lower: the tier below, with a cache of the same page size, window and kind.

    Attributes:
        moves: between the two tiers.
    """

    def __init__(
        self, tree: BasePrefixCache, allocator: TokenToKVPoolAllocator, *, lower: Tier, **options: Any
    ) -> None:
        super().__init__(tree, allocator, **options)
        self.moves = Moves(Tier("device", "GPU", self), lower)
        self.watch_victims(self.moves.write_before_eviction)

    def acquire(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        *options: Any,
        **more: Any,
    ) -> LeaseRecord:
        """Open a lease with the prefix of either tier."""
        if (open_lease := self.leases.find_unended(lease_id, session_id)) is not None:
            return open_lease
        with self.moves.holding(key, max_prefix_len):
            lease = super().acquire(lease_id, session_id, key, new_tokens, max_prefix_len, *options, **more)
            self._load(lease, max_prefix_len)
        return lease

    def lock(self, lease_id: str, session_id: str, key: RadixKey, priority: int = 0) -> LeaseRecord:
        """Lock the prefix of a key that either tier has; that of this tier if there is no room for a load."""
        if (open_lease := self.leases.find_unended(lease_id, session_id)) is not None:
            return open_lease
        with self.moves.holding(key):
            lease = super().lock(lease_id, session_id, key, priority)
            with suppress(OutOfSlotsError):
                self._load(lease, None)
        return lease

    def _load(self, lease: LeaseRecord, limit: int | None) -> None:
        move = self.moves.prepare_load(lease, limit)
        if move is not None:
            self.moves.complete(move, move.num_pages)
