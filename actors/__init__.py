"""The service: the Ray actor that owns a cache, its clients, and the same cache without Ray.

Names are loaded when they are first used: importing this package imports neither torch nor Ray.

The folders, from the ground up:

    loop          helpers of the event loop: periodic calls, and turns for background work
    metrics       counts as metrics of Ray, buckets of histograms, a dashboard for Grafana
    observe       counts and records of a running cache: history, ghost curve, recordings of traffic and their format
    transport     how messages travel: Ray calls, a Unix socket; checks of messages and arguments
    memory        the memory of pools: shapes, tensors, shared and registered memory
    tiers         the tiers below a pool, as requests see them; the tier in host memory, and the tier on a disk
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

`actors/service/cache_service.py` lists the steps of one request from the client's call to the tree and back.
"""

from typing import TYPE_CHECKING

from raydix.schemas.lazy_names import lazy_names

if TYPE_CHECKING:  # the one list of public names: `lazy_names` reads it
    from raydix.actors.client.attached_pool import AttachedPool as AttachedPool
    from raydix.actors.client.lease import Lease as Lease
    from raydix.actors.client.lease import Loaded as Loaded
    from raydix.actors.client.local_prefix_cache import LocalPrefixCache as LocalPrefixCache
    from raydix.actors.client.prefix_cache_client import PrefixCacheClient as PrefixCacheClient
    from raydix.actors.client.rank_leases import acquire_ranks as acquire_ranks
    from raydix.actors.client.watched_actor import WatchedActor as WatchedActor
    from raydix.actors.cluster.deploy import connect as connect
    from raydix.actors.cluster.deploy import shutdown_cache as shutdown_cache
    from raydix.actors.cluster.deploy import start_cache as start_cache
    from raydix.actors.cluster.deploy import start_cache_async as start_cache_async
    from raydix.actors.cluster.placement import beside as beside
    from raydix.actors.fleet.fleet import Fleet as Fleet
    from raydix.actors.fleet.fleet import connect_fleet as connect_fleet
    from raydix.actors.fleet.route import Route as Route
    from raydix.actors.service.cache_actor import PrefixCacheActor as PrefixCacheActor

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
