"""`Moves`: the loads and the writes between two tiers."""

from __future__ import annotations

from raydix.cache_core import RadixKey
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.loads import Filled, Loads
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import check_all
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import Writes


class Moves:
    """The loads and the writes between two tiers. A move is ended by `complete`, whatever it is.

    Args:
        options: of the writes.
    """

    def __init__(self, upper: Tier, lower: Tier, bytes_per_page: int = 0, *, are_neighbours: bool = True) -> None:
        self.upper, self.lower = upper, lower
        self.writes = Writes(upper, lower, bytes_per_page, are_neighbours=are_neighbours)
        self.loads = Loads(lower, upper)

    @property
    def in_flight(self) -> list[Move]:
        """The moves in flight."""
        return self.loads.in_flight + self.writes.in_flight

    def prepare_load(self, lease: LeaseRecord, limit: int | None = None) -> Move | None:
        """Begin to load a lease's prefix, of at most `limit` tokens."""
        return self.loads.prepare(lease, LookUp(lease.key, limit))

    def prefetch(self, key: RadixKey, limit: int | None = None) -> Move | None:
        """Begin to load a prefix for no lease."""
        return self.loads.prepare_prefetch(LookUp(key, limit))

    def running(self, key: RadixKey, limit: int | None = None) -> Move | None:
        """The load that brings the next page of a key."""
        return self.loads.running(LookUp(key, limit))

    def complete(self, move: Move, num_pages: int, is_whole: bool | None = None) -> Filled:
        """End a move."""
        if move.is_load:
            return self.loads.complete(move, num_pages, is_whole)
        return Filled(self.writes.complete(move, num_pages, is_whole))

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule is broken."""
        check_all((self.loads,), (self.writes,))
