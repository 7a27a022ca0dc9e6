"""What all tests share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked `gpu` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # only here: most runs should not wait for it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One small Ray cluster for all tests that need one. What a test starts on it, it ends."""
    import ray  # only here, as above

    ray.init(
        num_cpus=4,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def running_cache(ray_cluster: None) -> Iterator[Callable[[Any], Any]]:
    """The one cache actor of a configuration, started when it is first asked for. Leave it empty for the next test."""
    from raydix.actors import shutdown_cache, start_cache

    actors: dict[str, Any] = {}

    def running(config: Any) -> Any:
        if config.digest() not in actors:
            actors[config.digest()] = start_cache(config)
        return actors[config.digest()]

    yield running
    for actor in actors.values():
        shutdown_cache(actor)
