"""Runs of the tests: groups for pytest-xdist, and the list of tests that did not run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import os
import pytest

@pytest.mark.ray
@pytest.mark.figures
@pytest.mark.parametrize("number", range(5))
def test_on_the_cluster(number):
    print("ran in", os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.trace
def test_of_a_trace(): pass

@pytest.mark.long
def test_at_length(): pass

@pytest.mark.more
def test_of_another_kind(): pass

@pytest.mark.long
@pytest.mark.more
def test_of_another_kind_at_length(): pass

@pytest.mark.prometheus
def test_of_alerts(): pass

def test_of_a_serial_port():
    pytest.skip("needs a serial port: plug one in")
"""


@pytest.mark.more
def test_a_cluster_has_one_process_and_what_did_not_run_is_listed_with_its_command(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "service"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "conftest.py", folder.parent)
    for name in ("test_a.py", "test_b.py"):
        (folder / name).write_text(TESTS)
    options = ["-m", "not long and not more and not prometheus", "-p", "no:cacheprovider"]
    options += ["-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAYDIX_"))}

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, *options, folder],
        capture_output=True,
        text=True,
        env=environ,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    processes = re.findall(r"^test_on_the_cluster\[\d\]: ran in (\w+)$", done.stdout, flags=re.MULTILINE)
    assert len(processes) == 10, done.stdout
    assert len(set(processes)) == 1
    not_run = done.stdout.partition("not run, and how to run it")[2].splitlines()
    assert sorted(line.strip() for line in not_run[1:6]) == [
        "2  RAYDIX_TRACE names no trace: make test-trace RAYDIX_TRACE=conversation_trace.jsonl",
        "2  more: make test-more",
        "2  needs a serial port: plug one in",
        "2  prometheus: make test-prometheus",
        "4  long: make test-long",
    ]
