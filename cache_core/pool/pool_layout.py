"""`PoolLayout`: the places of each layer's KV and states in one allocation. It allocates no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

import torch

Shape = Sequence[int]

_ALIGNMENT = 256  # bytes; each tensor starts at a multiple


class Layer(Protocol):
    """A layer of a pool: its kind, and the shapes of its tensors."""

    @property
    def kind(self) -> str:
        """Return "full", "swa" or "state"."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a token's K, V and, if it has any, index key; or of the tensors of a state."""


@dataclass(frozen=True)
class PoolLayout:
    """The places of each layer's tensors in the pool's memory.

    A full layer's K is `[num_slots + page_size, num_kv_heads, head_dim]`; its V has `v_head_dim` instead. A
    sliding-window layer has `num_swa_slots` instead of `num_slots`. The first `page_size` slots are reserved for
    padding, so that slot ids index the tensors directly. A layer with index keys has a third tensor for them,
    `[rows, index_head_dim]`.

    A state layer has no K and V, but a tensor `[num_state_slots + 1, *shape]` for each of its shapes; state slot 0 is
    reserved. The states follow all KV; the states of one slot are contiguous.

    With `max_seq_len`, each sequence has that many consecutive slots, and no slot is reserved. Then every layer is
    full, all are alike, and its K is `[num_slots, num_kv_heads, head_dim]`.
    """

    num_slots: int
    page_size: int
    layers: tuple[Layer, ...]
    dtype: torch.dtype
    num_swa_slots: int = 0
    num_state_slots: int = 0
    max_seq_len: int | None = None

    def kind(self, layer: int) -> str:
        """Return the kind of a layer: "full", "swa" or "state"."""
        return self.layers[layer].kind

    @cached_property
    def kv_layers(self) -> list[int]:
        """The layers that have K and V."""
        return [number for number, layer in enumerate(self.layers) if layer.kind != "state"]

    @cached_property
    def token_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a token's K, V and, if it has any, index key in each layer with KV, which must be alike."""
        return self.layers[self.kv_layers[0]].shapes if self.kv_layers else ((0, 0), (0, 0))

    @cached_property
    def difference(self) -> str:
        """Two layers with K, V or index keys of different shapes, as text; empty if all layers are alike."""
        for number in self.kv_layers:
            if (shapes := self.layers[number].shapes) != self.token_shapes:
                first = self.kv_layers[0]
                return f"a token has shapes {self.token_shapes} in layer {first}, but {shapes} in layer {number}"
        return ""

    def shapes(self, layer: int) -> list[tuple[int, ...]]:
        """Return the shapes of a layer's K and V, and of its index keys if it has any; empty for a state layer."""
        if self.kind(layer) == "state":
            return []
        rows = self.num_slots if self.kind(layer) == "full" else self.num_swa_slots
        if self.max_seq_len is None:
            rows += self.page_size
        return [(rows, *shape) for shape in self.layers[layer].shapes]

    def copy_shapes(self, num_slots: int) -> list[tuple[int, ...]]:
        """Return the shapes of copies of slots in all layers: of K, of V, and of index keys if layers have any.

        All layers must be alike.
        """
        return [(len(self.layers), num_slots, *shape) for shape in self.token_shapes]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        num_rows, row = self._state_rows
        return self._kv_bytes + num_rows * row

    def views(self, storage: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return each layer's tensors, as views of `storage`, a 1-D uint8 tensor of `num_bytes`."""
        layers, at = [], 0
        states = iter(views_of_rows(self.state_rows(storage), self._states, self.dtype))
        for layer in range(len(self.layers)):
            if self.kind(layer) == "state":
                layers.append(next(states))
                continue
            tensors = []
            for shape in self.shapes(layer):
                size = prod(shape) * self.dtype.itemsize
                tensors.append(storage[at : at + size].view(self.dtype).view(shape))
                at += aligned(size)
            layers.append(tuple(tensors))
        return layers

    def state_rows(self, storage: torch.Tensor) -> torch.Tensor:
        """Return the states of all layers, `[num_state_slots + 1, bytes]` uint8, as a view of `storage`."""
        return storage[self._kv_bytes : self.num_bytes].view(self._state_rows)

    def sequence_views(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all K and all V, `[sequence, position, layer, num_kv_heads, dim]` each, as views of `storage`.

        The layout must have `max_seq_len`. Then all layers are alike, so one stride leads from each to the next.
        """
        assert self.max_seq_len is not None, "sequence_views needs a layout with max_seq_len"
        memory = storage[: self.num_bytes].view(self.dtype)
        to_next_layer = memory.numel() // max(1, len(self.layers))
        at, views, length = memory.storage_offset(), [], self.max_seq_len
        for heads, dim in self.token_shapes:
            slot = heads * dim
            shape = (self.num_slots // length, length, len(self.layers), heads, dim)
            views.append(memory.as_strided(shape, (length * slot, slot, to_next_layer, dim, 1), at))
            at += self._bytes((self.num_slots, slot)) // self.dtype.itemsize
        return views[0], views[1]

    @property
    def _kv_bytes(self) -> int:
        return sum(self._bytes(shape) for layer in range(len(self.layers)) for shape in self.shapes(layer))

    @property
    def _states(self) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of each state layer's tensors."""
        return [layer.shapes for layer in self.layers if layer.kind == "state"]

    @property
    def _state_rows(self) -> tuple[int, int]:
        """The shape of `state_rows`."""
        return self.num_state_slots + 1, bytes_of_row(self._states, self.dtype)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return aligned(prod(shape) * self.dtype.itemsize)


def aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a multiple of the alignment."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def memory_for(num_bytes: int, device: torch.device | str, storage: torch.Tensor | None) -> torch.Tensor:
    """Return the memory of a pool: `storage`, or zeroed memory of a device if it is None.

    Raises:
        ValueError: `storage` is too small.
    """
    if storage is None:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if storage.numel() < num_bytes:
        raise ValueError(f"storage must have at least {num_bytes} bytes, not {storage.numel()}")
    return storage


def _bytes_of(shape: Shape, dtype: torch.dtype) -> int:
    return aligned(max(1, prod(shape)) * dtype.itemsize)  # an empty tensor also needs a place


def bytes_of_row(shapes: Sequence[Sequence[Shape]], dtype: torch.dtype) -> int:
    """Return the bytes of one state slot, given the shapes of each layer's tensors."""
    return sum(_bytes_of(shape, dtype) for of_layer in shapes for shape in of_layer)


def views_of_rows(
    rows: torch.Tensor, shapes: Sequence[Sequence[Shape]], dtype: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    """Return each layer's tensors, `[num_rows, *shape]`, as views of `rows`, `[num_rows, bytes_of_row]` uint8.

    Within one slot a tensor is contiguous. Its stride from slot to slot is `bytes_of_row`, so one copy of a row copies
    the states of all layers.
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
