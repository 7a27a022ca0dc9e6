"""What all tests share."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

WITH_CLUSTERS_OF_THEIR_OWN = ("chaos", "examples")
FIGURES = {"benchmark", "figures"}  # marks of tests that print what they counted or measured


@pytest.hookimpl(tryfirst=True)  # before they are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on the cluster below: `make test` has a process for it, and one for all else."""
    for item in items:
        if item.get_closest_marker("ray") and item.path.parent.name not in WITH_CLUSTERS_OF_THEIR_OWN:
            item.add_marker(pytest.mark.shares_cluster)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what tests counted and measured, though they passed, and in whichever process."""
    told = [each for each in terminalreporter.stats.get("passed", ()) if FIGURES & set(each.keywords)]
    for report in told:
        for title, text in report.sections:
            if title == "Captured stdout call":
                terminalreporter.write_line(f"{report.nodeid.partition('::')[2]}: {text.strip()}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a GPU or a trace where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch  # only here: most runs should not wait for it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("trace") is not None and not os.environ.get("RAYDIX_TRACE"):
        pytest.skip("RAYDIX_TRACE names no trace: make test-trace RAYDIX_TRACE=conversation_trace.jsonl")


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
