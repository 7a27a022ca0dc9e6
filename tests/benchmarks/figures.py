"""A benchmark's figures, each with its reference and its goal, and their table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

HEADING = f"{'group':<11}{'what':<62}{'measured':>16}{'ratio':>8}  {'to':<17}{'goal':>8}  {'met':<4}{'gate':>8}"


@dataclass(frozen=True)
class Figure:
    """One measurement. Goal and gate are limits of the ratio if there is one, otherwise of the value.

    A missed goal is reported; a missed gate fails `make bench`.
    """

    group: str
    what: str
    value: float
    unit: str
    ratio: float | None = None
    to: str = ""  # the reference of the ratio, measured in the same run
    at_most: float | None = None  # the goal
    at_least: float | None = None  # the goal
    gate: float | None = None  # on the same side as the goal, and no tighter

    def __post_init__(self) -> None:
        goal = self.at_least if self.at_most is None else self.at_most
        if goal is not None and self.gate is not None and not self._reaches(goal, self.gate):
            raise ValueError(f"{self.what}: the gate {self.gate:g} is tighter than the goal {goal:g}")

    @property
    def judged(self) -> float:
        """Return the value that the limits apply to."""
        return self.value if self.ratio is None else self.ratio

    @property
    def met(self) -> bool | None:
        """Return whether the goal is met, or None without a goal."""
        goal = self.at_least if self.at_most is None else self.at_most
        return None if goal is None else self._reaches(self.judged, goal)

    @property
    def failed(self) -> bool:
        """Return whether the gate is missed."""
        return self.gate is not None and not self._reaches(self.judged, self.gate)

    def _reaches(self, value: float, limit: float) -> bool:
        return bool(value >= limit if self.at_most is None else value <= limit)  # not numpy's

    @property
    def measured(self) -> str:
        """Return the value with its unit."""
        digits = 0 if abs(self.value) >= 1_000 else 1 if abs(self.value) >= 10 else 2
        return f"{self.value:,.{digits}f} {self.unit}"

    @property
    def goal(self) -> str:
        """Return the goal as text."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    def line(self) -> str:
        """Return its line of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        met = {None: "", True: "yes", False: "NO"}[self.met]
        gate = "" if self.gate is None else f"{self.gate:g}"
        return (
            f"{self.group:<11}{self.what:<62}{self.measured:>16}{ratio:>8}  {self.to:<17}{self.goal:>8}  "
            f"{met:<4}{gate:>8}"
        ).rstrip()


def times_in_turns(works: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each in each round, all in turns, after an uncounted round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_rounds + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    return {name: each[1:] for name, each in times.items()}


def median_ratio(times: Mapping[str, list[float]], name: str, floor: str) -> float:
    """Return the speed relative to the floor: the median over the rounds, so that one disturbed round counts little."""
    return median(least / took for took, least in zip(times[name], times[floor], strict=True))
