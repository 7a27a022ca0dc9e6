"""`nearest_cache`: a worker finds a cache of its own node, and the workers of a node are spread over its caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from raydix.actors import shutdown_cache, start_cache
from raydix.actors.cluster.placement import nearest_cache
from raydix.schemas import CacheConfig, CacheUnavailable, InvalidRequest, PoolConfig

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def namespace(ray_cluster: None) -> Iterator[str]:
    """A Ray namespace with two caches."""
    name = f"near-{uuid4().hex[:8]}"
    config = CacheConfig(page_size=16, pool=PoolConfig(num_slots=64))
    handles = [start_cache(config, name=each, namespace=name) for each in ("chat-0", "chat-1")]
    yield name
    for handle in handles:
        shutdown_cache(handle)


@pytest.mark.more
def test_places_are_spread_over_the_caches_of_the_node(namespace: str) -> None:
    found = [nearest_cache("chat-*", place=place, namespace=namespace) for place in range(4)]

    assert found == ["chat-0", "chat-1", "chat-0", "chat-1"]
    assert nearest_cache("*-1", namespace=namespace) == "chat-1"


@pytest.mark.more
def test_a_node_without_such_a_cache(namespace: str) -> None:
    with pytest.raises(CacheUnavailable, match="no cache with a name like 'code-\\*' runs on node"):
        nearest_cache("code-*", namespace=namespace)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"place": -1}, "place must be"), ({"place": "0"}, "place must be"), ({"timeout_s": -1}, "seconds")],
)
def test_wrong_arguments(namespace: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        nearest_cache("chat-*", namespace=namespace, **options)
