"""On Ray, clients and the cache are killed and stopped, calls cancelled, answers lost; no slot and no KV is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.figures

SWARM = Path(__file__).with_name("swarm.py")
NUM_PLACES = 12


def counts_of(**options: int) -> dict[str, Any]:
    """Return the counts of a run on a Ray cluster of its own, which ends only when all slots are released."""
    arguments = [argument for name, value in options.items() for argument in (f"--{name}", str(value))]
    ran = subprocess.run([sys.executable, SWARM, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    counts: dict[str, Any] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"seed"')))
    return counts


def check(counts: dict[str, Any], operations: int, kills: int, restarts: int) -> None:
    """Check that requests were served and that each disturbance happened."""
    assert counts["served"] >= operations
    assert counts["survivors"] + counts["killed at the end"] == NUM_PLACES
    assert counts["caches killed"] == restarts
    for doing in ("writing", "waiting", "anything"):
        assert counts[f"killed while {doing}"] == kills // 3
    for happened in (
        "stopped while writing",
        "cancelled",
        "answers lost",
        "CacheUnavailable",
        "leases granted",
        "leases adopted",
        "tokens compared",
        "blocks read at the end",
    ):
        assert counts[happened] > 0, happened


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.timeout(900)  # a minute on an idle machine
def test_nothing_is_lost_while_clients_and_the_cache_are_killed() -> None:
    options = {"operations": 300, "kills": 3, "restarts": 1}
    check(counts_of(**options, **{"deadline-s": 800}), **options)


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(0)
def test_nothing_is_lost_in_ten_thousand_operations() -> None:
    options = {"operations": 10_000, "kills": 60, "restarts": 5}
    check(counts_of(**options), **options)
