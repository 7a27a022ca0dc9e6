"""The first program of the README runs as printed, and prints the hits that its comments promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.documents import README, blocks


@pytest.mark.ray
def test_the_first_program_runs_and_hits_the_pages_it_published(tmp_path: Path) -> None:
    program = tmp_path / "first.py"
    program.write_text(next(block.text for block in blocks(README) if block.language == "python"))

    environ = os.environ | {"RAY_ADDRESS": "local"}  # not the user's cluster
    done = subprocess.run([sys.executable, program], cwd=tmp_path, env=environ, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "0 of 1000 tokens are cached" in done.stdout
    assert "prefix_len=992" in done.stdout
