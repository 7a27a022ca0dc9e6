"""`InFloat64`: runs the code of a model in float64 throughout, also where it casts to float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FLOAT32 = id(torch.float32)  # compared as an id, because tensors compare their elements


class InFloat64(TorchFunctionMode):
    """A context in which torch computes in float64 wherever the code of a model asks for float32.

    Many models cast to float32 inside, for a norm, a softmax, a router or a scan. Their rounding depends on the
    processor and the number of threads. The context holds for the thread that enters it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif kwargs or _FLOAT32 in map(id, args) or func is torch.full:
            args = [_widened(value) for value in args]
            kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
            if func is torch.full and kwargs.get("dtype") is None and isinstance([*args, *kwargs.values()][1], float):
                kwargs["dtype"] = torch.float64  # the least number of float64 does not fit into the default dtype
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor) and result.dtype is torch.float32
        ):  # the model's code left the dtype to the default
            return result.double()
        return result


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
