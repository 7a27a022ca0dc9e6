"""Tiny models with sliding windows and with recurrent states, and the results of their own `DynamicCache`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from support.models.tiny_llama import random_prompt
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    DynamicCache,
    FalconH1Config,
    Gemma3TextConfig,
    JambaConfig,
    MistralConfig,
    MoshiConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)

if TYPE_CHECKING:
    from raydix.actors.huggingface.worker import Generation

__all__ = [
    "BAMBA",
    "FALCON_H1",
    "GEMMA_3",
    "JAMBA",
    "MISTRAL",
    "MOSHI",
    "QWEN3_NEXT",
    "WINDOW",
    "check_same",
    "continuation",
    "random_model",
    "random_prompt",
]

WINDOW = 8

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # far from uniform, so that a wrong KV shows
    "dtype": "float32",
    "eos_token_id": None,  # random models come upon it soon
}

MISTRAL = MistralConfig(**COMMON, num_hidden_layers=2, sliding_window=WINDOW)

GEMMA_3 = Gemma3TextConfig(
    **COMMON,
    num_hidden_layers=3,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)

FALCON_H1 = FalconH1Config(
    **COMMON,
    num_hidden_layers=2,  # each with attention and a state
    mamba_d_ssm=32,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=1,
    mamba_d_state=8,
    mamba_d_conv=4,
    mamba_chunk_size=16,
)

QWEN3_NEXT = Qwen3NextConfig(
    **(COMMON | {"initializer_range": 0.2}),  # beyond, it differs from itself by 2e-4 when cut
    num_hidden_layers=4,  # three with a state, then one with attention
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)

# ---------------------------------------------------------------- their forward does not go on from its own cache

JAMBA = JambaConfig(
    **COMMON,
    num_hidden_layers=2,
    attn_layer_period=2,
    attn_layer_offset=1,
    mamba_d_state=8,
    mamba_dt_rank=4,
    num_experts=2,
    num_experts_per_tok=1,
)

BAMBA = BambaConfig(
    **COMMON,
    num_hidden_layers=4,
    attn_layer_indices=[1],
    mamba_expand=1,
    mamba_n_heads=4,
    mamba_d_head=8,
    mamba_n_groups=1,
    mamba_d_state=8,
)

MOSHI = MoshiConfig(**COMMON, num_hidden_layers=2, sliding_window=WINDOW)  # its windows are not masked


def random_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """The model that a worker with this seed has, made without a worker."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(deepcopy(config)).eval()


@torch.inference_mode()
def continuation(
    model: Any, prompt: list[int], cuts: Sequence[int], num_new: int, start: int | None = None
) -> tuple[torch.Tensor, list[int]]:
    """Run a prompt in parts that end at `cuts`, then decode greedily, all in the model's own `DynamicCache`.

    Returns the logits after each token from `start` (None: the first cut) on, but for the last one generated, and the
    generated ids.
    """
    cache = DynamicCache(config=model.config)
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(prompt)}), len(prompt)]
    logits, generated = [], []
    for begin, end in pairwise(edges):
        logits.append(model(torch.tensor([prompt[begin:end]]), past_key_values=cache).logits[0])
    for _ in range(num_new - 1):
        generated.append(int(logits[-1][-1].argmax()))
        logits.append(model(torch.tensor([generated[-1:]]), past_key_values=cache).logits[0])
    generated.append(int(logits[-1][-1].argmax()))
    return torch.cat(logits)[min(cuts, default=0) if start is None else start :], generated


def check_same(found: Generation, logits: torch.Tensor, token_ids: list[int]) -> None:
    """Check a worker's answer against the logits after each token but the last, and the ids, of passes without a cache.

    Logits may differ by a thousandth of their standard deviation.
    """
    expected = logits[found.prefix_len :]
    assert found.logits is not None
    assert list(found.token_ids) == token_ids
    assert found.logits.shape == expected.shape
    assert (found.logits - expected).abs().max() < 1e-3 * expected.std()
