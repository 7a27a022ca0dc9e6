"""`MoveBatch`: several moves as one plan of a copier, and what each of them has of a copy that ended early."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.cache_core.tiers.move import Move

NONE = np.empty(0, np.int64)


def move(pages: range, is_load: bool = False, num_windows: int = 0, states: tuple[int, ...] = ()) -> Move:
    """A move of pages; its target's are 100 higher, its windows 1000 and more."""
    starts = np.array(pages, np.int64)
    windows = starts[len(starts) - num_windows :] + 1000
    source_state = 7 if states else None
    no: Any = None
    return Move(
        is_load, no, no, no, no, cast(Any, range(99)), 0, starts, starts + 100, 0, windows, windows + 100,
        source_state, states,
    )  # fmt: skip


def results(batch: MoveBatch, num_pages: int, end: Any = "cancelled") -> list[tuple[int, bool]]:
    return [(pages, is_whole) for _, pages, is_whole in batch.results(Ended(num_pages, end))]


def test_a_batch_joins_its_moves_in_order() -> None:
    batch = MoveBatch([move(range(1, 4), num_windows=2), move(range(8, 10), num_windows=1)])

    assert batch.plan.upper.tolist() == [1, 2, 3, 8, 9]
    assert batch.plan.lower.tolist() == [101, 102, 103, 108, 109]
    windows = batch.plan.windows
    assert (windows.upper.tolist(), windows.lower.tolist()) == ([1002, 1003, 1009], [1102, 1103, 1109])
    assert windows.pages.tolist() == [1, 2, 4], "a window half goes with its page"


def test_a_load_copies_up() -> None:
    batch = MoveBatch([move(range(1, 3), is_load=True, num_windows=1, states=(4, 5))])

    assert (batch.plan.upper.tolist(), batch.plan.lower.tolist()) == ([101, 102], [1, 2])
    assert (batch.plan.windows.upper.tolist(), batch.plan.windows.lower.tolist()) == ([1102], [1002])
    assert (batch.plan.states.upper.tolist(), batch.plan.states.lower.tolist()) == ([4, 5], [7, 7])
    assert batch.plan.states.pages.tolist() == [1, 1]


def test_each_move_has_the_leading_pages_that_were_copied() -> None:
    batch = MoveBatch([move(range(1, 4)), move(range(8, 10))])

    assert results(batch, 0) == [(0, False), (0, False)]
    assert results(batch, 2) == [(2, False), (0, False)]
    assert results(batch, 3) == [(3, True), (0, False)]
    assert results(batch, 4, "failed") == [(3, True), (1, False)]
    assert results(batch, 5, "whole") == [(3, True), (2, True)]


@pytest.mark.parametrize("end", ["cancelled", "late", "failed", "closed"])
def test_a_state_is_copied_with_the_last_page_before_it(end: str) -> None:
    state_alone = move(range(0), states=(4,))
    batch = MoveBatch([move(range(1, 4), states=(3,)), state_alone, move(range(8, 10))])

    assert batch.plan.states.pages.tolist() == [2, 2], "the state alone goes with the last page of the move before"
    assert results(batch, 2, end) == [(2, False), (0, False), (0, False)]
    assert results(batch, 3, end) == [(3, True), (0, True), (0, False)]


@pytest.mark.parametrize("end", ["cancelled", "late", "failed", "closed"])
def test_a_state_before_all_pages_is_copied_with_the_first_one(end: str) -> None:
    batch = MoveBatch([move(range(0), states=(4,)), move(range(8, 10))])

    assert batch.plan.states.pages.tolist() == [0]
    assert results(batch, 0, end) == [(0, False), (0, False)]
    assert results(batch, 1, end) == [(0, True), (1, False)]


def test_states_alone_are_there_with_a_whole_copy_only() -> None:
    batch = MoveBatch([move(range(0), states=(4,)), move(range(0), states=(5,))])

    assert len(batch.plan) == 0 and len(batch.plan.states.upper) == 2
    assert results(batch, 0) == [(0, False), (0, False)]
    assert results(batch, 0, "whole") == [(0, True), (0, True)]
