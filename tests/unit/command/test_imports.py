"""A command imports what it needs: ray, torch, numpy and pydantic together take seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.processes.fresh_process import run_fresh

from raydix.actors.cli import route_defaults
from raydix.actors.cli.version import core_on_disk
from raydix.actors.replay.policies import ROUTERS
from raydix.cache_core.kernels import CORE
from raydix.schemas import RouteConfig

HEAVY = ("ray", "torch", "numpy", "pydantic")
PROGRAM = """
import sys, json
try:
    {program}
except SystemExit as end:
    print(end.code)
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


def imported(program: str) -> tuple[str, Any]:
    """Run a program; return its output and the heavy packages that it has imported."""
    done = run_fresh(PROGRAM.format(program=program, heavy=HEAVY))
    assert done.stdout, done.stderr
    *output, names = done.stdout.splitlines()
    return "\n".join(output), json.loads(names)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["fleet", "replay", "--help"], 0),
        (["start", "--nope"], 2),
        (["stats"], 2),
        (["replay", "--limit", "none"], 2),
        (["start", "--for", "no-engine"], 2),
    ],
    ids=str,
)
def test_versions_help_and_wrong_arguments_wait_for_no_package(arguments: list[str], status: int) -> None:
    output, heavy = imported(f"from raydix.actors.cli.app import app; app({arguments!r})")

    by_typer = {"pydantic"} if arguments[0].isalpha() else set()  # its newer releases read arguments with it
    assert set(heavy) <= by_typer
    assert output.splitlines()[-1] == str(status)


def test_looking_for_caches_and_their_counts_waits_for_no_torch() -> None:
    modules = (
        "actors.cluster.deploy, raydix.actors.service.cache_actor, raydix.actors.cli.stats_view, raydix.schemas.stats"
    )

    assert "torch" not in imported(f"import raydix.{modules}")[1]


def test_the_options_about_routers_have_the_defaults_of_their_modules() -> None:
    config = RouteConfig()

    assert tuple(ROUTERS) == route_defaults.ROUTERS
    assert (route_defaults.WEIGHT, route_defaults.PROMISE_TTL_S, route_defaults.NUM_RANDOM) == (
        config.weight,
        config.promise_ttl_s,
        config.num_random,
    )


def test_the_core_on_disk_is_the_one_that_runs() -> None:
    assert core_on_disk() == CORE
