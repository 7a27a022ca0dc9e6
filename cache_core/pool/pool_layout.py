"""`PoolLayout`: the places of each layer's KV and states in one allocation. It allocates no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

Shape = Sequence[int]

_ALIGNMENT = 256  # bytes; each tensor starts at a multiple


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The places of each layer's tensors in the pool's memory.

    A full layer's K is `[num_slots + page_size, num_kv_heads, head_dim]`; its V has `v_head_dim` instead. A
    sliding-window layer has `num_swa_slots` instead of `num_slots`. The first `page_size` slots are reserved for
    padding, so that slot ids index the tensors directly. A layer with index keys has a third tensor for them,
    `[rows, index_dim]`.

    A state layer has no K and V, but a tensor `[num_state_slots + 1, *shape]` for each of `state_shapes`; state slot 0
    is reserved. The states follow all KV; the states of one slot are contiguous.

    With `kv_shapes`, layers differ in `(num_kv_heads, head_dim, v_head_dim)`, and the fields of these names are unused.

    With `max_seq_len`, each sequence has that many consecutive slots, and no slot is reserved. Then every layer is
    full, and its K is `[num_slots, num_kv_heads, head_dim]`.

    Raises:
        ValueError: `kv_shapes` does not have a shape for each layer, or all layers with K and V have the same shape; or
            `index_dims` does not have a number for each layer.
    """

    num_slots: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    layer_kinds: tuple[str, ...] | None = None  # "full", "swa" or "state" for each layer; None: all full
    num_swa_slots: int = 0
    num_state_slots: int = 0
    state_shapes: tuple[tuple[int, ...], ...] = ()
    max_seq_len: int | None = None
    kv_shapes: tuple[tuple[int, int, int], ...] | None = None  # for each layer, if layers differ; None: all alike
    index_dims: tuple[int, ...] = ()  # elements of an index key in each layer, 0: none; empty: no layer has any

    def __post_init__(self) -> None:
        if len(self.index_dims) not in (0, self.num_layers):
            raise ValueError(f"index_dims must have a number for each of {self.num_layers} layers: {self.index_dims}")
        if self.kv_shapes is None:
            return
        if len(self.kv_shapes) != self.num_layers:
            raise ValueError(f"kv_shapes must have a shape for each of {self.num_layers} layers: {self.kv_shapes}")
        if len({self.kv_shapes[layer] for layer in self.kv_layers}) < 2:
            raise ValueError(f"kv_shapes is for layers that differ, but those with K and V are alike: {self.kv_shapes}")

    def kind(self, layer: int) -> str:
        """Return the kind of a layer: "full", "swa" or "state"."""
        return self.layer_kinds[layer] if self.layer_kinds is not None else "full"

    @property
    def kv_layers(self) -> list[int]:
        """The layers that have K and V."""
        return [layer for layer in range(self.num_layers) if self.kind(layer) != "state"]

    def kv_shape(self, layer: int) -> tuple[int, int, int]:
        """Return `(num_kv_heads, head_dim, v_head_dim)` of a layer with K and V."""
        if self.kv_shapes is not None:
            return self.kv_shapes[layer]
        return self.num_kv_heads, self.head_dim, self.v_head_dim

    def index_dim(self, layer: int) -> int:
        """Return the elements of an index key of a layer; 0: it has none."""
        return self.index_dims[layer] if self.index_dims else 0

    @property
    def difference(self) -> str:
        """Two layers with K, V or index keys of different shapes, as text; empty if all layers are alike."""
        if self.kv_shapes is None and not self.index_dims:
            return ""
        names: dict[str, Callable[[int], object]] = {
            "(num_kv_heads, head_dim, v_head_dim)": self.kv_shape,
            "the number of elements of an index key": self.index_dim,
        }
        first, *others = self.kv_layers
        for name, of_layer in names.items():
            for other in others:
                if of_layer(other) != of_layer(first):
                    return f"{name} is {of_layer(first)} in layer {first}, but {of_layer(other)} in layer {other}"
        return ""

    def shapes(self, layer: int) -> list[tuple[int, ...]]:
        """Return the shapes of a layer's K and V, and of its index keys if it has any; empty for a state layer."""
        if self.kind(layer) == "state":
            return []
        rows = self.num_slots if self.kind(layer) == "full" else self.num_swa_slots
        if self.max_seq_len is None:
            rows += self.page_size
        num_kv_heads, head_dim, v_head_dim = self.kv_shape(layer)
        shapes: list[tuple[int, ...]] = [(rows, num_kv_heads, head_dim), (rows, num_kv_heads, v_head_dim)]
        if index_dim := self.index_dim(layer):
            shapes.append((rows, index_dim))
        return shapes

    def copy_shapes(self, num_slots: int) -> list[tuple[int, ...]]:
        """Return the shapes of copies of slots in all layers: of K, of V, and of index keys if layers have any.

        All layers must be alike.
        """
        lead = self.num_layers, num_slots
        shapes: list[tuple[int, ...]] = [(*lead, self.num_kv_heads, dim) for dim in (self.head_dim, self.v_head_dim)]
        return [*shapes, (*lead, max(self.index_dims))] if self.index_dims else shapes

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        num_rows, row = self._state_rows
        return self._kv_bytes + num_rows * row

    def views(self, storage: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Return each layer's tensors, as views of `storage`, a 1-D uint8 tensor of `num_bytes`."""
        layers, at = [], 0
        states = iter(views_of_rows(self.state_rows(storage), self._states, self.dtype))
        for layer in range(self.num_layers):
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
        assert self.kv_shapes is None, "sequence_views needs a layout without kv_shapes"
        assert not self.index_dims, "sequence_views needs a layout without index keys"
        memory = storage[: self.num_bytes].view(self.dtype)
        to_next_layer = memory.numel() // max(1, self.num_layers)
        at, views, length = memory.storage_offset(), [], self.max_seq_len
        for dim in (self.head_dim, self.v_head_dim):
            slot = self.num_kv_heads * dim
            shape = (self.num_slots // length, length, self.num_layers, self.num_kv_heads, dim)
            views.append(memory.as_strided(shape, (length * slot, slot, to_next_layer, dim, 1), at))
            at += self._bytes((self.num_slots, slot)) // self.dtype.itemsize
        return views[0], views[1]

    @property
    def _kv_bytes(self) -> int:
        return sum(self._bytes(shape) for layer in range(self.num_layers) for shape in self.shapes(layer))

    @property
    def _states(self) -> list[tuple[tuple[int, ...], ...]]:
        """The shapes of each state layer's tensors."""
        return [self.state_shapes] * (self.num_layers - len(self.kv_layers))

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
