"""The states of all layers side by side, a row for each state slot: one copy moves all of a state."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

Shape = Sequence[int]

_ALIGNMENT = 256  # bytes; each tensor starts on such a boundary


def aligned(num_bytes: int) -> int:
    """So many bytes, or as many more as it takes to the next boundary."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(shape: Shape, dtype: torch.dtype) -> int:
    return aligned(max(1, prod(shape)) * dtype.itemsize)  # so that there is a row, though nothing is in it


def bytes_of_row(shapes: Sequence[Sequence[Shape]], dtype: torch.dtype) -> int:
    """Bytes of one state: the tensors of each layer, by their shapes."""
    return sum(_bytes_of(shape, dtype) for of_layer in shapes for shape in of_layer)


def views_of_rows(
    rows: torch.Tensor, shapes: Sequence[Sequence[Shape]], dtype: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    """Each layer's tensors, `[num_rows, *shape]`, as views of `rows`, `[num_rows, bytes_of_row]` uint8.

    What is a row of one of them is contiguous; from row to row it is as far as all layers take.
    """
    layers, at = [], 0
    for of_layer in shapes:
        tensors = []
        for shape in of_layer:
            size = prod(shape) * dtype.itemsize
            tensors.append(rows[:, at : at + size].view(dtype).view(len(rows), *shape))
            at += _bytes_of(shape, dtype)
        layers.append(tuple(tensors))
    return layers
