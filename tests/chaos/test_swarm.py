"""Nothing is lost on Ray while clients and the cache are killed and calls are cancelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SWARM = Path(__file__).with_name("swarm.py")


def counts_of(*options: str) -> dict[str, Any]:
    """What happened in a run, which ends only when everything was given back; it has a Ray of its own."""
    ran = subprocess.run([sys.executable, SWARM, *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    print(ran.stdout)
    counts: dict[str, Any] = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith('{"seed"')))
    return counts


def check(counts: dict[str, Any], num_operations: int, num_restarts: int) -> None:
    """Work was done, things were killed, and what they left was read again."""
    assert counts["served"] >= num_operations / 2
    assert counts["caches killed"] == num_restarts
    for happened in (
        "workers killed",
        "survivors",
        "cancelled",
        "answers seen lost",
        "CacheUnavailable",
        "tokens compared",
    ):
        assert counts[happened] > 0, happened


@pytest.mark.ray
def test_nothing_is_lost_while_clients_and_the_cache_are_killed() -> None:
    check(counts_of("--operations", "1600", "--restarts", "2", "--deadline-s", "240"), 1600, 2)


@pytest.mark.ray
@pytest.mark.long
def test_nothing_is_lost_in_ten_thousand_operations() -> None:
    check(counts_of("--operations", "10000", "--restarts", "5"), 10_000, 5)
