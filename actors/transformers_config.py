"""What a transformers model asks of a cache, read from its configuration. Loads transformers when called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from raydix.actors.transformers_layers import ModelLayers, measure_kv, measure_states
from raydix.schemas import CacheConfig, InvalidRequest, PoolConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ModelSource: TypeAlias = "PreTrainedConfig | Mapping[str, Any] | str"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What a pool holds of a token in each layer, and of a recurrent state."""

    kinds: tuple[str, ...]  # of each layer: "full", "swa" or "state"
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str  # torch's name, such as "bfloat16"
    state_shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_pool(cls, pool: PoolConfig) -> PoolShape:
        """What a pool is configured to hold."""
        kinds = pool.layer_kinds or ("full",) * pool.num_layers
        v_head_dim = pool.head_dim if pool.v_head_dim is None else pool.v_head_dim
        return cls(kinds, pool.num_kv_heads, pool.head_dim, v_head_dim, pool.dtype, pool.state_shapes)

    def fields_unlike(self, other: PoolShape) -> str:
        """Those of a `PoolConfig` that would have to be other than they are for this, and what they would be."""
        kinds = "layer_kinds" if self.state_shapes or "swa" in self.kinds else "num_layers"
        wanted = {
            kinds: (self.kinds, other.kinds),
            "num_kv_heads": (self.num_kv_heads, other.num_kv_heads),
            "head_dim": (self.head_dim, other.head_dim),
            "v_head_dim": (self.v_head_dim, other.v_head_dim),
            "dtype": (self.dtype, other.dtype),
            "state_shapes": (self.state_shapes, other.state_shapes),
        }
        unlike = {name: mine for name, (mine, others) in wanted.items() if mine != others}
        if "num_layers" in unlike:
            unlike["num_layers"] = len(self.kinds)
        return ", ".join(f"{name}={mine!r}" for name, mine in unlike.items())

    def __str__(self) -> str:
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in ("full", "swa", "state") if kind in self.kinds]
        layers = f"{len(self.kinds)}" if set(self.kinds) <= {"full"} else " + ".join(counts)
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim} + {self.v_head_dim}"
        states = f", states of {list(self.state_shapes)}" if self.state_shapes else ""
        return f"{layers} layers of {self.num_kv_heads} KV heads of {dims} ({self.dtype}){states}"


def pool_config_for(
    model: ModelSource,
    num_slots: int,
    *,
    num_swa_slots: int | None = None,
    num_state_slots: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
) -> PoolConfig:
    """The pool that fits a model, so that nobody has to count its heads, layers and states.

    Args:
        model: a transformers configuration, a dictionary of one (with `model_type`), or a model's name or path.
        num_slots: tokens that the pool holds; a multiple of the cache's `page_size`.
        num_swa_slots: tokens that the sliding-window layers hold, likewise; None: `num_slots`. For models with such.
        num_state_slots: recurrent states that the pool holds: one for each running request, and those that are shared.
            For models with such, which need it.
        dtype: the model's. None: the one its configuration names, else float32.
        device: where the cache puts the pool, as in `PoolConfig`.

    Raises:
        ConfigMismatch: the model keeps things that a pool has no place for, or transformers cannot make it.
        InvalidRequest: a number is missing, or is for another kind of model.
        ImportError: transformers is not installed.
    """
    config = load_config(model)
    layers = ModelLayers.of(config)
    _check_counts(config, layers, num_swa_slots, num_state_slots)
    name = dtype_name(config, dtype)
    kept: torch.dtype = getattr(torch, name)
    kinds, kv = layers.kinds, measure_kv(config)
    return PoolConfig.model_validate(
        {
            "num_slots": num_slots,
            "num_layers": len(kinds),
            "num_kv_heads": kv.num_kv_heads,
            "head_dim": kv.head_dim,
            "v_head_dim": None if kv.v_head_dim == kv.head_dim else kv.v_head_dim,
            "layer_kinds": None if set(kinds) == {"full"} else kinds,
            "num_swa_slots": num_swa_slots,
            "num_state_slots": num_state_slots or 0,
            "state_shapes": [state.pool_shape(kept) for state in measure_states(config, kept)],
            "dtype": name,
            "device": device,
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
    """The cache that serves a model: its kind, its window and its pool.

        cache = start_cache(cache_config_for("google/gemma-3-1b-it", 65_536, page_size=16, num_swa_slots=16_384))

    Args:
        model, num_slots, num_swa_slots, num_state_slots, dtype, device: as for `pool_config_for`.
        options: all else that a `CacheConfig` takes, such as `page_size`.

    Raises:
        ConfigMismatch, InvalidRequest, ImportError: as for `pool_config_for`.
    """
    config = load_config(model)
    layers = ModelLayers.of(config)
    pool = pool_config_for(
        config,
        num_slots,
        num_swa_slots=num_swa_slots,
        num_state_slots=num_state_slots,
        dtype=dtype,
        device=device,
    )
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


def load_config(model: ModelSource) -> PreTrainedConfig:
    """The configuration of a model given in any of the forms that `pool_config_for` takes."""
    if not isinstance(model, (str, Mapping)):
        return model
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError("a transformers model needs the extra: pip install raydix[transformers]") from error
    if isinstance(model, str):
        config: PreTrainedConfig = AutoConfig.from_pretrained(model)
        return config
    if "model_type" not in model:
        raise InvalidRequest("a model given as a dictionary needs its model_type, such as 'llama'")
    return AutoConfig.for_model(**model)


def dtype_name(config: PreTrainedConfig, dtype: str | torch.dtype | None) -> str:
    """The dtype a model runs in: what is asked for, else what its configuration names, else float32."""
    chosen = dtype or getattr(config, "dtype", None) or torch.float32
    return str(chosen).removeprefix("torch.")
