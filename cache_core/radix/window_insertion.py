"""`WindowTreeCache`: a `TreeCache` that may keep sliding-window KV beside the full one.

Layers that attend to the last `sliding_window_size` tokens only have KV of their own, for which a node is live or a
tombstone: `swa_component` has the rules, with pictures. Without a window it is a `TreeCache` and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from raydix.cache_core.components.component import Component
from raydix.cache_core.components.window_kv import WindowKV, WindowReceipt
from raydix.cache_core.errors import LockError
from raydix.cache_core.eviction.policy import EvictionPolicy
from raydix.cache_core.kernels import Victims
from raydix.cache_core.pool.release import release_victims, taking_pages
from raydix.cache_core.radix.insertion import Take
from raydix.cache_core.radix.tree_cache import SlotPool, TreeCache
from raydix.cache_core.tree.packed_slots import Row, expand_slots, meet
from raydix.cache_core.tree.tree_node import TreeNode


class WindowTreeCache(TreeCache):
    """What `RadixCache` and `MambaRadixCache` share."""

    def __init__(
        self,
        page_size: int,
        sliding_window_size: int | None,
        token_to_kv_pool_allocator: SlotPool | None,
        on_node_evict: Callable[[int], None] | None,
        aux: Sequence[Component],
        eviction_policy: str | EvictionPolicy,
        node_type: type[TreeNode] = TreeNode,
    ) -> None:
        page_size = index(page_size)
        if sliding_window_size is not None and (sliding_window_size := index(sliding_window_size)) < 1:
            raise ValueError(f"sliding_window_size must be at least 1, not {sliding_window_size}")
        pool: Any = token_to_kv_pool_allocator
        if sliding_window_size is not None and pool is not None and not hasattr(pool, "free_swa"):
            raise ValueError("a cache with a sliding window needs a pool with free_swa(indices)")
        self.sliding_window_size = sliding_window_size
        self._swa: WindowKV | None = None
        if sliding_window_size is not None and page_size >= 1:
            free_swa = getattr(pool, "free_swa", None)
            self._swa = WindowKV(sliding_window_size, page_size, free_swa, taking_pages(pool, "free_swa"))
        parts = aux if self._swa is None else [self._swa, *aux]
        super().__init__(page_size, pool, on_node_evict, parts, eviction_policy, node_type)
        self._transfer_swa = getattr(pool, "transfer_swa", None)

    @property
    def supports_swa(self) -> bool:
        """Whether a sliding window is kept."""
        return self._swa is not None

    # ---------------------------------------------------------------- insert

    def _absorb(self, path: list[TreeNode], fresh_from: int, incoming: Any, take: Take) -> list[TreeNode]:
        if self._swa is None:
            return path
        healed: list[TreeNode] = []
        for node in path:
            start = max(node.end - len(node), fresh_from)
            if node.swa_tombstone and start < node.end:
                if start > node.end - len(node):
                    healed.append(self._split(node, start))
                self._heal(node, take(incoming, self.page_size, start, node.end))
            healed.append(node)
        return healed

    def _heal(self, node: TreeNode, fresh: Row) -> None:
        """Give a tombstone the window KV of incoming slots: with the slots, or alone where a lock keeps its own. If
        the pool refuses to move that, it stays a tombstone, and the next eviction tells."""
        num_tokens, held = len(node), node.slots
        assert self._swa is not None and held is not None
        if meet(fresh, held, num_tokens):
            return  # the tree's own slots bring nothing fresh
        if not node.lock_ref:
            if self._replaced is None:
                self._replaced = Victims()
            self._replaced.add(node, held, num_tokens)
            node.slots = fresh
        elif self._transfer_swa is not None:
            incoming, own = expand_slots(fresh, num_tokens), expand_slots(held, num_tokens)
            if not self._swa.refused.moved(self._transfer_swa, incoming, own):
                return
        elif self.pool is not None:
            return
        self._swa.heal(node)

    def _give_back_replaced(self) -> None:
        """Hand what tombstones had to the pool, in one call. That somebody else has freed it is no reason for the
        insert to fail: its caller would free incoming slots that the tree has by then. The next eviction tells."""
        replaced, self._replaced = self._replaced, None
        assert self._swa is not None and replaced is not None
        if self.pool is not None:
            with self._swa.refused:
                release_victims(replaced, self.pool.free, self._free_pages, self.page_size)

    def _cuts(self, start: int, stop: int, fresh_from: int) -> Sequence[tuple[int, int, bool]]:
        """A tombstone for what comes without window KV, then the rest; its tail is one window, so that a lock pins no
        more."""
        if self._swa is None or (fresh_from <= start and stop - start <= self._swa.padded_window):
            return super()._cuts(start, stop, fresh_from)
        edge = min(max(start, fresh_from), stop)
        tail = max(edge, stop - self._swa.padded_window)
        spans = [(start, edge, False), (edge, tail, True), (tail, stop, True)]
        return [span for span in spans if span[0] < span[1]]

    # ---------------------------------------------------------------- locks

    def _check_receipt(self, node: TreeNode, receipt: Any) -> None:
        if self._swa is None:
            super()._check_receipt(node, receipt)
        elif not isinstance(receipt, WindowReceipt) or receipt.used or receipt.node is not node:
            raise LockError("an unlock needs the receipt of this very lock, once")

    def release_window(self, node: TreeNode, receipt: WindowReceipt) -> None:
        """Give up the window of a lock early, as decoding has left it behind; the full KV stays locked. Idempotent.

        Raises:
            StaleNodeError: the node is no longer in the tree.
            LockError: the receipt is used, another lock's, or none.
        """
        if self._swa is None or node is self.root:
            return
        self._check_in_tree(node)
        if not isinstance(receipt, WindowReceipt) or receipt.used or receipt.node is not node:
            raise LockError("a window is given up with the receipt of its own lock, before that is given back")
        self._swa.release(node, receipt)

    def window_start(self, receipt: WindowReceipt | None) -> int | None:
        """Return the first token of the window that the lock of this receipt holds; None if it holds no window."""
        return None if receipt is None or receipt.released else receipt.start

    # ---------------------------------------------------------------- sizes

    def swa_evictable_size(self) -> int:
        """Tokens with live window KV that no window lock holds. O(1)."""
        return 0 if self._swa is None else self._swa.evictable

    def swa_protected_size(self) -> int:
        """Tokens with live window KV that a window lock holds. O(1)."""
        return 0 if self._swa is None else self._swa.protected
