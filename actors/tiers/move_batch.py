"""`MoveBatch`: moves that are copied together, as one plan of a `Copier`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.page_records import CopyPlan, Pairs
from raydix.cache_core.tree.packed_slots import Starts

_NO_SLOTS: Starts = np.empty(0, np.int64)


class MoveBatch:
    """Several moves of one direction, copied in order as one plan.

    Attributes:
        plan: the pages of all moves, in order, with their window halves and states.

    Args:
        moves: at least one; all are loads, or none is.
    """

    def __init__(self, moves: Sequence[Move]) -> None:
        self.moves = tuple(moves)
        sizes = [move.num_pages for move in moves]
        self._ends = list(accumulate(sizes))
        windows, states = _Joined(), _Joined()
        for move, end in zip(moves, self._ends, strict=True):
            num_windows = len(move.source_windows)
            windows.add(move, move.source_windows, move.target_windows, np.arange(end - num_windows, end))
            if move.source_state is not None:
                number = len(move.target_states)
                sources, targets = np.full(number, move.source_state, np.int64), np.array(move.target_states, np.int64)
                states.add(move, sources, targets, np.full(number, _last(end)))
        pages = _Joined()
        for move in moves:
            pages.add(move, move.source_starts, move.target_starts, _NO_SLOTS)
        upper, lower, _ = pages.pairs()
        self.plan = CopyPlan(upper, lower, windows.pairs(), states.pairs())

    def results(self, copied: Ended) -> Iterator[tuple[Move, int, bool]]:
        """Yield each move, its number of copied leading pages, and whether its windows and states were copied, too."""
        for move, end in zip(self.moves, self._ends, strict=True):
            num_pages = min(max(0, copied.num_pages - (end - move.num_pages)), move.num_pages)
            is_whole = copied.num_pages >= end and (move.source_state is None or copied.num_pages > _last(end))
            yield move, num_pages, is_whole or copied.end == "whole"


def _last(end: int) -> int:
    """Return the last page of a move that ends before page `end`; its state is copied with that page."""
    return max(0, end - 1)


class _Joined:
    """Slots of several moves, in the pool and in the tier below."""

    def __init__(self) -> None:
        self._parts: list[tuple[Starts, Starts, Starts]] = []

    def add(self, move: Move, sources: Starts, targets: Starts, pages: Starts) -> None:
        """Append the slots of a move."""
        if len(sources):
            self._parts.append((targets, sources, pages) if move.is_load else (sources, targets, pages))

    def pairs(self) -> Pairs:
        """Return all slots in order."""
        if not self._parts:
            return Pairs(_NO_SLOTS, _NO_SLOTS, _NO_SLOTS)
        return Pairs(*(np.concatenate(part) for part in zip(*self._parts, strict=True)))
