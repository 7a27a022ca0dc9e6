"""The layout of the pool that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar

import torch

from raydix.cache_core import KVPool, PoolLayout, RecordLayout, RecordPool
from raydix.cache_core.pool.kv_pool import ARRAYS, WITH_INDEX, WITHOUT_INDEX
from raydix.cache_core.pool.pool_layout import aligned
from raydix.schemas import CacheConfig, InvalidRequest, PoolConfig, Segment
from raydix.schemas.config import TierSizes

OPAQUE = (
    "this pool keeps opaque records (PoolConfig.format), and the slots of a record cannot be addressed singly: map the "
    "pool (attach_pool(mapped=True)), and use `pages`, `windows` and `states`"
)


A = TypeVar("A")


def layout_of(config: CacheConfig) -> PoolLayout | RecordLayout:
    """Return the layout that a configuration asks for."""
    return records_of(config) if config.pool.format == "opaque" else layers_of(config)


def records_of(config: CacheConfig) -> RecordLayout:
    """Return the layout of an opaque pool."""
    pool = config.pool
    return layout_below(config, TierSizes(pool.num_slots, _num_swa_slots(config), pool.num_state_slots))


def pool_below(
    config: CacheConfig, num_slots: int, num_swa_slots: int | None = None, num_state_slots: int = 0
) -> PoolConfig:
    """Return the pool of a tier below a cache: opaque, in host memory, for the records of `PageRecords`.

    Below an index-only cache, it is index-only.

    Args:
        config: of the cache.
        num_slots, num_swa_slots, num_state_slots: of the tier; the last two for caches with windows and with states.
    """
    pool = config.pool
    fields: dict[str, object] = pool.model_dump() if pool.format == "opaque" else {}
    fields |= {"num_slots": num_slots, "num_swa_slots": num_swa_slots, "num_state_slots": num_state_slots}
    if pool.layers:
        tables = _tables(pool)
        fields |= {"segments": tables["full"], "swa_segments": tables["swa"], "state_segments": tables["state"]}
        fields["format"] = "opaque"
    return PoolConfig.model_validate(fields | {"device": "cpu"})


def layout_below(config: CacheConfig, sizes: TierSizes) -> RecordLayout:
    """Return the layout of the pool of a tier below a cache, without records if the cache is index-only.

    Args:
        config: of the cache.
        sizes: of the tier.
    """
    below = records_below(config)
    return RecordLayout(
        num_slots=sizes.num_slots,
        page_size=config.page_size,
        slot_bytes=below.slot_bytes,
        num_swa_slots=sizes.num_swa_slots,
        swa_slot_bytes=below.swa_slot_bytes,
        num_state_slots=sizes.num_state_slots,
        state_bytes=below.state_bytes,
    )


def records_below(config: CacheConfig) -> PoolConfig:
    """Return a pool with the records of the tiers below a cache; without records if the cache is index-only."""
    if config.pool.format == "opaque":
        return config.pool
    return pool_below(config, config.page_size, *_smallest(config))


def _smallest(config: CacheConfig) -> tuple[int | None, int]:
    """Return the window slots and states of the smallest tier below a pool with layers: of those that have layers."""
    pool = config.pool
    return config.page_size if pool.has_layers_of("swa") else None, int(pool.has_layers_of("state"))


def _tables(pool: PoolConfig) -> dict[str, tuple[Segment, ...]]:
    """Return the segments of each kind of records."""
    tables = {"full": _Table(), "swa": _Table(), "state": _Table()}
    for number, layer in enumerate(pool.layers):
        table, is_state = tables[layer.kind], layer.kind == "state"
        names = [f"state tensor {place}" for place in range(len(layer.shapes))] if is_state else ARRAYS
        for name, shape in zip(names, layer.shapes, strict=False):
            table.add(name, number, pool.dtype, shape)
            if is_state:  # Each tensor of a state begins at a multiple of the alignment.
                table.add("padding", number, "uint8", [aligned(table.num_bytes) - table.num_bytes])
    return {kind: table.segments for kind, table in tables.items()}


class _Table:
    """The segments of a record, one after the other."""

    def __init__(self) -> None:
        self.segments: tuple[Segment, ...] = ()
        self.num_bytes = 0

    def add(self, name: str, layer: int, dtype: str, shape: Sequence[int]) -> None:
        """Append a segment, unless it is empty."""
        if prod(shape):
            name = f"{name} of layer {layer}"
            self.segments += (Segment.at(self.num_bytes, name=name, layer=layer, dtype=dtype, shape=tuple(shape)),)
            self.num_bytes += self.segments[-1].bytes


def layers_of(config: CacheConfig) -> PoolLayout:
    """Return the layout of a pool with layers."""
    pool = config.pool
    return PoolLayout(
        num_slots=pool.num_slots,
        page_size=config.page_size,
        max_seq_len=config.max_seq_len,
        layers=pool.layers,
        dtype=getattr(torch, pool.dtype),
        num_swa_slots=_num_swa_slots(config),
        num_state_slots=pool.num_state_slots,
    )


def _num_swa_slots(config: CacheConfig) -> int:
    return config.pool.num_swa_slots or (config.pool.num_slots if config.sliding_window_size else 0)


def pool_of(
    layout: PoolLayout | RecordLayout, device: torch.device | str = "cpu", storage: torch.Tensor | None = None
) -> KVPool | RecordPool:
    """Return a pool of this layout, in new memory of a device or in `storage`."""
    if isinstance(layout, RecordLayout):
        return RecordPool(layout, device, storage)
    return KVPool(layout, device, storage)


def with_layers(pool: KVPool | RecordPool) -> KVPool:
    """Return a pool with layers; raise InvalidRequest for an opaque one."""
    if isinstance(pool, RecordPool):
        raise InvalidRequest(OPAQUE)
    return pool


def check_layers_alike(layout: PoolLayout | RecordLayout) -> PoolLayout:
    """Return the layout if all its layers keep K, V and index keys of one shape, as copies of all layers need.

    Raises:
        InvalidRequest: layers differ, or the pool is opaque.
    """
    if isinstance(layout, RecordLayout):
        raise InvalidRequest(OPAQUE)
    if difference := layout.difference:
        raise InvalidRequest(
            f"this pool's layers differ: {difference}. read_kv and write_kv copy layers that are alike: map the pool "
            "(attach_pool(mapped=True), on the node or card of the cache), and use write and gather, layer by layer"
        )
    return layout


def given_arrays(layout: PoolLayout, k: A, v: A, index: A | None) -> tuple[A, ...]:
    """Return the arrays of a write to all layers: K, V and, if the layers have any, index keys.

    Raises:
        InvalidRequest: index keys are missing, or given to layers that have none.
    """
    if (index is None) == (len(layout.token_shapes) > 2):
        raise InvalidRequest(WITHOUT_INDEX if index is None else WITH_INDEX)
    return (k, v) if index is None else (k, v, index)
