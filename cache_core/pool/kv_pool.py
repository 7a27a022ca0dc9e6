"""`KVPool`: the tensors that hold KV and states, in one allocation. `PoolLayout` has the places of the tensors."""

from __future__ import annotations

import torch

from raydix.cache_core.pool.copy_slots import check_out, check_shapes, put_rows, take_rows
from raydix.cache_core.pool.pool_layout import PoolLayout, memory_for


class KVPool:
    """K and V of every layer, indexed by slot, and the states of state layers, indexed by state slot.

    Attributes:
        k, v: each layer's tensors; those of a state layer are empty.

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
        self._page_size = 1 if layout.max_seq_len else layout.page_size  # consecutive slots that can be copied as one
        layers = layout.views(storage)
        none = torch.empty(0, dtype=layout.dtype, device=storage.device)
        has_kv = [layout.kind(layer) != "state" for layer in range(layout.num_layers)]
        self.k = [tensors[0] if kv else none for tensors, kv in zip(layers, has_kv, strict=True)]
        self.v = [tensors[1] if kv else none for tensors, kv in zip(layers, has_kv, strict=True)]
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
        layers = [layer for layer in range(self.layout.num_layers) if self.layout.kind(layer) == kind]
        if kind == "state":
            return {
                f"state tensor {number} of layer {layer}": tensor
                for layer in layers
                for number, tensor in enumerate(self.state(layer))
            }
        halves = (("K", self.k), ("V", self.v))
        return {f"{name} of layer {layer}": tensors[layer] for layer in layers for name, tensors in halves}

    def state_rows(self) -> torch.Tensor:
        """Return the states of all layers, `[num_state_slots + 1, bytes]` uint8, as a view of the pool."""
        return self.layout.state_rows(self.storage)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy KV into slots of one layer. The caller must hold the slots.

        Consecutive slots and slots that fill whole pages are copied at memory bandwidth.

        Args:
            slots: int64, `[n]`; window slots for a sliding-window layer. To write many layers on a GPU, move the slots
                there first: the transfer takes longer than the copy.
            k: `[n, num_kv_heads, head_dim]`; cast to the pool's dtype.
            v: `[n, num_kv_heads, v_head_dim]`; cast to the pool's dtype.

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
        """Return copies of the K and V of `slots` in one layer, `[n, num_kv_heads, dim]` each.

        Args:
            slots: int64, `[n]`; window slots for a sliding-window layer.
            out: tensors to copy into, which are returned. They must be contiguous and have the results' shapes and the
                pool's dtype and device. Large new tensors cost several times the copy, so reuse `out` in a loop.

        Raises:
            ValueError: `out` does not fit.
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
        """Return copies of the K and V of `slots` in all layers, `[num_layers, n, num_kv_heads, dim]` each.

        Sliding-window layers are read at `swa_slots`; state layers are zeros.

        Raises:
            ValueError: layers differ in shape, or a sliding-window layer needs `swa_slots`.
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
        """Copy KV into slots of all layers that have KV. The caller must hold the slots.

        Args:
            slots: int64, `[n]`.
            k, v: `[num_layers, n, num_kv_heads, dim]` each; cast to the pool's dtype.
            swa_slots: int64, `[n]`, for sliding-window layers.

        Raises:
            ValueError: layers differ in shape (nothing was written), or a sliding-window layer needs `swa_slots`.
        """
        self._check_alike()
        slots, swa_slots = self._brought_here(slots, swa_slots)
        for layer in self.layout.kv_layers:
            self.write(layer, self._rows(layer, slots, swa_slots), k[layer], v[layer])

    def _check_alike(self) -> None:
        if difference := self.layout.difference:
            raise ValueError(f"layers that differ in shape must be copied one by one: {difference}")

    def _brought_here(
        self, slots: torch.Tensor, swa_slots: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        place = self.storage.device
        return slots.to(place), None if swa_slots is None else swa_slots.to(place)

    def _rows(self, layer: int, slots: torch.Tensor, swa_slots: torch.Tensor | None) -> torch.Tensor:
        if self.layout.kind(layer) == "full":
            return slots
        if swa_slots is None:
            raise ValueError("swa_slots must not be None: the pool has sliding-window layers")
        return swa_slots


def wait_for_device(tensor: torch.Tensor) -> None:
    """Wait until a GPU has finished the work queued for a tensor.

    Call this before a message that lets another process read or overwrite the slots.
    """
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
