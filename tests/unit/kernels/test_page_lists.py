"""`free_pages`, against a loop over lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydix.cache_core.kernels import COMPILED, free_pages

NUM_PAGES = 11


def fault_in(starts: list[int], used: set[int], page_size: int) -> str | None:
    """Return the fault of the first page that cannot be freed; None if there is none."""
    seen = set()
    for start in starts:
        page, beyond = divmod(start, page_size)
        if beyond or not 1 <= page < NUM_PAGES:
            return "outside"
        if page not in used:
            return "free"
        if page in seen:
            return "twice"
        seen.add(page)
    return None


@given(
    st.lists(st.integers(-20, 200) | st.integers(-(2**63), 2**63 - 1), max_size=12),
    st.sets(st.integers(1, 10)),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([1, 2, -1]),
    st.sampled_from(["numbers", "pages", "used pages"]),
    st.integers(0, 1),
)
def test_pages_are_freed_all_or_none(
    starts: list[int], used: set[int], page_size: int, step: int, kind: str, offset: int
) -> None:
    if kind == "pages":
        starts = [start % (NUM_PAGES + 1) * page_size for start in starts]
    elif kind == "used pages" and used:
        starts = list(dict.fromkeys(sorted(used)[start % len(used)] * page_size for start in starts))
    given = starts[::step]
    array = np.frombuffer(bytes(offset) + np.array(starts, np.int64).tobytes(), np.int64, len(starts), offset)
    marks, stack = np.full(NUM_PAGES, -1, np.int32), np.zeros(30, np.int64)
    marks[list(used)] = 0
    num_free = NUM_PAGES - 1 - len(used)

    fault = free_pages(array[::step], marks, stack, num_free, page_size)

    assert fault == fault_in(given, used, page_size)
    freed = [] if fault else given
    assert set(np.flatnonzero(marks == 0)) == used - {start // page_size for start in freed}
    assert stack.tolist() == [0] * num_free + freed[::-1] + [0] * (30 - num_free - len(freed))


def test_more_pages_than_there_is_room_for_are_not_freed() -> None:
    marks, stack = np.zeros(9, np.int32), np.zeros(2, np.int64)

    assert free_pages(np.arange(1, 4), marks, stack, 0, 1) == "outside"
    assert free_pages(np.arange(1, 3), marks, stack, 1, 1) == "outside"
    assert not marks.any() and not stack.any()


STARTS, MARKS, STACK = np.ones(1, np.int64), np.zeros(2, np.int32), np.zeros(2, np.int64)
MISTAKES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: free_pages(STARTS, MARKS, STACK, 0, 0), ValueError),
    (lambda: free_pages(STARTS, MARKS, STACK, -1, 1), ValueError),
    (lambda: free_pages(None, MARKS, STACK, 0, 1), TypeError),  # type: ignore[arg-type]
    (lambda: free_pages(STARTS, None, STACK, 0, 1), TypeError),  # type: ignore[arg-type]
    (lambda: free_pages(STARTS, MARKS, None, 0, 1), TypeError),  # type: ignore[arg-type]
    (lambda: free_pages(STARTS, MARKS, STACK, "0", 1), TypeError),  # type: ignore[arg-type]
    (lambda: free_pages(STARTS * 1.0, MARKS, STACK, 0, 1), (ValueError, IndexError)),  # type: ignore[arg-type]
]
# of the types of arguments, which only compiled code checks
COMPILED_MISTAKES: list[tuple[Callable[[], Any], Any]] = [
    (lambda: free_pages(STARTS, MARKS * 1.0, STACK, 0, 1), ValueError),  # type: ignore[arg-type]
    (lambda: free_pages(STARTS, MARKS, STACK * 1.0, 0, 1), ValueError),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("mistake", "error"), MISTAKES + COMPILED_MISTAKES * COMPILED)
def test_a_mistake_raises_and_changes_nothing(mistake: Callable[[], Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        mistake()

    assert not MARKS.any() and not STACK.any()
