"""`traits_of`: how a model must be run, found out with a small model of the same classes.

A small model, in float32, shows in seconds what the code of a large one does. Where there is none, as for code that
comes with a model, the model itself is run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig

from raydix.actors.transformers_check import ModelCheck, ModelFails, ModelTraits
from raydix.actors.transformers_forward import ForwardPass, pad_token_id
from raydix.actors.transformers_twin import TwinUnavailable, build_twin, small_twin
from raydix.schemas import ConfigMismatch

_MAX_KEPT = 64
_kept: OrderedDict[tuple[str, str], ModelTraits | str] = OrderedDict()  # traits, or why there are none
_lock = threading.Lock()


def traits_of(config: PreTrainedConfig, device: torch.device, itself: ForwardPass | None = None) -> ModelTraits | None:
    """Return how a model must be run. The outcome is kept for the next call with an equal configuration.

    Args:
        config: the model's.
        device: where the small model is run.
        itself: the model, to be run where there is no small one. None: it is not there.

    Returns:
        None if there is no small model, and `itself` is None.

    Raises:
        ConfigMismatch: the model cannot be served, with a cache or without.
    """
    key = config.to_json_string(use_diff=False), str(device)
    with _lock:
        found = _kept.get(key) or _traits_of_twin(config, device)
        if found is None:
            return None if itself is None else ModelCheck(itself, config).traits()
        _kept[key] = found
        while len(_kept) > _MAX_KEPT:
            _kept.popitem(last=False)
    if isinstance(found, str):
        raise ConfigMismatch(found)
    return found


def _traits_of_twin(config: PreTrainedConfig, device: torch.device) -> ModelTraits | str | None:
    """Return the traits of a small model, or why it has none; None if there is no small model that runs."""
    try:
        twin = small_twin(config)
        check = ModelCheck(ForwardPass(build_twin(twin).to(device), pad_token_id(twin)), twin)
    except TwinUnavailable:
        return None
    try:
        with _one_thread():
            return check.traits()
    except ModelFails:
        return None
    except ConfigMismatch as error:
        return str(error)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute on one thread: small tensors are slower on several, ten times where others use the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
