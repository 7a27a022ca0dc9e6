"""The compiled inner loops do what the plain ones do, and refuse what would make them read what is not theirs."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes.fresh_process import run_fresh

from raydix.cache_core import kernels
from raydix.cache_core.kernels import plain_kernels

compiled = pytest.mark.skipif(not kernels.COMPILED, reason="the kernels were not compiled: no compiler was at hand")
RUNS = st.builds(lambda first, count: [*range(first, first + count)], st.integers(0, 2**40), st.integers(3, 60))
MANY_RUNS = st.lists(RUNS, min_size=2, max_size=5).map(lambda runs: [slot for run in runs for slot in run])
SLOTS = st.one_of(
    RUNS, MANY_RUNS, st.lists(st.one_of(st.integers(0, 2**31 - 1), st.integers(-(2**63), 2**63 - 17)), max_size=5)
)
PAGES = st.sampled_from([1, 2, 3, 16])
U32 = st.integers(0, 2**32 - 1)


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
@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.integers(1, 3))
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
@given(st.lists(SLOTS, max_size=5), PAGES, st.booleans())
def test_rows_are_expanded_as_by_the_plain_kernel(rows: list[list[int]], page_size: int, in_pages: bool) -> None:
    packed = [plain_kernels.compact(torch.tensor(row, dtype=torch.int64), 1, 0, len(row)) for row in rows]
    num_tokens = sum(map(len, rows)) * (page_size if in_pages else 1)

    ours, theirs = (kernel.expand(packed, num_tokens, page_size) for kernel in (kernels, plain_kernels))
    assert ours is not None and theirs is not None
    assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
    assert kernels.expand(packed, num_tokens * page_size + 1, page_size) is None
    assert kernels.join(packed) == plain_kernels.join(packed) == np.array([*chain(*rows)], np.int64).tobytes()


@compiled
@given(SLOTS, PAGES, st.integers(0, 95), st.data())
def test_slots_are_compacted_as_by_the_plain_kernel(
    starts: list[int], page_size: int, other: int, data: st.DataObject
) -> None:
    firsts = torch.tensor(starts, dtype=torch.int64) * data.draw(st.sampled_from([1, page_size]))
    slots = (firsts[:, None] + torch.arange(page_size)).reshape(-1)
    if other < len(slots):
        slots[other] += 1
    stop = data.draw(st.integers(0, len(slots)))
    start = data.draw(st.integers(0, stop))

    row = kernels.compact(slots, page_size, start, stop)

    assert row == plain_kernels.compact(slots, page_size, start, stop)
    assert type(row) is bytes


@pytest.mark.parametrize("is_row", [pytest.param(kernels.is_row, marks=compiled), plain_kernels.is_row])
@pytest.mark.parametrize(
    ("slots", "is_one"),
    [
        (torch.arange(4), True),
        (torch.arange(9)[2:8], True),
        (torch.empty(0, dtype=torch.int64), False),
        (torch.arange(3), False),
        (torch.arange(8)[::2], False),
        (torch.arange(8).reshape(2, 4), False),
        (torch.arange(4, dtype=torch.int32), False),
        (torch.arange(4, device="meta"), False),
        (torch.nn.Parameter(torch.arange(4), requires_grad=False), False),
        (np.arange(4), False),
        ([1, 2, 3, 4], False),
        (None, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_row_of_slots_as_most_callers_have_them_is_told_at_once(is_row: Any, slots: Any, is_one: bool) -> None:
    assert is_row(slots, 4) is is_one
    with pytest.raises(ValueError, match="needed must not be negative"):
        is_row(slots, -1)


@pytest.mark.parametrize("kernel", [pytest.param(kernels, marks=compiled), plain_kernels])
@pytest.mark.parametrize(
    ("slots", "page_size", "size"),
    [
        ([0, 2**31 - 1], 1, 9),
        ([0, 2**31], 1, 16),
        ([0, -1], 1, 16),
        ([4, 5, 6, 7, 2, 3], 2, 13),
        ([2**31 - 1, 2**31], 2, 5),
        ([4, 6, 6, 7], 2, 17),
        ([7, 8, 9], 1, 18),
        (list(range(2**40, 2**40 + 600)), 1, 18),
        ([*range(300), 301], 1, 34),
        ([*range(16), *range(30, 45)], 1, 125),
        ([*range(16), *range(30, 46)], 1, 34),
        ([*range(90, 80, -1), *range(2**40, 2**40 + 170)], 1, 178),
        ([*range(0, 70, 2), *range(100, 1_100)], 1, 4_141),
        ([*range(0, 68, 2), *range(100, 1_100)], 1, 562),
        ([slot + slot // 16 for slot in range(4_096)], 1, 4_098),
        ([slot + slot // 16 for slot in range(4_112)], 1, 16_449),
        ([9, 8, 7], 1, 13),
        ([], 2, 0),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_a_row_is_as_small_as_it_can_be(kernel: Any, slots: list[int], page_size: int, size: int) -> None:
    row = kernel.compact(torch.tensor(slots, dtype=torch.int64), page_size, 0, len(slots))

    assert len(row) == size
    assert kernel.expand([row], len(slots), page_size).tolist() == slots


@compiled
@given(
    st.lists(st.integers(-20, 200), min_size=1, max_size=12),
    st.sets(st.integers(1, 10)),
    PAGES,
    st.sampled_from([1, 2, -1]),
    st.booleans(),
)
def test_pages_are_taken_back_as_by_the_plain_kernel(
    starts: list[int], used: set[int], page_size: int, step: int, are_first_slots: bool
) -> None:
    marks = np.full(11, -1, np.int32)
    marks[list(used)] = 0
    pages = np.array(starts)[::step] // page_size * page_size if are_first_slots else np.array(starts)[::step]

    def done(take_back: Any) -> tuple[str | None, list[bool], list[int]]:
        free, stack = marks.copy(), np.zeros(30, np.int64)
        fault = take_back(pages, free, stack, 10 - len(used), page_size)
        return fault, (free < 0).tolist(), stack.tolist()

    assert done(kernels.take_back) == done(plain_kernels.take_back)


@compiled
@given(
    st.lists(st.tuples(st.integers(-1, 300), st.integers(1, 150)), min_size=1, max_size=3),
    st.sets(st.integers(0, 300), max_size=2),
    st.integers(0, 1),
)
def test_runs_of_pages_are_taken_back_as_by_the_plain_kernel(
    runs: list[tuple[int, int]], others: set[int], odd: int
) -> None:
    slots = np.concatenate([np.arange(first, first + length) for first, length in runs])
    marks = np.full(301, -1, np.int32)
    marks[slots[(slots > 0) & (slots < len(marks))]] = 0
    marks[list(others)] = -1
    shifted = np.frombuffer(bytes(odd) + slots.tobytes(), np.int64, len(slots), odd)  # not where int64 should lie

    def done(take_back: Any) -> tuple[str | None, list[int], list[int]]:
        free, stack = marks.copy(), np.zeros(500, np.int64)
        fault = take_back(shifted, free, stack, 20, 1)
        return fault, np.flatnonzero(free == 0).tolist(), stack.tolist()

    assert done(kernels.take_back) == done(plain_kernels.take_back)


@pytest.mark.parametrize("take_back", [pytest.param(kernels.take_back, marks=compiled), plain_kernels.take_back])
def test_a_run_that_ends_outside_marks_nothing_there(take_back: Any) -> None:
    marks = np.zeros(300, np.int32)

    assert take_back(np.arange(50, 200), marks[:100], np.zeros(500, np.int64), 20, 1) == "outside"

    assert not marks.any()


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
        ([3, 3, 5, 0], "twice"),
        ([5, 3, 3, 0], "free"),
        ([3, 0, 3, 5], "outside"),
    ],
)
def test_why_pages_are_not_taken_back_is_told(take_back: Any, pages: list[int], fault: str | None) -> None:
    marks = np.full(11, -1, np.int32)
    marks[[3, 4]] = 0

    assert take_back(np.array(pages), marks, np.zeros(10, np.int64), 8, 1) == fault
    assert np.flatnonzero(marks == 0).tolist() == ([] if fault is None else [3, 4])


@pytest.mark.parametrize("take_back", [pytest.param(kernels.take_back, marks=compiled), plain_kernels.take_back])
@pytest.mark.parametrize("starts", [[13], [15], [12, 13], [12, 16, 17], [-1], [1]])
def test_a_page_is_taken_back_by_its_first_slot_alone(take_back: Any, starts: list[int]) -> None:
    marks, stack = np.full(11, -1, np.int32), np.zeros(10, np.int64)
    marks[[3, 4]] = 0

    assert take_back(np.array(starts), marks, stack, 8, 4) == "outside"
    assert np.flatnonzero(marks == 0).tolist() == [3, 4]
    assert not stack.any()


# ---------------------------------------------------------------- what they refuse


@compiled
@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: kernels.expand((b"",), 0, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.expand([bytearray(8)], 1, 1), TypeError),  # type: ignore[list-item]
        (lambda: kernels.join([bytearray(8)]), TypeError),  # type: ignore[list-item]
        (lambda: kernels.join([b"123"]), ValueError),
        (lambda: kernels.join([np.array([0, -1]).tobytes() + b"12"]), ValueError),
        (lambda: kernels.join([np.array([0, 2**62]).tobytes() + b"12"] * 9), ValueError),
        (lambda: kernels.compact(torch.arange(4), 1, 2, 5), ValueError),
        (lambda: kernels.compact(torch.arange(4), 1, 3, 2), ValueError),
        (lambda: kernels.compact(torch.arange(4), 1, -1, 2), ValueError),
        (lambda: kernels.compact(torch.arange(4), 0, 0, 4), ValueError),
        (lambda: kernels.compact([1, 2], 1, 0, 1), TypeError),  # type: ignore[arg-type]
        (lambda: kernels.compact(torch.arange(4, dtype=torch.int32), 1, 0, 1), TypeError),
        (lambda: kernels.compact(torch.arange(4, device="meta"), 1, 0, 1), TypeError),
        (lambda: kernels.compact(torch.arange(8)[::2], 1, 0, 1), TypeError),
        (lambda: kernels.compact(torch.zeros((2, 2), dtype=torch.int64), 1, 0, 1), TypeError),
        (lambda: kernels.is_row(torch.arange(4), -1), ValueError),
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
def test_rows_that_say_more_than_there_can_be_are_not_expanded() -> None:
    huge = np.array([0, 2**58]).tobytes() + b"12"

    assert kernels.expand([huge] * 4, 2**60, 1) is None
    assert kernels.expand([b"12345678"], 2**62, 2**62) is None


@compiled
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9), min_size=4, max_size=8), st.integers(1, 3))
def test_of_malformed_runs_no_more_is_written_than_they_say(numbers: list[int], page_size: int) -> None:
    row = np.array([*numbers[: len(numbers) // 2 * 2], 0, 5]).tobytes() + b"12"
    slots = kernels.expand([row], 5 * page_size, page_size)

    assert slots is not None and slots.numel() == 5 * page_size


@pytest.mark.parametrize("take_back", [pytest.param(kernels.take_back, marks=compiled), plain_kernels.take_back])
def test_more_pages_than_there_is_room_for_are_refused(take_back: Any) -> None:
    marks, stack = np.zeros(9, np.int32), np.zeros(2, np.int64)

    assert take_back(np.arange(1, 4), marks, stack, 0, 1) == "outside"
    assert not marks.any()


@compiled
def test_nothing_is_kept_alive() -> None:
    rows, slots = [np.arange(4).tobytes()], torch.arange(64)
    ids = np.arange(9, dtype=np.int32)
    watched = [rows[0], slots, ids, torch.Tensor, torch.int64]
    before = [sys.getrefcount(each) for each in watched]

    for _ in range(1_000):
        kernels.pack(ids)
        kernels.expand(rows, 64, 16)
        kernels.join(rows)
        kernels.compact(slots, 16, 0, 64)
        kernels.is_row(slots, 64)

    assert [sys.getrefcount(each) for each in watched] == before


@compiled
@given(st.lists(st.integers(0, 9_000), min_size=2, max_size=20), st.data())
def test_memory_is_used_again_only_once_it_is_nobodys(sizes: list[int], data: st.DataObject) -> None:
    kept = []
    for first, size in enumerate(sizes):
        slots = kernels.expand([np.arange(first, first + size).tobytes()], size, 1)
        assert slots is not None
        if data.draw(st.booleans()):
            kept.append((slots, slots[size // 2 :], first, size))  # a part keeps the whole array alive
            del kept[0 : data.draw(st.integers(0, 1))]
        del slots

    for slots, part, first, size in kept:
        assert slots.tolist() == [*range(first, first + size)]
        assert part.tolist() == [*range(first + size // 2, first + size)]


# ---------------------------------------------------------------- which are in use


def test_the_plain_ones_can_be_chosen_and_serve_a_cache_as_well() -> None:
    program = (
        "from support.traffic.radix import run_random_traffic\n"
        "from raydix.cache_core import kernels\nfrom raydix.cache_core.kernels import plain_kernels\n"
        "assert not kernels.COMPILED and kernels.walk is plain_kernels.walk\n"
        "for page_size in (1, 4): run_random_traffic(page_size, page_size, num_operations=500)\n"
        "print('served')"
    )

    done = run_fresh(program, RAYDIX_PLAIN="1")

    assert done.stdout.split() == ["served"], done.stderr


@pytest.mark.parametrize(("plain", "core"), [("1", "interpreted"), ("0", kernels.CORE)])
def test_the_command_and_the_counts_say_which_are_in_use(plain: str, core: str) -> None:
    program = (
        "import asyncio\n"
        "from raydix.actors import LocalPrefixCache\n"
        "from raydix.actors.cli.app import app\n"
        "from raydix.schemas import CacheConfig, PoolConfig\n"
        "cache = LocalPrefixCache(CacheConfig(pool=PoolConfig(num_slots=8, device='cpu')))\n"
        "print(asyncio.run(cache.stats()).core, flush=True)\n"
        "app(['--version'])"
    )

    done = run_fresh(program, RAYDIX_PLAIN=plain)

    assert done.stdout.split("\n")[:2] == [core, f"raydix {version('raydix')} (core: {core})"], done.stderr


@compiled
@pytest.mark.parametrize("change", ["del {}", "{} = 7", "{} = torch._C._to_dlpack(torch.arange(2))"])
def test_without_what_they_need_of_torch_the_plain_ones_serve(change: str) -> None:
    program = (
        f"import torch; {change.format('torch.Tensor.__dlpack_c_exchange_api__')}\n"
        "from raydix.cache_core import RadixCache, RadixKey, kernels\n"
        "cache = RadixCache(); cache.insert(RadixKey([1, 2]))\n"
        "print(kernels.COMPILED, cache.match_prefix(RadixKey([1, 2])).indices.tolist())"
    )

    done = run_fresh(program)

    assert done.stdout.split() == ["False", "[1,", "2]"], done.stderr
