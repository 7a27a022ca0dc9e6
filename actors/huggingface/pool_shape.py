"""`PoolShape`: the tensors that a pool must have for a transformers model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raydix.actors.huggingface.layer_mapping import NO_KV, KVShape, ModelLayers, StateTensor
from raydix.schemas import ConfigMismatch, PoolConfig


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The KV and index key of a token in each layer of a pool, and the tensors of a recurrent state.

    Attributes:
        kinds: of each layer: "full", "swa" or "state".
        kv: of each layer; `NO_KV` for a layer that keeps a state.
        dtype: torch's name, such as "bfloat16".
        state_shapes: in elements of `dtype`.
    """

    kinds: tuple[str, ...]
    kv: tuple[KVShape, ...]
    dtype: str
    state_shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of_model(
        cls, layers: ModelLayers, kv: tuple[KVShape, ...], states: tuple[StateTensor, ...], dtype: torch.dtype
    ) -> PoolShape:
        """Return the shape that a model with KV of this dtype needs.

        Raises:
            ConfigMismatch: its states do not fit into a pool of the dtype, or its index keys have several widths.
        """
        if len(widths := {shape.index_head_dim for shape in kv} - {0}) > 1:
            raise ConfigMismatch(f"the index keys of this model's layers differ in width: {sorted(widths)}")
        name = str(dtype).removeprefix("torch.")
        return cls(layers.kinds, kv, name, tuple(state.pool_shape(dtype) for state in states))

    @classmethod
    def of_pool(cls, pool: PoolConfig) -> PoolShape:
        """Return the shape of a configured pool."""
        kinds, dims = pool.layer_kinds or ("full",) * pool.num_layers, pool.index_dims or (0,) * pool.num_layers
        kv = tuple(KVShape(*shape, dim) for shape, dim in zip(pool.layer_shapes, dims, strict=True))
        return cls(kinds, kv, pool.dtype, pool.state_shapes)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers with KV have the same shape, also of index keys."""
        return len(self._shapes) < 2

    def pool_fields(self) -> dict[str, Any]:
        """Return the fields of a `PoolConfig` for this shape."""
        fields: dict[str, Any] = {
            "num_layers": len(self.kinds),
            "layer_kinds": None if set(self.kinds) <= {"full"} else self.kinds,
            "state_shapes": self.state_shapes,
            "dtype": self.dtype,
            "index_head_dim": max((shape.index_head_dim for shape in self._shapes), default=0),
            "index_layers": self._index_layers,
        }
        if len({shape[:3] for shape in self._shapes}) > 1:
            return fields | {"kv_shapes": tuple(shape[:3] for shape in self.kv)}
        shape = next(iter(self._shapes), NO_KV)
        v_head_dim = None if shape.v_head_dim == shape.head_dim else shape.v_head_dim
        return fields | {"num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "v_head_dim": v_head_dim}

    def fields_unlike(self, other: PoolShape) -> str:
        """Return the fields of a `PoolConfig` that differ from another shape's, with their values."""
        mine, others = self.pool_fields(), other.pool_fields()
        return ", ".join(f"{name}={value!r}" for name, value in mine.items() if value != others.get(name))

    @property
    def _index_layers(self) -> tuple[int, ...] | None:
        """The layers with index keys; None: there are none, or all full-attention layers have them."""
        layers = tuple(layer for layer, shape in enumerate(self.kv) if shape.index_head_dim)
        full = tuple(layer for layer, kind in enumerate(self.kinds) if kind == "full")
        return None if layers in ((), full) else layers

    @property
    def _shapes(self) -> set[KVShape]:
        return {shape for shape, kind in zip(self.kv, self.kinds, strict=True) if kind != "state"}

    def __str__(self) -> str:
        counts = [f"{self.kinds.count(kind)} {kind}" for kind in ("full", "swa", "state") if kind in self.kinds]
        layers = f"{len(self.kinds)}" if set(self.kinds) <= {"full"} else " + ".join(counts)
        kv = " or ".join(_text(shape) for shape in sorted(self._shapes))
        states = f", states of {list(self.state_shapes)}" if self.state_shapes else ""
        return f"{layers} layers of {kv} ({self.dtype}){states}"


def _text(shape: KVShape) -> str:
    heads, dim, v_dim, index_dim = shape
    text = f"{heads} KV heads of {dim}" if dim == v_dim else f"{heads} KV heads of {dim} + {v_dim}"
    return f"{text} with index keys of {index_dim}" if index_dim else text
