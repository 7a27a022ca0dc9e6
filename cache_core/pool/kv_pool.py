"""`KVPool`: the tensors that hold KV and states, in one allocation: KV layer by layer, states slot by slot."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from raydix.cache_core.pool.copy_slots import check_out, check_shapes, put_rows, take_rows
from raydix.cache_core.pool.state_rows import aligned, bytes_of_row, views_of_rows


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where each layer's tensors lie in the pool's memory.

    A full layer's K is `[num_slots + page_size, num_kv_heads, head_dim]`, its V the same with `v_head_dim`; a
    sliding-window layer has `num_swa_slots` in place of `num_slots`. The first `page_size` rows are reserved for
    padding, so that slot ids index the tensors directly. A state layer has a tensor `[num_state_slots + 1, *shape]` for
    each of `state_shapes`, with row 0 reserved, and no K and V. States lie behind all KV, those of one slot together.

    With `kv_shapes`, layers differ in `(num_kv_heads, head_dim, v_head_dim)`, and the fields of these names are unused.

    With `max_seq_len`, slots come in runs of so many, for one sequence each, and none is reserved: every layer is full,
    its K `[num_slots, num_kv_heads, head_dim]`.

    Raises:
        ValueError: `kv_shapes` does not have a shape for each layer, or those of all layers with K and V are equal.
    """

    num_slots: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    layer_kinds: tuple[str, ...] | None = None  # "full", "swa" or "state" of each layer; None: all full
    num_swa_slots: int = 0
    num_state_slots: int = 0
    state_shapes: tuple[tuple[int, ...], ...] = ()
    max_seq_len: int | None = None
    kv_shapes: tuple[tuple[int, int, int], ...] | None = None  # of each layer, where layers differ; None: all alike

    def __post_init__(self) -> None:
        if self.kv_shapes is None:
            return
        if len(self.kv_shapes) != self.num_layers:
            raise ValueError(f"kv_shapes must have a shape for each of {self.num_layers} layers: {self.kv_shapes}")
        if len({self.kv_shapes[layer] for layer in self.kv_layers}) < 2:
            raise ValueError(f"kv_shapes is for layers that differ, but those with K and V are alike: {self.kv_shapes}")

    def kind(self, layer: int) -> str:
        """ "full", "swa" or "state"."""
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

    @property
    def difference(self) -> str:
        """Name two layers whose K and V differ in shape, and their shapes; empty where all layers are alike."""
        if self.kv_shapes is None:
            return ""
        first, *others = self.kv_layers
        other = next(layer for layer in others if self.kv_shapes[layer] != self.kv_shapes[first])
        return (
            f"(num_kv_heads, head_dim, v_head_dim) is {self.kv_shapes[first]} in layer {first}, "
            f"but {self.kv_shapes[other]} in layer {other}"
        )

    def shapes(self, layer: int) -> list[tuple[int, ...]]:
        """The shapes of a layer's K and V; none for a state layer."""
        if self.kind(layer) == "state":
            return []
        rows = self.num_slots if self.kind(layer) == "full" else self.num_swa_slots
        if self.max_seq_len is None:
            rows += self.page_size
        num_kv_heads, head_dim, v_head_dim = self.kv_shape(layer)
        return [(rows, num_kv_heads, head_dim), (rows, num_kv_heads, v_head_dim)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        num_rows, row = self._state_rows
        return self._kv_bytes + num_rows * row

    def views(self, storage: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """Each layer's tensors, as views of `storage`, a 1-D uint8 tensor of `num_bytes`."""
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
        """All there is of each state slot, `[num_state_slots + 1, bytes]` uint8, as a view of `storage`."""
        return storage[self._kv_bytes : self.num_bytes].view(self._state_rows)

    def sequence_views(self, storage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and all V by sequence, `[sequence, position, layer, num_kv_heads, dim]` each, as views of `storage`.

        Only with `max_seq_len`: the layers are all alike then, so one stride leads from each to the next.
        """
        assert self.max_seq_len is not None, "this pool's slots come in pages"
        assert self.kv_shapes is None, "this pool's layers differ"
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
        """How many rows the states have, and of how many bytes."""
        return self.num_state_slots + 1, bytes_of_row(self._states, self.dtype)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        return aligned(prod(shape) * self.dtype.itemsize)


class KVPool:
    """K and V of every layer, indexed by slot, and the states of state layers, by state slot.

    Attributes:
        k, v: each layer's tensors; those of a state layer are empty.

    Args:
        layout: shapes and dtype.
        device: where to allocate; ignored if `storage` is given.
        storage: memory to lay the pool over, 1-D uint8 of at least `layout.num_bytes`: shared memory or another
            process's pool. None allocates it, zeroed.
    """

    def __init__(
        self, layout: PoolLayout, device: torch.device | str = "cpu", storage: torch.Tensor | None = None
    ) -> None:
        self.layout = layout
        if storage is None:
            storage = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        elif storage.numel() < layout.num_bytes:
            raise ValueError(f"the pool needs {layout.num_bytes} bytes, not {storage.numel()}")
        self.storage = storage
        self._page_size = 1 if layout.max_seq_len else layout.page_size  # of slots that lie together
        layers = layout.views(storage)
        none = torch.empty(0, dtype=layout.dtype, device=storage.device)
        has_kv = [layout.kind(layer) != "state" for layer in range(layout.num_layers)]
        self.k = [tensors[0] if kv else none for tensors, kv in zip(layers, has_kv, strict=True)]
        self.v = [tensors[1] if kv else none for tensors, kv in zip(layers, has_kv, strict=True)]
        self._states = [() if kv else tensors for tensors, kv in zip(layers, has_kv, strict=True)]

    def by_sequence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool as `(k_cache, v_cache)`, `[sequence, position, layer, num_kv_heads, dim]` each: views of its memory.

        Only for a layout with `max_seq_len`.
        """
        return self.layout.sequence_views(self.storage)

    def state(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors of a state layer, `[num_state_slots + 1, *shape]` each; none for other layers."""
        return self._states[layer]

    def state_rows(self) -> torch.Tensor:
        """All layers' states by slot, `[num_state_slots + 1, bytes]` uint8: what `state` shows in parts."""
        return self.layout.state_rows(self.storage)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy KV into slots of one layer. `k`: [n, num_kv_heads, head_dim], `v`: [n, num_kv_heads, v_head_dim].

        `slots` is int64 of length n: window slots for a sliding-window layer. The caller answers for holding them. One
        copy, cast to the pool's dtype: of slots that follow one another or fill whole pages as fast as memory allows.
        To bring slots to a GPU takes longer than to use them there: who writes many layers has them there already.

        Raises:
            ValueError: a shape does not fit; nothing was written.
        """
        place = self.storage.device
        slots = slots.to(place)
        check_shapes(slots, (k, self.k[layer]), (v, self.v[layer]))
        k, v = k.to(place, self.layout.dtype), v.to(place, self.layout.dtype)
        put_rows(self.k[layer], slots, k, self._page_size)
        put_rows(self.v[layer], slots, v, self._page_size)

    def gather(
        self, layer: int, slots: torch.Tensor, out: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V of `slots` (int64, length n) in one layer, `[n, num_kv_heads, dim]` each.

        `out`: contiguous tensors of these shapes and the pool's dtype, to copy into; they are returned. New memory
        costs several times the copy where it is large, so who gathers often keeps its own.

        Raises:
            ValueError: `out` is none of that, or lies on another device.
        """
        place = self.storage.device
        slots = slots.to(place)
        k, v = self.k[layer], self.v[layer]
        k_out, v_out = out or (k.new_empty(len(slots), *k.shape[1:]), v.new_empty(len(slots), *v.shape[1:]))
        check_shapes(slots, (k_out, k), (v_out, v))
        if out is not None:
            check_out(k_out, k)
            check_out(v_out, v)
        take_rows(k, slots, k_out, self._page_size)
        take_rows(v, slots, v_out, self._page_size)
        return k_out, v_out

    def read_all(self, slots: torch.Tensor, swa_slots: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V of `slots` in all layers, `[num_layers, n, num_kv_heads, dim]` each.

        Sliding-window layers are read at `swa_slots`; state layers are zeros.

        Raises:
            ValueError: layers differ in shape.
        """
        layout = self.layout
        self._check_alike()
        slots, swa_slots = self._brought_here(slots, swa_slots)
        shape = (layout.num_layers, len(slots), layout.num_kv_heads)
        k = torch.empty(*shape, layout.head_dim, dtype=layout.dtype, device=self.storage.device)
        v = torch.empty(*shape, layout.v_head_dim, dtype=layout.dtype, device=self.storage.device)
        for layer in range(layout.num_layers):
            if layout.kind(layer) == "state":
                k[layer].zero_()
                v[layer].zero_()
            else:
                self.gather(layer, self._rows(layer, slots, swa_slots), (k[layer], v[layer]))
        return k, v

    def write_all(
        self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, swa_slots: torch.Tensor | None = None
    ) -> None:
        """`write` in all layers that have KV: `k` and `v` are `[num_layers, n, num_kv_heads, dim]`.

        Raises:
            ValueError: layers differ in shape; nothing was written.
        """
        self._check_alike()
        slots, swa_slots = self._brought_here(slots, swa_slots)
        for layer in self.layout.kv_layers:
            self.write(layer, self._rows(layer, slots, swa_slots), k[layer], v[layer])

    def _check_alike(self) -> None:
        if difference := self.layout.difference:
            raise ValueError(f"layers that differ cannot be copied at once, only one by one: {difference}")

    def _brought_here(
        self, slots: torch.Tensor, swa_slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        place = self.storage.device
        return slots.to(place), None if swa_slots is None else swa_slots.to(place)

    def _rows(self, layer: int, slots: torch.Tensor, swa_slots: torch.Tensor | None) -> torch.Tensor:
        if self.layout.kind(layer) == "full":
            return slots
        if swa_slots is None:
            raise ValueError("the pool has sliding-window layers: their slots are needed, too")
        return swa_slots


def wait_for_device(tensor: torch.Tensor) -> None:
    """Until a GPU has done what was asked of it: others read and overwrite slots as soon as they are told of them."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
