"""Tensors that stand for a card's: operations that mix them with tensors of host memory raise, as CUDA would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from raydix.cache_core.pool import record_copies

DEVICE = torch.device("xpu")


class OnCard(torch.Tensor):
    """A tensor that says it lies on a card."""


class WithCard(TorchFunctionMode):
    """In this context, `OnCard` tensors have another device. Only `copy_`, `to` and `cpu` cross it.

    `copy_` raises if the tensor in host memory crosses the end of a piece that is registered with CUDA.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        on_card = {isinstance(tensor, OnCard) for tensor in tensors if tensor.dim()}
        if func == torch.Tensor.device.__get__ and on_card == {True}:  # type: ignore[attr-defined]
            return DEVICE
        if func is torch.Tensor.to and DEVICE in args[1:]:
            return args[0].clone().as_subclass(OnCard)
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor).clone()
        if len(on_card) > 1 and func is not torch.Tensor.copy_:
            raise RuntimeError(f"Expected all tensors to be on the same device: {getattr(func, '__name__', func)}")
        if len(on_card) > 1:
            for tensor in tensors:
                if not isinstance(tensor, OnCard):
                    _check_piece(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if on_card and isinstance(args[0] if args else None, OnCard) and isinstance(result, torch.Tensor):
            return result.as_subclass(OnCard)
        return result


def _check_piece(tensor: torch.Tensor) -> None:
    """Raise RuntimeError unless a tensor is contiguous, in one piece of registered memory."""
    piece, start = record_copies.PIECE_BYTES, tensor.data_ptr()
    if not tensor.is_contiguous() or start // piece != (start + max(1, tensor.nbytes) - 1) // piece:
        raise RuntimeError("CUDA error: invalid argument")
