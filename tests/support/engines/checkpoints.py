"""Small models with real random weights, saved for vLLM: large enough weights that wrong KV changes the answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_config(kind: str, **more: Any) -> Any:
    """The configuration of a small model of that kind."""
    import transformers as tr

    fields = {**_COMMON, **more}
    match kind:
        case "llama":
            return tr.LlamaConfig(**fields)
        case "qwen2":
            return tr.Qwen2Config(**fields)
        case "mistral":
            return tr.MistralConfig(**{"sliding_window": 128, "head_dim": 32, **fields})
        case "gemma3":
            return tr.Gemma3TextConfig(
                **{
                    "sliding_window": 128,
                    "head_dim": 32,
                    "layer_types": ["sliding_attention", "full_attention"],
                    **fields,
                }
            )
        case "deepseek":
            mla = {
                "q_lora_rank": None,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "first_k_dense_replace": 2,
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
                "n_shared_experts": 1,
                "moe_intermediate_size": 64,
                "num_key_value_heads": 2,
            }
            return tr.DeepseekV2Config(**{**fields, **mla})
        case "lfm2":
            blocks = {
                "conv_dim": 64,
                "conv_L_cache": 3,
                "block_dim": 64,
                "block_multiple_of": 32,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False,
            }
            return tr.Lfm2Config(**{**fields, **blocks, "layer_types": ["conv", "full_attention"]})
    raise ValueError(kind)


def save_model(kind: str, folder: Path, *, seed: int = 0, **more: Any) -> Path:
    """Save a model with random weights; return its folder."""
    import transformers as tr

    config = make_config(kind, **more)
    torch.manual_seed(seed)
    model = tr.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    std = 1.6 / config.hidden_size**0.5
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.ndim >= 2:
                each.normal_(0.0, 1.0 if "embed_tokens" in name else std)
            elif name.endswith("bias"):
                each.normal_(0.0, 0.5)
            else:
                each.normal_(1.0, 0.1)
    model.save_pretrained(folder)
    return folder
