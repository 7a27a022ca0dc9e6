"""A tiny Llama with grouped-query attention, and the results of its own `DynamicCache`."""

from __future__ import annotations

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.3,  # far from uniform, so that a wrong KV shows
    dtype="float32",
    eos_token_id=None,  # random models come upon it soon
)


def random_llama(seed: int = 0) -> LlamaForCausalLM:
    """The model that a worker with this seed has, made without a worker."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LLAMA).eval()


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LLAMA.vocab_size, (num_tokens,), generator=generator).tolist()


@torch.inference_mode()
def continuation(model: LlamaForCausalLM, prompt: list[int], cut: int, num_new: int) -> tuple[torch.Tensor, list[int]]:
    """Run `prompt[:cut]`, then the rest, then decode greedily, all in the model's own `DynamicCache`.

    Returns the logits after each token from `cut` on, but for the last one generated, and the generated ids.
    """
    cache = DynamicCache(config=model.config)
    if cut:
        model(torch.tensor([prompt[:cut]]), past_key_values=cache)
    logits, generated, pending = [], [], prompt[cut:]
    for _ in range(num_new):
        step = model(torch.tensor([pending]), past_key_values=cache).logits[0]
        logits.append(step)
        pending = [int(step[-1].argmax())]
        generated += pending
    return torch.cat(logits), generated
