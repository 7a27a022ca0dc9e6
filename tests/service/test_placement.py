"""Caches one on each GPU, their workers beside them, and the GPUs given back."""

import subprocess
import sys
from pathlib import Path

import pytest

from raydix.actors.placement import group_name

TWO_GPUS = Path(__file__).parents[1] / "two_gpus.py"


@pytest.mark.ray
def test_each_gpu_gets_a_cache_that_its_workers_share_and_is_free_when_that_is_stopped() -> None:
    done = subprocess.run([sys.executable, str(TWO_GPUS)], capture_output=True, text=True, timeout=250, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "all as it should be\n"


def test_names_of_two_namespaces_do_not_meet() -> None:
    assert group_name("kv-0", "a") != group_name("kv-0", "b")
