"""Pools of layers that differ in kind, shape and index keys: a write into slots changes those bytes and no others.

Then rules of the layout are broken one by one, and the claim must see each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.claims.hypothesis_claims import refute, uphold

from raydix.cache_core import KVPool, PoolLayout
from raydix.cache_core.pool import kv_pool, pool_layout
from raydix.schemas import LayerShape

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
STATE_SHAPES = [((3,), (2, 2)), ((5,),)]
MARGIN = 512  # bytes of other memory before and behind the pool


@dataclass(frozen=True)
class Step:
    """One write: its layer, number of rows, the rows, and the method."""

    layer: int
    num_rows: int
    seed: int
    in_whole_pages: bool
    by_view: bool


@st.composite
def layouts(draw: Any) -> PoolLayout:
    """Two KV layers that differ, among others of each kind; page sizes 1, 4 and 16."""
    dims, page_size = st.integers(1, 9), draw(st.sampled_from([1, 4, 16]))
    shape_of_a_layer = st.tuples(st.integers(1, 3), dims, dims)
    first, second = draw(st.lists(shape_of_a_layer, min_size=2, max_size=2, unique=True))
    kinds = [*draw(st.lists(st.sampled_from(["full", "swa", "state"]), max_size=4)), "full", "swa"]
    kinds = draw(st.permutations(kinds))
    pair = [first, second]
    layers = []
    for kind in kinds:
        heads, k, v = (0, 0, 0) if kind == "state" else pair.pop() if pair else draw(shape_of_a_layer)
        index = draw(st.sampled_from([0, 3, 8]))
        kv = {"kind": kind, "num_kv_heads": heads, "head_dim": k, "v_head_dim": v, "index_head_dim": index}
        state = {"kind": kind, "state_shapes": draw(st.sampled_from(STATE_SHAPES))}
        layers.append(LayerShape.model_validate(kv if heads else state))
    num_pages = st.integers(1, 4)
    return PoolLayout(
        num_slots=page_size * draw(num_pages),
        page_size=page_size,
        layers=tuple(layers),
        dtype=draw(st.sampled_from(DTYPES)),
        num_swa_slots=page_size * draw(num_pages),
        num_state_slots=draw(st.integers(1, 3)),
    )


some_steps = st.lists(
    st.builds(Step, st.integers(0, 5), st.integers(1, 40), st.integers(0, 2**32), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)


def shape_of(layout: PoolLayout, layer: int) -> LayerShape:
    shape = layout.layers[layer]
    assert isinstance(shape, LayerShape)
    return shape


def tensors_of(pool: KVPool, layer: int) -> list[torch.Tensor]:
    """A layer's K, V and index keys, or its states."""
    index = [pool.index[layer]] if shape_of(pool.layout, layer).index_head_dim else []
    return list(pool.state(layer)) or [pool.k[layer], pool.v[layer], *index]


def shapes_of(layout: PoolLayout, layer: int) -> list[tuple[int, ...]]:
    """The shapes of these tensors, as the documents of a layout say them."""
    shape = shape_of(layout, layer)
    if shape.kind == "state":
        return [(layout.num_state_slots + 1, *of_state) for of_state in shape.state_shapes]
    rows = layout.page_size + (layout.num_slots if shape.kind == "full" else layout.num_swa_slots)
    k, v = shape.head_dim, shape.head_dim if shape.v_head_dim is None else shape.v_head_dim
    index = [(rows, shape.index_head_dim)] if shape.index_head_dim else []
    return [(rows, shape.num_kv_heads, k), (rows, shape.num_kv_heads, v), *index]


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A copy of a tensor, `[rows, bytes]`."""
    return tensor.contiguous().view(len(tensor), -1).view(torch.uint8).numpy().copy()


def random_bits(generator: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    data = generator.integers(0, 256, prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def choose_rows(generator: np.random.Generator, num_rows: int, page_size: int, step: Step) -> torch.Tensor:
    """Return distinct rows in any order, or whole pages of them."""
    unit = page_size if step.in_whole_pages and num_rows % page_size == 0 else 1
    starts = generator.permutation(num_rows // unit)[: max(1, step.num_rows // unit)] * unit
    return torch.from_numpy((starts[:, None] + np.arange(unit)).ravel())


def write(pool: KVPool, layer: int, rows: torch.Tensor, values: list[torch.Tensor], by_view: bool) -> None:
    """Write into a layer by `write`, or through the tensors that the pool shows."""
    if not by_view and pool.layout.kind(layer) != "state":
        pool.write(layer, rows, *values)
        return
    for tensor, value in zip(tensors_of(pool, layer), values, strict=True):
        tensor.view(torch.uint8)[rows] = value.view(torch.uint8)


def a_write_changes_its_place_alone(layout: PoolLayout, steps: list[Step]) -> None:
    """Every tensor is kept as a copy of its own, so that two that share bytes are found as one changes the other."""
    memory = random_bits(np.random.default_rng(0), torch.uint8, layout.num_bytes + 2 * MARGIN)
    pool = KVPool(layout, storage=memory[MARGIN : MARGIN + layout.num_bytes])
    layers = range(len(layout.layers))
    assert [[tuple(each.shape) for each in tensors_of(pool, layer)] for layer in layers] == [
        shapes_of(layout, layer) for layer in layers
    ]
    expected = [[as_bytes(each) for each in tensors_of(pool, layer)] for layer in layers]
    for step in steps:
        generator, layer, num_changed = np.random.default_rng(step.seed), step.layer % len(layout.layers), 0
        shapes, before = shapes_of(layout, layer), memory.clone()
        rows = choose_rows(generator, shapes[0][0], layout.page_size, step)
        values = [random_bits(generator, layout.dtype, len(rows), *shape[1:]) for shape in shapes]

        write(pool, layer, rows, values, step.by_view)

        for place, value in zip(expected[layer], values, strict=True):
            num_changed += int((place[rows.numpy()] != as_bytes(value)).sum())
            place[rows.numpy()] = as_bytes(value)
        for other in layers:
            for tensor, place in zip(tensors_of(pool, other), expected[other], strict=True):
                assert np.array_equal(as_bytes(tensor), place), (step, other)
        assert int((memory != before).sum()) == num_changed, step  # nothing between tensors, or around the pool
        if layout.kind(layer) != "state":
            for read, value in zip(pool.gather(layer, rows), values, strict=True):
                assert np.array_equal(as_bytes(read), as_bytes(value)), step


def test_a_write_into_layers_that_differ_changes_its_place_alone() -> None:
    uphold(a_write_changes_its_place_alone, layout=layouts(), steps=some_steps)


# ---------------------------------------------------------------- planted faults

FAULTS: list[Fault] = []


def breaks(plant: Fault) -> Fault:
    """Register a fault that the claim must see; its name says what goes wrong."""
    FAULTS.append(plant)
    return plant


@breaks
def all_layers_have_the_shape_of_the_first(patch: Patch) -> None:
    original = PoolLayout.shapes

    def shapes(layout: PoolLayout, layer: int) -> list[tuple[int, ...]]:
        return [(rows, *shape) for (rows, *_), shape in zip(original(layout, layer), layout.token_shapes, strict=False)]

    patch.setattr(PoolLayout, "shapes", shapes)


@breaks
def values_have_the_dimension_of_keys(patch: Patch) -> None:
    original = PoolLayout.shapes

    def shapes(layout: PoolLayout, layer: int) -> list[tuple[int, ...]]:
        of_layer = original(layout, layer)
        return of_layer[:1] * 2 + of_layer[2:] if of_layer else []

    patch.setattr(PoolLayout, "shapes", shapes)


@breaks
def layers_are_as_far_apart_as_if_they_were_alike(patch: Patch) -> None:
    def views(layout: PoolLayout, storage: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        all_layers = original(layout, storage)
        first = all_layers[layout.kv_layers[0]][0]
        for number, layer in enumerate(layout.kv_layers):
            k, *others = all_layers[layer]
            at = number * pool_layout.aligned(first.nbytes)
            all_layers[layer] = storage[at : at + k.nbytes].view(layout.dtype).view(k.shape), *others
        return all_layers

    original = PoolLayout.views
    patch.setattr(PoolLayout, "views", views)


@breaks
def states_begin_within_the_last_layer(patch: Patch) -> None:
    original = PoolLayout.state_rows

    def state_rows(layout: PoolLayout, storage: torch.Tensor) -> torch.Tensor:
        rows = original(layout, storage)
        at = storage.numel() - rows.numel() - pool_layout.aligned(1)
        return storage[at : at + rows.numel()].view(rows.shape)

    patch.setattr(PoolLayout, "state_rows", state_rows)


@breaks
def window_layers_have_a_row_for_each_slot(patch: Patch) -> None:
    original = PoolLayout.shapes

    def shapes(layout: PoolLayout, layer: int) -> list[tuple[int, ...]]:
        return [(layout.num_slots + layout.page_size, *shape[1:]) for shape in original(layout, layer)]

    patch.setattr(PoolLayout, "shapes", shapes)


@breaks
def index_keys_lie_where_values_do(patch: Patch) -> None:
    def views(layout: PoolLayout, storage: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        layers = original(layout, storage)
        for layer in layout.kv_layers:
            if len(layout.layers[layer].shapes) > 2:
                k, v, index = layers[layer]
                at = v.data_ptr() - storage.data_ptr()
                layers[layer] = k, v, storage[at : at + index.nbytes].view(layout.dtype).view(index.shape)
        return layers

    original = PoolLayout.views
    patch.setattr(PoolLayout, "views", views)


@breaks
def all_layers_have_index_keys_of_one_width(patch: Patch) -> None:
    original = PoolLayout.shapes

    def shapes(layout: PoolLayout, layer: int) -> list[tuple[int, ...]]:
        width = max(shape_of(layout, other).index_head_dim for other in layout.kv_layers)
        of_layer = original(layout, layer)
        return [*of_layer[:2], (of_layer[0][0], width)] if len(of_layer) > 2 else of_layer

    patch.setattr(PoolLayout, "shapes", shapes)


@breaks
def index_keys_are_not_written(patch: Patch) -> None:
    original = kv_pool.put_rows

    def put_rows(target: torch.Tensor, slots: torch.Tensor, source: torch.Tensor, page_size: int) -> None:
        if target.ndim == 3:
            original(target, slots, source, page_size)

    patch.setattr(kv_pool, "put_rows", put_rows)


@breaks
def a_page_is_written_a_row_too_far(patch: Patch) -> None:
    original = kv_pool.put_rows

    def put_rows(target: torch.Tensor, slots: torch.Tensor, source: torch.Tensor, page_size: int) -> None:
        original(target, (slots + (len(slots) > 1)).clamp(max=len(target) - 1), source, page_size)

    patch.setattr(kv_pool, "put_rows", put_rows)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_broken_rule_is_seen(plant: Fault, monkeypatch: Patch) -> None:
    plant(monkeypatch)

    refute(a_write_changes_its_place_alone, layout=layouts(), steps=some_steps)
