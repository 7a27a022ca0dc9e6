"""`examples/replay_trace.py` counts exactly on a trace made by hand, and gives the published rates on a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "replay_trace.py"

# Seven prompts for a cache of four pages: [input_length, hash_ids], and what each finds there.
PROMPTS = [
    (1100, [0, 1, 2]),  # nothing; leaves pages 0 and 1
    (1536, [0, 1, 3]),  # both
    (600, [7, 8]),  # nothing; page 3 has to go, as the only leaf
    (1024, [0, 9]),  # page 0
    (512, [7]),  # page 7
    (512, [5]),  # nothing; page 1 has to go, used before 9 and 7
    (700, [0, 1]),  # page 0; page 9 has to go
    (2560, [20, 21, 22, 23, 24]),  # larger than the cache
]
REUSED = 1024 + 512 + 512 + 512
EVICTED = 3 * 512


@pytest.fixture
def replay_trace(load_example: Callable[[str], ModuleType]) -> ModuleType:
    return load_example("replay_trace")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": length, "output_length": 9, "hash_ids": ids})
        for i, (length, ids) in enumerate(PROMPTS)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(tmp_path: Path, *args: object) -> list[dict[str, Any]]:
    out = tmp_path / "out.json"
    command = [sys.executable, str(EXAMPLE), *map(str, args), "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    return rows


@pytest.mark.parametrize("where", [pytest.param("--local"), pytest.param("--page-size=512", marks=pytest.mark.ray)])
def test_a_trace_made_by_hand_gives_exact_counts(where: str, trace: Path, tmp_path: Path) -> None:
    (row,) = run(tmp_path, trace, "--capacity", 4 * 512, where)

    assert (row["requests"], row["prompt_tokens"], row["too_large"]) == (8, 8544, 1)
    assert (row["reused_tokens"], row["evicted_tokens"]) == (REUSED, EVICTED)
    assert row["hit_rate_percent"] == pytest.approx(100 * REUSED / 8544)


def test_several_capacities_a_limit_and_a_plot(trace: Path, tmp_path: Path) -> None:
    rows = run(tmp_path, trace, "--local", "--limit", 3, "--capacity", 2048, 4096, "--plot", tmp_path / "hits.png")

    assert [(row["capacity"], row["requests"], row["evicted_tokens"]) for row in rows] == [(2048, 3, 512), (4096, 3, 0)]
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")


def test_background_eviction_can_be_switched_on(trace: Path, tmp_path: Path) -> None:
    (row,) = run(tmp_path, trace, "--local", "--capacity", 4 * 512, "--high-watermark", 0.5)

    assert row["evicted_tokens"] > EVICTED


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Invalid JSON"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "line 2: hash_ids: Field required"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "line 2: input_length: "),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}', "600 tokens need 2 hash ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-4]}', "must not be negative"),
    ],
)
def test_a_malformed_line_is_named_with_what_is_wrong(
    replay_trace: ModuleType, tmp_path: Path, line: str, complaint: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [4]}\n' + line)

    with pytest.raises(ValueError, match=complaint):
        replay_trace.read_trace(path)


def test_a_malformed_trace_ends_in_one_line_and_not_in_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")

    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "bad.jsonl"], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path}/bad.jsonl, line 1: timestamp: Field required\n"


def test_equal_ids_are_equal_blocks_and_other_ids_other_blocks(replay_trace: ModuleType) -> None:
    def tokens(length: int, ids: list[int]) -> np.ndarray:
        request = {"timestamp": 0, "input_length": length, "output_length": 0, "hash_ids": ids}
        return replay_trace.TracedRequest.model_validate(request).tokens()

    one, other = tokens(1024, [182_789, 3]), tokens(700, [3, 182_789])

    assert one.dtype == np.uint32
    assert one[512:].tolist() == other[:512].tolist()
    assert one[:188].tolist() == other[512:].tolist()
    assert len(np.unique(one)) == 1024


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.skipif("RAYDIX_TRACE" not in os.environ, reason="set RAYDIX_TRACE to Mooncake's conversation trace")
def test_the_conversation_trace_gives_the_rates_of_a_whole_page_lru(tmp_path: Path) -> None:
    """An independent simulation of whole pages of 512 and least-recently-used leaves gave these rates."""
    rows = run(tmp_path, os.environ["RAYDIX_TRACE"], "--capacity", 1_024_000, 4_096_000, 16_384_000)

    assert [row["requests"] for row in rows] == [12_031] * 3
    assert [row["hit_rate_percent"] for row in rows] == [pytest.approx(rate, abs=0.3) for rate in (5.6, 18.8, 34.4)]
