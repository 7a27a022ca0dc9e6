"""What a benchmark says: figures, each with what it is a ratio to and what was promised, and the table of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

HEADING = f"{'group':<11}{'what':<62}{'measured':>16}{'ratio':>8}  {'to':<17}{'goal':>8}  {'met':<4}{'gate':>8}"


@dataclass(frozen=True)
class Figure:
    """One measurement. Goal and gate are limits of the ratio, where there is one, else of the value.

    What is missed by less than the gate allows is told; beyond it, `make bench` fails.
    """

    group: str
    what: str
    value: float
    unit: str
    ratio: float | None = None
    to: str = ""  # what the ratio is to, measured in the same run
    at_most: float | None = None  # the goal
    at_least: float | None = None  # the goal
    gate: float | None = None  # on the same side as the goal, and no tighter

    def __post_init__(self) -> None:
        goal = self.at_least if self.at_most is None else self.at_most
        if goal is not None and self.gate is not None and not self._reaches(goal, self.gate):
            raise ValueError(f"{self.what}: the gate {self.gate:g} is tighter than the goal {goal:g}")

    @property
    def judged(self) -> float:
        """What the limits are of."""
        return self.value if self.ratio is None else self.ratio

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None: there is none."""
        goal = self.at_least if self.at_most is None else self.at_most
        return None if goal is None else self._reaches(self.judged, goal)

    @property
    def failed(self) -> bool:
        """Whether the gate says that something is broken."""
        return self.gate is not None and not self._reaches(self.judged, self.gate)

    def _reaches(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_most is None else value <= limit

    @property
    def measured(self) -> str:
        """The value with its unit."""
        digits = 0 if abs(self.value) >= 1_000 else 1 if abs(self.value) >= 10 else 2
        return f"{self.value:,.{digits}f} {self.unit}"

    @property
    def goal(self) -> str:
        """The goal in words."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return "" if self.at_least is None else f">= {self.at_least:g}"

    def line(self) -> str:
        """Its line of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        met = {None: "", True: "yes", False: "NO"}[self.met]
        gate = "" if self.gate is None else f"{self.gate:g}"
        return (
            f"{self.group:<11}{self.what:<62}{self.measured:>16}{ratio:>8}  {self.to:<17}{self.goal:>8}  "
            f"{met:<4}{gate:>8}"
        ).rstrip()


def times_in_turns(works: Mapping[str, Callable[[], object]], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, all taking turns, after a round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_rounds + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    return {name: each[1:] for name, each in times.items()}


def median_ratio(times: Mapping[str, list[float]], name: str, floor: str) -> float:
    """How many times faster than the floor: the median of the rounds, so that what disturbs one counts little."""
    return median(least / took for took, least in zip(times[name], times[floor], strict=True))
