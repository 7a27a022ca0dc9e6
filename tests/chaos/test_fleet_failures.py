"""On a Ray cluster of three nodes, caches, routers, nodes and the directory fail under traffic: no hit has wrong KV, no
slot is lost, the routers go on, and their indexes equal the caches' snapshots.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # a minute on an idle machine

PROGRAM = Path(__file__).with_name("fleet_failures.py")
FAILURES = [
    "start",  # nothing fails
    "disturbed_batches",
    "client_that_never_publishes",
    "killed_cache",
    "other_configuration",
    "failing_directory",
    "killed_node",
    "killed_router",
    "killed_directory",
]


def lines_of(*options: str) -> list[dict[str, Any]]:
    """Return what a run on a cluster of its own prints: the counts after each failure, in order."""
    ran = subprocess.run([sys.executable, PROGRAM, *options], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"failure"')]
    assert lines, ran.stdout + ran.stderr
    assert ran.returncode == 0 or lines[-1]["error"], ran.stdout + ran.stderr
    return lines


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """Run every failure once, one after another."""
    return {line["failure"]: line for line in lines_of()}


@pytest.mark.long
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_costs_no_slot_and_no_kv_and_routers_go_on(failure: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert failure in outcomes, f"the run ended before: {list(outcomes.values())[-1]}"
    line = outcomes[failure]
    assert line["error"] is None, line["error"]
    assert line["served"] > 0 and line["hit tokens"] > 0


@pytest.mark.long
@pytest.mark.timeout(0)
def test_ten_rounds_of_failures() -> None:
    lines = lines_of("--rounds", "10", "--requests", "600")

    assert [line["error"] for line in lines if line["error"]] == []
    assert [line["failure"] for line in lines[-len(FAILURES) + 1 :]] == FAILURES[1:]
