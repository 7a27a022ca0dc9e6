"""Rows are copied by slices, by pages and in wide elements: always what indexing would copy, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.caches.pool_layers import layer_shapes

from raydix.cache_core import KVPool, PoolLayout

PAGE, NUM_SLOTS = 4, 60
LAYOUT = PoolLayout(NUM_SLOTS, PAGE, layer_shapes(("full",) * 2, 2, 8, 3), torch.float16)
PAGES = [8, 9, 10, 11, 40, 41, 42, 43, 20, 21, 22, 23]
SLOTS = {
    "one": [7],
    "a run": list(range(9, 30)),
    "the whole pool": list(range(PAGE + NUM_SLOTS)),
    "pages": PAGES,
    "pages and a part": [*PAGES, 12, 13],
    "a part, then pages": [6, 7, *PAGES],
    "pages that start between": [slot + 1 for slot in PAGES],
    "a page out of order": [8, 10, 9, 11, 40, 41, 42, 43],
    "like a run at both ends": [8, 10, 9, 11],
    "backwards": list(range(30, 10, -1)),
    "scattered": [50, 4, 33, 12, 61, 8],
    "none": [],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn]


def random_bits(generator: np.random.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits at all, those of NaN among them."""
    data = generator.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if data.size else torch.empty(shape, dtype=dtype)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """`[rows, bytes]`, a copy."""
    return rows.contiguous().view(len(rows), -1).view(torch.uint8).clone()


def pool_of(dtype: torch.dtype, head_dim: int, shift: int) -> KVPool:
    """A pool of random bits, with memory that starts a number of bytes after a boundary."""
    layout = replace(LAYOUT, dtype=dtype, layers=layer_shapes(("full",) * 2, 2, head_dim, 3))
    memory = random_bits(np.random.default_rng(1), torch.uint8, layout.num_bytes + 256)
    return KVPool(layout, storage=memory[shift:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("head_dim", [8, 3])
@pytest.mark.parametrize("shift", [0, 4])
def test_what_is_written_and_gathered_is_what_indexing_says(
    dtype: torch.dtype, slots: list[int], head_dim: int, shift: int
) -> None:
    pool = pool_of(dtype, head_dim, shift)
    generator, ids = np.random.default_rng(2), torch.tensor(slots, dtype=torch.int64)
    k = random_bits(generator, dtype, len(slots), 2, head_dim)
    v = random_bits(generator, dtype, len(slots), 2, 3)
    expected = [as_bytes(pool.k[1]), as_bytes(pool.v[1])]
    for rows, given in zip(expected, (k, v), strict=True):
        if slots:
            rows[ids] = as_bytes(given)
    other_layer = as_bytes(pool.k[0]), as_bytes(pool.v[0])

    pool.write(1, ids, k, v)

    assert as_bytes(pool.k[1]).equal(expected[0])
    assert as_bytes(pool.v[1]).equal(expected[1])
    assert as_bytes(pool.k[0]).equal(other_layer[0])
    assert as_bytes(pool.v[0]).equal(other_layer[1])
    if slots:
        out = (torch.empty_like(k), torch.empty_like(v))
        pool.gather(1, ids, out)
        for got in (out, pool.gather(1, ids)):
            assert as_bytes(got[0]).equal(as_bytes(k))
            assert as_bytes(got[1]).equal(as_bytes(v))


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
def test_rows_that_lie_apart_are_written_as_they_are(slots: list[int]) -> None:
    pool = pool_of(torch.float16, 8, 0)
    generator, ids = np.random.default_rng(3), torch.tensor(slots, dtype=torch.int64)
    k = random_bits(generator, torch.float16, 2, len(slots), 8).transpose(0, 1)  # as attention has them
    v = random_bits(generator, torch.float16, len(slots), 2, 6)[:, :, ::2]

    pool.write(0, ids, k, v)

    got_k, got_v = pool.gather(0, ids)
    assert as_bytes(got_k).equal(as_bytes(k)) if slots else not len(got_k)
    assert as_bytes(got_v).equal(as_bytes(v)) if slots else not len(got_v)


@pytest.mark.parametrize("slots", [[-1], [NUM_SLOTS + PAGE], [62, 63, 64], [-4, -3, -2, -1, 8, 9, 10, 11], [-1, 0, 1]])
def test_a_slot_that_is_no_row_is_refused(slots: list[int]) -> None:
    pool = pool_of(torch.float16, 8, 0)
    before = pool.storage.clone()
    ids, n = torch.tensor(slots), len(slots)

    with pytest.raises((IndexError, RuntimeError)):
        pool.write(0, ids, torch.ones(n, 2, 8), torch.ones(n, 2, 3))
    with pytest.raises((IndexError, RuntimeError)):
        pool.gather(0, ids)

    if n == 1:
        assert pool.storage.equal(before)


@pytest.mark.parametrize("slots", [[8, 9, 10, 11], [8, 12], [5]])
def test_kv_that_does_not_fit_its_slots_is_refused(slots: list[int]) -> None:
    pool = pool_of(torch.float16, 8, 0)
    ids = torch.tensor(slots)

    with pytest.raises(ValueError, match=f"{len(slots)} slots need"):
        pool.write(0, ids, torch.ones(len(slots) + 1, 2, 8), torch.ones(len(slots) + 1, 2, 3))
    with pytest.raises(ValueError, match=f"{len(slots)} slots need"):
        pool.gather(0, ids, (torch.empty(1, 1, 8), torch.empty(1, 1, 3)))


@pytest.mark.parametrize("shift", [4, 8, 12])
def test_kv_at_any_address_is_written(shift: int) -> None:
    pool = pool_of(torch.float16, 8, 0)
    data = np.random.default_rng(4).integers(0, 256, 16 + 12 * 2 * 8 * 2, np.uint8)
    start = -data.ctypes.data % 16 + shift  # not on the boundary of the widest elements
    k = torch.from_numpy(data[start % 16 :][: 12 * 2 * 8 * 2]).view(torch.float16).view(12, 2, 8)

    pool.write(0, torch.tensor(PAGES), k, torch.zeros(12, 2, 3))

    assert as_bytes(pool.gather(0, torch.tensor(PAGES))[0]).equal(as_bytes(k))
