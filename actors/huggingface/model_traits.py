"""`traits_of`: how a model must be run, found out with a small model of the same classes.

A small model, in float64 and on the CPU, shows in seconds what the code of a large one does, on every processor alike.
Where there is none, as for code that comes with a model, the model itself is run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import torch
import transformers
from transformers import DynamicCache, PreTrainedConfig

from raydix.actors.huggingface.errors import refusing
from raydix.actors.huggingface.forward_pass import ForwardPass, pad_token_id
from raydix.actors.huggingface.in_float64 import InFloat64
from raydix.actors.huggingface.model_check import TWIN_BOUND, ModelCheck, ModelFails, ModelTraits
from raydix.actors.huggingface.sequence_lengths import ModelLengths
from raydix.actors.huggingface.small_twin import TwinUnavailable, build_twin, small_twin
from raydix.schemas import ConfigMismatch

_MAX_KEPT = 64
_LONGEST = 100  # tokens run in a model's dtype: more than a small model computes together
_kept: OrderedDict[tuple[str, str, torch.dtype], ModelTraits | str] = OrderedDict()  # traits, or why there are none
_lock = threading.Lock()


def traits_of(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, itself: ForwardPass | None = None
) -> ModelTraits | None:
    """Return how a model must be run. The outcome is kept for the next call with an equal configuration.

    Args:
        config: the model's.
        device: the worker's. The small model must run there in the model's dtype.
        dtype: the model's.
        itself: the model, to be run where there is no small one. None: it is not there.

    Returns:
        None if there is no small model, and `itself` is None.

    Raises:
        ConfigMismatch: the model cannot be served, with a cache or without.
    """
    key = config.to_json_string(use_diff=False), str(device), dtype
    with _lock:
        found = _kept.get(key) or _traits_of_twin(config, device, dtype)
        if found is None:
            return None if itself is None else _traits_of_itself(config, itself)
        _kept[key] = found
        while len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)
    if isinstance(found, str):
        raise ConfigMismatch(found)
    return found


def _traits_of_itself(config: PreTrainedConfig, forward: ForwardPass) -> ModelTraits:
    """Return the traits of the model itself, as far as its rounding lets them be seen.

    The bound between rounding and another result is a judgement here: see `ModelCheck`.

    Raises:
        ConfigMismatch: the model cannot be run, or is not causal.
    """
    try:
        return ModelCheck(forward, config).traits()
    except ModelFails as error:
        raise ConfigMismatch(str(error)) from error


def _traits_of_twin(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> ModelTraits | str | None:
    """Return the traits of a small model, or why it has none; None if there is no small model that runs."""
    try:
        twin = small_twin(config)
        check = ModelCheck(ForwardPass(build_twin(twin), pad_token_id(twin)), twin, TWIN_BOUND)
    except TwinUnavailable:
        return None
    try:
        with _one_thread():
            with InFloat64():
                traits = check.traits()
            _check_dtype(twin, device, dtype, traits)
            return traits
    except ModelFails:
        return None
    except ConfigMismatch as error:
        return str(error)


def _check_dtype(twin: PreTrainedConfig, device: torch.device, dtype: torch.dtype, traits: ModelTraits) -> None:
    """Run a prompt and two tokens after it in a dtype, whatever the logits.

    Raises:
        ConfigMismatch: transformers fails, as where it multiplies float32 by weights of the dtype.
    """
    forward = ForwardPass(build_twin(twin, dtype=dtype).to(device), pad_token_id(twin))
    forward.positions = traits.positions
    num_tokens = ModelLengths.of(twin).first(_LONGEST)
    tokens = np.full(num_tokens, forward.pad_token_id or 0)  # RoBERTa's positions of other tokens end sooner
    with refusing(f"transformers {transformers.__version__} cannot run this {twin.model_type} model in {dtype}"):
        forward.logits(tokens, 0, None, 1)
        if traits.cannot_share is None or traits.has_own_cache:
            cache = DynamicCache(config=twin)
            for start, end in pairwise(sorted({0, max(0, num_tokens - 2), max(0, num_tokens - 1), num_tokens})):
                forward.logits(tokens[:end], start, cache, 1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute on one thread: small tensors are slower on several, ten times where others use the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
