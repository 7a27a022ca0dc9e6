"""`SortedRuns`: entries in ascending order, kept so that any may come and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any

_LONGEST = 1024  # entries of a run; a longer one is cut in two


class SortedRuns:
    """A list of short sorted lists: `add`, `remove` and `pop_first` cost two bisections and a short move each.

    Entries are unequal tuples that can be ordered.
    """

    def __init__(self) -> None:
        self._runs: list[list[Any]] = []
        self._lasts: list[Any] = []  # the last entry of each run

    def add(self, entry: Any) -> None:
        """Put an entry in its place."""
        if not self._runs:
            self._runs, self._lasts = [[entry]], [entry]
            return
        at = min(bisect_left(self._lasts, entry), len(self._lasts) - 1)
        run = self._runs[at]
        insort(run, entry)
        if len(run) > _LONGEST:
            half = len(run) // 2
            self._runs[at : at + 1] = [run[:half], run[half:]]
            self._lasts[at : at + 1] = [run[half - 1], run[-1]]
        else:
            self._lasts[at] = run[-1]

    def remove(self, entry: Any) -> None:
        """Take an entry out, which is there."""
        at = bisect_left(self._lasts, entry)
        self._take(at, bisect_left(self._runs[at], entry))

    def first(self) -> Any:
        """The lowest entry; None if there is none."""
        return self._runs[0][0] if self._runs else None

    def pop_first(self) -> Any:
        """Take the lowest entry out, of at least one."""
        return self._take(0, 0)

    def _take(self, at: int, index: int) -> Any:
        run = self._runs[at]
        entry = run.pop(index)
        if run:
            self._lasts[at] = run[-1]
        else:
            del self._runs[at], self._lasts[at]
        return entry

    def __iter__(self) -> Iterator[Any]:
        """In ascending order."""
        for run in self._runs:
            yield from run

    def clear(self) -> None:
        """Forget every entry."""
        self._runs, self._lasts = [], []
