"""`small_twin` and `build_twin` keep the kinds of layers, in small sizes, with reproducible weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache, PreTrainedConfig

from raydix.actors.huggingface.small_twin import TwinUnavailable, build_twin, small_twin

PHI_3_LONG: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0 + i for i in range(48)], "long_factor": [2.0] * 48},
}
DEEPSEEK_YARN: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
LARGE: dict[str, dict[str, Any]] = {
    "phi3-longrope": PHI_3_LONG,
    "deepseek-yarn": DEEPSEEK_YARN,
    "llama3": {
        "model_type": "llama",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "dynamic": {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 62, "sliding_window": 1024},
    "gemma3n": {"model_type": "gemma3n_text"},
    "gemma4": {"model_type": "gemma4_text"},
    "jamba": {"model_type": "jamba"},
    "recurrent-gemma": {"model_type": "recurrent_gemma"},
    "nemotron-h": {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-"},
    "zamba2": {"model_type": "zamba2"},
    "qwen3-next": {"model_type": "qwen3_next"},
}


def config_of(fields: dict[str, Any]) -> PreTrainedConfig:
    return AutoConfig.for_model(**copy.deepcopy(fields))


def cache_layers(config: PreTrainedConfig) -> set[str]:
    return {type(layer).__name__ for layer in DynamicCache(config=config).layers}


@pytest.mark.parametrize("fields", LARGE.values(), ids=LARGE)
def test_the_twin_of_a_large_model_is_small_and_has_its_kinds_of_layers(fields: dict[str, Any]) -> None:
    config = config_of(fields)
    before = config.to_dict()
    twin = small_twin(config)
    assert config.to_dict() == before
    assert type(twin) is type(config) and cache_layers(twin) == cache_layers(config)
    model = build_twin(twin)
    assert sum(parameter.numel() for parameter in model.parameters()) <= 2_000_000
    tokens = torch.arange(200)[None] % 90
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
    assert logits.isfinite().all() and logits.std() > 0.1


def test_windows_and_rope_boundaries_are_within_the_window() -> None:
    twin = small_twin(config_of(PHI_3_LONG), window=48)
    rope = twin.rope_parameters
    assert rope["original_max_position_embeddings"] == twin.original_max_position_embeddings == 48
    assert twin.max_position_embeddings == 48 * 32
    assert len(rope["short_factor"]) == len(rope["long_factor"]) == 4  # half of a head of 8
    assert small_twin(config_of(LARGE["gemma3"]), window=48).sliding_window == 48


def test_shared_kv_layers_and_other_heads_stay() -> None:
    gemma_3n = small_twin(config_of(LARGE["gemma3n"]))
    assert 0 < gemma_3n.num_kv_shared_layers < gemma_3n.num_hidden_layers
    per_layer = small_twin(config_of(LARGE["gemma4"])).per_layer_config
    assert len({layer.head_dim for layer in per_layer}) == 2


def test_special_tokens_stay_different_and_in_the_vocabulary() -> None:
    config = config_of({"model_type": "qwen3_5"})
    twin = small_twin(config)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    assert len({getattr(config, name) for name in names}) == len({getattr(twin, name) for name in names}) == 4
    assert all(getattr(twin, name) < twin.get_text_config().vocab_size for name in names)


def test_a_small_configuration_keeps_its_sizes_but_for_windows() -> None:
    sizes = {"vocab_size": 200, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
    config = AutoConfig.for_model("mistral", **sizes, num_hidden_layers=3, intermediate_size=20, sliding_window=100)
    twin = small_twin(config)
    assert {name: getattr(twin, name) for name in sizes} == sizes
    assert (twin.num_hidden_layers, twin.sliding_window, twin.dtype) == (3, 64, torch.float32)


def test_equal_seeds_give_equal_weights_and_leave_the_process_alone() -> None:
    config = small_twin(config_of({"model_type": "qwen2"}))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, other = (build_twin(config, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    norms = first["model.norm.weight"]
    assert norms.std() > 0.01  # not all 1, so that a skipped norm shows


def test_a_model_that_transformers_cannot_make_is_refused() -> None:
    with pytest.raises(TwinUnavailable, match="no causal LM of"):
        build_twin(PreTrainedConfig())
    with pytest.raises(TwinUnavailable, match="cannot make this"):
        build_twin(small_twin(AutoConfig.for_model("musicgen")))
