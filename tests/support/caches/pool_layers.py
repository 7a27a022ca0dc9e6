"""Layers of a pool that keep KV of one shape, or states of one shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raydix.schemas import LayerShape

STATE_SHAPES = ((3,), (2, 2))


def layer_shapes(
    kinds: Sequence[str],
    num_kv_heads: int = 1,
    head_dim: int = 4,
    v_head_dim: int | None = None,
    index_head_dim: int = 0,
    index_layers: Collection[int] | None = None,  # None: all with KV
    state_shapes: tuple[tuple[int, ...], ...] = STATE_SHAPES,
) -> tuple[LayerShape, ...]:
    """Return a layer of each of these kinds."""
    state = {"kind": "state", "state_shapes": state_shapes}
    kv = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
    with_index = range(len(kinds)) if index_layers is None else index_layers
    shapes = [
        state if kind == "state" else kv | {"kind": kind, "index_head_dim": index_head_dim * (layer in with_index)}
        for layer, kind in enumerate(kinds)
    ]
    return tuple(LayerShape.model_validate(shape) for shape in shapes)
