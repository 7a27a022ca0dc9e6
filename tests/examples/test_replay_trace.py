"""`examples/replay_trace.py` counts exactly on a trace made by hand, in this process and on Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from traces import EVICTED, PROMPT_TOKENS, REUSED, write_trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay_trace.py"


@pytest.mark.parametrize("where", [pytest.param("--local"), pytest.param("--page-size=512", marks=pytest.mark.ray)])
def test_a_trace_made_by_hand_gives_exact_counts(where: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, EXAMPLE, write_trace(tmp_path), where, "--capacity", "2048", "--json", out]

    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert (row["requests"], row["prompt_tokens"], row["too_large"]) == (8, PROMPT_TOKENS, 1)
    assert (row["reused_tokens"], row["evicted_tokens"]) == (REUSED, EVICTED)
    assert row["hit_rate_percent"] == pytest.approx(100 * REUSED / PROMPT_TOKENS)
    assert f"2,048 tokens: {100 * REUSED / PROMPT_TOKENS:5.1f} % hit" in done.stdout


def test_a_malformed_trace_ends_in_one_line_and_not_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")

    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "bad.jsonl"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}/bad.jsonl, line 1: timestamp: Field required\n"


def test_where_figures_could_not_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLE, write_trace(tmp_path), "--local", "--json", tmp_path / "no" / "out.json"]

    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stdout == ""
    assert "no/out.json cannot be written" in done.stderr
