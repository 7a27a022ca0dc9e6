"""`RadixCache`: prefixes of token ids to KV slots, for full attention and for sliding windows.

Layers that attend to the last `sliding_window_size` tokens only have KV of their own, for which a node is live or a
tombstone: `swa_component` has the rules, with pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from raydix.cache_core.base_prefix_cache import EvictResult, InsertResult
from raydix.cache_core.errors import LockError, StaleNodeError
from raydix.cache_core.full_component import Victims
from raydix.cache_core.radix_key import RadixKey
from raydix.cache_core.radix_tree import Query
from raydix.cache_core.slot_rows import Slots, as_slots, compact_slots, expand_slots, join_rows
from raydix.cache_core.swa_component import SwaComponent, WindowReceipt
from raydix.cache_core.tree_cache import SlotPool, Take, TreeCache
from raydix.cache_core.tree_node import TreeNode


class RadixCache(TreeCache):
    """The prefix cache for full attention, and for models with sliding-window layers.

    The cache owns the slots it adopted, from the insert until it frees them to the pool (evicted, reset, or replaced
    when a tombstone heals). Keys and values are copied on insert.

    Args:
        page_size: tokens a page; matches and inserts are floored to whole pages.
        sliding_window_size: tokens that a sliding-window layer attends to; None: full attention alone.
        token_to_kv_pool_allocator: gets evicted slots back by `free(indices)`, and the window halves of tombstones by
            `free_swa(indices)`. If it has `transfer_swa(src, dst)`, tombstones heal under a lock, too. None drops them.
        on_node_evict: called with the id of each evicted node, after it left the tree.

    Raises:
        ValueError: a window is given with a pool that lacks `free_swa`, or a size is out of range.
    """

    def __init__(
        self,
        page_size: int = 1,
        sliding_window_size: int | None = None,
        token_to_kv_pool_allocator: SlotPool | None = None,
        on_node_evict: Callable[[int], None] | None = None,
    ) -> None:
        if sliding_window_size is not None and sliding_window_size < 1:
            raise ValueError(f"sliding_window_size must be at least 1, not {sliding_window_size}")
        pool: Any = token_to_kv_pool_allocator
        if sliding_window_size is not None and pool is not None and not hasattr(pool, "free_swa"):
            raise ValueError("a cache with a sliding window needs a pool with free_swa(indices)")
        self.sliding_window_size = sliding_window_size
        self._swa = None if sliding_window_size is None else SwaComponent(sliding_window_size, page_size)
        super().__init__(page_size, pool, on_node_evict, [] if self._swa is None else [self._swa])
        self._transfer_swa = getattr(pool, "transfer_swa", None)

    @property
    def supports_swa(self) -> bool:
        """Whether a sliding window is kept."""
        return self._swa is not None

    # ---------------------------------------------------------------- insert

    def insert(
        self,
        key: RadixKey,
        value: torch.Tensor | None = None,
        *,
        prev_prefix_len: int = 0,
        swa_evicted_seqlen: int = 0,
        from_node: TreeNode | None = None,
        **kwargs: Any,
    ) -> InsertResult:
        """Make the KV in `value` findable under `key`, whole pages of it.

        The tree adopts (and copies) the slots in [prefix_len, aligned length). It frees none: of those in
        [prev_prefix_len, prefix_len), `duplicate_indices` names the ones it does not hold, the caller's to free. The
        tail beyond the last whole page stays the caller's, too. Tombstones over tokens that come with window KV heal:
        an unlocked one takes the incoming slots over and frees its own, a locked one takes their window half only.

        Args:
            value: int64, one slot per token of `key`; None takes the ids themselves (for simulation).
            prev_prefix_len: leading slots known to be the tree's own.
            swa_evicted_seqlen: leading tokens whose window KV is gone; rounded up to whole pages. No effect without a
                window; so have arguments of other kinds of caches.
            from_node: `last_node` of a match of a prefix of this key: the walk starts there, and the slots before it
                are taken to be the tree's own.

        Raises:
            InvalidKeyError: `value` is shorter than the key, `from_node` does not lie on its path, or fewer than
                `prev_prefix_len` tokens are in the tree.
            StaleNodeError: `from_node` is no longer in the tree.
        """
        aligned = len(key) - len(key) % self.page_size
        slots = as_slots(key, value, aligned)
        if not aligned:
            self._resume_node(key, from_node)
            return InsertResult(0, self.root)

        def take(start: int, stop: int) -> Slots:
            return compact_slots(slots[start:stop], self.page_size)

        done = self._insert(key, from_node, take, prev_prefix_len, self._aligned(swa_evicted_seqlen))
        duplicates = self._duplicates(slots, max(prev_prefix_len, done.resumed_at), done)
        return InsertResult(done.prefix_len, done.last_node, False, duplicates)

    def _absorb(self, path: list[TreeNode], fresh_from: int, take: Take) -> list[TreeNode]:
        if self._swa is None:
            return path
        healed: list[TreeNode] = []
        for node in path:
            start = max(node.end - len(node), fresh_from)
            if node.swa_tombstone and start < node.end:
                if start > node.end - len(node):
                    healed.append(self._split(node, start - (node.end - len(node))))
                self._heal(node, take(start, node.end))
            healed.append(node)
        return healed

    def _heal(self, node: TreeNode, fresh: Slots) -> None:
        """Give a tombstone the window KV of incoming slots: with the slots, or alone where a lock keeps its own."""
        assert self._swa is not None and node.slots is not None
        old, size = node.slots, len(node)
        if np.isin(expand_slots(fresh, size), expand_slots(old, size)).any():
            return  # the tree's own slots bring nothing fresh
        if not node.lock_ref:
            node.slots = fresh
            self._give_back_slots(old, len(node))
        elif self._transfer_swa is not None:
            size = len(node)
            self._transfer_swa(torch.from_numpy(expand_slots(fresh, size)), torch.from_numpy(expand_slots(old, size)))
        elif self.pool is not None:
            return
        self._swa.heal(node)

    def _cuts(self, start: int, stop: int, fresh_from: int) -> list[tuple[int, int, bool]]:
        """A tombstone for what comes without window KV, then the rest; its tail is one window, so that a lock pins no
        more."""
        if self._swa is None or start >= stop:
            return super()._cuts(start, stop, fresh_from)
        edge = min(max(start, fresh_from), stop)
        tail = max(edge, stop - self._swa.padded_window)
        spans = [(start, edge, False), (edge, tail, True), (tail, stop, True)]
        return [span for span in spans if span[0] < span[1]]

    def _adopt(self, parent: TreeNode, query: Query, start: int, stop: int, slots: Slots, live: bool) -> TreeNode:
        leaf = super()._adopt(parent, query, start, stop, slots, live)
        if self._swa is not None:
            self._swa.add(leaf, live)
        return leaf

    # ---------------------------------------------------------------- locks

    def inc_lock_ref(self, node: TreeNode) -> WindowReceipt | None:
        """Keep `node` and its ancestors from eviction, and the window KV of the last window up to it.

        O(depth in nodes). With a sliding window, returns a receipt that `dec_lock_ref` takes back once.

        Raises:
            StaleNodeError: the node is no longer in the tree.
        """
        if self._swa is None:
            super().inc_lock_ref(node)
            return None
        if node is not self.root:
            self._check_live(node)
            self._full.lock(node)
        return self._swa.lock(node)

    def dec_lock_ref(self, node: TreeNode, receipt: Any = None, *, swa_boundary_id: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`; once unlocked, a leaf may be evicted. O(depth in nodes).

        Args:
            receipt: what `inc_lock_ref` returned, also accepted as `swa_boundary_id`; None without a window.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the node is not locked, or the receipt is missing, used, or another lock's.
        """
        receipt = swa_boundary_id if receipt is None else receipt
        if self._swa is None:
            super().dec_lock_ref(node, receipt, **kwargs)
            return
        if not isinstance(receipt, WindowReceipt) or receipt.used or receipt.node is not node:
            raise LockError("an unlock needs the receipt of this very lock, once")
        if node is not self.root:
            self._check_locked(node)
            self._swa.unlock(node, receipt)
            self._full.unlock(node)
        receipt.used = True

    def release_window(self, node: TreeNode, receipt: WindowReceipt) -> None:
        """Give up the window of a lock early, as decoding has left it behind; the full KV stays locked. Idempotent.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the receipt is used, or another lock's.
        """
        if self._swa is None or node is self.root:
            return
        if node.slots is None:
            raise StaleNodeError(f"{node} is no longer in the tree")
        if receipt.used or receipt.node is not node:
            raise LockError("a window is given up with the receipt of its own lock, before that is given back")
        self._swa.unlock(node, receipt)

    # ---------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, swa_num_tokens: int = 0) -> EvictResult:
        """Free at least `num_tokens` slots, then the window KV of at least `swa_num_tokens` tokens in all.

        Whole unlocked leaves go first, least recently used first; a parent becomes a candidate when its last child has
        gone. What window KV is then still wanted is taken from the nodes that were longest in no match's window: they
        become tombstones, or, as unlocked leaves, go whole. O(log n) per victim.
        """
        if self._swa is None:
            return super().evict(num_tokens)
        before = self._swa.evictable
        victims = self._full.evict(num_tokens)
        tombstones = Victims()
        while before - self._swa.evictable < swa_num_tokens and (node := self._swa.pop_victim()) is not None:
            if node.children or node.lock_ref:
                self._swa.make_tombstone(node)
                tombstones.add(node, node.slots)
            else:
                self._full.take_out(node, victims)
        swa_evicted = before - self._swa.evictable
        if tombstones.rows and self.pool is not None:
            free_swa = cast(Any, self.pool).free_swa
            free_swa(torch.from_numpy(join_rows(tombstones.token_rows())))
        self._give_back(victims)
        return EvictResult(victims.num_tokens, swa_evicted)

    def swa_evictable_size(self) -> int:
        """Tokens with live window KV that no window lock holds. O(1)."""
        return 0 if self._swa is None else self._swa.evictable

    def swa_protected_size(self) -> int:
        """Tokens with live window KV that a window lock holds. O(1)."""
        return 0 if self._swa is None else self._swa.protected
