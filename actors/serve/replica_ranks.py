"""`ReplicaRanks`: ranks the replicas of a deployment for each request, by their caches' pages and load."""

from __future__ import annotations

import asyncio
import logging
import random
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from raydix.actors.fleet.cost import MAX_ALL
from raydix.actors.fleet.fleet import Fleet, connect_fleet
from raydix.actors.fleet.route import Route
from raydix.actors.serve.prompt_reader import PromptReader, RequestPrompt
from raydix.actors.serve.replica_pairs import ReplicaPairs, ReplicaPlace
from raydix.schemas import CacheError, CacheUnavailable, InvalidRequest, ReplicaRouterStats, RouteConfig

logger = logging.getLogger(__name__)

NO_CACHE = "no cache"  # cause why a request goes to the least loaded replica; `PromptReader` has the others
_CONNECT_S = 5.0  # time limit of one attempt to find the caches
_LOG_S = 60.0  # time between two lines with the counts
_running: weakref.WeakSet[ReplicaRanks] = weakref.WeakSet()


class FleetOptions(NamedTuple):
    """The arguments of `connect_fleet`."""

    caches: Any
    config: RouteConfig
    namespace: str
    fingerprint: str | None


class Ranked(NamedTuple):
    """The replicas for a request, in groups: the best first. Within a group the least loaded is the best."""

    groups: list[list[Hashable]]
    route: Route | None = None  # the route to the cache of the first group; None: all replicas are one group
    prompt: RequestPrompt | None = None
    has_no_prompt: bool = False  # The prompt was read in vain, or refused.


class ReplicaRanks:
    """Ranks replicas, each identified by a key. Belongs to one event loop.

    While there are replicas, it looks for the caches. Until one is found, and while no cache is alive that has a
    replica, all replicas are one group.

    Attributes:
        reader: reads the prompts of the requests.
    """

    def __init__(self, deployment: str, options: FleetOptions, reader: PromptReader) -> None:
        """Make it without replicas; `set_replicas` gives it some.

        Args:
            deployment: a name, for the counts.
        """
        self._deployment = deployment
        self._options = options
        self.reader = reader
        self._fleet: Fleet | None = None
        self._places: list[ReplicaPlace] = []
        self._pairs: ReplicaPairs | None = None  # None: the replicas have changed
        self._paired_at = -1  # `Fleet.num_changes` when they were paired
        self._connecting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._log_at = 0.0
        self._logged: dict[str, Any] = {}
        _running.add(self)

    # ---------------------------------------------------------------- life

    def set_replicas(self, places: Sequence[ReplicaPlace]) -> None:
        """Replace the replicas, and look for the caches while there are any. Needs a running loop."""
        self._places = list(places)
        self._pairs = None
        if self._places and self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        elif not self._places:
            self._begin_close()

    async def _connect(self) -> None:
        if not self.reader.is_loaded:
            await self.reader.load()
        caches, config, namespace, fingerprint = self._options
        while self._fleet is None:
            try:
                self._fleet = await connect_fleet(
                    caches, config=config, fingerprint=fingerprint, namespace=namespace, timeout_s=_CONNECT_S
                )
            except CacheUnavailable as error:
                logger.warning("requests go to the least loaded replica: %s", error)
            except Exception:
                logger.exception("requests go to the least loaded replica until the caches are reached")
                await asyncio.sleep(_CONNECT_S)

    def _begin_close(self) -> None:
        if self._connecting is not None:
            step = asyncio.create_task(_end(self._connecting, self._fleet))
            self._connecting = self._fleet = None
            self._closing.add(step)
            step.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close the connections to the caches, and the reader. Idempotent."""
        self._places, self._pairs = [], None
        self._begin_close()
        await asyncio.gather(*self._closing, return_exceptions=True)
        self.reader.close()

    # ---------------------------------------------------------------- replicas

    def caches_of(self, key: Hashable) -> list[str]:
        """Return the names of the caches that a replica uses."""
        pairs = self._paired()
        return [] if pairs is None else pairs.by_replica.get(key, [])

    def _paired(self) -> ReplicaPairs | None:
        """Return the pairs of replicas and caches; None: the caches are not found yet."""
        if self._fleet is None:
            return None
        if self._pairs is None or self._paired_at != self._fleet.num_changes:
            self._pairs = ReplicaPairs(self._places, self._fleet.places())
            self._paired_at = self._fleet.num_changes
        return self._pairs

    # ---------------------------------------------------------------- requests

    async def rank(self, request: Any, keys: Sequence[Hashable], earlier: Ranked | None = None) -> Ranked:
        """Return the replicas for a request, and the route that counts the request at its cache.

        Args:
            request: as the function that reads prompts takes it.
            keys: of the replicas that may get the request.
            earlier: the result of an earlier call for the request, if no replica has accepted it. Its prompt is used
                again, its route is cancelled, and the cause why it has none is not counted again.
        """
        self._log()
        if earlier is not None and earlier.has_no_prompt:
            return Ranked(least_loaded(keys), has_no_prompt=True)
        if self._has_pairs():
            prompt = earlier.prompt if earlier is not None and earlier.prompt else await self.reader.read(request)
            if prompt is None:  # The reader has counted it.
                return Ranked(least_loaded(keys), has_no_prompt=True)
            if (ranked := await self._rank(prompt, keys, earlier and earlier.route)) is not None:
                return ranked
        if earlier is None:
            self._counts[NO_CACHE] += 1
        elif earlier.route is not None:
            earlier.route.cancel()
        return Ranked(least_loaded(keys))

    def count(self, ranked: Ranked) -> None:
        """Count a request with a route that a replica has accepted."""
        assert ranked.route is not None and ranked.prompt is not None
        self._counts["routes"] += 1
        self._counts["prompt"] += len(ranked.prompt.tokens)
        self._counts["prefix"] += ranked.route.prefix_len

    def _has_pairs(self) -> bool:
        pairs = self._paired()
        return pairs is not None and bool(pairs.by_cache)

    async def _rank(self, prompt: RequestPrompt, keys: Sequence[Hashable], earlier: Route | None) -> Ranked | None:
        pairs = self._paired()
        assert self._fleet is not None and pairs is not None
        if not pairs.by_cache:  # The caches were lost meanwhile.
            return None
        among = None if pairs.cover_all else pairs.by_cache
        try:
            route = await self._fleet.route(prompt.tokens, **prompt.namespace, among=among, replaces=earlier)
        except InvalidRequest as error:
            self.reader.note_refused(error)
            return Ranked(least_loaded(keys), has_no_prompt=True)
        except CacheUnavailable:
            return None
        allowed = set(keys)
        groups: list[list[Hashable]] = []
        for name in (route.cache, *route.next_best):
            groups.append([key for key in pairs.by_cache[name] if key in allowed])
            allowed.difference_update(groups[-1])
        groups += least_loaded([key for key in keys if key in allowed])
        return Ranked(groups, route, prompt)

    async def move(self, ranked: Ranked, caches: Sequence[str]) -> Route | None:
        """Count a request at the best of the given caches, in place of the cache of its route, which is cancelled.

        Returns:
            The route; None: none of the caches is alive.
        """
        assert ranked.route is not None and ranked.prompt is not None and self._fleet is not None
        self._counts["moved"] += 1
        prompt = ranked.prompt
        try:
            return await self._fleet.route(prompt.tokens, **prompt.namespace, among=caches, replaces=ranked.route)
        except CacheError:
            return None

    def stats(self) -> ReplicaRouterStats:
        """Return the counts since the start."""
        pairs = self._paired()
        by_cache = {} if pairs is None else pairs.by_cache
        paired = {key for keys in by_cache.values() for key in keys}
        causes = Counter(self.reader.counts)
        causes[NO_CACHE] += self._counts[NO_CACHE]
        return ReplicaRouterStats(
            deployment=self._deployment,
            routes=self._counts["routes"],
            prompt_tokens=self._counts["prompt"],
            prefix_tokens=self._counts["prefix"],
            moved=self._counts["moved"],
            least_loaded=dict(+causes),
            replicas={name: len(keys) for name, keys in sorted(by_cache.items())},
            unpaired=len(self._places) - len(paired),
            fleet=None if self._fleet is None else self._fleet.stats(),
        )

    def _log(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._log_at:
            return
        self._log_at = now + _LOG_S
        counts = self.stats().model_dump(exclude={"fleet"})
        if counts != self._logged:
            self._logged = counts
            logger.info("requests that were routed: %s", counts)


async def _end(connecting: asyncio.Task[None], fleet: Fleet | None) -> None:
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    if fleet is not None:
        await fleet.close()


def running_routers() -> list[ReplicaRanks]:
    """Return the routers of this process, to read their `stats`: one for each deployment that it calls by a handle."""
    return list(_running)


def least_loaded(keys: Sequence[Hashable]) -> list[list[Hashable]]:
    """Return replicas in random order as one group; of more than 16, so many random ones, and then the others."""
    shuffled = random.sample(list(keys), len(keys))
    return [group for group in (shuffled[:MAX_ALL], shuffled[MAX_ALL:]) if group]
