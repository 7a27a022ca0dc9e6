"""The cache and pool that a transformers model needs, from its configuration. Loads transformers when called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from raydix.actors.huggingface.errors import refusing
from raydix.actors.huggingface.layer_mapping import ModelLayers
from raydix.actors.huggingface.measure import measure
from raydix.schemas import CacheConfig, ConfigMismatch, InvalidRequest, PoolConfig
from raydix.schemas.shown import brief
from raydix.schemas.version import how_to_install

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ModelSource: TypeAlias = "PreTrainedConfig | Mapping[str, Any] | str"


def pool_config_for(
    model: ModelSource,
    num_slots: int,
    *,
    num_swa_slots: int | None = None,
    num_state_slots: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
) -> PoolConfig:
    """Return the configuration of the pool that fits a model's heads, layers and states.

    Args:
        model: a transformers configuration, a dictionary of one (with `model_type`), or a model's name or path.
        num_slots: tokens that the pool holds; a multiple of the cache's `page_size`.
        num_swa_slots: tokens that the sliding-window layers hold; a multiple of the `page_size`. None: `num_slots`.
            Only for models with sliding windows.
        num_state_slots: recurrent states that the pool holds: one for each running request, and the cached ones. For
            models with recurrent states, which require it.
        dtype: dtype of the model. None: its configuration's, else float32.
        device: where the cache puts the pool, as in `PoolConfig`.

    Raises:
        ConfigMismatch: a pool cannot hold the model's KV and states, or transformers cannot make the model.
        InvalidRequest: a number is missing, or applies to another kind of model.
        ImportError: transformers is not installed.
    """
    config = load_config(model)
    check_kind(config)
    chosen = named_dtype(config, dtype)
    layers = ModelLayers.of(config)
    shape, _ = measure(config, layers, chosen)
    _check_traits(config, chosen)
    _check_counts(config, layers, num_swa_slots, num_state_slots)
    return PoolConfig.model_validate(
        {
            "num_slots": num_slots,
            "num_swa_slots": num_swa_slots,
            "num_state_slots": num_state_slots or 0,
            "device": device,
            **shape._asdict(),
        }
    )


def cache_config_for(
    model: ModelSource,
    num_slots: int,
    *,
    num_swa_slots: int | None = None,
    num_state_slots: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    **options: Any,
) -> CacheConfig:
    """Return the configuration of the cache that serves a model: its kind, its window and its pool.

        cache = start_cache(cache_config_for("google/gemma-3-1b-it", 65_536, page_size=16, num_swa_slots=16_384))

    Args:
        model, num_slots, num_swa_slots, num_state_slots, dtype, device: as for `pool_config_for`.
        options: other fields of `CacheConfig`, such as `page_size`.

    Raises:
        ConfigMismatch, InvalidRequest, ImportError: as for `pool_config_for`.
    """
    config = load_config(model)
    pool = pool_config_for(
        config,
        num_slots,
        num_swa_slots=num_swa_slots,
        num_state_slots=num_state_slots,
        dtype=dtype,
        device=device,
    )
    layers = ModelLayers.of(config)
    return CacheConfig(
        kind="mamba" if layers.has_states else "radix",
        sliding_window_size=layers.window,
        pool=pool,
        **options,
    )


def _check_counts(
    config: PreTrainedConfig, layers: ModelLayers, num_swa_slots: int | None, num_state_slots: int | None
) -> None:
    model = f"this {config.model_type} model"
    if layers.has_states and not num_state_slots:
        raise InvalidRequest(f"{model} keeps recurrent states: num_state_slots must say how many the pool holds")
    if not layers.has_states and num_state_slots:
        raise InvalidRequest(f"{model} keeps no recurrent states: num_state_slots is for those that do")
    if layers.window is None and num_swa_slots is not None:
        raise InvalidRequest(f"{model} has no sliding windows: num_swa_slots is for those that do")


def _check_traits(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    from raydix.actors.huggingface.model_traits import traits_of

    run_in = torch.float32 if dtype is torch.float16 else dtype  # a CPU lacks some of a GPU's float16
    traits = traits_of(config, torch.device("cpu"), run_in)
    if traits is not None:
        traits.check_can_share()


def load_config(model: ModelSource) -> PreTrainedConfig:
    """Return the configuration of a model given in any of the forms that `pool_config_for` takes.

    Raises:
        InvalidRequest: a dictionary has no `model_type`, or the model has another form.
        ConfigMismatch: transformers has no such model.
        ImportError: transformers is not installed.
    """
    try:
        from transformers import AutoConfig, PreTrainedConfig
    except ImportError as error:
        raise ImportError(f"a transformers model needs an extra; {how_to_install('transformers')}") from error
    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, (str, Mapping)):
        raise InvalidRequest(
            f"model must be a transformers configuration, a dictionary of one, or a name or path, not {brief(model)}"
        )
    if not isinstance(model, str) and "model_type" not in model:
        raise InvalidRequest("a model given as a dictionary needs its model_type, such as 'llama'")
    name = model if isinstance(model, str) else str(model["model_type"])
    with refusing(f"transformers has no configuration of {brief(name)}"):
        return AutoConfig.from_pretrained(model) if isinstance(model, str) else AutoConfig.for_model(**model)


def check_kind(config: PreTrainedConfig) -> None:
    """Check that a configuration is of a causal LM that reads tokens alone.

    Raises:
        ConfigMismatch: it is not.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    is_mapped = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "auto_map" in vars(config)
    if not is_mapped:
        raise ConfigMismatch(f"transformers has no causal LM of model_type {kind!r}")
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise ConfigMismatch(
            f"this {kind} model is an encoder and a decoder: its KV depends on the encoder's input, not on tokens alone"
        )
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigMismatch(f"this {kind} model has no vocabulary of tokens")


def named_dtype(config: PreTrainedConfig, dtype: str | torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a model runs: the given one, else its configuration's, else float32.

    Raises:
        InvalidRequest: models do not run in it.
    """
    given = dtype or getattr(config, "dtype", None) or torch.float32
    chosen: Any = getattr(torch, str(given).removeprefix("torch."), None)
    if chosen not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InvalidRequest(f"dtype must be float32, float16, bfloat16 or float64, not {brief(given)}")
    named: torch.dtype = chosen
    return named
