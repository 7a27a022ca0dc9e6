"""Tests that need a GPU, and a Ray cluster that has it: `make test-gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def gpu_cluster() -> Iterator[None]:
    """A Ray cluster with this machine's first GPU."""
    import ray

    from raydix.actors import start_cache

    start_cache.__kwdefaults__["timeout_s"] = 300  # other programs may use the machine
    ray.init(
        "local",
        num_cpus=8,
        num_gpus=1,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()
