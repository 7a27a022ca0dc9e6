"""The references for a worker's logits: passes without a cache, and the model's own `DynamicCache`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from raydix.actors.huggingface.forward_pass import ForwardPass, Positions, pad_token_id

__all__ = ["Passes", "difference", "is_dynamic", "make_model", "run_own_cache"]


def make_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Make the model that a worker with this seed has, without a worker."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype).eval()


def is_dynamic(config: PreTrainedConfig) -> bool:
    """Whether the KV of a token depends on the length of its sequence, by the configuration."""
    text = config.get_text_config(decoder=True)
    ropes = str(getattr(text, "rope_parameters", None))
    return "longrope" in ropes or "dynamic" in ropes or hasattr(text, "keep_window_size")


class Passes:
    """The logits of sequences without a cache.

    A sequence takes one pass. Where KV depends on the length, the tokens of the prompt take one, and each generated
    token takes another, over all tokens up to it: so does `generate` of transformers without a cache.

    Args:
        config: the model's.
        dtype: of the model.
        by_step: whether each generated token takes a pass in any case.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, *, by_step: bool = False) -> None:
        self._config = config
        self._dtype = dtype
        self._is_dynamic = is_dynamic(config)
        self._by_step = by_step or self._is_dynamic
        self._model = make_model(config, dtype)
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, tokens: Sequence[int], num_prompt: int) -> torch.Tensor:
        """Return the logits of a sequence, `[n, vocabulary]`; the first `num_prompt` tokens are the prompt."""
        if not self._by_step:
            return self._pass(tuple(tokens))
        steps = [self._pass(tuple(tokens[:end]))[-1:] for end in range(num_prompt + 1, len(tokens) + 1)]
        return torch.cat([self._pass(tuple(tokens[:num_prompt])), *steps])

    @torch.inference_mode()
    def _pass(self, tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in self._known:
            # rotary embeddings may keep the frequencies of the longest sequence so far
            model = make_model(self._config, self._dtype) if self._is_dynamic else self._model
            accepted = inspect.signature(model.forward).parameters
            options = {"use_cache": False} if "use_cache" in accepted else {}
            self._known[tokens] = model(input_ids=torch.tensor([tokens]), **options).logits[0]
        return self._known[tokens]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference in standard deviations of the expected logits; NaN counts as infinite."""
    off = float((found.double() - expected.double()).abs().max() / expected.double().std())
    return math.inf if math.isnan(off) else off


def run_own_cache(model: Any, tokens: Sequence[int], ends: Sequence[int], positions: Positions) -> torch.Tensor:
    """Return the logits of a sequence, `[n, vocabulary]`, run in parts that end at `ends` in the model's own cache."""
    forward = ForwardPass(model, pad_token_id(model.config))
    forward.positions = positions
    cache = DynamicCache(config=model.config)
    ids = np.array(tokens)
    parts: Iterator[tuple[int, int]] = pairwise([0, *sorted({end for end in ends if 0 < end < len(ids)}), len(ids)])
    return torch.cat([forward.logits(ids[:end], start, cache, end - start) for start, end in parts])
