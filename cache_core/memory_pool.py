"""`KVPool`: the tensors that hold the KV, layer by layer, in one allocation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ALIGNMENT = 256  # bytes; each layer's tensors start on such a boundary


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Where each layer's K and V lie in the pool's memory.

    A layer's K is `[num_slots + page_size, num_kv_heads, head_dim]`, its V the same with `v_head_dim`. The first
    `page_size` rows are reserved for padding, so that slot ids can index the tensors directly.
    """

    num_slots: int
    page_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        """Rows of each layer's tensors."""
        return self.num_slots + self.page_size

    @property
    def k_bytes(self) -> int:
        """Bytes of one layer's K."""
        return self.num_rows * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def v_bytes(self) -> int:
        """Bytes of one layer's V."""
        return self.num_rows * self.num_kv_heads * self.v_head_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_layers * (_aligned(self.k_bytes) + _aligned(self.v_bytes))

    def views(self, storage: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The K and V tensors of each layer, as views of `storage`, a 1-D uint8 tensor of `num_bytes`."""
        k, v, at = [], [], 0
        for _ in range(self.num_layers):
            k.append(self._view(storage, at, self.k_bytes, self.head_dim))
            at += _aligned(self.k_bytes)
            v.append(self._view(storage, at, self.v_bytes, self.v_head_dim))
            at += _aligned(self.v_bytes)
        return k, v

    def _view(self, storage: torch.Tensor, at: int, num_bytes: int, dim: int) -> torch.Tensor:
        rows = storage[at : at + num_bytes].view(self.dtype)
        return rows.view(self.num_rows, self.num_kv_heads, dim)


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every kernel can copy: 8-bit floats as bytes."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class KVPool:
    """K and V of every layer, indexed by slot.

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
        self.k, self.v = layout.views(storage)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy KV into slots of one layer. `k`: [n, num_kv_heads, head_dim], `v`: [n, num_kv_heads, v_head_dim].

        `slots` is int64 of length n. The caller answers for holding them. One copy, cast to the pool's dtype.
        """
        slots = slots.to(self.storage.device)
        _bits(self.k[layer]).index_copy_(0, slots, _bits(k.to(self.layout.dtype)))
        _bits(self.v[layer]).index_copy_(0, slots, _bits(v.to(self.layout.dtype)))

    def gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V of `slots` (int64, length n) in one layer, `[n, num_kv_heads, dim]` each."""
        slots = slots.to(self.storage.device)
        return self.k[layer].index_select(0, slots), self.v[layer].index_select(0, slots)

    def read_all(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the K and V of `slots` in all layers, `[num_layers, n, num_kv_heads, dim]` each."""
        layout = self.layout
        k = torch.empty(layout.num_layers, len(slots), layout.num_kv_heads, layout.head_dim, dtype=layout.dtype)
        v = torch.empty(layout.num_layers, len(slots), layout.num_kv_heads, layout.v_head_dim, dtype=layout.dtype)
        k, v = k.to(self.storage.device), v.to(self.storage.device)
        for layer in range(layout.num_layers):
            k[layer], v[layer] = self.gather(layer, slots)
        return k, v

    def write_all(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """`write` in all layers: `k` and `v` are `[num_layers, n, num_kv_heads, dim]`."""
        for layer in range(self.layout.num_layers):
            self.write(layer, slots, k[layer], v[layer])
