"""`Moves`: the loads and the writes between two tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raydix.cache_core import OutOfSlotsError, RadixKey
from raydix.cache_core.components.component import Component
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.loads import Filled, Loads
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import check_all
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import Writes
from raydix.cache_core.tree.tree_node import TreeNode


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

    def write_before_eviction(self, node: TreeNode, component: Component | None = None) -> None:
        """Write a node that is about to be evicted, as if a copy took no time: see `KVCache.watch_victims`."""
        ends = self.writes.ends_of(node, component)
        self.writes.count_lost(node, [end for end in ends if not self._write_whole(end)])

    def _write_whole(self, end: TreeNode) -> bool:
        """Write what the lower tier lacks of a path; return False if that has no room."""
        writes, lower = self.writes, self.lower.cache
        while (found := writes.missing(end)) is not None:
            stop = writes.stop_within(found, writes.batch_pages)
            is_whole, key = stop == found.node.end, found.path.key[:stop]
            state = self.upper.cache.tree.state_at(found.node) if is_whole else None
            try:
                target = lower.open_target(key, found.first, state is not None, found.live_from)
            except OutOfSlotsError:
                writes.counts.writes_refused += 1
                return False
            writes.publish(target, key, found.live_from, is_whole)
            if is_whole:
                return True
        return True

    @contextmanager
    def holding(self, key: RadixKey, limit: int | None = None) -> Iterator[None]:
        """Keep the lower tier's prefix of a key while a lease is opened, which may evict nodes in both tiers."""
        lower = self.lower.cache
        stop = self.lower.longest_prefix(key, limit)
        held = lower.open_target(lower.tree_key(key)[:stop], stop) if stop else None
        try:
            yield
        finally:
            if held is not None:
                lower.end_quietly(held)

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule is broken."""
        check_all((self.loads,), (self.writes,))
