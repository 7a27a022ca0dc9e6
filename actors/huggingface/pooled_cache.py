"""The transformers `Cache` of one sequence whose KV and state lie in a pool.

    model.forward ── update(layer, k, v) ──> write into the slots of the new tokens
                  <── K, V of the sequence ── gathered from the slots of all tokens so far, or of the window's
                  ──── conv, recurrent ─────> copied into the lease's own row of the states, and read from there

`PooledCache` works on the pool's memory itself, and so needs a mapped pool on the model's device; `CopiedCache`, of
`pooled_copy`, is for workers that cannot or will not map. Either gives the model tensors with the values, shapes and
order that its own `DynamicCache` would give, so the arithmetic is the same to the bit. One sequence each: the batch
size is 1.

Cost of a step per layer: the rows of the new tokens written, and one gather of the sequence (a sliding-window layer: of
the window), straight into attention's layout. A `DynamicCache` copies as much once a step, by concatenation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache, DummyLayer

from raydix.actors.huggingface.layer_mapping import ModelLayers, PoolLayers, StateTensor
from raydix.actors.huggingface.pooled_layers import (
    PooledHybridLayer,
    PooledHybridWindowLayer,
    PooledKV,
    PooledLayer,
    PooledStateLayer,
    StateRows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class MappedPool(Protocol):
    """What is needed of a pool: a `KVPool`, or an `AttachedPool` that is mapped."""

    @property
    def k(self) -> list[torch.Tensor]:
        """Each layer's K, `[rows, num_kv_heads, head_dim]`, contiguous; empty where there is none."""

    @property
    def v(self) -> list[torch.Tensor]:
        """Each layer's V, likewise."""

    def state(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's state tensors, `[rows, *shape]` each; each row is contiguous."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write KV of one layer into slots, `[n, num_kv_heads, dim]` each."""


class PooledCache(Cache):
    """The KV and state of one sequence, in the slots of its lease.

    The caller answers for the slots: it holds the lease, privately for `slots[num_tokens:]`, as long as a forward pass
    may run, and calls `repoint` when an insert or a release of the window has changed them.

    Args:
        pool: a `KVPool` or mapped `AttachedPool`, on the model's device and of its dtype.
        slots: the slot of each token, int64, those to be computed included.
        num_tokens: leading tokens whose KV is in the pool already; the state is the one after them.
        swa_slots: the window slot of each token, likewise, 0 where its KV is gone; for sliding-window layers.
        state_slot: the row of the state tensors; for layers with a state.
        layers: which of the pool's layers the model's layers use. None: one each, of full attention.
        states: the tensors of a layer's state.
    """

    def __init__(
        self,
        pool: MappedPool,
        slots: torch.Tensor,
        num_tokens: int,
        *,
        swa_slots: torch.Tensor | None = None,
        state_slot: int | None = None,
        layers: ModelLayers | None = None,
        states: Sequence[StateTensor] = (),
    ) -> None:
        self._pool = pool
        self._state_slot = state_slot
        self._states = states
        layers = layers or ModelLayers.full(len(pool.k))
        some_kv = next(uses.kv for uses in layers.layers if uses.kv is not None)
        self._kv = PooledKV(pool.write, pool.k[some_kv].device)
        self.repoint(slots, swa_slots)
        super().__init__(layers=[self._layer(uses, num_tokens) for uses in layers.layers])

    def repoint(self, slots: torch.Tensor, swa_slots: torch.Tensor | None = None) -> None:
        """Go on with other slots, of equal KV: those that the tree had already. Never during a forward pass."""
        self._kv.point(slots, swa_slots)

    def _layer(self, uses: PoolLayers, num_tokens: int) -> Any:
        if uses.kv is None:
            if uses.state is None:
                return DummyLayer()  # type: ignore[no-untyped-call]
            return PooledStateLayer(self._rows(uses.state), num_tokens > 0)
        kv = (self._kv, uses.kv, self._pool.k[uses.kv], self._pool.v[uses.kv], num_tokens)
        if uses.state is None:
            return PooledLayer(*kv, uses.window)
        rows = self._rows(uses.state)
        return PooledHybridLayer(*kv, rows) if uses.window is None else PooledHybridWindowLayer(*kv, uses.window, rows)

    def _rows(self, layer: int) -> StateRows:
        """Return views of the lease's own row of each state tensor."""
        if self._state_slot is None:
            raise ValueError("a layer with a recurrent state needs a state slot")
        row = slice(self._state_slot, self._state_slot + 1)
        pairs = zip(self._states, self._pool.state(layer), strict=True)
        return [(state, tensor[row].view(state.dtype)) for state, tensor in pairs]
