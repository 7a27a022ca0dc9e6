"""`ModelLayers`: maps each layer of a transformers model to layers of a pool. Loads transformers when called.

A layer of a model keeps KV of all tokens or of a window, a recurrent state, KV and a state, or nothing. A layer of a
pool keeps either KV or a state, so a model's layer with both uses two:

    Gemma 3     swa swa full            0: swa          1: swa          2: full
    Qwen3-Next  state state full        0: state        1: state        2: full
    Falcon-H1   (full, state) twice     0: full, state                  1: full, state
    Nemotron-H  state, nothing, full    0: state        1:              2: full

The index keys of sparse attention lie in the layer of K and V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from raydix.actors.huggingface.errors import refusing
from raydix.schemas import ConfigMismatch, LayerShape
from raydix.schemas.layer_shape import LayerKind

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


class PoolLayers(NamedTuple):
    """The layers of the pool that one layer of a model uses."""

    kv: int | None = None  # the layer of its K and V
    window: int | None = None  # tokens that it attends to; None: all
    state: int | None = None  # the layer of its recurrent state


class StateTensor(NamedTuple):
    """One tensor of a layer's recurrent state."""

    name: str  # "conv" or "recurrent"
    number: int  # place among the layer's tensors with this name, from 0 on
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pool_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape in a pool of this dtype: the same bits, so a wider dtype takes more elements.

        Raises:
            ConfigMismatch: an element of the pool does not divide one of the state.
        """
        return (*self.shape[:-1], _pool_elements("a state", self.shape[-1], self.dtype, dtype))


def _pool_elements(name: str, num_elements: int, kept: torch.dtype, pool: torch.dtype) -> int:
    """Return how many elements of the pool's dtype have the bits of so many elements of the model's."""
    ratio, rest = divmod(kept.itemsize, pool.itemsize)
    if rest:
        raise ConfigMismatch(f"{name} in {kept} does not fit into a pool of {pool}")
    return num_elements * ratio


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers of a model, in order."""

    layers: tuple[PoolLayers, ...]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelLayers:
        """Return the layers of a model, from the layers of its own cache.

        Raises:
            ConfigMismatch: a pool cannot hold the contents of a layer.
        """
        layers: list[PoolLayers] = []
        num_used = 0
        for index, layer in enumerate(_own_cache(config).layers):
            uses = _pool_layers(layer, num_used)
            if uses is None:
                raise ConfigMismatch(
                    f"layer {index} of this {config.model_type} model keeps a {type(layer).__name__}: "
                    "a cache serves full attention, index keys, sliding windows and recurrent states"
                )
            layers.append(uses)
            num_used += (uses.kv is not None) + (uses.state is not None)
        if all(uses.kv is None for uses in layers):
            raise ConfigMismatch(f"this {config.model_type} model keeps no KV: there is nothing to share")
        return cls(tuple(layers))

    @classmethod
    def full(cls, num_layers: int) -> ModelLayers:
        """Return layers of full attention only."""
        return cls(tuple(PoolLayers(kv=layer) for layer in range(num_layers)))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the pool."""
        kinds: list[LayerKind] = []
        for uses in self.layers:
            if uses.kv is not None:
                kinds.append("full" if uses.window is None else "swa")
            if uses.state is not None:
                kinds.append("state")
        return tuple(kinds)

    @property
    def window(self) -> int | None:
        """The largest sliding window, in tokens; None without sliding windows."""
        return max((uses.window for uses in self.layers if uses.window is not None), default=None)

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return any(uses.state is not None for uses in self.layers)

    def kv_in(self, cache: Cache) -> tuple[LayerShape, ...] | None:
        """Return the shape of each layer of the pool with KV, from a cache of the model's own after a forward pass.

        Layers that the pass did not reach get the shape of others of their kind. None: no layer has KV.

        Raises:
            ConfigMismatch: index keys do not fit into a pool of K's dtype.
        """
        found = [(uses.window is None, _kv_shape(cache.layers[i])) for i, uses in self._with_kv()]
        of_kind = {is_full: shape for is_full, shape in found if shape is not None}
        if not of_kind:
            return None
        any_shape = next(iter(of_kind.values()))
        return tuple(shape or of_kind.get(is_full, any_shape) for is_full, shape in found)

    def unused_in(self, cache: Cache) -> list[int]:
        """Return the layers of the model that must have KV, but have none after a forward pass."""
        return [i for i, _ in self._with_kv() if _kv_shape(cache.layers[i]) is None]

    def dtypes_in(self, cache: Cache) -> set[torch.dtype]:
        """Return the dtypes of the KV in a cache."""
        kept: list[Any] = [cache.layers[i] for i, _ in self._with_kv()]
        return {layer.keys.dtype for layer in kept if layer.is_initialized}

    def states_in(self, cache: Cache) -> tuple[StateTensor, ...]:
        """Return the tensors of a layer's state, from a cache of the model's own after a forward pass.

        Raises:
            ConfigMismatch: the layers differ, or the cache has no states.
        """
        kept = {_state_tensors(cache.layers[i]) for i, uses in enumerate(self.layers) if uses.state is not None}
        if () in kept:
            raise ConfigMismatch("this model keeps its recurrent states outside the layers of its cache")
        if len(kept) > 1:
            raise ConfigMismatch(f"the recurrent states of this model's layers differ: {sorted(map(str, kept))}")
        return kept.pop() if kept else ()

    def _with_kv(self) -> list[tuple[int, PoolLayers]]:
        """Return the layers of the model that use a layer of the pool with KV, with their numbers."""
        return [(number, uses) for number, uses in enumerate(self.layers) if uses.kv is not None]


def _own_cache(config: PreTrainedConfig) -> Cache:
    from transformers import DynamicCache

    with refusing(f"transformers has no cache for this {config.model_type} model"):
        return DynamicCache(config=config)


def _pool_layers(layer: Any, first: int) -> PoolLayers | None:
    """Return the layers of the pool, from `first` on, for a layer of the model's cache. None: not supported."""
    from transformers import cache_utils as own

    kind = type(layer)
    if kind is own.DummyLayer:
        return PoolLayers()
    if kind in (own.DynamicLayer, own.DynamicIndexedLayer):
        return PoolLayers(kv=first)
    if kind is own.DynamicSlidingWindowLayer:
        return PoolLayers(kv=first, window=layer.sliding_window)
    if kind is own.LinearAttentionLayer:
        return PoolLayers(state=first)
    if kind is own.LinearAttentionAndFullAttentionLayer:
        return PoolLayers(kv=first, state=first + 1)
    if kind is own.LinearAttentionAndSlidingWindowAttentionLayer:
        return PoolLayers(kv=first, window=layer.sliding_window, state=first + 1)
    return None


def _kv_shape(layer: Any) -> LayerShape | None:
    k, v = getattr(layer, "keys", None), getattr(layer, "values", None)
    if k is None or v is None:
        return None
    index = getattr(layer, "indexer_keys", None)
    index_dim = 0 if index is None else _pool_elements("an index key", index.shape[2], index.dtype, k.dtype)
    _, heads, _, dim = k.shape
    return LayerShape(num_kv_heads=heads, head_dim=dim, v_head_dim=v.shape[3], index_head_dim=index_dim)


def _state_tensors(layer: Any) -> tuple[StateTensor, ...]:
    held = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return tuple(
        StateTensor(name, number, tuple(tensor.shape[1:]), tensor.dtype)
        for name, tensors in held.items()
        for number, tensor in sorted(tensors.items())
        if tensor is not None
    )
