"""`MambaRadixCache`: prefixes to KV slots and recurrent states, for models that mix attention with Mamba-like layers.

The attention layers may be full, windowed or both. States have slots, locks and an eviction order apart from KV:
`components.recurrent_state` has the rules, with a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm
from operator import index
from typing import Any, cast

import torch

from raydix.cache_core.base_prefix_cache import InsertResult
from raydix.cache_core.components.lru_list import LRUList
from raydix.cache_core.components.mamba_tree_node import MambaTreeNode
from raydix.cache_core.components.recurrent_state import RecurrentState, StateSlots
from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.pool.release import SlotPool
from raydix.cache_core.radix.insertion import insert_slots
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.radix_key import RadixKey, check_key
from raydix.cache_core.tree.tree_node import TreeNode, uses_in


class MambaRadixCache(PrefixCache):
    """The prefix cache for hybrid models.

    The cache owns the KV slots and the state slots that it adopted, until it frees them.

    Args:
        page_size: tokens of a page; matches and inserts are floored to whole pages.
        token_to_kv_pool_allocator: frees evicted KV slots by `free(indices)`; None drops them.
        mamba_pool: frees evicted state slots by `free_track_slot(slot)`; None drops them.
        on_node_evict: called with the id of each evicted node, after the node left the tree.
        chunk_size: tokens of the model's state chunks. `mamba_branching_seqlen` is a multiple of it and of `page_size`.
        sliding_window_size: tokens that a sliding-window layer attends to; None without such layers.
        eviction_policy: the order in which unlocked leaves are evicted, as for `RadixCache`. States that are evicted
            alone go in the order of last use.
    """

    def __init__(
        self,
        page_size: int = 1,
        token_to_kv_pool_allocator: SlotPool | None = None,
        mamba_pool: StateSlots | None = None,
        on_node_evict: Callable[[int], None] | None = None,
        *,
        chunk_size: int = 1,
        sliding_window_size: int | None = None,
        eviction_policy: str | EvictionPolicy = "lru",
    ) -> None:
        chunk_size = index(chunk_size)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, not {chunk_size}")
        self.mamba_pool = mamba_pool
        self._states = RecurrentState(mamba_pool)
        super().__init__(
            page_size,
            sliding_window_size,
            token_to_kv_pool_allocator,
            on_node_evict,
            eviction_policy,
            self._states,
            MambaTreeNode,
            lcm(index(page_size), chunk_size),
        )

    @property
    def mamba_lru(self) -> LRUList:
        """The nodes with a state, ordered by the last use of the state. O(n log n).

        Each read makes a new list. It links the nodes themselves, so it is valid until the next list is made.
        """
        view = LRUList(mamba=True)
        holders = (node for node in self._state_nodes() if node.mamba_value is not None)
        for node in sorted(holders, key=lambda node: (node.mamba_access_time, node.id)):
            view.insert_mru(node)
        return view

    @property
    def full_lru(self) -> LRUList:
        """The nodes, ordered by last use: a new list, valid until the next one is made. O(n log n)."""
        view = LRUList()
        uses = {node: use for top in self.parts.tops() for node, use in uses_in(top).items()}
        for node in sorted(self._state_nodes(), key=lambda node: (uses[node].last_access_time, node.end)):
            view.insert_mru(node)
        return view

    def _state_nodes(self) -> Iterator[MambaTreeNode]:
        return (cast(MambaTreeNode, node) for node in self.parts.nodes())

    def insert(
        self,
        key: RadixKey,
        value: torch.Tensor | None = None,
        *,
        mamba_value: int | None = None,
        prev_prefix_len: int = 0,
        swa_evicted_seqlen: int = 0,
        from_node: TreeNode | None = None,
        priority: int = 0,
        **kwargs: Any,
    ) -> InsertResult:
        """Insert the KV in `value`, and the state in slot `mamba_value`, under `key`.

        KV slots and the other arguments are as in `RadixCache.insert`. The state must be the one after the key's last
        token. The tree adopts it unless the last node has one: then `mamba_exist` is True, and the caller must free the
        slot.

        Raises:
            InvalidKeyError: a state is given, and the key is not whole pages; or as `RadixCache.insert`.
            SlotError: the pool has not allocated `mamba_value`, or the tree has it already.
            StaleNodeError: `from_node` is no longer in the tree.
        """
        if mamba_value is not None:
            mamba_value = self._state_for(key, mamba_value)
        try:
            done = insert_slots(self.parts, key, value, prev_prefix_len, swa_evicted_seqlen, from_node, priority)
            if len(key) >= self.page_size:
                done.mamba_exist = self._attach(done.last_node, mamba_value)
            return done
        finally:
            self.end_insert()

    def _state_for(self, key: RadixKey, mamba_value: int) -> int:
        """Return the slot of the state after the last token of `key`; raise if the tree cannot adopt it."""
        check_key(key)
        if not len(key) or len(key) % self.page_size:
            raise InvalidKeyError(f"with a state, key must be whole pages of {self.page_size}, not {len(key)} tokens")
        return self._states.checked(mamba_value)

    def state_at(self, node: TreeNode) -> int | None:
        """Return the slot of the state at a node; None if the node has none."""
        return cast(MambaTreeNode, node).mamba_value

    def state_slots(self) -> list[int]:
        """Return the slots of all states in the cache, for checks. O(n)."""
        return [node.mamba_value for node in self._state_nodes() if node.mamba_value is not None]

    def attach_state(self, node: TreeNode, mamba_value: int | None) -> bool:
        """Give a node the state in a slot, unless the slot is None or the node has a state; return whether it had one.

        Raises:
            InvalidKeyError: a state is given for the root.
            SlotError: the pool has not allocated `mamba_value`, or the tree has it already.
            StaleNodeError: the node is not in the tree.
        """
        if node is not self.root:
            self.parts.check_in_tree(node)
        elif mamba_value is not None:
            raise InvalidKeyError("node must be below the root: a state follows a token, and the root has none")
        if mamba_value is not None:
            if cast(MambaTreeNode, node).mamba_value is None:
                mamba_value = self._states.checked(mamba_value)
        exists = self._attach(node, mamba_value)
        if self.parts.events is not None:
            self.parts.events.flush()
        return exists

    def _attach(self, node: TreeNode, slot: int | None) -> bool:
        """Do `attach_state` without its checks."""
        exists = cast(MambaTreeNode, node).mamba_value is not None
        if slot is not None and not exists:
            self.parts.clock += 1
            self._states.attach(node, slot, self.parts.clock)
        return exists

    def mamba_evictable_size(self) -> int:
        """Return the number of unlocked states. O(1)."""
        return self._states.evictable

    def mamba_protected_size(self) -> int:
        """Return the number of locked states. O(1)."""
        return self._states.protected
