"""Tests with the real vLLM: `make test-engines`. Elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.engines.laboratory import Laboratory

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:
        return
    skip = pytest.mark.skip(reason="needs vLLM: make test-engines")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a cluster of these tests' own."""
    import ray

    context = ray.init(
        "local", num_cpus=4, include_dashboard=False, namespace="raydix", object_store_memory=200 * 2**20
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def laboratory(ray_address: str, tmp_path: Path) -> Iterator[Laboratory]:
    """Makes models, caches and engines; ends them after the test, when no lease may be open."""
    made = Laboratory(ray_address, tmp_path)
    yield made
    made.close()
