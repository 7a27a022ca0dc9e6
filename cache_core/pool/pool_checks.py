"""`PoolChecks`: the content checks of the KV, window KV and states of a pool of pages."""

from __future__ import annotations

import numpy as np

from raydix.cache_core.pool.content_check import ContentCheck
from raydix.cache_core.pool.kv_pool import KVPool
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.record_pool import RecordPool
from raydix.cache_core.tree.packed_slots import Starts


class PoolChecks:
    """The content checks of a pool in CPU memory: of its KV, window KV and states.

    All free slots are poisoned when the checks begin, and later each slot when it is freed. Slots reserved for padding
    are not poisoned. The caller must report published pages and states.

    Args:
        pool: the tensors; the layout must not have `max_seq_len`.
        allocator: the slots of the pool; its `on_free` is set.
        states: the state slots of the pool, or None; its `on_free` is set.
    """

    def __init__(
        self, pool: KVPool | RecordPool, allocator: TokenToKVPoolAllocator, states: MambaPool | None = None
    ) -> None:
        page = allocator.page_size
        self._allocator = allocator
        self.kv = ContentCheck(pool.checked_tensors("full"), page)
        self.window = ContentCheck(pool.checked_tensors("swa"), page, "window slot")
        self.states = ContentCheck(pool.checked_tensors("state"), 1, "state slot")
        allocator.on_free = self.kv.poison
        self.kv.poison(allocator.free_starts())
        if allocator.swa is not None:
            allocator.swa.on_free = self.window.poison
            self.window.poison(allocator.swa.free_starts())
        if states is not None:
            states.on_free = self.states.poison
            self.states.poison(np.array(states.free_slots()))

    def publish(self, starts: Starts) -> None:
        """Keep checksums of pages in the tree, and of their window halves."""
        self.kv.publish(starts)
        self.window.publish(self._halves(starts))

    def verify(self, starts: Starts) -> None:
        """Raise ContentError if one of these pages in the tree, or its window half, was written after its publish."""
        self.kv.verify(starts)
        self.window.verify(self._halves(starts))

    def _halves(self, starts: Starts) -> Starts:
        halves = self._allocator.swa_starts(starts)
        return halves[halves > 0]
