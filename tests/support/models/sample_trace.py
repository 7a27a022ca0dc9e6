"""A trace made by hand, and the results of a cache of four pages of 512 tokens; and traces that were recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# Seven prompts for a cache of four pages: [input_length, hash_ids], and the hit of each.
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
PROMPT_TOKENS = sum(length for length, _ in PROMPTS[:-1])  # of those that fit in 2,048 slots
REUSED = 1024 + 512 + 512 + 512
EVICTED = 3 * 512


def write_trace(folder: Path, prompts: list[tuple[int, list[int]]] = PROMPTS) -> Path:
    """Prompts as a trace in a file."""
    lines = [
        json.dumps({"timestamp": 1000 * i, "input_length": length, "output_length": 9, "hash_ids": ids})
        for i, (length, ids) in enumerate(prompts)
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def recorded_trace(name: str) -> Path:
    """A trace in the folder of RAYDIX_TRACE; without it, the test is skipped."""
    found = beside_trace(name)
    if found is None:
        pytest.skip(f"{name} is not in the folder of RAYDIX_TRACE")
    return found


def beside_trace(name: str) -> Path | None:
    """A trace in the folder of RAYDIX_TRACE; None: it is not there."""
    return next(iter(sorted(Path(os.environ["RAYDIX_TRACE"]).parent.glob(f"{name}.jsonl*"))), None)
