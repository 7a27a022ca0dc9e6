"""The transformers `Cache` of one sequence whose KV lies in a pool's slots.

    model.forward ── update(layer, k, v) ──> write into the slots of the new tokens
                  <── K, V of the sequence ── gathered from the slots of all tokens so far

`PooledCache` works on the pool's memory itself, and so needs a mapped pool on the model's device. `CopiedCache` is
for workers that cannot or will not map: it is the model's own `DynamicCache`, filled from a copy of the prefix.
Either gives attention contiguous tensors with the values that a `DynamicCache` would give, so the arithmetic is the
same to the bit. One sequence each: the batch size is 1.

Cost of a step per layer: the rows of the new tokens written, and one gather of the sequence, straight into
attention's layout. A `DynamicCache` copies the sequence once a step too, by concatenation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
except ImportError as error:
    raise ImportError("the transformers worker needs the extra: pip install raydix[transformers]") from error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class MappedPool(Protocol):
    """What is needed of a pool: a `KVPool`, or an `AttachedPool` that is mapped."""

    @property
    def k(self) -> list[torch.Tensor]:
        """Each layer's K, `[rows, num_kv_heads, head_dim]`, contiguous."""

    @property
    def v(self) -> list[torch.Tensor]:
        """Each layer's V, likewise."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write KV of one layer into slots, `[n, num_kv_heads, dim]` each."""


class _Slots:
    """The slots of one sequence, and where each head of them lies in a layer seen as rows of `[dim]`."""

    def __init__(self, slots: torch.Tensor, num_kv_heads: int, device: torch.device) -> None:
        self.ids = slots.to(device)  # [capacity]
        heads = torch.arange(num_kv_heads, device=device)
        self.rows = self.ids * num_kv_heads + heads[:, None]  # [num_kv_heads, capacity]


class PooledLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `PooledCache`."""

    def __init__(self, cache: PooledCache, layer: int, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self._layer = layer
        self._num_tokens = num_tokens  # whose KV is in the pool
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the KV of new tokens, `[1, num_kv_heads, n, dim]` each; returns the sequence's, new ones last.

        Raises:
            ValueError: the batch is larger than 1, or there are more tokens than slots. Nothing was written.
        """
        batch_size, _, num_new, _ = key_states.shape
        start, stop = self._num_tokens, self._num_tokens + num_new
        slots, pool = self._cache.slots, self._cache.pool
        if batch_size != 1 or stop > len(slots.ids):
            raise ValueError(f"{batch_size} sequences, {stop} tokens: there are slots for 1, {len(slots.ids)}")
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        pool.write(self._layer, slots.ids[start:stop], k, v)
        self._num_tokens = stop
        rows = slots.rows[:, :stop]
        return _gather(pool.k[self._layer], rows), _gather(pool.v[self._layer], rows)

    def get_seq_length(self) -> int:
        """Tokens whose KV is in the pool."""
        return self._num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the KV that `query_length` new tokens attend to."""
        return self._num_tokens + query_length, 0

    def get_max_length(self) -> int:
        """-1: as long as the lease."""
        return -1

    def reset(self) -> NoReturn:
        """Refused: the prefix is shared."""
        raise NotImplementedError("the slots of a pooled cache belong to a lease: make a new cache instead")

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        """Refused: there is one sequence."""
        raise NotImplementedError("a pooled cache holds one sequence: beam search needs one cache per beam")


class PooledCache(Cache):
    """The KV of one sequence, in the slots of its lease.

    The caller answers for the slots: it holds the lease, privately for `slots[num_tokens:]`, as long as a forward pass
    may run, and calls `repoint` when an insert has changed them.

    Args:
        pool: a `KVPool` or mapped `AttachedPool`, on the model's device and of its dtype.
        slots: the slot of each token, int64, those to be computed included.
        num_tokens: leading tokens whose KV is in the pool already.
    """

    def __init__(self, pool: MappedPool, slots: torch.Tensor, num_tokens: int) -> None:
        self.pool = pool
        self.repoint(slots)
        super().__init__(layers=[PooledLayer(self, layer, num_tokens) for layer in range(len(pool.k))])

    def repoint(self, slots: torch.Tensor) -> None:
        """Go on with other slots, of equal KV: those that the tree had already. Never during a forward pass."""
        k = self.pool.k[0]
        self.slots = _Slots(slots, k.shape[1], k.device)


class CopiedCache(DynamicCache):
    """The KV of one sequence in this process's memory: a copy of the prefix, then what was computed.

    Args:
        config: the model's.
        device: the model's.
        k: the prefix's K in every layer, `[num_layers, n, num_kv_heads, head_dim]`; None: there is no prefix.
        v: its V, likewise.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config=config)
        self._num_stored = 0  # leading tokens whose KV is in the pool, or has been taken to be put there
        if k is not None and v is not None:
            self._num_stored = k.shape[1]
            for layer in range(len(k)):
                keys, values = (part[layer].to(device).transpose(0, 1).unsqueeze(0) for part in (k, v))
                self.update(keys, values, layer)

    def layer_kv(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's K and V, `[num_kv_heads, n, dim]`: views, until the model runs again."""
        pairs = []
        for layer in self.layers:
            if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
                raise TypeError(f"a {type(layer).__name__} holds no full-attention KV: has the model run?")
            pairs.append((layer.keys[0], layer.values[0]))
        return pairs

    def take_computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V computed since the last call, `[num_layers, n, num_kv_heads, dim]` each.

        They are the caller's, to write into the pool before it publishes their tokens.
        """
        start, self._num_stored = self._num_stored, self.get_seq_length()
        k, v = zip(*self.layer_kv(), strict=True)
        return _stack(k, start), _stack(v, start)


def _stack(layers: tuple[torch.Tensor, ...], start: int) -> torch.Tensor:
    """`[num_layers, n, num_kv_heads, dim]` of layers `[num_kv_heads, start + n, dim]`."""
    return torch.stack([layer[:, start:].transpose(0, 1) for layer in layers])


def _gather(layer: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`[1, num_kv_heads, n, dim]`, contiguous, of a layer `[slots, num_kv_heads, dim]`."""
    num_kv_heads, num_tokens = rows.shape
    dim = layer.shape[-1]
    gathered = layer.view(-1, dim).index_select(0, rows.reshape(-1))
    return gathered.view(1, num_kv_heads, num_tokens, dim)
