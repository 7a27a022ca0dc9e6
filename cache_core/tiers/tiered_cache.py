"""`TieredCache`: two tiers without KV, whose copies take no time: for replays and simulations."""

from __future__ import annotations

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.results import Published
from raydix.cache_core.tiers.moves import Moves
from raydix.cache_core.tree.radix_key import RadixKey


class TieredCache:
    """The requests of a cache with a lower tier. Evicted nodes are written first, and loads end where they begin.

    Args:
        moves: between the two tiers; no other caller may use them.
    """

    def __init__(self, moves: Moves) -> None:
        self.moves = moves
        self._device = moves.upper.cache
        self._device.watch_victims(moves.write_before_eviction)

    def acquire(
        self, lease_id: str, session_id: str, key: RadixKey, new_tokens: int = 0, max_prefix_len: int | None = None
    ) -> LeaseRecord:
        """Open a lease as `LeasedCache.acquire` does, with the prefix of either tier."""
        with self.moves.holding(key, max_prefix_len):
            lease = self._device.acquire(lease_id, session_id, key, new_tokens, max_prefix_len)
            self._load(lease, max_prefix_len)
        return lease

    def lock(self, lease_id: str, session_id: str, key: RadixKey) -> LeaseRecord:
        """Open a lease as `LeasedCache.lock` does, with the prefix of either tier.

        Raises:
            OutOfSlotsError: there is no room for a load. The lease is open, with the prefix of the device.
        """
        with self.moves.holding(key):
            lease = self._device.lock(lease_id, session_id, key)
            self._load(lease, None)
        return lease

    def _load(self, lease: LeaseRecord, limit: int | None) -> None:
        move = self.moves.plan_load(lease, limit)
        if move is not None:
            self.moves.finish(move, move.num_pages)

    def insert(self, lease_id: str, session_id: str, num_tokens: int, suffix: RadixKey) -> Published:
        """Publish as `LeasedCache.insert` does."""
        return self._device.insert(lease_id, session_id, num_tokens, suffix)

    def release(self, lease_id: str, session_id: str) -> bool:
        """End a lease as `LeasedCache.release` does."""
        return self._device.release(lease_id, session_id)
