"""`Fleet`: a router of requests to several caches; `connect_fleet` makes one."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from types import NoneType
from typing import Any, Self

from raydix.actors.client.forwarding import with_options_of
from raydix.actors.client.lease import Lease, make_pending
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.client.shared_acquire import SharedAcquire
from raydix.actors.fleet.cache_directory import CacheDirectory, directory_of
from raydix.actors.fleet.cost import MAX_ALL
from raydix.actors.fleet.fleet_report import explain_route, fleet_stats
from raydix.actors.fleet.members import FleetMembers
from raydix.actors.fleet.membership import CachePlace
from raydix.actors.fleet.route import Route
from raydix.actors.fleet.route_chooser import Prompt, RouteChooser
from raydix.actors.transport.validation import checked_namespace, checked_seconds, checked_tokens
from raydix.cache_core import PageIndex
from raydix.schemas import (
    CacheBusy,
    CacheError,
    CacheUnavailable,
    FleetStats,
    InvalidRequest,
    ModelFingerprint,
    PoolExhausted,
    RouteConfig,
    RouteExplanation,
)
from raydix.schemas.shown import brief, shown


async def connect_fleet(
    caches: Any,
    *,
    config: RouteConfig | None = None,
    fingerprint: ModelFingerprint | str | None = None,
    namespace: str = "raydix",
    timeout_s: float = 60,
) -> Fleet:
    """Return a router of requests to several caches, as soon as one of them can get requests.

    The router reads the slim events of each cache, and so knows which cache holds which prefixes. It looks for new
    caches each second. Left out, with one warning that names the cause (`fleet.stats().left_out`), are: caches without
    slim events, caches with another page size or stride than most, and caches that are bound to another base model.

    Without a cache NAME, the caches NAME-tp0, NAME-tp1 and so on belong to the ranks of a tensor-parallel engine. They
    are one destination, called NAME, with the least hit of its ranks. It is left out while one of them is.

    Args:
        caches: a pattern of the names of cache actors, such as "chat-*"; or a dict of caches by name, as
            `PrefixCacheClient` takes them, which the caller may change later.
        config: how a cache is chosen.
        fingerprint: of the base model: caches that are bound to another one are left out. Or its `str()`. None: the one
            of most caches. Caches that are bound to none stay in.
        namespace: the Ray namespace of the names.
        timeout_s: seconds to wait for a cache, now and in each later request while none is alive.

    Returns:
        The router, which belongs to the running event loop. Close it.

    Raises:
        CacheUnavailable: no cache could get requests within `timeout_s`, and the message has the causes; or no Ray
            cluster runs.
        InvalidRequest: an argument is wrong; the message names it.
    """
    if config is None:
        config = RouteConfig()
    if not isinstance(config, RouteConfig):
        raise InvalidRequest(f"config must be a RouteConfig, not {type(config).__name__}")
    if not isinstance(fingerprint, (ModelFingerprint, str, type(None))):
        raise InvalidRequest(f"fingerprint must be a ModelFingerprint, its str() or None, not {brief(fingerprint)}")
    checked_seconds(timeout_s)
    directory = directory_of(caches, namespace)
    fleet = Fleet(directory, config, None if fingerprint is None else str(fingerprint), timeout_s)
    try:
        await fleet.open()
    except BaseException:
        await fleet.close()
        raise
    return fleet


class Fleet:
    """A router: sends each request to the cache that holds its prefix, or will soon, unless too much waits there.

    Made by `connect_fleet`; belongs to one event loop. Several routers may serve the same caches: each sees the others'
    requests in the caches' events. The knowledge of a router is a hint, which may be late by the delay of the events:
    the cache's own `acquire` decides. A route makes no call to any actor.

    Attributes:
        config: how a cache is chosen.
        members: the caches, as they come and go; for the parts of this package.
        chooser: the choice of a cache; for the parts of this package.
    """

    def __init__(
        self, directory: CacheDirectory, config: RouteConfig, fingerprint: str | None, timeout_s: float
    ) -> None:
        """Make a router without caches; `open` finds them."""
        self.config = config
        self.members = FleetMembers(directory, fingerprint, timeout_s, config)
        self.chooser = RouteChooser(self.members, config)
        self._timeout_s = timeout_s

    @property
    def index(self) -> PageIndex:
        """The pages of the caches."""
        return self.members.index

    @property
    def num_changes(self) -> int:
        """A number that rises whenever a cache begins or ceases to get requests."""
        return self.members.num_changes

    async def open(self, *, needs_one: bool = True) -> None:
        """Find the caches, and wait until one can get requests, and until each has answered or two seconds are over.

        Args:
            needs_one: False: return also if all caches are left out, once the cause of each is known.

        Raises:
            CacheUnavailable: no cache could within `timeout_s`, or none was found, or no Ray cluster runs.
            InvalidRequest: the directory has a wrong name, or something that is no cache.
        """
        await self.members.open(needs_one=needs_one)

    async def close(self) -> None:
        """Stop reading, and close all clients, which ends their leases. Idempotent."""
        await self.members.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        members = self.members
        return f"Fleet({members.directory}, {len(members.columns)} caches, {len(members.left_out())} left out)"

    # ---------------------------------------------------------------- routes

    async def route(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        among: Collection[str] | None = None,
        replaces: Route | None = None,
    ) -> Route:
        """Choose a cache for a request, and count the request there until its first token.

        It waits only while no cache is alive.

        Args:
            tokens: the ids of the prompt, as in `PrefixCacheClient.acquire`, and so are the following.
            among: the names of the caches to choose from, a set, list or dict of them; None: all.
            replaces: the route of an earlier attempt at the same request. It is cancelled, and its hashes are used
                again. The request counts once, at the later cache.

        Raises:
            CacheUnavailable: no cache was alive for `timeout_s`, or none of `among` is alive.
            InvalidRequest: an argument is wrong, or the router was closed.
        """
        packed, namespace = checked_tokens(tokens), checked_namespace(extra_key, lora_id, cache_salt)
        if among is not None:
            among = _checked_names(among)
        if not isinstance(replaces, (Route, NoneType)):
            raise InvalidRequest(f"replaces must be a Route or None, not {brief(replaces)}")
        if replaces is not None:
            replaces.cancel()
        await self.members.wait_alive()
        columns = self.members.columns
        if among is not None:
            columns = [column for column, member in self.members.by_column.items() if member.name in among]
            if not columns:
                raise CacheUnavailable(f"none of the {len(among)} caches in `among` is alive: route among others")
        prompt = None if replaces is None else replaces.prompt
        # All caches may have restarted with another shape since the earlier route.
        if prompt is None or not self.chooser.fits(prompt):
            prompt = self.chooser.prompt_of(packed, namespace)
        return self.chooser.send(prompt, columns, replaces)

    def client(self, route: Route) -> PrefixCacheClient:
        """Return the client of a route's cache. It belongs to the router: do not close it.

        Raises:
            CacheUnavailable: the cache is gone: route again.
            InvalidRequest: the route is to the caches of several ranks.
        """
        clients = self.clients(route)
        if len(clients) > 1:
            raise InvalidRequest(
                f"{shown(route.cache)} has {len(clients)} ranks: acquire_ranks(fleet.clients(route), ...)"
            )
        return clients[0]

    def clients(self, route: Route) -> list[PrefixCacheClient]:
        """Return the clients of the caches of a route's ranks, for `acquire_ranks`; of one cache, its client alone.

        They belong to the router: do not close them.

        Raises:
            CacheUnavailable: the cache is gone: route again.
        """
        member = self.members.by_name.get(route.cache)
        if member is None:
            raise CacheUnavailable(f"cache {route.cache!r} is no longer one of the fleet: route again")
        return [feed.client for feed in member.feeds]

    @make_pending
    @with_options_of(PrefixCacheClient.acquire)
    async def acquire(self, tokens: Any, **options: Any) -> Lease:
        """Route a request, and acquire a lease at its cache; if that cache refuses, at the next best.

        First each cache is asked without waiting, 16 at most. If all have too few slots, the request waits at the best
        one. The request counts as pending until the lease has published the prompt, or has ended. The caches of an
        engine's ranks are not asked: call `route`, and then `acquire_ranks` with `clients(route)`.

        Args:
            tokens: as in `PrefixCacheClient.acquire`, and so are the following.
            timeout_s: seconds to wait for slots; None: `LeaseConfig.acquire_timeout_s` of the cache; 0: do not wait.
            resumed: as in `PrefixCacheClient.acquire`, and so are the following.

        Returns:
            The lease, to be awaited or entered once. `lease.client` is the client of its cache.

        Raises:
            PoolExhausted: no cache had enough slots in time; this is the last refusal.
            CacheBusy: as PoolExhausted, if the last refusal was that the queue of a cache is full.
            CacheUnavailable: no cache has answered, or none was alive for `timeout_s` of `connect_fleet`.
            InvalidRequest: an argument is wrong, or all caches are of ranks; the message says which and why.
        """
        shared = SharedAcquire(tokens, **options)
        await self.members.wait_alive()
        prompt = self.chooser.prompt_of(shared.request.tokens, shared.request.namespace)
        deadline = self.members.loop.time() + self._timeout_s
        while True:
            try:
                lease = await self._acquire_anywhere(prompt, shared)
                break
            except CacheUnavailable:
                # All caches may have been lost meanwhile; then the request waits for one that comes back.
                if self.members.columns or self.members.loop.time() >= deadline:
                    raise
            await self.members.wait_alive()
        lease.remember_packed(tokens)
        return lease

    async def _acquire_anywhere(self, prompt: Prompt, shared: SharedAcquire) -> Lease:
        """Ask one cache after the other, the best first, without waiting; then wait at the best."""
        failed: CacheError | None = None
        hopeless: set[str] = set()
        timeout_s = shared.request.timeout_s
        for waits in (False, True) if timeout_s != 0 else (False,):
            tried = set(hopeless)
            while len(tried) < MAX_ALL and (columns := self._single_columns(tried)):
                route = self.chooser.send(prompt, columns)
                try:
                    return await self._acquire_at(route, shared, timeout_s if waits else 0.0)
                except CacheUnavailable as error:
                    failed = failed or error
                except (PoolExhausted, CacheBusy) as error:
                    failed = error
                    if isinstance(error, PoolExhausted) and not error.can_ever_fit:
                        hopeless.add(route.cache)
                    elif waits:
                        raise
                tried.add(route.cache)
        if failed is None and self.members.ranks:
            raise InvalidRequest(
                f"each of {self.members.directory} is an engine of several ranks: call route, and then "
                "acquire_ranks(fleet.clients(route), ...)"
            )
        raise failed or CacheUnavailable(f"no cache of {self.members.directory} is alive")

    async def _acquire_at(self, route: Route, shared: SharedAcquire, timeout_s: float | None) -> Lease:
        """Acquire a lease at a route's cache; the route ends with it. If the cache refuses, the route has ended."""
        member = self.members.by_name[route.cache]
        (feed,) = member.feeds
        try:
            lease = await shared.send(feed.client, max_prefix_len=shared.request.max_prefix_len, timeout_s=timeout_s)
        except BaseException as error:
            route.cancel()
            if isinstance(error, (PoolExhausted, CacheBusy, CacheUnavailable)):
                member.num_refused += 1
            if isinstance(error, CacheUnavailable):
                feed.note_unavailable(error)
            raise
        member.missed_tokens += max(0, min(route.prefix_len, shared.max_prefix_len) - lease.prefix_len)
        page_size = feed.client.config.page_size
        whole = len(shared.request.tokens) // page_size * page_size
        lease.on_change = partial(_note_lease, lease, route, whole)
        return lease

    def _single_columns(self, tried: Collection[str]) -> list[int]:
        """Return the columns of the members of one cache that were not tried."""
        if not tried and not self.members.ranks:
            return self.members.columns
        return [
            column
            for column, member in self.members.by_column.items()
            if column not in self.members.ranks and member.name not in tried
        ]

    # ---------------------------------------------------------------- the router's knowledge

    def explain(
        self, tokens: Any, *, extra_key: str | None = None, lora_id: str | None = None, cache_salt: str | None = None
    ) -> RouteExplanation:
        """Return the caches that a route of a prompt would compare now, the cheapest first. Nothing is counted.

        Args:
            tokens: as in `route`, and so are the following.

        Raises:
            CacheUnavailable: no cache is alive.
            InvalidRequest: an argument is wrong.
        """
        packed, namespace = checked_tokens(tokens), checked_namespace(extra_key, lora_id, cache_salt)
        if not self.members.columns:
            raise CacheUnavailable(f"no cache of {self.members.directory} is alive")
        return explain_route(self.members, self.chooser, self.chooser.prompt_of(packed, namespace))

    def stats(self) -> FleetStats:
        """Return the router's knowledge of each cache, and the caches that are left out."""
        return fleet_stats(self.members, self.chooser)

    def places(self) -> list[CachePlace]:
        """Return the places of the caches that get requests; the caches of an engine's ranks have one name."""
        return [place for member in self.members.by_column.values() for place in member.places()]

    def columns(self) -> dict[str, int]:
        """Return the column of each cache in `index`, by name; of an engine's ranks, the column of the first one."""
        return {member.name: column for column, member in self.members.by_column.items()}


def _checked_names(among: Any) -> Collection[str]:
    """Return the names as they are; InvalidRequest unless they are a collection of texts."""
    if isinstance(among, (str, bytes)) or not isinstance(among, Collection):
        raise InvalidRequest(f"among must be a set or a list of names of caches, not {brief(among)}")
    if wrong := [name for name in among if not isinstance(name, str)]:
        raise InvalidRequest(f"among must have names of caches, not {brief(wrong[0])}")
    return among


def _note_lease(lease: Lease, route: Route, whole: int) -> None:
    """End a route as soon as its lease has published the prompt's whole pages, or has ended."""
    if lease.published_len >= whole > lease.prefix_len or (lease.ended and lease.published_len > lease.prefix_len):
        route.first_token()
    elif lease.ended:
        route.cancel()
