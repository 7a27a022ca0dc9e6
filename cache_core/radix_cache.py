"""`RadixCache`: prefixes of token ids to KV slots, for full attention and for sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raydix.cache_core.base_prefix_cache import InsertResult
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.pool.release import SlotPool
from raydix.cache_core.radix.insertion import insert_slots
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.radix_key import RadixKey
from raydix.cache_core.tree.tree_node import TreeNode


class RadixCache(PrefixCache):
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
        eviction_policy: which unlocked leaf goes first: a name of `eviction.policy.POLICIES`, or a policy.

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
        super().__init__(page_size, sliding_window_size, token_to_kv_pool_allocator, on_node_evict, eviction_policy)

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
        tail beyond the last whole page stays the caller's as well. Tombstones heal where the incoming slots have window
        KV: an unlocked one adopts the slots, and its old ones are freed at the end; a locked one adopts only their
        window half.

        Args:
            value: int64, one slot per token of `key`; None takes the ids themselves (for simulation).
            prev_prefix_len: leading slots known to be the tree's own.
            swa_evicted_seqlen: leading tokens without window KV; rounded up to whole pages. No effect without a
                window; so have arguments of other kinds of caches.
            from_node: `last_node` of a match of a prefix of this key: the walk starts there, and the slots before it
                are taken to be the tree's own.
            priority: the request's: no node on the key's path has a lower one afterwards.

        Raises:
            InvalidKeyError: `value` is shorter than the key, `from_node` does not lie on its path, or fewer than
                `prev_prefix_len` tokens are in the tree.
            SlotError: the pool refused the old slots of a tombstone, which has healed, or to move a window half to one,
                which has not.
            StaleNodeError: `from_node` is no longer in the tree.
        """
        try:
            return insert_slots(self.parts, key, value, prev_prefix_len, swa_evicted_seqlen, from_node, priority)
        finally:
            if self.parts.window is not None:
                self.parts.window.release_replaced()
