"""`RaydixRequestRouter`: Ray Serve sends each request to the replica with the cache that holds its prefix.

    from raydix.actors.serve.router import request_router_config

    router = request_router_config(caches="chat-*", tokens_of="raydix.actors.serve.tokens:token_ids")

    @serve.deployment(num_replicas=4, request_router_config=router)
    class Model: ...

A router runs in each process that calls the deployment by a handle; `running_routers` lists the routers of a process.
Needs Ray 2.60 or later.

Serve copies the names of this module into such a process, by value. So state that a process shares lies elsewhere.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import NoneType
from typing import Any

from pydantic import ValidationError

from raydix.actors.cluster.deploy import NAMESPACE
from raydix.actors.serve.prompt_reader import PromptReader
from raydix.actors.serve.replica_pairs import ReplicaPlace
from raydix.actors.serve.replica_ranks import FleetOptions, ReplicaRanks, running_routers
from raydix.actors.serve.sent_request import SentRequest
from raydix.schemas import InvalidRequest, ReplicaRouterStats, RouteConfig
from raydix.schemas.message import first_fault
from raydix.schemas.shown import brief
from raydix.schemas.version import how_to_install

try:
    from ray.serve.config import RequestRouterConfig
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError(f"Ray Serve needs an extra; {how_to_install('serve')}") from error
if not hasattr(RunningReplica, "replica_metadata"):
    raise ImportError("RaydixRequestRouter needs Ray 2.60 or later: pip install 'ray[serve]>=2.60'")

__all__ = ["RaydixRequestRouter", "request_router_config", "running_routers"]

logger = logging.getLogger(__name__)

_NAME = "raydix.actors.serve.router.RaydixRequestRouter"
_CLOSE_S = 5.0  # time limit of the goodbyes to the caches at the exit of a process
_SENT = "raydix_sent"  # the attribute of a pending request that keeps its `SentRequest`
_RANKED = "raydix_ranked"  # the attribute of a pending request that keeps how it was ranked last


class RaydixRequestRouter(RequestRouter):
    """Ranks the replicas of a deployment by the prefix that their caches hold, and by the tokens that wait there.

    Each replica belongs to the cache that it names, as `"raydix_cache"` in the dict of its `record_replica_metadata`;
    else to the caches of its node on the GPU that it names, as `"raydix_gpu"` (the UUID); else to all caches of its
    node. Several replicas may belong to one cache: the least loaded of them gets the request. If all of them are at
    capacity or gone, the request goes to the replicas of the next best cache. A replica without a cache comes last.

    A request counts at its cache until its caller takes the first streamed item, it is answered or cancelled, it fails,
    or its replica dies; `RouteConfig.promise_ttl_s` at most. Where Serve gives the router no such sign
    (`handle.choose_replica`, Ray Client), it counts for that time.

    A request without tokens goes to the least loaded replica, and so does every request while no cache with a replica
    is alive. `stats` counts such requests by cause. The counts are logged once a minute, if they have changed.
    Neither the locality of Serve's default router nor its placement of multiplexed models is heeded.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the `request_router_kwargs`, as `request_router_config` does. Serve calls this.

        The caches are looked for as soon as there are replicas. If the arguments are wrong, that is logged, and each
        request fails with InvalidRequest: if this raised, Serve would let every request wait without end.
        """
        self._fault: InvalidRequest | None = None
        self._ranks: ReplicaRanks | None = None
        try:
            self._ranks = ReplicaRanks(f"{self.app_name}:{self._deployment_id.name}", *_checked_options(kwargs))
        except InvalidRequest as error:
            self._fault = error
            logger.error("every request of %s fails: %s", self._deployment_id, error)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: defaultdict[ReplicaID, set[SentRequest]] = defaultdict(set)  # replica -> requests that it has
        # Serve's id -> request
        self._called: weakref.WeakValueDictionary[str, SentRequest] = weakref.WeakValueDictionary()
        self._moves: set[asyncio.Task[None]] = set()

    # ---------------------------------------------------------------- replicas

    def create_replica_wrapper(self, replica_info: Any) -> RunningReplica:
        """Return a replica that notes the calls of requests. Serve calls this for each new replica."""
        return _FollowedReplica(replica_info, self._called)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas. Serve calls this on the router's loop."""
        super().update_replicas(replicas)
        if self._ranks is None:
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            close = weakref.finalize(self, _begin_close, self._loop, self._ranks)
            close.atexit = False
            # It is called before Ray ends.
            atexit.register(_close_at_exit, self._loop, weakref.ref(self._ranks))
        self._ranks.set_replicas(
            [ReplicaPlace.of(replica.replica_id, replica.node_id, replica.replica_metadata) for replica in replicas]
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
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [list(replicas.values())]
        if self._ranks is None:
            assert self._fault is not None, "without ranks there is a fault"
            if not pending_request.future.done():
                pending_request.future.set_exception(self._fault)
            # Serve asks again without a pause if it gets none.
            return [list(replicas.values())]
        earlier: SentRequest | None = getattr(pending_request, _SENT, None)
        if earlier is not None:  # A replica was at capacity.
            earlier.end(computed=False)
        ranked = await self._ranks.rank(pending_request, list(replicas), getattr(pending_request, _RANKED, None))
        setattr(pending_request, _RANKED, ranked)
        if ranked.route is not None:
            sent = SentRequest(ranked, earlier)
            setattr(pending_request, _SENT, sent)
            self._called[pending_request.metadata.internal_request_id] = sent
            pending_request.future.add_done_callback(sent.note_choice)
            sent.watch(pending_request, partial(_call_in, asyncio.get_running_loop()))
        groups = ([replicas[key] for key in group if isinstance(key, ReplicaID)] for group in ranked.groups)
        return [group for group in groups if group]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Follow a request that a replica has accepted, until its first item, its answer or its failure."""
        sent: SentRequest | None = getattr(pending_request, _SENT, None)
        if sent is None or self._loop is None or self._ranks is None:
            return
        delattr(pending_request, _SENT)
        self._called.pop(pending_request.metadata.internal_request_id, None)
        sent.accept()
        self._ranks.count(sent.ranked)
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
            move = loop.create_task(_move(self._ranks, sent, caches))
            self._moves.add(move)
            move.add_done_callback(self._moves.discard)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """End the route of a request that ends between the call of a replica and its acceptance."""
        super().on_request_completed(replica_id, internal_request_id)
        sent = self._called.get(internal_request_id)
        if sent is not None:
            sent.note_completion()

    def stats(self) -> ReplicaRouterStats:
        """Return the counts of this router since its start. `running_routers` returns all of a process.

        Raises:
            InvalidRequest: the router has wrong `request_router_kwargs`.
        """
        if self._ranks is None:
            assert self._fault is not None, "without ranks there is a fault"
            raise self._fault
        return self._ranks.stats()


def request_router_config(
    caches: str,
    tokens_of: str,
    *,
    tokens_of_kwargs: Mapping[str, Any] | None = None,
    tokens_of_timeout_s: float = 0.05,
    route: Mapping[str, Any] | None = None,
    namespace: str = NAMESPACE,
    fingerprint: str | None = None,
) -> RequestRouterConfig:
    """Return the `request_router_config` of a deployment, checked.

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
    kwargs = {
        "caches": caches,
        "tokens_of": tokens_of,
        "tokens_of_kwargs": tokens_of_kwargs,
        "tokens_of_timeout_s": tokens_of_timeout_s,
        "route": route,
        "namespace": namespace,
        "fingerprint": fingerprint,
    }
    _, reader = _checked_options(kwargs)
    reader.close()
    return RequestRouterConfig(request_router_class=_NAME, request_router_kwargs=kwargs)  # type: ignore[arg-type]


def _checked_options(kwargs: Mapping[str, Any]) -> tuple[FleetOptions, PromptReader]:
    """Return the options in the `request_router_kwargs`.

    Raises:
        InvalidRequest: one is wrong, missing or unknown; the message names it.
    """
    try:
        return _options(**kwargs)
    except TypeError as error:
        wrong = str(error).replace("_options()", "request_router_kwargs:").replace("argument", "key")
        raise InvalidRequest(wrong) from None


def _options(
    caches: Any,
    tokens_of: Any,
    tokens_of_kwargs: Any = None,
    tokens_of_timeout_s: Any = 0.05,
    route: Any = None,
    namespace: Any = NAMESPACE,
    fingerprint: Any = None,
) -> tuple[FleetOptions, PromptReader]:
    for name, value in (("caches", caches), ("namespace", namespace)):
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must be a string, not empty, not {brief(value)}")
    if not isinstance(fingerprint, (str, NoneType)):
        raise InvalidRequest(f"fingerprint must be a string or None, not {brief(fingerprint)}")
    if not isinstance(route, (Mapping, NoneType)):
        raise InvalidRequest(f"route must be a dict of the fields of RouteConfig, not {brief(route)}")
    try:
        config = RouteConfig(**(route or {}))
    except ValidationError as error:
        raise InvalidRequest(f"route: {first_fault(error)}") from None
    except TypeError as error:
        raise InvalidRequest(f"route: {error}") from None
    return FleetOptions(caches, config, namespace, fingerprint), PromptReader(
        tokens_of, tokens_of_kwargs, tokens_of_timeout_s
    )


async def _move(ranks: ReplicaRanks, sent: SentRequest, caches: list[str]) -> None:
    sent.take(await ranks.move(sent.ranked, caches))


class _FollowedReplica(RunningReplica):
    """A replica that notes at a request's `SentRequest` that the request calls it or reserves a slot at it.

    Args:
        called: the requests by Serve's id, of the router.
    """

    def __init__(self, replica_info: Any, called: Mapping[str, SentRequest]) -> None:
        super().__init__(replica_info)
        self._called = called

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> Any:
        self._note_call(pr.metadata)
        return super().try_send_request(pr, with_rejection)

    async def reserve_slot(self, request_metadata: Any) -> Any:
        self._note_call(request_metadata)
        return await super().reserve_slot(request_metadata)

    def _note_call(self, metadata: Any) -> None:
        sent = self._called.get(metadata.internal_request_id)
        if sent is not None:
            sent.note_call()


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


def _begin_close(loop: asyncio.AbstractEventLoop, ranks: ReplicaRanks) -> None:
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(ranks.close(), loop)


def _close_at_exit(loop: asyncio.AbstractEventLoop, found: weakref.ref[ReplicaRanks]) -> None:
    """Close at the exit of a process, where Serve's loop runs in another thread."""
    ranks = found()
    if ranks is not None and loop.is_running():
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(ranks.close(), loop).result(_CLOSE_S)
