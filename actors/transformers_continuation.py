"""Whether a model goes on from its cache as if it had never stopped: not the forward of every model does.

Some read a recurrent state only for a single token, some forget the window once it is full. What they say after a
prefix that was found is wrong then, and nothing else would tell.

    whole  |··········· first ···········|─ next ─|    the logits of the next tokens
    cut    |─────────── first ───────────|               are these, but for rounding
                                         |─ next ─|
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from raydix.actors.transformers_layers import ModelLayers
from raydix.schemas import ConfigMismatch

Parts: TypeAlias = Collection[NDArray[np.int64]]
RunParts: TypeAlias = Callable[[Parts, int], torch.Tensor]  # parts of a prompt: the logits of its last tokens

_NUM_FIRST, _NUM_NEXT = 12, 3  # tokens before and after the cut; one alone would be run as in decoding
_LONGEST_ON_CPU, _LONGEST = 512, 8192  # windows that are filled before the cut: longer ones would take too long
_TOLERANCES = {torch.float64: 3e-4, torch.float32: 3e-4, torch.float16: 0.02}  # relative; float32 may be TF32 on a GPU
_COARSE = 0.1  # of bfloat16 and what is coarser


def check_continuation(
    run_parts: RunParts,
    layers: ModelLayers,
    *,
    vocab_size: int,
    max_positions: int | None,
    dtype: torch.dtype,
    device: torch.device,
    model_type: str,
) -> None:
    """Compare a random prompt run whole with the same one run in two parts.

    Sliding windows are filled before the cut, unless they are longer than what is quick on the device.

    Args:
        run_parts: runs the parts of a prompt one after the other in a new cache of the model's own; returns the logits
            of the last tokens, as many as asked for.
        layers, vocab_size, max_positions, dtype, device, model_type: the model's.

    Raises:
        ConfigMismatch: the logits differ by more than rounding, or the second part fails.
    """
    longest = _LONGEST_ON_CPU if device.type == "cpu" else _LONGEST
    num_first = _NUM_FIRST + (layers.window if layers.window is not None and layers.window <= longest else 0)
    if max_positions is not None:
        num_first = min(num_first, max_positions - _NUM_NEXT)
    if num_first < 1:
        return  # too few positions to reuse anything
    prompt = np.random.default_rng(0).integers(0, vocab_size, num_first + _NUM_NEXT)
    whole = run_parts((prompt,), _NUM_NEXT)
    cannot = (
        f"the forward of this {model_type} model, in transformers {transformers.__version__}, cannot continue from "
        "a cached state or KV (serve it with use_cache=False): "
    )
    try:
        cut = run_parts((prompt[:num_first], prompt[num_first:]), _NUM_NEXT)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the same prompt in one was no trouble
        raise ConfigMismatch(f"{cannot}{error}") from error
    off = _distance(cut, whole)
    if off > _tolerance(dtype, device):
        raise ConfigMismatch(
            f"{cannot}the logits after a prompt in two parts are off by {off:.0%} from those after the same in one"
        )


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """How far logits are off, relative to how far they spread; of all tokens together, for in a mixture of experts
    rounding may send one of them to another expert."""
    logits, expected = (each.double() - each.double().mean(-1, keepdim=True) for each in (logits, expected))
    spread = expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float((logits - expected).norm() / spread)


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    if dtype is torch.float32 and device.type != "cpu":
        dtype = torch.float16  # TF32 rounds like it
    return _TOLERANCES.get(dtype, _COARSE)
