"""`make_ray_client` in processes that seed `random` alike, as the workers of an engine do."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import random, sys, time
from raydix.actors.engines.cache_link import make_ray_client
from raydix.schemas import CacheUnavailable

random.seed(0)
expected = random.getrandbits(32)
random.seed(0)
try:
    make_ray_client("no cache", "raydix", sys.argv[1], "test")
except CacheUnavailable:
    assert random.getrandbits(32) == expected, "the engine's seed has an effect as before"
time.sleep(2)
before = time.process_time()
time.sleep(2)
print(time.process_time() - before)
"""


@pytest.mark.more
@pytest.mark.ray
def test_clients_of_processes_with_one_seed_leave_each_other_alone(ray_cluster: None) -> None:
    """With one id for both, each of their subscribers to Ray's errors uses a fifth of a core for ever."""
    import ray

    address = ray.get_runtime_context().gcs_address
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, address], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    used_s = [float(each.communicate()[0]) for each in processes]

    assert max(used_s) < 0.1, used_s
