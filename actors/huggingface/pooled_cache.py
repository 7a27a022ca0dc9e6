"""The transformers `Cache` of one sequence with its KV and state in a pool.

    model.forward ── update(layer, k, v) ──> write to the slots of the new tokens
                  <── K, V of the sequence ── gathered from the slots of all tokens so far, or of the window's
              update_indexer(layer, key) ───> index keys, written and gathered with K and V
                  ──── conv, recurrent ─────> copied to the lease's row of the states, and read from there

`PooledCache` works on the memory of the pool, so it needs a mapped pool on the model's device. `CopiedCache`, of
`copied_cache`, is for workers that do not map the pool. Both return tensors with the values, shapes and order of the
model's own `DynamicCache`, so the arithmetic is the same to the bit. Each holds one sequence: the batch size is 1.

Cost of a step per layer: a write of the new tokens' rows, and one gather of the sequence (in a sliding-window layer, of
the window) into attention's layout. A `DynamicCache` copies as much in each step, by concatenation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache, DummyLayer

from raydix.actors.huggingface.layer_mapping import ModelLayers, PoolLayers, StateTensor
from raydix.actors.huggingface.pooled_layers import (
    PooledHybridLayer,
    PooledHybridWindowLayer,
    PooledIndexedLayer,
    PooledKV,
    PooledLayer,
    PooledStateLayer,
    StateRows,
    text_positions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class MappedPool(Protocol):
    """The pool of a cache: a `KVPool`, or a mapped `AttachedPool`."""

    @property
    def k(self) -> list[torch.Tensor]:
        """Each layer's K, `[rows, num_kv_heads, head_dim]`, contiguous; empty for layers without KV."""

    @property
    def v(self) -> list[torch.Tensor]:
        """Each layer's V, `[rows, num_kv_heads, v_head_dim]`, contiguous; empty for layers without KV."""

    @property
    def index(self) -> list[torch.Tensor]:
        """Each layer's index keys, `[rows, index_dim]`, contiguous; empty for layers without."""

    def state(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's state tensors, `[rows, *shape]` each, with contiguous rows."""

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """Write the KV of one layer to slots, `[n, num_kv_heads, dim]` each, and its index keys, `[n, index_dim]`."""


class PooledCache(Cache):
    """The KV and state of one sequence, in the slots of its lease.

    The caller must hold the lease while a forward pass may run, with private slots `slots[num_tokens:]`. After an
    insert or a release of the window has changed the slots, it must call `repoint`.

    Args:
        pool: a `KVPool` or mapped `AttachedPool`, on the model's device and with its dtype.
        slots: the slot of each token, int64, including tokens to be computed.
        num_tokens: leading tokens with KV in the pool; the state is the one after them.
        swa_slots: for sliding-window layers, the window slot of each token, int64; 0 if its window KV is gone.
        state_slot: for layers with a state, the row of the state tensors.
        layers: mapping of the model's layers to the pool's. None: one to one, full attention.
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
        self._state_layers = [uses.state for uses in layers.layers if uses.state is not None]
        some_kv = next(uses.kv for uses in layers.layers if uses.kv is not None)
        self._kv = PooledKV(pool.write, pool.k[some_kv].device)
        self._positions: torch.Tensor | None = None
        self.repoint(slots, swa_slots)
        super().__init__(layers=[self._layer(uses, num_tokens) for uses in layers.layers])

    def repoint(self, slots: torch.Tensor, swa_slots: torch.Tensor | None = None) -> None:
        """Replace slots by the tree's, which have equal KV. Do not call it during a forward pass."""
        self._kv.point(slots, swa_slots)

    def copy_state(self, state_slot: int) -> None:
        """Copy the state after the last token to another row of the state tensors. Not during a forward pass."""
        assert self._state_slot is not None, "the model keeps no states"
        for layer in self._state_layers:
            for tensor in self._pool.state(layer):
                tensor[state_slot].copy_(tensor[self._state_slot])

    def _layer(self, uses: PoolLayers, num_tokens: int) -> Any:
        if uses.kv is None:
            if uses.state is None:
                return DummyLayer()  # type: ignore[no-untyped-call]
            return PooledStateLayer(self._rows(uses.state), num_tokens > 0)
        kv = (self._kv, uses.kv, self._pool.k[uses.kv], self._pool.v[uses.kv], num_tokens)
        if (index := self._pool.index[uses.kv]).numel():
            return PooledIndexedLayer(*kv, index, self._positions_of(num_tokens))
        if uses.state is None:
            return PooledLayer(*kv, uses.window)
        rows = self._rows(uses.state)
        return PooledHybridLayer(*kv, rows) if uses.window is None else PooledHybridWindowLayer(*kv, uses.window, rows)

    def _positions_of(self, num_tokens: int) -> torch.Tensor | None:
        """Return the position ids that an indexed layer keeps, of the tokens in the pool; None: there are none."""
        if num_tokens and self._positions is None:
            self._positions = text_positions(num_tokens, self._kv.full.ids.device)
        return self._positions

    def _rows(self, layer: int) -> StateRows:
        """Return views of the lease's row of each state tensor."""
        if self._state_slot is None:
            raise ValueError("a layer with a recurrent state needs a state slot")
        row = slice(self._state_slot, self._state_slot + 1)
        pairs = zip(self._states, self._pool.state(layer), strict=True)
        return [(state, tensor[row].view(state.dtype)) for state, tensor in pairs]
