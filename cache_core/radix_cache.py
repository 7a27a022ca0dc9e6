"""`RadixCache`: prefixes of token ids to KV slots, for full attention and for sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any

import torch

from raydix.cache_core.base_prefix_cache import EvictResult, InsertResult, evict_result
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.radix.tree_cache import SlotPool
from raydix.cache_core.radix.window_insertion import WindowTreeCache
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode


class RadixCache(WindowTreeCache):
    """The prefix cache for full attention, and for models with sliding-window layers.

    The cache owns the slots it adopted, from the insert until it frees them to the pool (evicted, reset, or replaced
    when a tombstone heals). Keys and values are copied on insert.

    Args:
        page_size: tokens a page; matches and inserts are floored to whole pages.
        sliding_window_size: tokens that a sliding-window layer attends to; None: full attention alone.
        token_to_kv_pool_allocator: gets evicted slots back by `free(indices)`, and the window halves of tombstones by
            `free_swa(indices)`. If it has `transfer_swa(src, dst)`, tombstones heal under a lock, too: it is called
            in the midst of an insert, and leaves the cache alone. None drops them.
        on_node_evict: called with the id of each evicted node, after it left the tree.
        eviction_policy: which unlocked leaf goes first: a name of `eviction_policy.POLICIES`, or a policy of one's own.

    Raises:
        ValueError: a window is given with a pool that lacks `free_swa`, a size is out of range, or there is no such
            policy.
    """

    def __init__(
        self,
        page_size: int = 1,
        sliding_window_size: int | None = None,
        token_to_kv_pool_allocator: SlotPool | None = None,
        on_node_evict: Callable[[int], None] | None = None,
        *,
        eviction_policy: str | EvictionPolicy = "lru",
    ) -> None:
        super().__init__(page_size, sliding_window_size, token_to_kv_pool_allocator, on_node_evict, [], eviction_policy)

    def insert(
        self,
        key: RadixKey,
        value: torch.Tensor | None = None,
        *,
        prev_prefix_len: int = 0,
        swa_evicted_seqlen: int = 0,
        from_node: TreeNode | None = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> InsertResult:
        """Make the KV in `value` findable under `key`, whole pages of it.

        The tree adopts (and copies) the slots in [prefix_len, aligned length). It frees none: of those in
        [prev_prefix_len, prefix_len), `duplicate_indices` names the ones it does not hold, the caller's to free. The
        tail beyond the last whole page stays the caller's, too. Tombstones over tokens that come with window KV heal:
        an unlocked one takes the incoming slots over and frees its own, once all else is done; a locked one takes their
        window half only. If the pool refuses to take its own back, or to move that half, the next eviction tells; where
        no half was moved, the tombstone stays one.

        Args:
            value: int64, one slot per token of `key`; None takes the ids themselves (for simulation).
            prev_prefix_len: leading slots known to be the tree's own.
            swa_evicted_seqlen: leading tokens whose window KV is gone; rounded up to whole pages. No effect without a
                window; so have arguments of other kinds of caches.
            from_node: `last_node` of a match of a prefix of this key: the walk starts there, and the slots before it
                are taken to be the tree's own.
            priority: the request's: no node on the key's path has a lower one afterwards.

        Raises:
            InvalidKeyError: `value` is shorter than the key, `from_node` does not lie on its path, or fewer than
                `prev_prefix_len` tokens are in the tree.
            StaleNodeError: `from_node` is no longer in the tree.
        """
        fresh_from = self._aligned(swa_evicted_seqlen) if swa_evicted_seqlen else 0
        try:
            return self._insert_slots(key, value, prev_prefix_len, fresh_from, from_node, priority)
        finally:
            if self._replaced is not None:
                self._give_back_replaced()

    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Free at least `num_tokens` slots, then the window KV of at least `swa_num_tokens` tokens in all.

        Whole unlocked leaves go first, in the policy's order; a parent becomes a candidate when its last child has
        gone. What window KV is then still wanted is taken from the nodes that were longest in no match's window: they
        become tombstones, or, as unlocked leaves, go whole. O(log n) per victim, and a step for each node that comes up
        while a window holds it, once in that time.

        Raises:
            SlotError: the pool refused some of them, or some that tombstones had before they healed, and has the
                others; or it refused to move window halves to a tombstone.
        """
        free = self._free
        nobody_told = self.on_node_evict is None and self._events is None and self._history is None
        if free is not None and nobody_told and not self._full.tenants.rest.retired.pending:
            try:
                freed = self._full.free_leaves(num_tokens, self.page_size, free, self._free_each)
            except OverflowError:  # more than the compiled loop counts to, or less; nothing has happened yet
                most = self._full.at_most(num_tokens)
                freed = self._full.free_leaves(most, self.page_size, free, self._free_each)
            return evict_result(freed, 0, 0)
        if self._aux:
            return EvictResult(*self._evict(index(num_tokens), (index(swa_num_tokens),)))
        victims = self._handed_back(partial(self._full.evict, num_tokens))
        return evict_result(victims.num_tokens, 0, 0)
