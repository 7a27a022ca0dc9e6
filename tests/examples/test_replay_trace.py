"""`examples/replay_trace.py` counts exactly on a trace made by hand, in this process and on Ray."""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from support.models.sample_trace import EVICTED, PROMPT_TOKENS, REUSED, write_trace

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay_trace.py"
main = run_path(str(EXAMPLE))["main"]


@pytest.mark.parametrize(
    "where", ["--local", pytest.param("--page-size=512", marks=[pytest.mark.ray, pytest.mark.more])]
)
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


@pytest.mark.more
def test_a_malformed_trace_ends_in_one_line_and_not_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")

    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "bad.jsonl"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert f"error: {tmp_path}/bad.jsonl, line 1: timestamp: must be given" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "no/out.json"), "no/out.json: No such file or directory"),
        (("--json", "."), ".: Is a directory"),
        (("--json", "/proc/out.json"), "/proc/out.json: "),
        (("--limit", "-1"), "--limit: must be at least 1, not -1"),
        (("--limit", "0"), "--limit: must be at least 1, not 0"),
        (("--page-size", "0"), "--page-size: must be at least 1, not 0"),
        (("--capacity", "2048", "0"), "--capacity: must be at least 1, not 0"),
        (("--capacity", "many"), "--capacity: must be a whole number, not 'many'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_a_wrong_command_line_is_refused_before_the_work(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*map(str, (EXAMPLE, write_trace(tmp_path), "--local")), *arguments])

    with pytest.raises(SystemExit, match=r"^2$"):
        main()

    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (100, r"error: num_slots \(100\) must be a multiple of page_size \(512\): set it to 512, say"),
        (512 * 10**10, "error: num_slots: Input should be less than or equal to .*"),
    ],
)
def test_a_capacity_that_no_cache_has_ends_in_one_line(
    capacity: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (EXAMPLE, write_trace(tmp_path), "--local", "--capacity", capacity)
    monkeypatch.setattr(sys, "argv", [*map(str, command)])

    with pytest.raises(SystemExit, match=f"^{message}$"):
        main()
