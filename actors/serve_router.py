"""`RaydixRequestRouter`: Ray Serve sends each request to the replica with the cache that holds its prefix.

    from ray.serve.config import RequestRouterConfig

    @serve.deployment(
        num_replicas=4,
        request_router_config=RequestRouterConfig(
            request_router_class="raydix.actors.serve_router.RaydixRequestRouter",
            request_router_kwargs={"caches": "chat-*", "tokens_of": "raydix.actors.serve_tokens:token_ids"},
        ),
    )
    class Model: ...

A router runs in each process that calls the deployment by a handle. Needs Ray 2.60 or later.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from raydix.actors.deploy import NAMESPACE
from raydix.actors.fleet.prompt_reader import PromptReader
from raydix.actors.fleet.replica_pairs import ReplicaPlace
from raydix.actors.fleet.replica_ranks import FleetOptions, Ranked, ReplicaRanks
from raydix.actors.fleet.route import Route
from raydix.schemas import InvalidRequest, ReplicaRouterStats, RouteConfig
from raydix.schemas.shown import brief

try:
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError("Ray Serve needs the extra: pip install 'raydix[serve]'") from error
if not hasattr(RunningReplica, "replica_metadata"):
    raise ImportError("RaydixRequestRouter needs Ray 2.60 or later: pip install 'ray[serve]>=2.60'")

logger = logging.getLogger(__name__)

_LOG_S = 60.0  # between two lines with the counts
_SENT = "raydix_sent"  # the attribute of a pending request that keeps its `_Sent`
_routers: weakref.WeakSet[RaydixRequestRouter] = weakref.WeakSet()


class RaydixRequestRouter(RequestRouter):
    """Ranks the replicas of a deployment by what their caches hold of a request's prompt, and what waits there.

    Each replica belongs to the cache that it names, as `"raydix_cache"` in the dict of its `record_replica_metadata`;
    else to the caches of its node on the GPU that it names, as `"raydix_gpu"` (the UUID); else to all caches of its
    node. Several replicas may belong to one cache: the least loaded of them gets the request. If all of them are at
    capacity or gone, the request goes to the replicas of the next best cache. A replica without a cache comes last.

    A request counts at its cache until its caller takes the first streamed item, it is answered or cancelled, it fails,
    or its replica dies; `RouteConfig.promise_ttl_s` at most. Where Serve gives the router no sign of these
    (`handle.choose_replica`, Ray Client), it counts for that time.

    A request without tokens goes to the least loaded replica, and so does every request while no cache with a replica
    is alive. `stats` has the number of these, by cause. Each minute the counts are logged, if they have changed.
    Neither the locality of Serve's default router nor its placement of multiplexed models is heeded.
    """

    def initialize_state(
        self,
        caches: str,
        tokens_of: str,
        tokens_of_kwargs: Mapping[str, Any] | None = None,
        tokens_of_timeout_s: float = 0.05,
        route: Mapping[str, Any] | None = None,
        namespace: str = NAMESPACE,
        fingerprint: str | None = None,
    ) -> None:
        """Take the `request_router_kwargs`. The caches are looked for as soon as there are replicas.

        Args:
            caches: a pattern of the names of cache actors, as of `connect_fleet`.
            tokens_of: "module:function". It is called with a `PendingRequest` of Serve, in a thread, and returns
                `(tokens, namespace)` as `PrefixCacheClient.acquire` takes them, or None; the namespace is a
                `CacheNamespace` or None. Or "module:Class": an object of the class is called.
            tokens_of_kwargs: keyword arguments of the class.
            tokens_of_timeout_s: seconds; a request without tokens by then goes to the least loaded replica.
            route: the fields of `RouteConfig`.
            namespace: the Ray namespace of the caches.
            fingerprint: of the base model, as of `connect_fleet`.

        Raises:
            InvalidRequest: an argument is wrong; the message names it.
        """
        if not isinstance(caches, str) or not caches:
            raise InvalidRequest(f'caches must be a pattern of names, such as "chat-*", not {brief(caches)}')
        options = FleetOptions(caches, RouteConfig(**(route or {})), namespace, fingerprint)
        self._ranks = ReplicaRanks(options, PromptReader(tokens_of, tokens_of_kwargs, tokens_of_timeout_s))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: defaultdict[ReplicaID, set[_Sent]] = defaultdict(set)  # by the replica that has the request
        self._moves: set[asyncio.Task[None]] = set()
        self._log_at = 0.0
        self._logged: dict[str, Any] = {}
        _routers.add(self)

    # ---------------------------------------------------------------- replicas

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas. Serve calls this on the router's loop."""
        super().update_replicas(replicas)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ranks.connect()
            weakref.finalize(self, _close, self._loop, self._ranks).atexit = False
        self._ranks.set_replicas(
            [ReplicaPlace.of(each.replica_id, each.node_id, each.replica_metadata) for each in replicas]
        )

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a replica, and end the routes of its requests."""
        super().on_replica_actor_died(replica_id)
        for sent in self._open.pop(replica_id, set()):
            sent.end(computed=False)

    # ---------------------------------------------------------------- requests

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request in groups, the best first. Serve takes the least loaded of a group."""
        replicas = {each.replica_id: each for each in candidate_replicas}
        if pending_request is None:
            return [list(replicas.values())]
        earlier: _Sent | None = getattr(pending_request, _SENT, None)
        if earlier is not None:  # a replica was at capacity
            earlier.end(computed=False)
        ranked = await self._ranks.rank(pending_request, list(replicas))
        if ranked.route is not None:
            sent = _Sent(ranked)
            setattr(pending_request, _SENT, sent)
            pending_request.future.add_done_callback(sent.end_if_cancelled)
        self._log()
        groups = ([replicas[key] for key in group if isinstance(key, ReplicaID)] for group in ranked.groups)
        return [group for group in groups if group]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Follow a request that a replica has accepted, until its first item, its answer or its failure."""
        sent: _Sent | None = getattr(pending_request, _SENT, None)
        if sent is None or self._loop is None:
            return
        delattr(pending_request, _SENT)
        loop, opened = self._loop, self._open[replica_id]
        opened.add(sent)

        def end(computed: bool) -> None:
            opened.discard(sent)
            sent.end(computed)

        result.add_done_callback(lambda outcome: _call_in(loop, end, not isinstance(outcome, BaseException)))
        if pending_request.metadata.is_streaming:
            _watch_first_item(result, lambda: _call_in(loop, end, True))
        caches = self._ranks.caches_of(replica_id)
        if sent.ranked.route is not None and sent.ranked.route.cache not in caches:
            move = loop.create_task(self._move(sent, caches))
            self._moves.add(move)
            move.add_done_callback(self._moves.discard)

    async def _move(self, sent: _Sent, caches: list[str]) -> None:
        sent.take(await self._ranks.move(sent.ranked, caches))

    # ---------------------------------------------------------------- counts

    def stats(self) -> ReplicaRouterStats:
        """Return the counts of this router since its start."""
        name = f"{self.app_name}:{self._deployment_id.name}"
        return self._ranks.stats(name, sum(map(len, self._open.values())))

    def _log(self) -> None:
        assert self._loop is not None
        if self._loop.time() < self._log_at:
            return
        self._log_at = self._loop.time() + _LOG_S
        counts = self.stats().model_dump(exclude={"fleet", "open_routes"})
        if counts != self._logged:
            self._logged = counts
            logger.info("routes: %s", counts)


class _Sent:
    """A request that has a route: the route ends once, by whichever sign comes first."""

    def __init__(self, ranked: Ranked) -> None:
        self.ranked = ranked
        self._route = ranked.route
        self._computed: bool | None = None  # None: it is open

    def take(self, route: Route | None) -> None:
        """Replace the route. If the request has ended, the new one ends too."""
        self._route = route
        if self._computed is not None:
            self._end_route(self._computed)

    def end(self, computed: bool) -> None:
        """End the route. Idempotent."""
        if self._computed is None:
            self._computed = computed
            self._end_route(computed)

    def end_if_cancelled(self, future: asyncio.Future[Any]) -> None:
        """End the route if the caller has given the request up before a replica took it."""
        if future.cancelled():
            self.end(computed=False)

    def _end_route(self, computed: bool) -> None:
        if self._route is None:
            return
        if computed:
            self._route.first_token()
        else:
            self._route.cancel()


def running_routers() -> list[RaydixRequestRouter]:
    """Return the routers of this process, to read their `stats`."""
    return list(_routers)


def _watch_first_item(result: Any, note: Callable[[], None]) -> None:
    """Call a function when the caller has taken the first item of a streamed answer.

    The methods of this one answer are replaced, and put back with the first item.
    """
    take, take_later = result.__next__, result.__anext__

    def note_once() -> None:
        result.__dict__.pop("__next__", None)
        result.__dict__.pop("__anext__", None)
        note()

    def first() -> Any:
        item = take()
        note_once()
        return item

    async def first_later() -> Any:
        item = await take_later()
        note_once()
        return item

    result.__dict__.update(__next__=first, __anext__=first_later)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Call a function on a loop, from any thread. A loop that is closed needs no counts."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def _close(loop: asyncio.AbstractEventLoop, ranks: ReplicaRanks) -> None:
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(ranks.close(), loop)
