"""`KVPool`: the tensors that hold KV and states, in one allocation. `PoolLayout` has the places of the tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raydix.cache_core.pool.copy_slots import check_out, check_shapes, put_rows, take_rows
from raydix.cache_core.pool.pool_layout import PoolLayout, memory_for

ARRAYS = ("K", "V", "index keys")  # the names of a layer's arrays, in order; only some layers have the third
WITHOUT_INDEX = "index must be given: the index keys of a token are written with its K and V"
WITH_INDEX = "index must be left out: there are no index keys"


class KVPool:
    """K, V and index keys of every layer, indexed by slot, and the states of state layers, indexed by state slot.

    Attributes:
        k, v: each layer's tensors; those of a state layer are empty.
        index: each layer's index keys, `[rows, index_dim]`; empty for a layer that has none.

    Args:
        layout: shapes and dtype.
        device: the device of new memory; ignored if `storage` is given.
        storage: the memory of the pool, such as shared memory: 1-D uint8 of at least `layout.num_bytes`. None allocates
            zeroed memory.

    Raises:
        ValueError: `storage` is too small.
    """

    def __init__(
        self, layout: PoolLayout, device: torch.device | str = "cpu", storage: torch.Tensor | None = None
    ) -> None:
        self.layout = layout
        storage = self.storage = memory_for(layout.num_bytes, device, storage)
        self._device = storage.device
        self._page_size = 1 if layout.max_seq_len else layout.page_size  # consecutive slots that can be copied as one
        layers = layout.views(storage)
        none = torch.empty(0, dtype=layout.dtype, device=storage.device)
        has_kv = [layer.kind != "state" for layer in layout.layers]
        # K, V and, where the layer has any, index keys of each layer
        self._arrays = [tensors if kv else (none, none) for tensors, kv in zip(layers, has_kv, strict=True)]
        self.k = [arrays[0] for arrays in self._arrays]
        self.v = [arrays[1] for arrays in self._arrays]
        self.index = [arrays[2] if len(arrays) > 2 else none for arrays in self._arrays]
        self._states = [() if kv else tensors for tensors, kv in zip(layers, has_kv, strict=True)]

    def by_sequence(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `(k_cache, v_cache)`, `[sequence, position, layer, num_kv_heads, dim]` each, as views of the pool.

        The layout must have `max_seq_len`.
        """
        return self.layout.sequence_views(self.storage)

    def state(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a state layer, `[num_state_slots + 1, *shape]` each; empty for other layers."""
        return self._states[layer]

    def state_tensors(self) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of each state layer."""
        return [tensors for tensors in self._states if tensors]

    def checked_tensors(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a kind ("full", "swa" or "state") by their names in errors, `[slots, ...]` each."""
        layers = [number for number, layer in enumerate(self.layout.layers) if layer.kind == kind]
        if kind == "state":
            return {
                f"state tensor {number} of layer {layer}": tensor
                for layer in layers
                for number, tensor in enumerate(self.state(layer))
            }
        return {
            f"{name} of layer {layer}": array
            for layer in layers
            for name, array in zip(ARRAYS, self._arrays[layer], strict=False)
        }

    def state_rows(self) -> torch.Tensor:
        """Return the states of all layers, `[num_state_slots + 1, bytes]` uint8, as a view of the pool."""
        return self.layout.state_rows(self.storage)

    def write(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: torch.Tensor | None = None
    ) -> None:
        """Copy KV into slots of one layer. The caller must hold the slots.

        Consecutive slots and slots that fill whole pages are copied at memory bandwidth.

        Args:
            slots: int64, `[n]`; window slots for a sliding-window layer. To write many layers on a GPU, move the slots
                there first: the transfer takes longer than the copy.
            k: `[n, num_kv_heads, head_dim]`; cast to the pool's dtype.
            v: `[n, num_kv_heads, v_head_dim]`; cast to the pool's dtype.
            index: `[n, index_dim]`, for a layer with index keys; cast to the pool's dtype.

        Raises:
            ValueError: a shape does not fit, or `index` is missing or the layer has no index keys; nothing was written.
        """
        place, dtype, arrays = self._device, self.layout.dtype, self._arrays[layer]
        given = (k, v) if index is None else (k, v, index)
        if len(given) != len(arrays):
            raise ValueError(WITHOUT_INDEX if index is None else WITH_INDEX)
        slots = slots.to(place)
        pairs = [(values.to(place, dtype), array) for values, array in zip(given, arrays, strict=True)]
        check_shapes(slots, *pairs)
        for values, array in pairs:
            put_rows(array, slots, values, self._page_size)

    def gather(
        self, layer: int, slots: torch.Tensor, out: Sequence[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return copies of the K and V of `slots` in one layer, `[n, num_kv_heads, dim]` each.

        A layer with index keys also returns these, `[n, index_dim]`.

        Args:
            slots: int64, `[n]`; window slots for a sliding-window layer.
            out: tensors to copy into, which are returned. They must be contiguous and have the results' shapes and the
                pool's dtype and device. Large new tensors cost several times the copy, so reuse `out` in a loop.

        Raises:
            ValueError: `out` does not fit.
        """
        slots, arrays = slots.to(self._device), self._arrays[layer]
        if out is None:
            copies = tuple([array.new_empty(len(slots), *array.shape[1:]) for array in arrays])
        else:
            copies = tuple(out)
            _check_outs(slots, copies, arrays)
        for copy, array in zip(copies, arrays, strict=True):
            take_rows(array, slots, copy, self._page_size)
        return copies

    def read_all(self, slots: torch.Tensor, swa_slots: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return copies of the K and V of `slots` in all layers, `[num_layers, n, num_kv_heads, dim]` each.

        If the layers have index keys, also these, `[num_layers, n, index_dim]`. Sliding-window layers are read at
        `swa_slots`; state layers are zeros.

        Raises:
            ValueError: layers differ in shape, or a sliding-window layer needs `swa_slots`.
        """
        layout = self.layout
        self._check_alike()
        slots, swa_slots = self._brought_here(slots, swa_slots)
        shapes = layout.copy_shapes(len(slots))
        copies = tuple(torch.empty(*shape, dtype=layout.dtype, device=self._device) for shape in shapes)
        for layer in range(len(layout.layers)):
            of_layer = [copy[layer] for copy in copies]
            if layout.kind(layer) == "state":
                for rows in of_layer:
                    rows.zero_()
            else:
                self.gather(layer, self._rows(layer, slots, swa_slots), of_layer)
        return copies

    def write_all(
        self,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        swa_slots: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
    ) -> None:
        """Copy KV into slots of all layers that have KV. The caller must hold the slots.

        Args:
            slots: int64, `[n]`.
            k, v: `[num_layers, n, num_kv_heads, dim]` each; cast to the pool's dtype.
            swa_slots: int64, `[n]`, for sliding-window layers.
            index: `[num_layers, n, index_dim]`, if the layers have index keys; cast to the pool's dtype.

        Raises:
            ValueError: layers differ in shape (nothing was written), or a sliding-window layer needs `swa_slots`; or
                `index` is missing or the layers have no index keys (nothing was written).
        """
        self._check_alike()
        slots, swa_slots = self._brought_here(slots, swa_slots)
        for layer in self.layout.kv_layers:
            of_layer = None if index is None else index[layer]
            self.write(layer, self._rows(layer, slots, swa_slots), k[layer], v[layer], of_layer)

    def _check_alike(self) -> None:
        if difference := self.layout.difference:
            raise ValueError(f"layers that differ in shape must be copied one by one: {difference}")

    def _brought_here(
        self, slots: torch.Tensor, swa_slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        place = self._device
        return slots.to(place), None if swa_slots is None else swa_slots.to(place)

    def _rows(self, layer: int, slots: torch.Tensor, swa_slots: torch.Tensor | None) -> torch.Tensor:
        if self.layout.kind(layer) == "full":
            return slots
        if swa_slots is None:
            raise ValueError("swa_slots must not be None: the pool has sliding-window layers")
        return swa_slots


def _check_outs(slots: torch.Tensor, outs: tuple[torch.Tensor, ...], arrays: tuple[torch.Tensor, ...]) -> None:
    """Raise ValueError unless there is a tensor for each array of a layer, which can take the rows of `slots`."""
    if len(outs) != len(arrays):
        names = ", ".join(ARRAYS[: len(arrays)])
        raise ValueError(f"out must be {len(arrays)} tensors, of {names}, not {len(outs)}")
    pairs = list(zip(outs, arrays, strict=True))
    check_shapes(slots, *pairs)
    for out, array in pairs:
        check_out(out, array)


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait until a GPU has finished the work queued for a tensor.

    Call this before a message that lets another process read or overwrite the slots.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
