"""Measure how long commands take, from the start of their process to its end.

    python -m benchmarks.bench_commands [--quick]

in the tests' folder. The commands and the import of ray and torch, which most of them avoid, take turns. A cluster of
this machine is started for `list` and `stats`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from statistics import median
from typing import NamedTuple

from benchmarks.figures import HEADING, Figure, times_in_turns
from benchmarks.local_ray import ray_started

from raydix.actors import shutdown_cache, start_cache
from raydix.schemas import CacheConfig, PoolConfig

NAME = "timed"
IMPORTS = "import ray, torch"


class Limit(NamedTuple):
    """The longest that a command may take, in terms of the imports."""

    arguments: tuple[str, ...]
    at_most: float
    gate: float

    @property
    def command(self) -> str:
        """The command without `raydix`."""
        return " ".join(self.arguments)


LIMITS = (
    Limit(("--version",), 0.2, 0.4),
    Limit(("--help",), 0.3, 0.5),
    Limit(("list",), 1.25, 2.0),
    Limit(("stats", NAME), 1.25, 2.0),
)


def figures(quick: bool) -> list[Figure]:
    """Return a figure a command: its median, and its ratio to that of the imports."""
    import ray

    with ray_started():
        cache = start_cache(CacheConfig(pool=PoolConfig(num_slots=1_024)), name=NAME)
        environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        execute = partial(subprocess.run, check=True, stdout=subprocess.DEVNULL, env=environment)
        works = {IMPORTS: partial(execute, [sys.executable, "-c", IMPORTS])}
        for limit in LIMITS:
            works[limit.command] = partial(execute, [sys.executable, "-m", "raydix.actors.cli", *limit.arguments])
        times = times_in_turns(works, num_rounds=1 if quick else 5)
        shutdown_cache(cache)
    imports = median(times[IMPORTS])
    found = []
    for limit in LIMITS:
        took = median(times[limit.command])
        what, ratio = f"raydix {limit.command}", took / imports
        found.append(Figure("commands", what, took, "s", ratio, IMPORTS, at_most=limit.at_most, gate=limit.gate))
    return found


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line())


if __name__ == "__main__":
    main()
