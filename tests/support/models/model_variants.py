"""Configurations that the defaults of `model_zoo` leave out: other ropes, layers and switches of a type."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from support.models.model_zoo import MODEL_TYPES, NO_CONFIG, WINDOW, tiny_config
from transformers import AutoConfig, PreTrainedConfig

__all__ = ["NAMES", "VARIANTS", "config_named"]

LONGEST = 32  # tokens in the first range of models with KV that depends on the length
THETA = {"rope_theta": 10_000.0}
ORIGINAL = {"original_max_position_embeddings": LONGEST}
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0, 16.0]}
LONGROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "longrope", **THETA, **FACTORS, **ORIGINAL}, **ORIGINAL}
YARN: dict[str, Any] = {
    "max_position_embeddings": LONGEST,  # YaRN extends it
    "rope_parameters": {"rope_type": "yarn", "factor": 8.0, **THETA, **ORIGINAL},
}
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": LONGEST,
    "rope_parameters": {"rope_type": "dynamic", "factor": 8.0, **THETA},
}
LINEAR: dict[str, Any] = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}
LLAMA_3: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **THETA,
        **ORIGINAL,
    }
}
WINDOWS_AND_ALL = ["sliding_attention", "full_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3, longrope": ("phi3", LONGROPE),
    "phi3, longrope and windows": ("phi3", LONGROPE | {"sliding_window": WINDOW}),
    "minicpm3, longrope": ("minicpm3", LONGROPE),
    "phimoe, longrope": (
        "phimoe",
        {"rope_parameters": LONGROPE["rope_parameters"] | {"short_mscale": 1.1, "long_mscale": 1.2}, **ORIGINAL},
    ),
    "llama, YaRN": ("llama", YARN),
    "llama, dynamic NTK": ("llama", DYNAMIC),
    "llama, linear rope": ("llama", LINEAR),
    "llama, Llama 3 rope": ("llama", LLAMA_3),
    "deepseek_v3, YaRN": ("deepseek_v3", YARN),
    "lfm2, convolutions": ("lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}),
    "zaya, windows": (
        "zaya",
        {"num_hidden_layers": 4, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": WINDOW},
    ),
    "nemotron_h, M-*E": (
        "nemotron_h",
        {
            "num_hidden_layers": 8,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"] * 2,
        },
    ),
    "nemotron_h, M-M*-": (
        "nemotron_h",
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
        },
    ),
    "gemma4_text, shared KV": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": WINDOWS_AND_ALL * 3,
            "num_kv_shared_layers": 2,
            "initializer_range": 0.1,  # at 0.2, it differs from itself by 4e-4 when cut
        },
    ),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "glm_moe_dsa, shared indexers": (
        "glm_moe_dsa",
        {
            "num_hidden_layers": 3,
            "indexer_types": ["full", "shared", "full"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "falcon, grouped queries": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode, all heads": ("gpt_bigcode", {"multi_query": False}),
    "bert, encoder": ("bert", {"is_decoder": False}),
    "roberta, encoder": ("roberta", {"is_decoder": False}),
    "gemma3_text, bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
}
"""By name: a type, and what its configuration has besides."""

NAMES: tuple[str, ...] = tuple(name for name in MODEL_TYPES if name not in NO_CONFIG) + tuple(VARIANTS)
"""Of all configurations, in the order of the installed mapping."""


def config_named(name: str) -> PreTrainedConfig:
    """Return the tiny configuration of a type or variant."""
    if name not in VARIANTS:
        return tiny_config(name)
    model_type, options = VARIANTS[name]
    given = tiny_config(model_type).to_dict()
    given = {key: value for key, value in given.items() if key not in ("layer_types", "per_layer_config", "model_type")}
    return AutoConfig.for_model(model_type, **given | deepcopy(options))
