"""`PoolShape`: the tensors that a pool must have for a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from raydix.actors.huggingface.layer_mapping import ModelLayers, StateTensor
from raydix.schemas import LayerShape
from raydix.schemas.shown import counted


class PoolShape(NamedTuple):
    """The layers of a pool and their dtype, as the fields of a `PoolConfig`.

    Attributes:
        layers: of the pool.
        dtype: torch's name, such as "bfloat16".
    """

    layers: tuple[LayerShape, ...]
    dtype: str

    @classmethod
    def of_model(
        cls, layers: ModelLayers, kv: Sequence[LayerShape], states: tuple[StateTensor, ...], dtype: torch.dtype
    ) -> PoolShape:
        """Return the shape that a model with KV of this dtype needs.

        Args:
            layers: of the model.
            kv: of each layer of the pool that keeps KV.
            states: the tensors of a recurrent state.
            dtype: of the KV.

        Raises:
            ConfigMismatch: its states do not fit into a pool of the dtype.
        """
        state, of_kv = {"kind": "state", "state_shapes": [tensor.pool_shape(dtype) for tensor in states]}, iter(kv)
        shapes = [
            LayerShape.model_validate(state) if kind == "state" else next(of_kv).model_copy(update={"kind": kind})
            for kind in layers.kinds
        ]
        return cls(tuple(shapes), str(dtype).removeprefix("torch."))

    @property
    def is_uniform(self) -> bool:
        """Whether all layers with KV have the same shape, also of index keys."""
        return len({layer.shapes for layer in self.layers if layer.kind != "state"}) < 2

    def __str__(self) -> str:
        runs = [f"{counted(sum(1 for _ in run), 'layer')} ({layer})" for layer, run in groupby(self.layers)]
        return f"{' + '.join(runs) or 'no layers'} in {self.dtype}"
