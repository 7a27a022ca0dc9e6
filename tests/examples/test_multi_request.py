"""`examples/multi_request.py` keeps its promises on a small load, and says so."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_request.py"
SMALL = {
    "--conversations": 12,
    "--turns": 2,
    "--workers": 2,
    "--system-prompts": 2,
    "--message-len": 32,
    "--answer-len": 8,
    "--pool-tokens": 2560,
}


@pytest.mark.ray
@pytest.mark.figures
def test_a_small_load_keeps_every_promise_under_pressure(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = [str(each) for option in SMALL.items() for each in option]

    command = [sys.executable, str(EXAMPLE), *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    # How much sooner the first token comes is the demo's promise; here, beside other work, it is printed only.
    if done.stderr != "not kept: first token at least 3x sooner\n":
        assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["turns"] == figures["identical_turns"] == figures["acquires"] == 24
    assert figures["shared_prefix_turns"] == 22
    assert figures["prompt_tokens"] == 12 * (1032 + 1072)
    assert figures["reused_tokens"] + figures["computed_tokens"] == figures["prompt_tokens"]
    assert figures["hit_rate"] > 0.6
    print(f"\nfirst token sooner by {figures['first_token_speedup']:.1f}x")
    assert figures["first_token_ms_on"].keys() == figures["first_token_ms_off"].keys() == {"mean", "p50", "p95"}
    assert figures["wanted_slots"] == 2 * 1000 + 12 * 2 * 40
    assert figures["evicted_by_task"] > 0
    assert figures["peak_slots"] <= figures["pool_slots"] == 2560
    assert figures["acquires_refused"] == 0
    for row in ("hit rate", "time to first token, mean", "greedy answers identical", "tokens evicted"):
        assert row in done.stdout


def test_a_pool_too_small_for_one_conversation_is_refused_at_once() -> None:
    command = [sys.executable, str(EXAMPLE), "--pool-tokens", "1024"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 2
    assert "--pool-tokens must be a multiple of 16, and at least 1256" in done.stderr


@pytest.mark.parametrize(
    ("figures", "broken"),
    [
        ({}, []),
        ({"hit_rate": 0.6}, ["hit rate above 60 %"]),
        ({"first_token_speedup": 2.9}, ["first token at least 3x sooner"]),
        ({"identical_turns": 23}, ["greedy answers identical with and without the cache"]),
    ],
)
def test_a_promise_not_kept_is_named(
    load_example: Callable[[str], ModuleType], figures: dict[str, float], broken: list[str]
) -> None:
    kept = {"hit_rate": 0.61, "first_token_speedup": 3.0, "identical_turns": 24, "turns": 24}

    assert load_example("multi_request").broken_promises(kept | figures) == broken


def test_the_workload_is_the_same_for_equal_seeds(load_example: Callable[[str], ModuleType]) -> None:
    def messages(seed: int) -> list[list[int]]:
        numbers = {"conversations": 9, "turns": 2, "workers": 2, "message_len": 3}
        args = Namespace(seed=seed, system_prompts=2, system_prompt_len=5, **numbers)
        drawn = load_example("multi_request").draw_conversations(args)
        assert sum(each.is_first for each in drawn) == len({each.system_prompt.tobytes() for each in drawn}) == 2
        return [each.messages.tolist() for each in drawn]

    assert messages(1) == messages(1)
    assert messages(1) != messages(2)
