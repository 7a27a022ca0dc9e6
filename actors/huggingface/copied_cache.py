"""`CopiedCache`: the cache of a worker that does not map the pool: the model's own, with a copied prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from raydix.actors.huggingface.layer_mapping import ModelLayers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CopiedCache(DynamicCache):
    """The KV of one sequence in this process's memory: a copy of the prefix, then the computed tokens.

    Args:
        config: configuration of the model, which must keep no recurrent states.
        device: device of the model.
        k: K of the prefix in every layer, `[num_layers, n, num_kv_heads, head_dim]`; values behind a sliding window do
            not matter. None: no prefix.
        v: V of the prefix, with the shape of `k`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config=config)
        layers = ModelLayers.of(config).layers
        self._with_kv = [index for index, uses in enumerate(layers) if uses.kv is not None]
        for index, uses in enumerate(layers):
            if uses.window is not None:
                self.layers[index] = _RecordingWindowLayer(uses.window)
        self._num_stored = 0  # leading tokens with KV in the pool, or taken for it
        if k is not None and v is not None:
            for layer, index in enumerate(self._with_kv):
                keys, values = (part[layer].to(device).transpose(0, 1).unsqueeze(0) for part in (k, v))
                self.update(keys, values, index)
            self.take_computed()

    def take_computed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the K and V computed since the last call, `[num_layers, n, num_kv_heads, dim]`, on the CPU.

        The caller must write them to the pool before it publishes their tokens.
        """
        start, self._num_stored = self._num_stored, self.get_seq_length()
        k, v = zip(*(_computed(self.layers[index], start) for index in self._with_kv), strict=True)
        return torch.stack(k).cpu(), torch.stack(v).cpu()


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


def _computed(layer: Any, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of a layer's K and V from token `start` on, `[n, num_kv_heads, dim]` each."""
    if isinstance(layer, _RecordingWindowLayer):
        k, v = layer.take()
        start = 0
    elif isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        k, v = layer.keys, layer.values
    else:
        raise TypeError(f"a {type(layer).__name__} holds no KV: has the model run?")
    return k[0, :, start:].transpose(0, 1).contiguous(), v[0, :, start:].transpose(0, 1).contiguous()
