"""The README's first program runs as it stands there, and prints what its comments promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.ray
def test_the_first_program_runs_and_hits_what_it_published(tmp_path: Path) -> None:
    program = tmp_path / "first.py"
    program.write_text(python_blocks()[0])

    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    assert "0 of 1000 tokens are there" in done.stdout
    assert "prefix_len=992" in done.stdout


def test_every_program_compiles() -> None:
    for block in python_blocks():
        compile(block, str(README), "exec")


def test_every_make_target_named_exists() -> None:
    makefile = (README.parent / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))

    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(), flags=re.MULTILINE)) <= targets


def test_every_file_named_exists() -> None:
    named = re.findall(r"`((?:tests|examples|actors|cache_core|schemas)/[\w/.]*)`", README.read_text())

    assert named
    assert [name for name in named if not (README.parent / name).exists()] == []
