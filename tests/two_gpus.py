"""Run by itself: the command on a cluster of two GPUs, which are Ray's bookkeeping alone where there are none."""

from __future__ import annotations

import time
from typing import Any

import ray
from command_line import run, run_json

from raydix.actors.placement import beside

INDEX = ("--set", "pool.num_slots=64", "--set", "pool.device=auto")


@ray.remote(num_gpus=0.4, num_cpus=0)
class Worker:
    """Says which card it was given."""

    def gpu_ids(self) -> list[Any]:
        """Those of Ray."""
        return ray.get_gpu_ids()


def until_free(num_gpus: float) -> None:
    """Wait until so many GPUs can be reserved."""
    deadline = time.monotonic() + 60
    while ray.available_resources().get("GPU", 0) != num_gpus:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


def main() -> None:
    """Start, look, refuse, stop."""
    ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)

    started = run_json("start", *INDEX)
    assert [each["name"] for each in started] == ["kv-0", "kv-1"], started
    until_free(0)
    again = run_json("start", *INDEX)
    assert [each["reused"] for each in again] == [True, True], again
    assert [each["epoch"] for each in again] == [each["epoch"] for each in started]

    beside_each = [Worker.options(scheduling_strategy=beside(name)).remote() for name in ("kv-0", "kv-0", "kv-1")]
    first, second, other = ray.get([worker.gpu_ids.remote() for worker in beside_each])
    assert first == second != other, (first, second, other)

    refused = run_json("start", *INDEX, "--count", 3, "--timeout", 2, exit_code=3)["error"]
    assert "'kv-2' found no node with a free GPU" in refused["message"], refused
    assert [row["name"] for row in run_json("list")] == ["kv-0", "kv-1"]

    (on_cpu,) = run_json("start", "--name", "cpu", "--set", "pool.num_slots=64", "--set", "pool.device=cpu")
    assert (on_cpu["name"], on_cpu["device"]) == ("cpu-0", "cpu")

    del beside_each
    assert "kv-0: stopped" in run("stop", "--all").stdout
    until_free(2)
    ray.shutdown()
    print("all as it should be")


if __name__ == "__main__":
    main()
