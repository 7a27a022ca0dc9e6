"""Measure the shapes of a transformers model's KV and states, with or without weights. Loads transformers when called.

Configurations name the sizes of KV and states in many ways, and some do not name them. A run of one token on the "meta"
device, which computes shapes alone, measures them.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from raydix.actors.huggingface.errors import refusing
from raydix.actors.huggingface.layer_mapping import ModelLayers, StateTensor
from raydix.actors.huggingface.pool_shape import PoolShape
from raydix.schemas import ConfigMismatch, LayerShape

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


_ALL_NONZERO = "meta_nonzero_assume_all_nonzero"  # an option that older releases of torch lack


def measure(
    config: PreTrainedConfig, layers: ModelLayers, dtype: torch.dtype
) -> tuple[PoolShape, tuple[StateTensor, ...]]:
    """Return the shape of the pool that a model in this dtype needs, and the tensors of a layer's state.

    If the model cannot run without values, the layers that did run are measured. If none did, the usual fields of the
    configuration are read. A worker compares the result with the KV of the model itself.

    Raises:
        ConfigMismatch: transformers cannot make the model, or neither way gives the shapes.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    failure: ConfigMismatch | None = None
    with torch.device("meta"), torch.inference_mode(), _without_gpu_kernels(), _counting_all():
        model = bare_model(config, dtype)
        try:
            with refusing("one token cannot be run without values"):
                model(input_ids=torch.zeros(1, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
        except ConfigMismatch as error:
            failure = error
        else:
            check_used(config, layers, layers.unused_in(cache))
    kv = layers.kv_in(cache) or (_named_kv(config, failure),) * len(layers.kinds)
    states = layers.states_in(cache)
    return PoolShape.of_model(layers, kv, states, dtype), states


def measure_run(
    run: Callable[[Cache], object], config: PreTrainedConfig, layers: ModelLayers
) -> tuple[PoolShape, tuple[StateTensor, ...]]:
    """Return the shape of the pool that a model needs, and the tensors of a layer's state, measured by one pass.

    Args:
        run: runs the model with the given cache, which is empty and of the model's own class.
        config, layers: configuration and layers of the model.

    Raises:
        ConfigMismatch: a pool cannot hold the KV or states of the model.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    run(cache)
    check_used(config, layers, layers.unused_in(cache))
    kv, dtypes = layers.kv_in(cache), layers.dtypes_in(cache)
    if kv is None or len(dtypes) > 1:
        raise ConfigMismatch(
            f"the layers of this {config.model_type} model keep KV of several dtypes: {sorted(map(str, dtypes))}"
        )
    states = layers.states_in(cache)
    return PoolShape.of_model(layers, kv, states, dtypes.pop()), states


def check_used(config: PreTrainedConfig, layers: ModelLayers, unused: list[int]) -> None:
    """Check that every layer with KV has stored it in the model's own cache.

    Raises:
        ConfigMismatch: some layers have not.
    """
    if unused:
        every = len(unused) == sum(uses.kv is not None for uses in layers.layers)
        raise ConfigMismatch(
            f"{'the' if every else len(unused)} layers of this {config.model_type} model keep no KV in the cache of "
            "transformers: there is nothing to share"
        )


def bare_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Make a model on the device of the context.

    Raises:
        ConfigMismatch: transformers cannot make it; the message has the reason.
    """
    from transformers import AutoModelForCausalLM

    with suppress(ConfigMismatch), refusing("experts cannot be run together"):  # a choice among them needs values
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), dtype=dtype, experts_implementation="batched_mm"
        )
    with refusing(f"transformers cannot make this {config.model_type} model"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)  # type: ignore[no-untyped-call]


def _named_kv(config: PreTrainedConfig, failure: ConfigMismatch | None) -> LayerShape:
    text = config.get_text_config(decoder=True)
    try:
        num_heads: int = text.num_attention_heads
        dim: int = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        return LayerShape(num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads, head_dim=dim)
    except (AttributeError, TypeError) as error:
        raise ConfigMismatch(
            f"the KV of a token of this {config.model_type} model can neither be measured ({failure}) nor read from "
            f"its configuration ({error}): make its PoolConfig by hand"
        ) from error


@contextmanager
def _counting_all() -> Iterator[None]:
    """Make torch take all elements of "meta" tensors for nonzero: how many are depends on values.

    Some indexers look for the tokens that a mask leaves.
    """
    config: Any = importlib.import_module("torch.fx.experimental._config")
    if not hasattr(config, _ALL_NONZERO):
        yield
        return
    with config.patch({_ALL_NONZERO: True}):
        yield


@contextmanager
def _without_gpu_kernels() -> Iterator[None]:
    """Make transformers run models in plain torch.

    It takes kernels for GPUs wherever they are installed, which refuse tensors of other devices. It does not take
    them during the export of a model.
    """
    kernels: Any = importlib.import_module("transformers.integrations.hub_kernels")
    is_exporting = getattr(kernels, "is_torchdynamo_exporting", None)
    if is_exporting is None:
        yield
        return
    kernels.is_torchdynamo_exporting = lambda: True
    try:
        yield
    finally:
        kernels.is_torchdynamo_exporting = is_exporting
