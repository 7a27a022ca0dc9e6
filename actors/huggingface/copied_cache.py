"""`CopiedCache`: the cache of a worker that does not map the pool: the model's own, with a copied prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from raydix.actors.huggingface.layer_mapping import ModelLayers
from raydix.actors.huggingface.pooled_layers import text_positions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CopiedCache(DynamicCache):
    """The KV and index keys of one sequence in this process's memory: a copy of the prefix, then the computed tokens.

    Args:
        config: configuration of the model, which must keep no recurrent states.
        device: device of the model.
        k: K of the prefix in every layer, `[num_layers, n, num_kv_heads, head_dim]`; values behind a sliding window do
            not matter. None: no prefix.
        v: V of the prefix, with the shape of `k`.
        index: index keys of the prefix, `[num_layers, n, index_dim]`, if the layers keep them.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config=config)
        layers = ModelLayers.of(config).layers
        self._with_kv = [number for number, uses in enumerate(layers) if uses.kv is not None]
        for number, uses in enumerate(layers):
            if uses.window is not None:
                self.layers[number] = _RecordingWindowLayer(uses.window)
            elif isinstance(self.layers[number], DynamicIndexedLayer):
                self.layers[number] = _CopiedIndexedLayer()  # type: ignore[no-untyped-call]
        self._num_stored = 0  # leading tokens with KV in the pool, or taken for it
        if k is not None and v is not None:
            for layer, number in enumerate(self._with_kv):
                keys, values = (part[layer].to(device).transpose(0, 1).unsqueeze(0) for part in (k, v))
                self.update(keys, values, number)
                if index is not None:
                    own: Any = self.layers[number]
                    own.copy_index(index[layer].to(device))
            self.take_computed()

    def take_computed(self) -> tuple[torch.Tensor, ...]:
        """Return copies of the K and V computed since the last call, `[num_layers, n, num_kv_heads, dim]`, on the CPU.

        If the layers keep index keys, also these, `[num_layers, n, index_dim]`. The caller must write them to the pool
        before it publishes their tokens.
        """
        start, self._num_stored = self._num_stored, self.get_seq_length()
        arrays = zip(*(_computed(self.layers[number], start) for number in self._with_kv), strict=True)
        return tuple(torch.stack(of_layers).cpu() for of_layers in arrays)


class _RecordingWindowLayer(DynamicSlidingWindowLayer):
    """A layer of the model's cache that keeps all new KV until `take_computed`, also KV behind the window."""

    def __init__(self, window: int) -> None:
        super().__init__(window)  # type: ignore[no-untyped-call]
        self._computed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update the layer, and keep the KV of the new tokens."""
        self._computed.append((key_states, value_states))
        attended: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return attended

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the K and V of all tokens since the last call, `[1, num_kv_heads, n, dim]` each."""
        k, v = zip(*self._computed, strict=True)
        self._computed.clear()
        return torch.cat(k, 2), torch.cat(v, 2)


class _CopiedIndexedLayer(DynamicIndexedLayer):
    """A layer of the model's cache with index keys, which begins with those of a pool."""

    _copied: torch.Tensor | None = None  # the keys of the prefix in the pool's dtype, `[n, index_dim]`

    def copy_index(self, index: torch.Tensor) -> None:
        """Take the index keys of the prefix, and make its position ids, which the first layer of some models keeps."""
        self._copied = index
        self.indexer_position_ids = text_positions(len(index), index.device)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Update the index keys, after those of the prefix."""
        if self._copied is not None:
            self.lazy_initialization_indexer(indexer_key_states)  # type: ignore[no-untyped-call]
            self.indexer_keys, self._copied = self._copied.view(indexer_key_states.dtype).unsqueeze(0), None
        keys: torch.Tensor = super().update_indexer(indexer_key_states)
        return keys

    def index_from(self, start: int) -> torch.Tensor:
        """Return copies of the keys from token `start` on in the pool's dtype, `[n, index_dim]`."""
        if self._copied is not None:
            return self._copied[start:]
        assert self.indexer_keys is not None and self.keys is not None, "the layer has run"
        return self.indexer_keys[0, start:].clone().view(self.keys.dtype)


def _computed(layer: Any, start: int) -> tuple[torch.Tensor, ...]:
    """Return copies of a layer's K and V from token `start` on, `[n, num_kv_heads, dim]` each, and its index keys."""
    if isinstance(layer, _RecordingWindowLayer):
        k, v = layer.take()
        start = 0
    elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        k, v = layer.keys, layer.values
    else:
        raise TypeError(f"a {type(layer).__name__} holds no KV: has the model run?")
    kv = k[0, :, start:].transpose(0, 1).contiguous(), v[0, :, start:].transpose(0, 1).contiguous()
    return (*kv, layer.index_from(start)) if isinstance(layer, _CopiedIndexedLayer) else kv
