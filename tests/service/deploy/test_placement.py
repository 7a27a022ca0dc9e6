"""Caches on each GPU, their workers on the same GPUs, and the GPUs returned."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from support.processes.command_line import run, run_json
from support.waiting import wait_until

from raydix.actors import connect, shutdown_cache, start_cache
from raydix.actors.cluster.placement import beside, group_name
from raydix.actors.service.past_lives import LOST_GROUP, has_lost_its_group
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
def test_a_cache_with_a_removed_placement_group_is_named_as_such_at_once(ray_cluster: None) -> None:
    where = ["--namespace", f"removed-{uuid4().hex[:8]}"]
    group = placement_group([{"CPU": 0.01}])
    options: Any = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group), "namespace": where[1]}
    config = CacheConfig(pool=PoolConfig(num_slots=64))
    cache = start_cache(config, name="kv", **options)
    try:
        assert not has_lost_its_group(cache)
        remove_placement_group(group)
        wait_until(lambda: has_lost_its_group(cache))

        for again in (lambda: connect("kv", namespace=where[1]), lambda: start_cache(config, name="kv", **options)):
            with pytest.raises(CacheUnavailable, match="its placement group was removed"):
                again()
        (row,) = run_json("list", *where)
        assert (row["state"], row["findings"]) == ("ended", [LOST_GROUP])
        refused = run("stats", "kv", *where, exit_code=3).stderr
        assert "its placement group was removed\n" in refused and "raydix stop kv" in refused
    finally:
        ray.kill(cache)


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
