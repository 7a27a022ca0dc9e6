"""`nearest_cache`: a worker finds a cache of its own node, and the workers of a node are spread over its caches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import ray

from raydix.actors import shutdown_cache, start_cache
from raydix.actors.cli.start_for import _running
from raydix.actors.cluster import placement
from raydix.actors.cluster.placement import nearest_cache, pools_of
from raydix.schemas import CacheConfig, CacheUnavailable, InvalidRequest, PoolConfig

pytestmark = pytest.mark.ray

CONFIG = CacheConfig(page_size=16, pool=PoolConfig(num_slots=64))


@pytest.fixture(scope="module")
def namespace(ray_cluster: None) -> Iterator[str]:
    """A Ray namespace with two caches."""
    name = f"near-{uuid4().hex[:8]}"
    handles = [start_cache(CONFIG, name=each, namespace=name) for each in ("chat-0", "chat-1")]
    yield name
    for handle in handles:
        shutdown_cache(handle)


@pytest.mark.more
def test_places_are_spread_over_the_caches_of_the_node(namespace: str) -> None:
    found = [nearest_cache("chat-*", place=place, namespace=namespace) for place in range(4)]

    assert found == ["chat-0", "chat-1", "chat-0", "chat-1"]
    assert nearest_cache("*-1", namespace=namespace) == "chat-1"


@pytest.mark.more
def test_the_node_of_each_cache_is_found(namespace: str) -> None:
    pools = pools_of("*-1", namespace)

    here = ray.get_runtime_context().get_node_id()
    assert {name: pool and pool.node_id for name, pool in pools.items()} == {"chat-1": here}
    assert _running("chat", namespace) == {"chat-0": here, "chat-1": here}
    assert _running("cha", namespace) == _running("*", namespace) == {}


@pytest.mark.more
def test_a_node_without_such_a_cache(namespace: str) -> None:
    with pytest.raises(CacheUnavailable, match="no cache with a name like 'code-\\*' runs on node"):
        nearest_cache("code-*", namespace=namespace)


@pytest.mark.more
def test_a_worker_waits_for_the_cache_of_a_new_node(
    namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache starts in the pause after the first search."""
    handles: list[Any] = []

    def pause(seconds: float) -> None:
        if not handles:
            handles.append(start_cache(CONFIG, name="late-0", namespace=namespace))

    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))

    assert nearest_cache("late-*", namespace=namespace, wait_s=600) == "late-0"
    assert "no cache with a name like 'late-*' runs on node" in caplog.text
    shutdown_cache(handles[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place": -1}, "place must be"),
        ({"place": "0"}, "place must be"),
        ({"timeout_s": -1}, "seconds"),
        ({"wait_s": -1}, "seconds"),
    ],
)
def test_wrong_arguments(namespace: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        nearest_cache("chat-*", namespace=namespace, **options)
