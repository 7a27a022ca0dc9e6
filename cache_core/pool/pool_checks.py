"""`PoolChecks`: the checks of content of all that a pool of pages holds, as leases free, publish and find it."""

from __future__ import annotations

import numpy as np
import torch

from raydix.cache_core.pool.content_check import ContentCheck
from raydix.cache_core.pool.kv_pool import KVPool
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.tree.packed_slots import Starts


class PoolChecks:
    """Watches the KV, window KV and states of a pool in CPU memory, from now on.

    What the allocators have is poisoned, from the beginning, and what they get back; what is reserved for padding stays
    as it is. What is to be published and verified, they are told of.

    Args:
        pool: its tensors; not by rows.
        allocator: its slots.
        states: its state slots, if it has any.
    """

    def __init__(self, pool: KVPool, allocator: TokenToKVPoolAllocator, states: MambaPool | None = None) -> None:
        page = allocator.page_size
        self._allocator = allocator
        self.kv = ContentCheck(kv_tensors(pool, "full"), page)
        self.window = ContentCheck(kv_tensors(pool, "swa"), page, "window slot")
        self.states = ContentCheck(_state_tensors(pool), 1, "state slot")
        allocator.on_free = self.kv.poison
        self.kv.poison(allocator.free_starts())
        if allocator.swa is not None:
            allocator.swa.on_free = self.window.poison
            self.window.poison(allocator.swa.free_starts())
        if states is not None:
            states.on_free = self.states.poison
            self.states.poison(np.array(states.free_slots()))

    def publish(self, starts: Starts) -> None:
        """These pages are in the tree, with what window halves they have."""
        self.kv.publish(starts)
        self.window.publish(self._halves(starts))

    def verify(self, starts: Starts) -> None:
        """Raise ContentError if somebody has written to one of these pages, or its window half, in the tree."""
        self.kv.verify(starts)
        self.window.verify(self._halves(starts))

    def _halves(self, starts: Starts) -> Starts:
        halves = self._allocator.swa_starts(starts)
        return halves[halves > 0]


def kv_tensors(pool: KVPool, kind: str) -> dict[str, torch.Tensor]:
    """The K and V of each layer of a kind, by name."""
    layers = [layer for layer in range(pool.layout.num_layers) if pool.layout.kind(layer) == kind]
    halves = (("K", pool.k), ("V", pool.v))
    return {f"{name} of layer {layer}": tensors[layer] for layer in layers for name, tensors in halves}


def _state_tensors(pool: KVPool) -> dict[str, torch.Tensor]:
    layers = range(pool.layout.num_layers)
    named = ((f"state tensor {i} of layer {layer}", t) for layer in layers for i, t in enumerate(pool.state(layer)))
    return dict(named)
