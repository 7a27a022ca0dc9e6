"""Faults of moves between tiers, planted under the core alone and under a whole service."""

from __future__ import annotations

from typing import Any

from support.faults.faults import Catalogue, Patch, around

from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.tiers.moves import Moves

FAULTS_OF_MOVES = Catalogue()
fault = FAULTS_OF_MOVES.register


@fault
def pages_are_published_before_their_copy_has_ended(patch: Patch) -> None:
    around(patch, Moves, "finish", lambda finish, self, move, num_pages, is_whole=None: finish(self, move, 10**6))


@fault
def slots_are_freed_under_the_copy(patch: Patch) -> None:
    def abandon(original: Any, self: LeasedCache, lease_id: str, session_id: str) -> bool:
        leases = self.leases.filling_for(session_id)
        found: bool = original(self, lease_id, session_id)
        for lease in leases:
            if lease.lease_id == lease_id:
                self._free_private(lease)
        return found

    around(patch, LeasedCache, "_abandon", abandon)


@fault
def the_lock_at_the_source_is_forgotten(patch: Patch) -> None:
    def lock_node(original: Any, self: KVCache, node: Any, path: Any) -> Any:
        lease = original(self, node, path)
        self.tree.dec_lock_ref(node, lease.receipt)
        return lease

    around(patch, KVCache, "lock_node", lock_node)


@fault
def the_lower_tier_is_not_retired(patch: Patch) -> None:
    def init(original: Any, self: Moves, *arguments: Any) -> None:
        original(self, *arguments)
        self.upper.cache.below = None

    around(patch, Moves, "__init__", init)


@fault
def a_lease_is_handed_out_after_a_retirement_in_the_middle_of_its_load(patch: Patch) -> None:
    def finish(original: Any, self: Moves, move: Any, num_pages: int, is_whole: bool | None = None) -> Any:
        move.source.retired = move.target.retired = False
        return original(self, move, num_pages, is_whole)

    around(patch, Moves, "finish", finish)


@fault
def a_loaded_token_is_counted_twice(patch: Patch) -> None:
    def hand_out(original: Any, self: KVCache, lease: Any, prefix_len: int) -> None:
        self.counters.tokens_reused += prefix_len - lease.prefix_len
        original(self, lease, prefix_len)

    around(patch, KVCache, "hand_out", hand_out)
