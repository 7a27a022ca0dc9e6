"""Replicas belong to the cache that they name, else to the caches on their card, else to those of their node."""

from __future__ import annotations

from raydix.actors.fleet.membership import CachePlace
from raydix.actors.serve.replica_pairs import ReplicaPairs, ReplicaPlace

CACHES = [
    CachePlace("a-0", "node-a", "GPU-0"),
    CachePlace("a-1", "node-a", "GPU-1"),
    CachePlace("b-0", "node-b", None),
]


def pairs(*replicas: ReplicaPlace) -> ReplicaPairs:
    return ReplicaPairs(replicas, CACHES)


def test_a_replica_belongs_to_the_cache_that_it_names() -> None:
    found = pairs(ReplicaPlace.of(1, "node-a", {"raydix_cache": "a-1"}), ReplicaPlace(2, "node-a", "b-0"))

    assert found.by_cache == {"a-1": [1], "b-0": [2]}


def test_a_replica_that_names_its_card_belongs_to_the_cache_on_it() -> None:
    found = pairs(ReplicaPlace.of(1, "node-a", {"raydix_gpu": "GPU-1"}), ReplicaPlace(2, "node-a", None, "GPU-0"))

    assert found.by_replica == {1: ["a-1"], 2: ["a-0"]}


def test_cards_of_other_nodes_do_not_count() -> None:
    assert pairs(ReplicaPlace(1, "node-b", None, "GPU-1")).by_replica == {1: ["b-0"]}


def test_a_replica_that_names_nothing_belongs_to_all_caches_of_its_node() -> None:
    found = pairs(ReplicaPlace(1, "node-a"), ReplicaPlace(2, "node-a"), ReplicaPlace(3, "node-b"))

    assert found.by_cache == {"a-0": [1, 2], "a-1": [1, 2], "b-0": [3]}
    assert found.cover_all


def test_replicas_without_a_cache() -> None:
    found = pairs(ReplicaPlace(1, "node-c"), ReplicaPlace(2, None), ReplicaPlace(3, "node-a", "gone"))

    assert found.by_cache == {}
    assert found.by_replica == {1: [], 2: [], 3: []}
    assert not found.cover_all
