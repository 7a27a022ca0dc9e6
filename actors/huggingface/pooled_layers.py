"""The layers of a `PooledCache`: KV in slots, of all tokens or of a window, index keys, a state, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from raydix.actors.huggingface.layer_mapping import StateTensor

StateRows = Sequence[tuple[StateTensor, torch.Tensor]]
"""The rows of a sequence in the tensors of a layer's state, `[1, *shape]` each, in the state's own dtype."""


_POSITION_DIMS = 3  # time, height and width


class PooledSlots:
    """The slots of one sequence, and the row of each head in a layer viewed as rows of `[dim]`."""

    def __init__(self, slots: torch.Tensor, device: torch.device, live_from: int = 0) -> None:
        self.live_from = live_from  # first token with KV
        self.ids = slots.to(device)  # [capacity]
        self._rows: dict[int, torch.Tensor] = {}  # num_kv_heads -> rows, `[num_kv_heads, capacity]`
        # The last call of `rows` and its result: most layers of a step ask for the same.
        self._latest: tuple[tuple[int, int, int], torch.Tensor] | None = None

    def rows(self, num_kv_heads: int, first: int, stop: int) -> torch.Tensor:
        """Return the row of each head of the slots of tokens [first, stop), in a layer of so many heads; head by head.

        The layers of a step share them.
        """
        wanted = num_kv_heads, first, stop
        if self._latest is None or self._latest[0] != wanted:
            rows = self._rows.get(num_kv_heads)
            if rows is None:
                heads = torch.arange(num_kv_heads, device=self.ids.device)
                rows = self._rows[num_kv_heads] = self.ids * num_kv_heads + heads[:, None]
            self._latest = wanted, rows[:, first:stop].reshape(-1)
        return self._latest[1]


class PooledKV:
    """The slots of one sequence in its layers: one array for all full layers, one for all window layers."""

    full: PooledSlots
    window: PooledSlots | None

    def __init__(self, write: Callable[..., None], device: torch.device) -> None:
        self.write = write  # layer, slots, k, v, index
        self._device = device

    def point(self, slots: torch.Tensor, swa_slots: torch.Tensor | None) -> None:
        """Replace the slots."""
        self.full = PooledSlots(slots, self._device)
        self.window = None
        if swa_slots is not None:
            gone = (swa_slots == 0).nonzero()
            live_from = int(gone[-1]) + 1 if len(gone) else 0
            self.window = PooledSlots(swa_slots, self._device, live_from)


def _refuse_reset(layer: Any) -> NoReturn:
    """Raise NotImplementedError: the slots belong to a lease, and other requests may share the prefix."""
    raise NotImplementedError("the slots of a pooled cache belong to a lease: make a new cache instead")


def _refuse_reorder(layer: Any, beam_idx: torch.Tensor) -> NoReturn:
    """Raise NotImplementedError: the cache holds one sequence."""
    raise NotImplementedError("a pooled cache holds one sequence: beam search needs one cache per beam")


class PooledLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Attention over all tokens so far, or over a sliding window of them.

    Args:
        kv: the slots of the sequence, and the function that writes KV to them.
        layer: the layer's index in the pool.
        k: keys of the layer, `[slots, num_kv_heads, dim]`.
        v: values of the layer, of the same shape.
        num_tokens: leading tokens with KV in the pool.
        window: a new token attends to the last `window - 1` tokens and itself; None: to all tokens.
    """

    reset = _refuse_reset
    reorder_cache = _refuse_reorder

    def __init__(
        self, kv: PooledKV, layer: int, k: torch.Tensor, v: torch.Tensor, num_tokens: int, window: int | None = None
    ) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self._place_kv(kv, layer, k, v, num_tokens, window)

    def _place_kv(
        self, kv: PooledKV, layer: int, k: torch.Tensor, v: torch.Tensor, num_tokens: int, window: int | None
    ) -> None:
        self._kv = kv
        self._layer = layer
        self._k, self._v = k, v
        self._num_tokens = num_tokens
        self._window = window
        self.is_sliding = window is not None
        self.is_initialized = True

    @property
    def _slots(self) -> PooledSlots:
        if self._window is None:
            return self._kv.full
        if self._kv.window is None:
            raise ValueError("a sliding-window layer needs window slots")
        return self._kv.window

    @property
    def _first(self) -> int:
        """The first token that the next ones attend to."""
        return 0 if self._window is None else max(0, self._num_tokens - self._window + 1)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the pool exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of new tokens, `[1, num_kv_heads, n, dim]` each; return the KV that they attend to, in order.

        Raises:
            ValueError: the batch is larger than 1, there are more tokens than slots, or the KV of an attended token is
                gone. Nothing was written.
        """
        batch_size, _, num_new, _ = key_states.shape
        slots, first, start = self._slots, self._first, self._num_tokens
        stop = self._checked_stop(slots, first, batch_size, num_new)
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self._kv.write(self._layer, slots.ids[start:stop], k, v)
        self._num_tokens = stop
        rows = slots.rows(self._k.shape[1], first, stop)
        return _gather(self._k, rows), _gather(self._v, rows)

    def _checked_stop(self, slots: PooledSlots, first: int, batch_size: int, num_new: int) -> int:
        """Return the number of tokens after an update, which must fit the slots."""
        stop = self._num_tokens + num_new
        if batch_size != 1 or stop > len(slots.ids):
            raise ValueError(f"{batch_size} sequences, {stop} tokens: there are slots for 1, {len(slots.ids)}")
        if first < slots.live_from:
            raise ValueError(f"token {first} is attended to, but the KV of those before {slots.live_from} is gone")
        return stop

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self._num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the KV that `query_length` new tokens attend to."""
        first = self._first
        return self._num_tokens + query_length - first, first

    def get_max_length(self) -> int:
        """Return -1: the lease sets the capacity."""
        return -1


class PooledIndexedLayer(PooledLayer):  # type: ignore[no-untyped-call]
    """Attention over chosen tokens, which an indexer finds by a key of each token.

        update(K, V)         ─┐
        update_indexer(keys) ─┴─> the second of the two calls writes K, V and keys together, whichever comes first

    Each call returns the rows of all tokens, the new ones included.

    Args:
        index: index keys of the layer, `[slots, index_dim]`; others as for `PooledLayer`.
        positions: the position ids of the tokens in the pool, `[3, 1, num_tokens]`, which the first indexed layer of
            some models keeps; None: there are no tokens.
    """

    def __init__(
        self,
        kv: PooledKV,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        num_tokens: int,
        index: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> None:
        super().__init__(kv, layer, k, v, num_tokens)
        self._index = index
        self._new_kv: tuple[torch.Tensor, torch.Tensor] | None = None  # `[n, num_kv_heads, dim]` each
        self._new_keys: torch.Tensor | None = None  # `[n, index_dim]`
        self.indexer_position_ids = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the KV of new tokens, `[1, num_kv_heads, n, dim]` each; return the KV of all tokens, in order.

        Raises:
            ValueError: the batch is larger than 1, there are more tokens than slots, or the tokens before have no index
                keys. Nothing was written.
        """
        if self._new_kv is not None:
            raise ValueError(
                f"layer {self._layer} of the pool has index keys, but the model kept none of the last tokens"
            )
        batch_size, _, num_new, _ = key_states.shape
        slots, start = self._slots, self._num_tokens
        stop = self._checked_stop(slots, 0, batch_size, num_new)
        rows = slots.rows(self._k.shape[1], 0, stop)
        k, v = _gather(self._k, rows), _gather(self._v, rows)
        k[:, :, start:], v[:, :, start:] = key_states, value_states
        self._new_kv = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self._num_tokens = stop
        self._write_new()
        return k, v

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Take the index keys of new tokens, `[1, n, dim]`; return the keys of all tokens, in order, in their dtype.

        Raises:
            ValueError: the batch is larger than 1, or there are more tokens than slots. Nothing was written.
        """
        batch_size, num_new, _ = indexer_key_states.shape
        slots, stop = self._slots, self._num_tokens
        if self._new_kv is None:
            stop = self._checked_stop(slots, 0, batch_size, num_new)
        self._new_keys = indexer_key_states[0].contiguous().view(self._index.dtype)
        keys = self._index.index_select(0, slots.ids[:stop])
        keys[stop - num_new :] = self._new_keys
        self._write_new()
        return keys.view(indexer_key_states.dtype).unsqueeze(0)

    def _write_new(self) -> None:
        """Write the new rows of all arrays of the layer, if all have come."""
        if self._new_kv is None or self._new_keys is None:
            return
        k, v = self._new_kv
        ids = self._slots.ids[self._num_tokens - len(k) : self._num_tokens]
        self._kv.write(self._layer, ids, k, v, self._new_keys)
        self._new_kv = self._new_keys = None


class PooledStateLayer(LinearAttentionLayer):
    """A recurrent state, in rows that the model updates in place.

    Args:
        rows: the lease's row of each state tensor.
        has_state: whether the rows hold the state after some tokens; else the sequence is empty.
    """

    reset = _refuse_reset
    reorder_cache = _refuse_reorder

    def __init__(self, rows: StateRows, has_state: bool) -> None:
        LinearAttentionLayer.__init__(self, _num_states(rows))
        _place_state(self, rows, has_state)


class PooledHybridLayer(PooledLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call, misc, override]
    """A layer with full attention and a recurrent state."""

    def __init__(
        self, kv: PooledKV, layer: int, k: torch.Tensor, v: torch.Tensor, num_tokens: int, rows: StateRows
    ) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, _num_states(rows))
        self._place_kv(kv, layer, k, v, num_tokens, None)
        _place_state(self, rows, num_tokens > 0)


class PooledHybridWindowLayer(PooledLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call, misc, override]
    """A layer with a sliding window and a recurrent state."""

    def __init__(
        self,
        kv: PooledKV,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        num_tokens: int,
        window: int,
        rows: StateRows,
    ) -> None:
        LinearAttentionAndSlidingWindowAttentionLayer.__init__(self, window, _num_states(rows))
        self._place_kv(kv, layer, k, v, num_tokens, window)
        _place_state(self, rows, num_tokens > 0)


def text_positions(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return position ids of leading tokens, `[3, 1, num_tokens]`, as an indexed layer of transformers keeps them.

    They are of text alone, 0, 1, 2, ... in each dimension, so no pool keeps them.
    """
    return torch.arange(num_tokens, device=device).expand(_POSITION_DIMS, 1, -1)


def _num_states(rows: StateRows) -> int:
    return 1 + max(state.number for state, _ in rows)


def _place_state(layer: Any, rows: StateRows, has_state: bool) -> None:
    for state, row in rows:
        getattr(layer, f"{state.name}_states")[state.number] = row
        getattr(layer, f"is_{state.name}_states_initialized")[state.number] = True
        layer.dtype, layer.device = row.dtype, row.device
        if state.name == "conv":
            layer.conv_kernel_size[state.number] = row.shape[-1]
        layer.has_previous_state[state.number] = has_state


def _gather(layer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gather rows of a layer `[slots, num_kv_heads, dim]` as `[1, num_kv_heads, n, dim]`, contiguous."""
    _, num_kv_heads, dim = layer.shape
    return layer.view(-1, dim).index_select(0, rows).view(1, num_kv_heads, len(rows) // num_kv_heads, dim)
