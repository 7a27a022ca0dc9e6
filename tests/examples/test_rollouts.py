"""`examples/rollouts.py` keeps its promises: a policy computes a prompt once, and a retired one leaves nothing."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("rollouts", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rollouts"] = module  # its dataclass looks up its own module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("lora_ids", [["policy-0", "policy-1"], ["policy", "policy"]], ids=["two", "one"])
def test_two_policies_share_their_prompts_and_nothing_else(lora_ids: list[str]) -> None:
    command = [sys.executable, str(EXAMPLE), "--rounds", "2", "--prompts", "3", "--samples", "2", "--json"]
    command += ["--one-lora-id"] * (len(set(lora_ids)) == 1)

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [each["policy"] for each in json.loads(done.stdout)] == ["policy-0", "policy-1"]
    assert [each["lora_id"] for each in json.loads(done.stdout)] == lora_ids
    for each in json.loads(done.stdout):
        assert each["prompt_tokens"] == 3 * 256 + 3 * 2 * 257
        assert each["reused_tokens"] == 3 * 2 * 256
        assert each["stored_slots"] == 3 * 256
        assert (each["changed_answers"], each["matched_after"], each["slots_left"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("counts", "broken"),
    [
        ({}, []),
        ({"reused_tokens": 61}, ["a policy computes each prompt once"]),
        ({"changed_answers": 1}, ["answers are those without the cache"]),
        ({"matched_after": 16}, ["nothing of a retired policy is matched"]),
        ({"slots_left": 16}, ["its slots come back"]),
    ],
)
def test_a_promise_not_kept_is_named(counts: dict[str, int], broken: list[str]) -> None:
    rollouts = example()
    kept = {
        "policy": "policy-0",
        "lora_id": "policy",
        "prompt_tokens": 100,
        "reused_tokens": 60,
        "needed_tokens": 40,
        "changed_answers": 0,
        "stored_slots": 32,
        "matched_after": 0,
        "slots_left": 0,
    }

    done = rollouts.Round(**(kept | counts))

    assert [promise for promise, is_kept in rollouts.promises(done).items() if not is_kept] == broken
