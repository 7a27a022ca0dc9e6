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

    The cache owns the slots that it adopted until it frees them to the pool: on eviction, on reset, or if the healing
    of a tombstone replaces them. An insert copies keys and values.

    Args:
        page_size: tokens of a page; matches and inserts are floored to whole pages.
        sliding_window_size: tokens that a sliding-window layer attends to; None: full attention only.
        token_to_kv_pool_allocator: the pool. `free(indices)` frees evicted slots, and `free_swa(indices)` the window
            halves of tombstones. If it has `transfer_swa(src, dst)`, locked tombstones can heal, too: `insert` calls it
            halfway, so it must not call the cache. None drops the slots.
        on_node_evict: called with the id of each evicted node, after the node left the tree.
        eviction_policy: the order in which unlocked leaves are evicted: a policy, or its name in
            `eviction.policy.POLICIES`.

    Raises:
        ValueError: a window is given with a pool that lacks `free_swa`, a size is out of range, or the policy is
            unknown.
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
        """Insert the KV in `value` under `key`, in whole pages.

        The tree adopts the slots in [prefix_len, aligned length). It frees no incoming slot. The caller must free
        `duplicate_indices`: the slots in [prev_prefix_len, prefix_len) that the tree does not have. The caller also
        keeps the slots beyond the last whole page.

        Tombstones heal where the incoming slots have window KV. An unlocked tombstone adopts the incoming slots; its
        old ones are freed at the end. A locked one adopts only their window half.

        Args:
            value: int64, one slot per token of `key`; None uses the ids as slots, for simulation.
            prev_prefix_len: leading slots that the caller knows to be the tree's.
            swa_evicted_seqlen: leading tokens without window KV; rounded up to whole pages. Ignored without a window,
                as are arguments of other kinds of caches.
            from_node: `last_node` of a match of a prefix of this key. The walk starts there; the slots before it must
                be the tree's.
            priority: of the request; raises the priority of every node on the key's path to at least this.

        Raises:
            InvalidKeyError: `value` is shorter than the key, `from_node` does not lie on its path, or the tree has
                fewer than `prev_prefix_len` of the tokens.
            SlotError: the pool refused the old slots of a tombstone, which has healed, or refused to move a window half
                to a tombstone, which has not healed.
            StaleNodeError: `from_node` is no longer in the tree.
        """
        try:
            return insert_slots(self.parts, key, value, prev_prefix_len, swa_evicted_seqlen, from_node, priority)
        finally:
            if self.parts.components:
                self.end_insert()
