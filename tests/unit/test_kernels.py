"""The compiled inner loops do what the plain ones do, and refuse what would make them read what is not theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydix.cache_core import RadixKey, kernels, plain_kernels

compiled = pytest.mark.skipif(not kernels.COMPILED, reason="the kernels were not compiled: no compiler was at hand")
PAGES = st.sampled_from([1, 2, 3, 16])
U32 = st.integers(0, 2**32 - 1)
BYTES = st.lists(st.sampled_from([0, 1]), max_size=40).map(bytes)


def node(data: bytes, page_bytes: int, unit: int, above: Any = None) -> Any:
    """A node of a tree, below another one."""
    made = SimpleNamespace(children={}, data=data, end=len(data) // unit + (above.end if above else 0))
    if above is not None:
        above.children[data[:page_bytes]] = made
    return made


# ---------------------------------------------------------------- the same as the plain ones


@pytest.mark.parametrize(
    "row",
    [list, lambda ids: np.array(ids, np.int64), lambda ids: np.array(ids, np.uint32), lambda ids: array("Q", ids)],
    ids=["list", "int64", "uint32", "array"],
)
@compiled
@given(ids=st.lists(U32, max_size=50))
def test_ids_that_fit_are_packed(row: Callable[[list[int]], Any], ids: list[int]) -> None:
    assert kernels.pack(row(ids)) == np.array(ids, "<u4").tobytes()


@compiled
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50), st.integers(1, 3))
def test_a_row_of_int32_is_packed_as_by_the_plain_kernel(ids: list[int], step: int) -> None:
    row = np.array(ids, np.int32)[::step]

    assert kernels.pack(row) == plain_kernels.pack(row)


@compiled
@pytest.mark.parametrize(
    "ids",
    [[-1], [2**32], [2**80], [1.0], [True], ["1"], [(1, 2)], (1, 2), "12", b"12", None, 7, [np.int64(1)],
     np.array([1.0]), np.array([[1]]), np.array([True]), np.array([-1]), np.array([2**32]), np.array([1], ">i4"),
     np.array([1], np.int16)],
    ids=repr,
)  # fmt: skip
def test_what_takes_a_closer_look_is_left_to_it(ids: Any) -> None:
    assert kernels.pack(ids) is None


@compiled
@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_a_walk_is_that_of_the_plain_kernel(data: st.DataObject, page_size: int, unit: int) -> None:
    page = page_size * unit
    nodes = [node(b"", page, unit)]
    for run in data.draw(st.lists(BYTES, max_size=8)):
        run = run[: len(run) // page * page]
        if run:
            nodes.append(node(run, page, unit, data.draw(st.sampled_from(nodes))))
    key = data.draw(BYTES.map(lambda key: key[: len(key) // unit * unit]))
    limit = data.draw(st.integers(0, len(key) // unit))

    assert kernels.walk(nodes[0], key, unit, page_size, limit) == plain_kernels.walk(
        nodes[0], key, unit, page_size, limit
    )


@compiled
@given(st.integers(0, 5_000), st.integers(0, 5_000), st.integers(1, 16))
def test_a_long_run_is_compared_to_the_byte(length: int, differs_at: int, page_size: int) -> None:
    length = length // page_size * page_size
    run = bytearray(np.arange(length, dtype=np.uint16).astype(np.uint8).tobytes())
    root = node(b"", page_size, 1)
    node(bytes(run), page_size, 1, root)
    if page_size <= differs_at < length:
        run[differs_at] ^= 1

    assert kernels.walk(root, bytes(run), 1, page_size, length) == plain_kernels.walk(
        root, bytes(run), 1, page_size, length
    )


@compiled
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 17), max_size=5), max_size=5), PAGES, st.booleans())
def test_rows_are_expanded_as_by_the_plain_kernel(rows: list[list[int]], page_size: int, in_pages: bool) -> None:
    packed = [np.array(row, np.int64).tobytes() for row in rows]
    num_tokens = sum(map(len, rows)) * (page_size if in_pages else 1)

    assert kernels.expand(packed, num_tokens, page_size) == plain_kernels.expand(packed, num_tokens, page_size)
    assert kernels.expand(packed, num_tokens * page_size + 1, page_size) is None


@compiled
@given(st.lists(st.integers(-(2**63), 2**63 - 17), max_size=6), PAGES, st.integers(0, 95), st.data())
def test_slots_are_compacted_as_by_the_plain_kernel(
    starts: list[int], page_size: int, other: int, data: st.DataObject
) -> None:
    slots = (torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(page_size)).reshape(-1)
    if other < len(slots):
        slots[other] += 1
    stop = data.draw(st.integers(0, len(slots)))
    start = data.draw(st.integers(0, stop))

    row = kernels.compact(slots, start, stop, page_size)

    assert row == plain_kernels.compact(slots, start, stop, page_size)
    assert type(row) is bytes


@compiled
@given(
    st.lists(st.integers(-20, 200), min_size=1, max_size=12),
    st.sets(st.integers(1, 10)),
    PAGES,
    st.sampled_from([1, 2, -1]),
)
def test_pages_are_taken_back_as_by_the_plain_kernel(
    starts: list[int], used: set[int], page_size: int, step: int
) -> None:
    marks = np.full(11, -1, np.int32)
    marks[list(used)] = 0
    pages = np.array(starts)[::step] // page_size * page_size if page_size > 1 else np.array(starts)[::step]

    def done(take_back: Any) -> tuple[bool, list[bool], list[int]]:
        free, stack = marks.copy(), np.zeros(30, np.int64)
        fault = take_back(pages, free, stack, 10 - len(used), page_size)
        return fault is None, (free < 0).tolist(), stack.tolist()  # of several faults, either may be named

    assert done(kernels.take_back) == done(plain_kernels.take_back)


@pytest.mark.parametrize("take_back", [pytest.param(kernels.take_back, marks=compiled), plain_kernels.take_back])
@pytest.mark.parametrize(
    ("pages", "fault"),
    [
        ([3, 4], None),
        ([3, 0], "outside"),
        ([-1, 3], "outside"),
        ([3, 11], "outside"),
        ([3, 5], "free"),
        ([3, 4, 3], "twice"),
    ],
)
def test_why_pages_are_not_taken_back_is_told(take_back: Any, pages: list[int], fault: str | None) -> None:
    marks = np.full(11, -1, np.int32)
    marks[[3, 4]] = 0

    assert take_back(np.array(pages), marks, np.zeros(10, np.int64), 8, 1) == fault
    assert np.flatnonzero(marks == 0).tolist() == ([] if fault is None else [3, 4])


# ---------------------------------------------------------------- what they refuse


@compiled
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: kernels.walk(node(b"", 1, 1), b"ab", 1, 1, 3), ValueError),
        (lambda: kernels.walk(node(b"", 1, 1), b"ab", 0, 1, 1), ValueError),
        (lambda: kernels.walk(node(b"", 1, 1), b"ab", 1, 0, 1), ValueError),
        (lambda: kernels.walk(node(b"", 1, 1), bytearray(b"ab"), 1, 1, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.walk(object(), b"ab", 1, 1, 1), AttributeError),
        (lambda: kernels.walk(SimpleNamespace(end=0, children=[]), b"ab", 1, 1, 1), TypeError),
        (lambda: kernels.walk(SimpleNamespace(end=0, children={b"a": 7}), b"ab", 1, 1, 1), AttributeError),
        (lambda: kernels.walk(SimpleNamespace(end=-1, children={}), b"ab", 1, 1, 1), ValueError),
        (lambda: kernels.expand((b"",), 0, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.expand([bytearray(8)], 1, 1), TypeError),  # type: ignore[list-item]
        (lambda: kernels.compact(torch.arange(4), 2, 5, 1), ValueError),
        (lambda: kernels.compact(torch.arange(4), 3, 2, 1), ValueError),
        (lambda: kernels.compact(torch.arange(4), -1, 2, 1), ValueError),
        (lambda: kernels.compact(torch.arange(4), 0, 4, 0), ValueError),
        (lambda: kernels.compact([1, 2], 0, 1, 1), AttributeError),  # type: ignore[arg-type]
        (lambda: kernels.take_back(np.zeros(1), np.zeros(2, np.int32), np.zeros(2, int), 0, 1), ValueError),
        (lambda: kernels.take_back(np.ones(1, int), np.zeros(2, int), np.zeros(2, int), 0, 1), ValueError),  # type: ignore[arg-type]
        (lambda: kernels.take_back(np.ones(1, int), np.zeros(2, np.int32), np.zeros(2, int), 3, 1), ValueError),
        (lambda: kernels.take_back(np.ones(1, int), np.zeros(2, np.int32), np.zeros(2, int), 0, 0), ValueError),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


@compiled
def test_more_pages_than_there_is_room_for_are_refused() -> None:
    marks, stack = np.zeros(9, np.int32), np.zeros(2, np.int64)

    assert kernels.take_back(np.arange(1, 4), marks, stack, 0, 1) == "outside"
    assert not marks.any()


@compiled
def test_nothing_is_kept_alive() -> None:
    tree = node(b"", 2, 1)
    child = node(b"abcd", 2, 1, tree)
    rows, slots = [np.arange(4).tobytes()], torch.arange(64)
    ids = np.arange(9, dtype=np.int32)
    watched = [tree, tree.children, child, child.data, rows[0], slots, ids]
    before = [sys.getrefcount(each) for each in watched]

    for _ in range(1_000):
        kernels.pack(ids)
        kernels.walk(tree, b"abcdef", 1, 2, 6)
        kernels.walk(tree, b"abxx", 1, 2, 4)
        kernels.expand(rows, 64, 16)
        kernels.compact(slots, 0, 64, 16)

    assert [sys.getrefcount(each) for each in watched] == before


# ---------------------------------------------------------------- which are in use


def test_the_plain_ones_can_be_chosen_and_serve_a_cache_as_well() -> None:
    program = (
        "from random_traffic import run_random_traffic\n"
        "from raydix.cache_core import kernels, plain_kernels\n"
        "assert not kernels.COMPILED and kernels.walk is plain_kernels.walk\n"
        "for page_size in (1, 4): run_random_traffic(page_size, page_size, num_operations=500)\n"
        "print('served')"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"RAYDIX_PLAIN": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.split() == ["served"], done.stderr


@pytest.mark.parametrize("ids", [[1, 2**31], np.array([1, 2**31]), np.array([1, 2**31], np.uint32)])
def test_a_key_is_the_same_by_either(monkeypatch: pytest.MonkeyPatch, ids: Any) -> None:
    key = RadixKey(ids)
    monkeypatch.setattr("raydix.cache_core.radix_key.pack", plain_kernels.pack)

    assert RadixKey(ids) == key
