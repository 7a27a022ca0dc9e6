"""Caches on each GPU, their workers on the same GPUs, and the GPUs returned."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydix.actors import shutdown_cache, start_cache
from raydix.actors.placement import beside, group_name
from raydix.schemas import CacheConfig, CacheUnavailable, PoolConfig

TESTS = Path(__file__).parents[2]


@pytest.mark.more
@pytest.mark.ray
def test_each_gpu_gets_a_cache_that_its_workers_share_and_is_free_when_that_is_stopped() -> None:
    command = [sys.executable, "-m", "support.processes.two_gpu_cluster"]

    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as it should be" in done.stdout.splitlines()


def test_names_of_two_namespaces_do_not_meet() -> None:
    assert group_name("kv-0", "a") != group_name("kv-0", "b")


@pytest.mark.ray
def test_no_worker_is_placed_with_a_cache_that_has_ended_or_does_not_answer(ray_cluster: None) -> None:
    cache = start_cache(CacheConfig(pool=PoolConfig(num_slots=64)))
    try:
        assert isinstance(beside(cache), NodeAffinitySchedulingStrategy)
        with pytest.raises(CacheUnavailable, match="does not answer"):
            while True:  # the answer may be here before it is waited for
                beside(cache, timeout_s=0)
    finally:
        shutdown_cache(cache)

    with pytest.raises(CacheUnavailable):
        while True:  # its process may answer for a moment
            beside(cache)
