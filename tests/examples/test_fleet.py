"""`examples/fleet.py` keeps its promises on a small load: fewer tokens are computed, and no answer changes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.py"
SMALL = {
    "--caches": 2,
    "--conversations": 12,
    "--turns": 3,
    "--system-prompts": 4,
    "--system-prompt-len": 200,
    "--pool-tokens": 1600,
}


def example() -> Any:
    spec = importlib.util.spec_from_file_location("fleet_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.figures
def test_a_small_load_is_computed_with_fewer_tokens_and_equal_answers() -> None:
    options = [str(each) for option in SMALL.items() for each in option]

    command = [sys.executable, str(EXAMPLE), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout)
    assert figures["turns"] == figures["identical_turns"] == sum(figures["routes"].values()) == 36
    assert figures["in_turn"]["prompt_tokens"] == figures["routed"]["prompt_tokens"] == 12 * (248 + 312 + 376)
    assert figures["routed"]["computed_tokens"] < figures["in_turn"]["computed_tokens"]
    assert figures["route_actor_calls"] == 0
    print(f"\na route takes {figures['route_ms_p50']:.2f} ms at p50")
    for side in ("in_turn", "routed"):
        print(f"{side}: {figures[side]['hit_rate']:.1%} hit, {figures[side]['computed_tokens']} tokens computed")


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, []),
        ({"identical_turns": 15}, ["answers are the same"]),
        ({"routed": {"computed_tokens": 900}}, ["the router computes fewer tokens"]),
        ({"route_actor_calls": 1}, ["a route calls no actor"]),
    ],
)
def test_a_promise_not_kept_is_named(changed: dict[str, Any], broken: list[str]) -> None:
    kept = {
        "turns": 16,
        "identical_turns": 16,
        "in_turn": {"computed_tokens": 900},
        "routed": {"computed_tokens": 300},
        "route_actor_calls": 0,
    }

    assert [promise for promise, is_kept in example().promises(kept | changed).items() if not is_kept] == broken
