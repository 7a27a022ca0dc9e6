"""A tiny random configuration of every causal LM type of transformers, written by hand, for tests.

They do not come from `small_twin`, so that it can be tested with them. A type gets the sizes of `SIZES` that its own
configuration has, and the entries of `OPTIONS`. Layers are two of each kind that the type has by default, in turn.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from raydix.actors.huggingface.small_twin import small_twin

__all__ = ["MODEL_TYPES", "NO_CONFIG", "UNBUILDABLE", "tiny_config"]

MODEL_TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

VOCABULARY = 100
WINDOW = 12

NO_CONFIG: dict[str, str] = {
    "gemma4_assistant": "a drafter, all of whose layers read the KV of another model",
}
"""Types of which no tiny configuration can be made, and why."""

UNBUILDABLE: dict[str, str] = {
    "gemma3n": "ImportError: its vision tower needs the package timm",
    "gemma4_unified_assistant": "ValueError: a drafter, all of whose layers read the KV of another model",
    "musicgen": "AttributeError: the causal LM is made from the decoder's configuration only",
    "musicgen_melody": "AttributeError: the causal LM is made from the decoder's configuration only",
}
"""Types that transformers cannot make or run here, and how it fails."""

TOKENS = {"pad_token_id": 90, "bos_token_id": 91, "eos_token_id": 92}

FOR_DEFAULTS: dict[str, dict[str, Any]] = {}
"""What the default configuration of a type needs, to be made at all."""

FROM_TWIN = ("dots3_note", "got_ocr2", "phi4_multimodal")
"""Types with parts for images and sounds whose sizes hang together: `small_twin` knows how, so these rely on it."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "init_std": 0.2,
    # widths
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "emb_dim": 32,
    "embedding_dim": 32,
    "embedding_size": 32,
    "dim_model": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "dim_ff": 48,
    "dff": 48,
    "d_ff": 48,
    "d_inner": 48,
    "n_inner": 48,
    "feed_forward_size": 48,
    "word_embed_proj_dim": 32,
    "lru_width": 32,
    "input_embedding_size": 16,
    "output_embedding_size": 24,
    "attention_hidden_size": 32,
    "router_hidden_size": 16,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "hc_lowrank": 8,
    "gated_norm_rank": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "attention_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "head_dim": 8,
    "dim_head": 8,
    "d_head": 8,
    "d_kv": 8,
    "kv_channels": 8,
    "attention_head_size": 8,
    "d_rel": 4,
    "rotary_dim": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "query_pre_attn_scalar": 8,
    # layers
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "num_blocks": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_encoder_layers": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    # recurrent states
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_headdim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "n_mamba_heads": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    # tokens
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "context_length": 512,
    "model_max_length": 512,
    "max_target_positions": 512,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW,
    "local_attention": WINDOW,
    "window_size": WINDOW,
    "keep_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "floor_scale": WINDOW,
    "index_topk": WINDOW,
    "rel_extent": WINDOW,
    "index_block_size": 4,
    "index_topk_blocks": 2,
    "vocab_size_per_layer_input": VOCABULARY,
}
"""The size of each field that a type has and that is not None by default."""

GEMMA_3N: dict[str, Any] = {  # the last two layers share the KV of those before
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "intermediate_size": 48,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
}
GEMMA_4: dict[str, Any] = {"global_head_dim": 16}
MINISTRAL: dict[str, Any] = {"head_dim": 8}
PER_LAYER_ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
QWEN_4: dict[str, Any] = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
DOTS_3: dict[str, Any] = {
    "num_key_value_heads": 4,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 24,
    "swa_qk_nope_head_dim": 8,
    "swa_head_dim": 16,
    "swa_v_head_dim": 8,
    "head_dim": 16,
}
DECODER: dict[str, Any] = {"is_decoder": True}
_ROC_WIDTHS: dict[str, Any] = {"pronunciation_embed_dim": 16, "shape_embed_dim": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        DECODER,
    ),
    **dict.fromkeys(("rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta"), DECODER),
    "xlm-roberta-xl": DECODER,
    "gemma3n_text": GEMMA_3N,
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": GEMMA_4,
    "dots3_note_text": DOTS_3,
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 6},
    "ministral": MINISTRAL,
    "hunyuan_v1_dense": MINISTRAL,
    "hunyuan_v1_moe": MINISTRAL,
    "nemotron": MINISTRAL,
    "qwen4_exp_text": QWEN_4,
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": PER_LAYER_ROPE,
    },
    "doge": {"keep_window_size": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "zamba": {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        "attention_hidden_size": 64,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "attention_head_dim": 16,
        "num_query_groups": 4,
    },
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "blt_local_encoder": {"hidden_size_global": 64},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_global_transformer": {"hidden_size": 64, "head_dim": 16},
    "roc_bert": DECODER | {"pronunciation_vocab_size": 20, "shape_vocab_size": 20} | _ROC_WIDTHS,
    "xmod": DECODER | {"default_language": "en_XX"},
    "reformer": DECODER
    | {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [8, 24],
        "num_buckets": 4,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
}
"""What a type needs besides."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a type, with float32 weights that are far from uniform, so that a wrong KV shows.

    Raises:
        KeyError: there is none; `NO_CONFIG` says why.
    """
    if model_type in NO_CONFIG:
        raise KeyError(f"{model_type}: {NO_CONFIG[model_type]}")
    if model_type in FROM_TWIN:
        return small_twin(AutoConfig.for_model(model_type), window=WINDOW)
    default = AutoConfig.for_model(model_type, **FOR_DEFAULTS.get(model_type, {}))
    options = _sizes_of(default) | _parts_of(default) | OPTIONS.get(model_type, {})
    return AutoConfig.for_model(model_type, **options, dtype="float32")


def _sizes_of(default: PreTrainedConfig) -> dict[str, Any]:
    fields = vars(default)
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name in fields and (type(fields[name]) in (int, float)) and not (type(size) is int and fields[name] < size)
    }
    if "num_key_value_heads" in fields:
        heads, kv = fields.get("num_attention_heads"), fields["num_key_value_heads"]
        sizes["num_key_value_heads"] = {heads: 4, None: 4, 1: 1}.get(kv, 2)
    if layer_types := _some_of_each(default, "layer_types"):
        sizes |= {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}
        if "layer_types" not in fields:
            sizes["layers_block_type"] = sizes.pop("layer_types")
    for index, (name, token) in enumerate(fields.items()):
        if name.endswith(("_token_id", "_token_index")) and type(token) is int and token >= VOCABULARY:
            sizes[name] = TOKENS.get(name, 60 + index % 30)
    if "mlp_layer_types" in fields:
        kinds = list(dict.fromkeys(fields["mlp_layer_types"] or ()))
        number = max(sizes["num_hidden_layers"], len(kinds))
        sizes["mlp_layer_types"] = kinds + kinds[-1:] * (number - len(kinds))
    return sizes


def _some_of_each(default: PreTrainedConfig, name: str) -> list[str]:
    """Layers of each kind in turn, twice if there are several."""
    stored = name in vars(default) or default.attribute_map.get(name) in vars(default)
    kinds = list(dict.fromkeys((getattr(default, name, None) or ()) if stored else ()))
    return kinds * 2


def _parts_of(default: PreTrainedConfig) -> dict[str, Any]:
    """The parts of a multi-modal configuration, small as well."""
    parts = {}
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            given = value.to_dict() | _sizes_of(value) | _parts_of(value) | OPTIONS.get(value.model_type, {})
            given.pop("per_layer_config", None)
            parts[name] = given
    return parts
