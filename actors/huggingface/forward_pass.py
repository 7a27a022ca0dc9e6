"""`ForwardPass`: one sequence through a transformers causal LM, with a cache or without one."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig


class Positions(Enum):
    """The position ids that a model gets when it continues from a cache."""

    OWN = "none: the model counts by itself"
    COUNTED = "0, 1, 2, ..."
    BEYOND_PADS = "pad + 1, pad + 2, ..., without pad tokens"


def pad_token_id(config: PreTrainedConfig) -> int | None:
    """Return the pad token that a configuration names, if it is in the vocabulary."""
    text = config.get_text_config(decoder=True)
    pad = getattr(text, "pad_token_id", None)
    return pad if isinstance(pad, int) and 0 <= pad < text.vocab_size else None


class ForwardPass:
    """Run a model over one sequence.

    Args:
        model: a causal LM, in evaluation mode.
        pad_token_id: the id that RoBERTa's positions skip; None: no such id.

    Attributes:
        positions: the position ids for the model.
        takes_positions: whether the model takes position ids.
        pad_token_id: as given.
    """

    def __init__(self, model: Any, pad_token_id: int | None) -> None:
        self.model = model
        self.positions = Positions.OWN
        self.pad_token_id = pad_token_id
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in accepted
        self._takes_use_cache = "use_cache" in accepted
        self._takes_num_kept = "logits_to_keep" in accepted
        self._dynamic = [module for module in model.modules() if _is_dynamic_rope(module)]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = self.model.device
        return device

    @torch.inference_mode()
    def logits(self, tokens: NDArray[np.int64], start: int, cache: Cache | None, num_kept: int) -> torch.Tensor:
        """Run a sequence from token `start` on, and return the logits of its last tokens.

        Args:
            tokens: the ids of the sequence from its first token on.
            start: number of leading tokens with KV in the cache.
            cache: the run adds the KV of the other tokens. None: run all tokens, and keep no KV.
            num_kept: number of last tokens to return logits for.

        Returns:
            `[num_kept, vocabulary]`, on the model's device.
        """
        for rope in self._dynamic:
            _forget_longest(rope)
        begin = 0 if cache is None else start
        arguments: dict[str, Any] = {"input_ids": torch.from_numpy(tokens[begin:]).to(self.device).unsqueeze(0)}
        if self._takes_use_cache:
            arguments["use_cache"] = cache is not None
        if self._takes_num_kept:
            arguments["logits_to_keep"] = num_kept
        if cache is not None:
            arguments["past_key_values"] = cache
            if self.positions is not Positions.OWN:
                arguments["position_ids"] = self._position_ids(tokens, begin)
        logits: torch.Tensor = self.model(**arguments).logits[0]
        return logits[-num_kept:]

    def _position_ids(self, tokens: NDArray[np.int64], start: int) -> torch.Tensor:
        if self.positions is Positions.COUNTED:
            ids = np.arange(start, len(tokens))
        else:
            is_token = tokens != self.pad_token_id
            ids = (np.cumsum(is_token) * is_token + self.pad_token_id)[start:]
        return torch.from_numpy(ids).to(self.device).unsqueeze(0)


def _is_dynamic_rope(module: Any) -> bool:
    return hasattr(module, "max_seq_len_cached") and "dynamic" in str(getattr(module, "rope_type", ""))


def _forget_longest(rope: Any) -> None:
    """Reset rotary embeddings, which keep the frequencies of the longest sequence so far."""
    for name, first in list(rope.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            kind = name.removesuffix("original_inv_freq")
            rope.register_buffer(f"{kind}inv_freq", first, persistent=False)
            if hasattr(rope, f"{kind}max_seq_len_cached"):
                setattr(rope, f"{kind}max_seq_len_cached", rope.original_max_seq_len)
    rope.max_seq_len_cached = rope.original_max_seq_len
