"""What a transformers model asks of a cache's pool, read from its configuration. Loads transformers when called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from raydix.schemas import ConfigMismatch, InvalidRequest, PoolConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ModelSource: TypeAlias = "PreTrainedConfig | Mapping[str, Any] | str"


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str  # torch's name, such as "bfloat16"

    @classmethod
    def of_pool(cls, pool: PoolConfig) -> KVShape:
        """What the slots of a pool hold."""
        v_head_dim = pool.head_dim if pool.v_head_dim is None else pool.v_head_dim
        return cls(pool.num_layers, pool.num_kv_heads, pool.head_dim, v_head_dim, pool.dtype)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim} + {self.v_head_dim}"
        return f"{self.num_layers} layers of {self.num_kv_heads} KV heads of {dims} ({self.dtype})"


def pool_config_for(
    model: ModelSource, num_slots: int, *, dtype: str | torch.dtype | None = None, device: str = "auto"
) -> PoolConfig:
    """The pool that fits a model, so that nobody has to count its heads.

    Args:
        model: a transformers configuration, a dictionary of one (with `model_type`), or a model's name or path.
        num_slots: tokens that the pool holds; a multiple of the cache's `page_size`.
        dtype: the model's. None: the one its configuration names, else float32.
        device: where the cache puts the pool, as in `PoolConfig`.

    Raises:
        ConfigMismatch: the model keeps more, or other things, than full-attention KV.
        ImportError: transformers is not installed.
    """
    config = load_config(model)
    check_full_attention(config)
    text = config.get_text_config(decoder=True)
    num_heads: int = text.num_attention_heads
    return PoolConfig.model_validate(
        {
            "num_slots": num_slots,
            "num_layers": text.num_hidden_layers,
            "num_kv_heads": getattr(text, "num_key_value_heads", None) or num_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // num_heads,
            "dtype": dtype_name(config, dtype),
            "device": device,
        }
    )


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


def check_full_attention(config: PreTrainedConfig) -> None:
    """Refuse models whose cache holds anything but the KV of every token.

    Raises:
        ConfigMismatch: a layer has a sliding window, or keeps a state.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            raise ConfigMismatch(
                f"layer {index} of this {config.model_type} model keeps a {type(layer).__name__}: "
                "a cache of this kind serves full-attention layers only"
            )
