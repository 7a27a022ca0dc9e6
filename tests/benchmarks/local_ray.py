"""A small Ray cluster for the benchmarks that need one, as tests have it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ray_started() -> Iterator[None]:
    """Run the block on a cluster of this machine. If one is running, use it, and leave it running."""
    import ray  # imported only here, as most benchmarks do not need it

    mine = not ray.is_initialized()
    if mine:
        ray.init(
            "local",
            num_cpus=4,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    yield
    if mine:
        ray.shutdown()
