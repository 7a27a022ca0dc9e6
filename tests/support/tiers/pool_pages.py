"""Pools of all kinds of layers with random bytes, and the records of their pages, made without the code under test."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core import KVPool, PoolLayout, RecordLayout, RecordPool
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.cache_core.tiers.page_records import KINDS, CopyPlan, Kind, PageCopies, PageRecords, Pairs
from raydix.schemas.layer_shape import LayerKind, LayerShape

PAGE = 4
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]
Pool = KVPool | RecordPool
Layout = PoolLayout | RecordLayout
Contents = dict[Kind, list[bytes]]  # the bytes of each record


def scatter(records: PageRecords, starts: NDArray[np.int64], data: torch.Tensor, kind: Kind = "full") -> None:
    """Copy records to pages."""
    records.copies(data, kind).load(records.rows(starts, kind), np.arange(len(starts)))


def layout(*layers: LayerShape, num_swa_slots: int = 0, num_state_slots: int = 0) -> PoolLayout:
    return PoolLayout(48, PAGE, layers, torch.uint8, num_swa_slots, num_state_slots)


def kv(heads: int = 2, k: int = 4, v: int = 4, index: int = 0, kind: LayerKind = "full") -> LayerShape:
    return LayerShape(kind=kind, num_kv_heads=heads, head_dim=k, v_head_dim=v, index_head_dim=index)


_SWA, _STATE = kv(kind="swa"), LayerShape(kind="state", state_shapes=((3, 2), (7,)))
_MIXED = (_SWA, kv(index=3), _STATE, kv(), kv(index=2, kind="swa"), _STATE)
LAYOUTS: dict[str, Layout] = {
    "attention": layout(*[kv()] * 3),
    "latent": layout(*[kv(1, 9, 0)] * 2),
    "narrow V": layout(*[kv(2, 6, 5)] * 3),
    "shapes": layout(kv(), kv(1, 8, 3), kv()),
    "index keys": layout(kv(index=5), kv(), kv(index=5), kv(index=3)),
    "windows": layout(kv(), _SWA, _SWA, kv(), num_swa_slots=24),
    "states": layout(_STATE, kv(), _STATE, num_state_slots=5),
    "mixed": layout(*_MIXED, num_swa_slots=20, num_state_slots=5),
    "no layers": layout(),
    "opaque": RecordLayout(48, PAGE, 13),
    "opaque, mixed": RecordLayout(48, PAGE, 24, 20, 7, 5, 33),
}


def random_pool(
    layout: Layout, dtype: torch.dtype = torch.uint8, storage: torch.Tensor | None = None, device: str = "cpu"
) -> Pool:
    """A pool whose bytes are random."""
    if isinstance(layout, RecordLayout):
        pool: Pool = RecordPool(layout, device, storage)
    else:
        pool = KVPool(replace(layout, dtype=dtype), device, storage)
    pool.storage.copy_(torch.randint(0, 256, pool.storage.shape, dtype=torch.uint8))
    wait_for_device(pool.storage)
    return pool


def layout_of(records: PageRecords, num_slots: int, num_swa_slots: int = 0, num_state_slots: int = 0) -> RecordLayout:
    """The layout of an opaque pool that can take records."""
    page = records.page_size
    return RecordLayout(
        num_slots=num_slots,
        page_size=page,
        slot_bytes=records.num_bytes("full") // page,
        num_swa_slots=num_swa_slots,
        swa_slot_bytes=records.num_bytes("swa") // page,
        num_state_slots=num_state_slots,
        state_bytes=records.num_bytes("state"),
    )


def pool_below(pool: Pool) -> RecordPool:
    """A pool with random bytes that can take the records of another one; it has other numbers of slots."""
    below = random_pool(layout_of(PageRecords(pool), 32 + PAGE, 16, 7))
    assert isinstance(below, RecordPool)
    return below


def contents(pool: Pool) -> Contents:
    """The bytes of all records of a pool, page by page and layer by layer."""
    return {kind: [b"".join(parts) for parts in zip(*_segments(pool, kind), strict=True)] for kind in KINDS}


def _segments(pool: Pool, kind: Kind) -> list[list[bytes]]:
    """For each segment of a kind, its bytes in each record."""
    if isinstance(pool, RecordPool):
        records = {"full": pool.pages, "swa": pool.windows, "state": pool.states}[kind]
        return [[as_bytes(record) for record in records]] if records.numel() else []
    if kind == "state":
        return [[as_bytes(row) for row in pool.state_rows()]] if pool.state_rows().numel() else []
    of_kind = [layer for layer in range(len(pool.layout.layers)) if pool.layout.kind(layer) == kind]
    arrays = [array for layer in of_kind for array in (pool.k[layer], pool.v[layer], pool.index[layer])]
    return [[as_bytes(page) for page in array.split(PAGE)] for array in arrays if array.numel()]


def as_bytes(values: torch.Tensor) -> bytes:
    return values.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def random_plan(rng: random.Random, pool: Pool, below: RecordPool, num_pages: int | None = None) -> CopyPlan:
    """Different pages, window halves and states of both pools, in runs or scattered."""
    upper, lower = contents(pool), contents(below)
    most = {kind: min(len(upper[kind]), len(lower[kind])) - 1 for kind in KINDS}
    number = most["full"] if pool.storage.numel() else 8
    number = rng.randint(0, number) if num_pages is None else num_pages

    def pairs(kind: Kind, count: int, slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        found, below = (draw(rng, len(records[kind]), count) * slots for records in (upper, lower))
        return found, below

    full = pairs("full", number, PAGE) if most["full"] > 0 else (np.arange(number) * PAGE,) * 2
    num_windows = rng.randint(0, min(number, max(0, most["swa"])))
    windows = Pairs(*pairs("swa", num_windows, PAGE), np.arange(number - num_windows, number))
    num_states = rng.randint(0, max(0, most["state"]))
    of_pages = np.sort(np.asarray([rng.randint(0, number) for _ in range(num_states)], np.int64))
    return CopyPlan(*full, windows, Pairs(*pairs("state", num_states, 1), of_pages))


def draw(rng: random.Random, number: int, count: int) -> NDArray[np.int64]:
    """Different records, in one run or scattered."""
    if not count:
        return np.empty(0, np.int64)
    if rng.random() < 0.5:
        first = rng.randint(1, number - count)
        return np.arange(first, first + count)
    return np.asarray(rng.sample(range(1, number), count), np.int64)


def copied(plan: CopyPlan, source: Contents, target: Contents, *, down: bool, stop: int | None = None) -> Contents:
    """The contents of the target after the first pages of a plan were copied; None: after all."""
    result = {kind: list(records) for kind, records in target.items()}
    stop = len(plan) if stop is None else stop
    parts = (("full", plan.upper, plan.lower, np.arange(len(plan)), PAGE), ("swa", *plan.windows, PAGE))
    for kind, upper, lower, pages, slots in (*parts, ("state", *plan.states, 1)):
        for above, below, page in zip(upper.tolist(), lower.tolist(), pages.tolist(), strict=True):
            if result[kind] and (page < stop or stop == len(plan)):
                at, to = (above, below) if down else (below, above)
                result[kind][to // slots] = source[kind][at // slots]
    return result


def check_random_plans(pool: Pool, number: int) -> None:
    """Write and load random plans chunk by chunk, as the reference does."""
    rng, below = random.Random(1), pool_below(pool)
    copies = PageCopies(pool, below)
    for _ in range(number):
        plan = random_plan(rng, pool, below)
        down = rng.random() < 0.5
        source, target = (pool, below) if down else (below, pool)
        wanted = copied(plan, contents(source), contents(target), down=down)
        for start, stop, _ in copies.chunks(plan, rng.choice([1, 200, 10_000])):
            (copies.write if down else copies.load)(plan, start, stop)
            assert stop == len(plan) or contents(target) != wanted
        assert contents(target) == wanted
        assert copies.first_difference(plan) is None
