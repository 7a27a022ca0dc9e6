"""The service: the Ray actor that owns a cache, its clients, and the same cache without Ray.

Names are loaded when they are first used: importing this package imports neither torch nor Ray.

The folders, from the ground up:

    metrics       counts as metrics of Ray, buckets of histograms, a dashboard for Grafana
    observe       counts and records of a running cache: history, ghost curve, recordings of traffic and their format
    transport     how messages travel: Ray calls, a Unix socket, mapped memory; checks of messages and arguments
    tiers         copies between a pool and the tiers below it: their threads, their memory, their files
    sessions      clients' sessions: owners, offers, deaths, the wait queue, admission
    service       the cache actor, the dispatch of requests, the background tasks
    cluster       caches in a Ray cluster: start, place, find and configure them
    client        `PrefixCacheClient`, its leases, the mapped pool, the plain form for threads
    fleet         the router of requests to several caches
    engines       the common parts of engines' connectors, and the connector of vLLM
    serve         the router as a policy of Ray Serve
    exporters     KV events in the formats of other programs
    huggingface   `TransformersWorker` and its parts
    demo          the demo: conversations, with the cache and without
    replay        replays of recorded traffic, on caches and on a simulated fleet
    report        the report page
    cli           the command `raydix`

`loop_timer` calls a method periodically; four folders use it.

`actors/service/cache_service.py` lists the steps of one request from the client's call to the tree and back.
"""

from typing import TYPE_CHECKING

from raydix.schemas.lazy_names import lazy_names

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.lease import Lease, Loaded
    from raydix.actors.client.local_prefix_cache import LocalPrefixCache
    from raydix.actors.client.prefix_cache_client import PrefixCacheClient
    from raydix.actors.client.rank_leases import acquire_ranks
    from raydix.actors.client.watched_actor import WatchedActor
    from raydix.actors.cluster.deploy import (
        connect,
        shutdown_cache,
        start_cache,
        start_cache_async,
    )
    from raydix.actors.cluster.placement import beside
    from raydix.actors.fleet.fleet import Fleet, connect_fleet
    from raydix.actors.fleet.route import Route
    from raydix.actors.service.cache_actor import PrefixCacheActor

__all__ = [
    "AttachedPool",
    "Fleet",
    "Lease",
    "Loaded",
    "LocalPrefixCache",
    "PrefixCacheActor",
    "PrefixCacheClient",
    "Route",
    "WatchedActor",
    "acquire_ranks",
    "beside",
    "connect",
    "connect_fleet",
    "shutdown_cache",
    "start_cache",
    "start_cache_async",
]

__getattr__ = lazy_names(
    __name__,
    {
        "client.attached_pool": "AttachedPool",
        "client.lease": "Lease Loaded",
        "client.local_prefix_cache": "LocalPrefixCache",
        "client.prefix_cache_client": "PrefixCacheClient",
        "client.rank_leases": "acquire_ranks",
        "cluster.deploy": "connect shutdown_cache start_cache start_cache_async",
        "cluster.placement": "beside",
        "fleet.fleet": "Fleet connect_fleet",
        "fleet.route": "Route",
        "service.cache_actor": "PrefixCacheActor",
        "client.watched_actor": "WatchedActor",
    },
)


def __dir__() -> list[str]:
    return __all__
