"""A cluster of another release of Ray is named with both versions, by commands and by `connect`."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from support.processes.fresh_process import run_fresh
from support.processes.ray_head import ray_head

OTHER = "2.52.0"
PYTHON = platform.python_version()
CAUSE = f"it runs Ray {OTHER} on Python {PYTHON}, and this process Ray {ray.__version__} on Python {PYTHON}"

pytestmark = [pytest.mark.ray, pytest.mark.more]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of the other release. Its dependencies are those of the tests' own."""
    folder = tmp_path_factory.mktemp("ray")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"ray=={OTHER}"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a package index: pip install ray=={OTHER}")
    with ray_head(PYTHONPATH=str(folder), RAY_AUTH_MODE="disabled") as address:
        yield address


def test_a_command_says_both_versions_in_one_line(address: str, tmp_path: Path) -> None:
    for arguments in (["list"], ["stats", "kv"], ["start", "--set", "pool.num_slots=64"], ["fleet", "list"]):
        command = [sys.executable, "-m", "raydix.actors.cli", *arguments, "--address", address]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=tmp_path)

        error, advice = done.stderr.splitlines()
        assert (done.returncode, CAUSE in error) == (3, True), error
        assert "ray --version" in advice
        assert CAUSE in json.loads(done.stdout)["error"]["message"]


def test_connect_says_both_versions(address: str) -> None:
    program = (
        "import os\n"
        f"os.environ['RAY_ADDRESS'] = {address!r}\n"
        "from raydix.actors import connect\n"
        "from raydix.schemas import CacheUnavailable\n"
        "try:\n    connect('kv-0')\n"
        "except CacheUnavailable as error:\n    print(error)\n"
    )

    assert CAUSE in run_fresh(program).stdout
