"""Which replicas of a deployment compute for which cache: by the cache's name, by node and GPU, or by node."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from raydix.actors.fleet.membership import CachePlace

CACHE_KEY, GPU_KEY = "raydix_cache", "raydix_gpu"  # keys of a replica's metadata


class ReplicaPlace(NamedTuple):
    """Where a replica runs."""

    key: Hashable  # the replica's id
    node_id: str | None  # Ray's id of the node; None: not known
    cache: str | None = None  # the name of the replica's cache; None: the replica gives none
    gpu_uuid: str | None = None  # the replica's card; None: the replica gives none

    @classmethod
    def of(cls, key: Hashable, node_id: str | None, metadata: Mapping[str, Any]) -> ReplicaPlace:
        """Return the place of a replica, from the metadata that the replica publishes."""
        return cls(key, node_id, metadata.get(CACHE_KEY), metadata.get(GPU_KEY))


def caches_of(replica: ReplicaPlace, caches: Iterable[CachePlace]) -> list[str]:
    """Return the names of the caches that a replica may use.

    A replica that names its cache uses that one. A replica that names its GPU uses the caches on that card. Any other
    replica uses the caches of its node. If the node has several, the router cannot know which, and sends the requests
    of each cache to all replicas of the node.
    """
    if replica.cache is not None:
        return _names(cache for cache in caches if cache.name == replica.cache)
    here = [cache for cache in caches if cache.node_id == replica.node_id]
    same_card = _names(cache for cache in here if replica.gpu_uuid is not None and cache.gpu_uuid == replica.gpu_uuid)
    return same_card or _names(here)


def _names(caches: Iterable[CachePlace]) -> list[str]:
    """Return the names of caches, each once: the ranks of an engine have one name."""
    return list(dict.fromkeys(cache.name for cache in caches))


class ReplicaPairs:
    """The replicas of each cache, and the caches of each replica. A cache may have several replicas, or none."""

    def __init__(self, replicas: Iterable[ReplicaPlace], caches: Iterable[CachePlace]) -> None:
        caches = list(caches)
        self.by_cache: dict[str, list[Hashable]] = {}  # caches with at least one replica
        self.by_replica: dict[Hashable, list[str]] = {}
        for replica in replicas:
            names = self.by_replica[replica.key] = caches_of(replica, caches)
            for name in names:
                self.by_cache.setdefault(name, []).append(replica.key)
        self.cover_all = len(self.by_cache) == len(_names(caches))  # every cache has a replica
