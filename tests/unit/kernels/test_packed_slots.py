"""Rows of packed slots, against lists of slots; mistakes; memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydix.cache_core.kernels import COMPILED, expand, is_row, join, pack_slots

RUNS = st.builds(lambda first, count: [*range(first, first + count)], st.integers(0, 2**40), st.integers(3, 60))
MANY_RUNS = st.lists(RUNS, min_size=2, max_size=5).map(lambda runs: [slot for run in runs for slot in run])
SLOTS = st.one_of(
    RUNS, MANY_RUNS, st.lists(st.one_of(st.integers(0, 2**31 - 1), st.integers(-(2**63), 2**63 - 17)), max_size=5)
)
PAGES = st.sampled_from([1, 2, 3, 16])


def packed(slots: list[int]) -> bytes:
    """Return a row that names each slot."""
    return pack_slots(torch.tensor(slots, dtype=torch.int64), 1, 0, len(slots))


@given(st.lists(SLOTS, max_size=5), PAGES, st.booleans())
def test_rows_are_expanded_to_one_slot_per_token(rows: list[list[int]], page_size: int, in_pages: bool) -> None:
    lanes = range(page_size if in_pages else 1)
    expected = [slot + lane for slot in chain(*rows) for lane in lanes]
    every = [packed(row) for row in rows]

    slots = expand(every, len(expected), page_size)

    assert slots is not None and slots.dtype == torch.int64 and slots.tolist() == expected
    assert expand(every, len(expected) * page_size + 1, page_size) is None
    assert join(every).tolist() == [*chain(*rows)] and join(every).dtype == np.int64


@given(SLOTS, PAGES, st.integers(0, 95), st.data())
def test_a_part_of_slots_is_packed(starts: list[int], page_size: int, other: int, data: st.DataObject) -> None:
    firsts = torch.tensor(starts, dtype=torch.int64) * data.draw(st.sampled_from([1, page_size]))
    slots = (firsts[:, None] + torch.arange(page_size)).reshape(-1)
    if other < len(slots):
        slots[other] += 1
    stop = data.draw(st.integers(0, len(slots)))
    start = data.draw(st.integers(0, stop))
    part = slots[start:stop].tolist()

    row = pack_slots(slots, page_size, start, stop)

    pages = [part[at : at + page_size] for at in range(0, len(part), page_size)]
    in_runs = all(page == [*range(page[0], page[0] + len(page))] for page in pages)
    assert type(row) is bytes
    assert join([row]).tolist() == ([page[0] for page in pages] if in_runs else part)
    assert len(row) % 2 == (bool(part) and all(0 <= slot < 2**31 for slot in join([row]).tolist()))


@pytest.mark.parametrize(
    ("slots", "page_size", "size"),
    [
        ([0, 2**31 - 1], 1, 9),
        ([0, 2**31], 1, 16),
        ([0, -1], 1, 16),
        ([4, 5, 6, 7, 2, 3], 2, 13),
        ([2**31 - 1, 2**31], 2, 5),
        ([4, 6, 6, 7], 2, 17),
        ([7, 8, 9], 1, 13),
        ([7, 8, 9], 2**63 - 1, 5),
        ([*range(16, 32), *range(5, 9)], 16, 9),
        ([*range(16, 32), *range(5, 9), 10], 16, 85),
        ([*range(2**40, 2**40 + 600)], 300, 16),
        ([*range(2**40, 2**40 + 599), 0], 300, 4_800),
        ([slot + slot // 64 for slot in range(4_096)], 64, 257),
        ([slot + slot // 65 for slot in range(4_096)], 64, 16_385),
        ([], 2, 0),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_a_row_is_as_small_as_it_can_be(slots: list[int], page_size: int, size: int) -> None:
    assert len(pack_slots(torch.tensor(slots, dtype=torch.int64), page_size, 0, len(slots))) == size


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (torch.arange(4), True),
        (torch.arange(9)[2:8], True),
        (torch.empty(0, dtype=torch.int64), False),
        (torch.arange(3), False),
        (torch.arange(8)[::2], False),
        (torch.arange(8).reshape(2, 4), False),
        (torch.arange(4, dtype=torch.int32), False),
        (torch.arange(4, device="meta"), False),
        (torch.arange(4).to_sparse(), False),
        (torch.nn.Parameter(torch.arange(4), requires_grad=False), False),
        (np.arange(4), False),
        ([1, 2, 3, 4], False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_row_is_int64_in_a_contiguous_tensor_on_the_cpu(slots: Any, expected: bool) -> None:
    assert is_row(slots, 4) is expected


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_slots_are_packed_wherever_they_lie_in_memory(offset: int) -> None:
    slots = torch.arange(7, 107)
    memory = bytearray(offset) + bytearray(slots.numpy().tobytes())

    row = pack_slots(torch.frombuffer(memory, dtype=torch.int64, offset=offset), 4, 0, 100)

    assert row == pack_slots(slots, 4, 0, 100)


def test_expanded_and_joined_slots_can_be_written() -> None:
    row = packed([4, 5, 6])
    expanded = expand([row], 3, 1)
    assert expanded is not None and expanded.is_contiguous()

    expanded += 1
    join([row])[:] = 0

    assert expanded.tolist() == [5, 6, 7]
    assert join([row]).tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("row", "slots"), [(b"", []), (b"123", []), (b"\7\0\0\x00123", [7]), (b"\7\0\0\0\0\0\0\x001234", [7])]
)
def test_bytes_beyond_the_last_slot_are_not_read(row: bytes, slots: list[int]) -> None:
    assert join([row, packed([9])]).tolist() == [*slots, 9]
    assert expand([row], len(slots), 1).tolist() == slots  # type: ignore[union-attr]


MISTAKES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: is_row(torch.arange(4), -1), ValueError),
    (lambda: pack_slots(torch.arange(4), 1, 2, 5), TypeError),
    (lambda: pack_slots(torch.arange(4), 1, 3, 2), ValueError),
    (lambda: pack_slots(torch.arange(4), 1, -1, 2), ValueError),
    (lambda: pack_slots(torch.arange(4), 0, 0, 4), ValueError),
    (lambda: pack_slots([1, 2], 1, 0, 1), TypeError),  # type: ignore[arg-type]
    (lambda: pack_slots(None, 1, 0, 0), TypeError),  # type: ignore[arg-type]
    (lambda: pack_slots(torch.arange(4, dtype=torch.int32), 1, 0, 1), TypeError),
    (lambda: pack_slots(torch.arange(4, device="meta"), 1, 0, 1), TypeError),
    (lambda: pack_slots(torch.arange(8)[::2], 1, 0, 1), TypeError),
    (lambda: pack_slots(torch.zeros((2, 2), dtype=torch.int64), 1, 0, 1), TypeError),
    (lambda: expand(None, 0, 1), TypeError),  # type: ignore[arg-type]
    (lambda: expand([None], 0, 1), TypeError),  # type: ignore[list-item]
    (lambda: expand([7], 0, 1), TypeError),  # type: ignore[list-item]
    (lambda: expand([packed([1])], 2**62, 2**62), (MemoryError, ValueError)),
    (lambda: join([None]), TypeError),  # type: ignore[list-item]
    (lambda: join(7), TypeError),  # type: ignore[arg-type]
]
# of the types of arguments, which only compiled code checks
COMPILED_MISTAKES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: expand((b"",), 0, 1), TypeError),  # type: ignore[arg-type]
    (lambda: expand([bytearray(8)], 1, 1), TypeError),  # type: ignore[list-item]
    (lambda: join([bytearray(8)]), TypeError),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("mistake", "error"), MISTAKES + COMPILED_MISTAKES * COMPILED)
def test_a_mistake_raises(mistake: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        mistake()


def test_no_row_and_no_tensor_is_kept_alive() -> None:
    rows, slots = [np.arange(4).tobytes()], torch.arange(64)
    watched = [rows, rows[0], slots, torch.Tensor, torch.int64]
    before = [sys.getrefcount(each) for each in watched]

    for _ in range(1_000):
        expand(rows, 64, 16)
        expand(rows, 63, 16)
        join(rows)
        pack_slots(slots, 16, 0, 64)
        is_row(slots, 64)

    assert [sys.getrefcount(each) for each in watched] == before


@pytest.mark.skipif(not COMPILED, reason="interpreted, rows are joined before the slots are allocated")
def test_no_slot_is_written_beyond_the_allocated_ones() -> None:
    rows, thresholds = [packed([1, 2, 3])], gc.get_threshold()

    class Late:
        def __del__(self) -> None:
            rows.append(bytes(2**20))

    gc.disable()
    cycle: Any = Late()
    cycle.itself = cycle
    del cycle
    is_early = sys.version_info < (3, 12)  # later versions collect garbage between bytecodes alone
    try:
        with pytest.raises(RuntimeError, match="the rows changed") if is_early else nullcontext():
            gc.set_threshold(gc.get_count()[0])
            gc.enable()
            expand(rows, 3, 1)  # the new tensor starts a collection
    finally:
        gc.set_threshold(*thresholds)

    assert len(rows) == 2
