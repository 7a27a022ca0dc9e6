"""Run by itself: the command on a cluster of two GPUs, which are Ray's bookkeeping alone where there are none."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from support.processes.command_line import run, run_json

from raydix.actors import shutdown_cache, start_cache
from raydix.actors.cluster.placement import beside, remove_placement, start_on_own_gpu
from raydix.actors.huggingface.causal_model import _has_a_gpu
from raydix.schemas import CacheConfig, CacheUnavailable, PoolConfig

CONFIG = CacheConfig(pool=PoolConfig(num_slots=64))
INDEX = ("--set", "pool.num_slots=64", "--set", "pool.device=auto")
TENSORS = (*INDEX, "--set", "pool.layers=[{num_kv_heads: 1, head_dim: 8}]")


@ray.remote(num_gpus=0.4, num_cpus=0)
class Worker:
    """Says which card it was given."""

    def gpu_ids(self) -> list[Any]:
        """Those of Ray."""
        return ray.get_gpu_ids()

    def may_use_gpu(self) -> bool:
        """Whether a model here may go to a card: not to one that is visible, but another's."""
        return _has_a_gpu()


def until_free(num_gpus: float) -> None:
    """Wait until so many GPUs can be reserved."""
    deadline = time.monotonic() + 300
    while ray.available_resources().get("GPU", 0) != num_gpus:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


def in_the_bundle_of_the_cache() -> None:
    """A cache in a group of its user's own: its workers come to its bundle, not to the first."""
    group = placement_group([{"GPU": 1}, {"GPU": 1}])
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1)
    cache = start_cache(CONFIG, scheduling_strategy=place, num_gpus=0.1)

    found = beside(cache)

    assert isinstance(found, PlacementGroupSchedulingStrategy)
    assert (found.placement_group.id, found.placement_group_bundle_index) == (group.id, 1)
    shutdown_cache(cache)
    remove_placement_group(group)
    until_free(2)


def late_ones_are_not_left_behind() -> None:
    """A cache that does not start in time ends, with its group; another attempt finds all free."""
    try:
        start_on_own_gpu(CONFIG, "late", timeout_s=1)
    except CacheUnavailable:
        until_free(2)
        assert not ray.util.list_named_actors(all_namespaces=True)
    ray.kill(start_on_own_gpu(CONFIG, "late"))
    remove_placement("late")
    until_free(2)


def main() -> None:
    """Start, look, refuse, stop."""
    ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    (without_tensors,) = run_json("start", "--name", "index", *INDEX)
    assert without_tensors["num_bytes"] == 0, without_tensors
    until_free(2)
    run("stop", "index-0")

    started = run_json("start", *TENSORS)
    assert [each["name"] for each in started] == ["kv-0", "kv-1"], started
    until_free(0)
    again = run_json("start", *TENSORS)
    assert [each["reused"] for each in again] == [True, True], again
    assert [each["epoch"] for each in again] == [each["epoch"] for each in started]

    beside_each = [Worker.options(scheduling_strategy=beside(name)).remote() for name in ("kv-0", "kv-0", "kv-1")]
    first, second, other = ray.get([worker.gpu_ids.remote() for worker in beside_each])
    assert first == second != other, (first, second, other)
    unplaced = Worker.options(num_gpus=0).remote()
    assert ray.get([beside_each[0].may_use_gpu.remote(), unplaced.may_use_gpu.remote()]) == [True, False]

    refused = run_json("start", *TENSORS, "--count", 3, "--timeout", 5, exit_code=1)["error"]
    assert "'kv-2' found no node with a free GPU" in refused["message"], refused
    assert [row["name"] for row in run_json("list")] == ["kv-0", "kv-1"]

    (on_cpu,) = run_json("start", "--name", "cpu", "--set", "pool.num_slots=64", "--set", "pool.device=cpu")
    assert (on_cpu["name"], on_cpu["device"]) == ("cpu-0", "cpu")

    del beside_each, unplaced
    assert "kv-0: stopped" in run("stop", "--all").stdout
    until_free(2)
    in_the_bundle_of_the_cache()
    late_ones_are_not_left_behind()
    ray.shutdown()
    print("all as it should be")


if __name__ == "__main__":
    main()
