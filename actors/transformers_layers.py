"""`ModelLayers`: which of a pool's layers each layer of a transformers model uses. Loads transformers when called.

A layer of a model keeps KV of all tokens, or of a window's, or a recurrent state, or KV and a state. A layer of a pool
keeps one thing, so a model's layer that keeps two uses two:

    Gemma 3     swa swa full            0: swa          1: swa          2: full
    Qwen3-Next  state state full        0: state        1: state        2: full
    Falcon-H1   (full, state) twice     0: full, state                  1: full, state
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch

from raydix.schemas import ConfigMismatch

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig

Kind: TypeAlias = Literal["full", "swa", "state"]

_FOREIGN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What transformers raises where it cannot make or run a model."""


class PoolLayers(NamedTuple):
    """What one layer of a model uses of the pool."""

    kv: int | None = None  # the layer of its K and V
    window: int | None = None  # tokens that it attends to, if that is not all
    state: int | None = None  # the layer of its recurrent state


class KVShape(NamedTuple):
    """What a layer keeps of a token."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int


class StateTensor(NamedTuple):
    """One tensor of a layer's recurrent state."""

    name: str  # "conv" or "recurrent"
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pool_shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        """The shape in a pool of this dtype: the same bits, so a wider state takes more elements.

        Raises:
            ConfigMismatch: an element of the pool does not divide one of the state.
        """
        ratio, rest = divmod(self.dtype.itemsize, dtype.itemsize)
        if rest:
            raise ConfigMismatch(f"a state in {self.dtype} does not fit into a pool of {dtype}")
        return (*self.shape[:-1], self.shape[-1] * ratio)


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """The layers of a model, in its order."""

    layers: tuple[PoolLayers, ...]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelLayers:
        """What a model keeps, by the layers of its own cache.

        Raises:
            ConfigMismatch: a layer keeps something that a pool has no place for.
        """
        from transformers import DynamicCache
        from transformers.cache_utils import (
            DynamicLayer,
            DynamicSlidingWindowLayer,
            LinearAttentionAndFullAttentionLayer,
            LinearAttentionLayer,
        )

        layers: list[PoolLayers] = []
        num_used = 0
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) is DynamicLayer:
                uses = PoolLayers(kv=num_used)
            elif type(layer) is DynamicSlidingWindowLayer:
                uses = PoolLayers(kv=num_used, window=layer.sliding_window)
            elif type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
                uses = PoolLayers(state=num_used)
            elif type(layer) is LinearAttentionAndFullAttentionLayer and layer.number_of_states == 1:
                uses = PoolLayers(kv=num_used, state=num_used + 1)
            else:
                raise ConfigMismatch(
                    f"layer {index} of this {config.model_type} model keeps a {type(layer).__name__}: "
                    "a cache serves full attention, sliding windows, and layers with one recurrent state"
                )
            layers.append(uses)
            num_used += (uses.kv is not None) + (uses.state is not None)
        found = cls(tuple(layers))
        found._check(config)
        return found

    def _check(self, config: PreTrainedConfig) -> None:
        if all(uses.kv is None for uses in self.layers):
            raise ConfigMismatch(f"this {config.model_type} model keeps no KV: there is nothing to share")
        if self.window is not None and self.has_states:
            raise ConfigMismatch(
                f"this {config.model_type} model has sliding windows and recurrent states: no kind of cache has both"
            )

    @classmethod
    def full(cls, num_layers: int) -> ModelLayers:
        """Layers of full attention only."""
        return cls(tuple(PoolLayers(kv=layer) for layer in range(num_layers)))

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What each layer of the pool keeps."""
        kinds: list[Kind] = []
        for uses in self.layers:
            if uses.kv is not None:
                kinds.append("full" if uses.window is None else "swa")
            if uses.state is not None:
                kinds.append("state")
        return tuple(kinds)

    @property
    def window(self) -> int | None:
        """Tokens that the sliding-window layers attend to, the widest of them; None: there are none."""
        return max((uses.window for uses in self.layers if uses.window is not None), default=None)

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent states."""
        return any(uses.state is not None for uses in self.layers)

    def kv_in(self, cache: Cache) -> KVShape | None:
        """What a layer keeps of a token, read from a cache of the model's own that it, or a part of it, has run with.

        Raises:
            ConfigMismatch: the layers differ.
        """
        shapes = {KVShape(k.shape[1], k.shape[3], v.shape[3]) for k, v in self._kept_in(cache)}
        if len(shapes) > 1:
            raise ConfigMismatch(f"the layers of this model differ in what they keep: {sorted(shapes)}")
        return shapes.pop() if shapes else None

    def dtypes_in(self, cache: Cache) -> set[torch.dtype]:
        """Those of the KV there."""
        return {k.dtype for k, _ in self._kept_in(cache)}

    def _kept_in(self, cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
        kept: list[Any] = [layer for layer, uses in zip(cache.layers, self.layers, strict=True) if uses.kv is not None]
        return [(layer.keys, layer.values) for layer in kept if layer.is_initialized]

    def states_in(self, cache: Cache) -> tuple[StateTensor, ...]:
        """The tensors of a layer's state, read from a cache of the model's own that it has run with.

        Raises:
            ConfigMismatch: the layers differ, or a state is nowhere to be found.
        """
        kept = {_state_tensors(cache.layers[i]) for i, uses in enumerate(self.layers) if uses.state is not None}
        if () in kept:
            raise ConfigMismatch("this model keeps its recurrent states elsewhere than in the layers of its cache")
        if len(kept) > 1:
            raise ConfigMismatch(f"the recurrent states of this model's layers differ: {sorted(map(str, kept))}")
        return kept.pop() if kept else ()


def measure_kv(config: PreTrainedConfig) -> KVShape:
    """What a layer of a model keeps of a token, without its weights: one token through the model.

    Configurations name it in many ways, and some not at all. What the usual names say is taken where nothing could be
    measured; a worker compares it with what its model really keeps.

    Raises:
        ConfigMismatch: the layers differ, or transformers cannot make or run the model; the message says why.
    """
    from transformers import DynamicCache

    layers, cache = ModelLayers.of(config), DynamicCache(config=config)
    with torch.device("meta"), torch.inference_mode(), _without_gpu_kernels():
        model = _bare_model(config, torch.bfloat16)  # what is kept does not hang on it, but not all runs in others here
        try:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
        except _FOREIGN as error:  # what hangs on values cannot run without: the layers before have run
            return layers.kv_in(cache) or _named_kv(config, error)
    return layers.kv_in(cache) or _named_kv(config, None)


def _named_kv(config: PreTrainedConfig, failure: Exception | None) -> KVShape:
    text = config.get_text_config(decoder=True)
    try:
        num_heads: int = text.num_attention_heads
        dim: int = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        return KVShape(getattr(text, "num_key_value_heads", None) or num_heads, dim, dim)
    except (AttributeError, TypeError) as error:
        raise ConfigMismatch(
            f"what this {config.model_type} model keeps of a token can neither be measured ({failure}) nor read from "
            f"its configuration ({error}): make its PoolConfig by hand"
        ) from error


def _bare_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """The model without weights, on the device of the context."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]
    except _FOREIGN as error:
        raise ConfigMismatch(
            f"transformers cannot make this {config.model_type} model: {type(error).__name__}: {error}"
        ) from error


def measure_states(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[StateTensor, ...]:
    """The tensors of a model's recurrent state, without its weights: one token through each layer that has one.

    Raises:
        ConfigMismatch: they cannot be found, or differ.
    """
    layers = ModelLayers.of(config)
    if not layers.has_states:
        return ()
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    with torch.device("meta"), torch.inference_mode(), _without_gpu_kernels():
        model = _bare_model(config, dtype)
        token = torch.zeros(1, 1, config.get_text_config(decoder=True).hidden_size, dtype=dtype)
        for module in model.modules():
            if "cache_params" in inspect.signature(module.forward).parameters and hasattr(module, "layer_idx"):
                module(token, cache_params=cache)
    return layers.states_in(cache)


@contextmanager
def _without_gpu_kernels() -> Iterator[None]:
    """Have transformers run models in plain torch: kernels for GPUs, which it takes wherever they are installed, refuse
    tensors of other devices. It goes without them where a model is exported."""
    kernels: Any = importlib.import_module("transformers.integrations.hub_kernels")
    is_exporting = getattr(kernels, "is_torchdynamo_exporting", None)
    if is_exporting is None:  # an older one, which looks at the device
        yield
        return
    kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        kernels.is_torchdynamo_exporting = is_exporting


def _state_tensors(layer: Any) -> tuple[StateTensor, ...]:
    held = {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}
    return tuple(
        StateTensor(name, tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in held.items() if tensor is not None
    )
