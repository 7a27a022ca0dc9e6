"""`Fleet`: a router of requests to several caches; `connect_fleet` makes one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from types import NoneType, TracebackType
from typing import Any, NamedTuple, Self

from raydix.actors.client.lease import Lease, make_pending
from raydix.actors.client.prefix_cache_client import PrefixCacheClient
from raydix.actors.fleet.cache_directory import CacheDirectory, CacheSource, directory_of
from raydix.actors.fleet.cache_feed import CacheFeed
from raydix.actors.fleet.cost import MAX_ALL, Candidate, choose, compared, cost
from raydix.actors.fleet.fleet_member import FleetMember, members_of
from raydix.actors.fleet.membership import CachePlace, PageShape, left_out_causes
from raydix.actors.fleet.open_routes import OpenRoutes
from raydix.actors.fleet.route import Route
from raydix.actors.transport.validation import (
    checked_name,
    checked_namespace,
    checked_seconds,
    checked_tokens,
    make_request,
)
from raydix.cache_core import PageIndex, RadixKey, page_hashes
from raydix.cache_core.fleet_index.page_hashes import Hashes
from raydix.schemas import (
    AcquireRequest,
    CacheBusy,
    CacheError,
    CacheUnavailable,
    FleetCacheStats,
    FleetStats,
    InvalidRequest,
    ModelFingerprint,
    PoolExhausted,
    RouteCandidate,
    RouteConfig,
    RouteExplanation,
    TokenIds,
)
from raydix.schemas.shown import brief, shown

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between looks for new caches and gone ones
_REFRESH_S = 5.0  # between questions for a cache's fingerprint
_GATHER_S = 2.0  # for the answers of all caches, before the first decision


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

    Without a cache NAME, the caches NAME-tp0, NAME-tp1 and so on are those of a tensor-parallel engine's ranks. They
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


class _Prompt(NamedTuple):
    """A prompt, as the index knows it."""

    num_tokens: int
    hashes: Hashes  # of the pages at the ends of strides
    shape: PageShape | None  # the shape by which it was hashed


class _Choice(NamedTuple):
    """The candidates for a prompt."""

    candidates: list[Candidate]
    runs: dict[int, tuple[int, int]]  # by column: leading pages that are stored, and those that are expected


class Fleet:
    """A router: sends each request to the cache that holds its prefix, or will soon, unless too much waits there.

    Made by `connect_fleet`; belongs to one event loop. Several routers may serve the same caches: each sees the others'
    requests in the caches' events. The knowledge of a router is a hint, which may be late by the delay of these events:
    the cache's own `acquire` decides. A route makes no call to any actor.

    Attributes:
        index: the pages of the caches.
        config: how a cache is chosen.
        num_changes: rises whenever a cache begins or ceases to get requests.
    """

    def __init__(
        self, directory: CacheDirectory, config: RouteConfig, fingerprint: str | None, timeout_s: float
    ) -> None:
        """Make a router without caches; `open` finds them."""
        self.config = config
        self.index = PageIndex()
        self._directory = directory
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._routes = OpenRoutes(self.index, config.promise_ttl_s, self._loop.time)
        self._rng = Random()
        self._feeds: dict[str, CacheFeed] = {}
        self._members: dict[str, FleetMember] = {}
        self._by_column: dict[int, FleetMember] = {}  # those that get requests, by the column of the first rank
        self._ranks: dict[int, tuple[int, ...]] = {}  # of those with several ranks: their columns, by the first
        self._columns: list[int] = []
        self._shape: PageShape | None = None
        self._may_decide = False
        self._has_changed = asyncio.Event()  # set when a feed has changed
        self._chores: set[asyncio.Task[None]] = set()
        self._is_alive = asyncio.Event()  # set while a cache can get requests
        self._num_routes = 0
        self._fault = ""  # of the directory
        self.num_changes = 0
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # ---------------------------------------------------------------- life

    async def open(self, *, needs_one: bool = True) -> None:
        """Find the caches, and wait until one can get requests, and until each has answered or two seconds are over.

        Args:
            needs_one: False: return also if all caches are left out, once the cause of each is known.

        Raises:
            CacheUnavailable: no cache could within `timeout_s`, or none was found, or no Ray cluster runs.
            InvalidRequest: the directory has a wrong name, or something that is no cache.
        """
        self._note_caches(await self._directory.look())
        self._looking = asyncio.create_task(self._keep_looking())
        deadline = self._loop.time() + min(_GATHER_S, self._timeout_s)
        await self._wait_until(self._has_answers, deadline)
        self._may_decide = True
        self._decide()
        if needs_one:
            await self._wait_alive()
        else:
            await self._wait_until(self._has_settled_ones, self._loop.time() + self._timeout_s)
            if not self._feeds:
                raise self._none_alive()
        await self._wait_until(self._is_settled, deadline)

    async def _wait_until(self, holds: Callable[[], bool], deadline: float) -> None:
        """Wait until a condition on the feeds holds, or until a loop time."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not holds():
                    self._has_changed.clear()
                    await self._has_changed.wait()

    def _is_settled(self) -> bool:
        return all(feed.is_settled for feed in self._feeds.values())

    def _has_settled_ones(self) -> bool:
        return bool(self._feeds) and self._is_settled()

    def _has_answers(self) -> bool:
        """Return whether every cache has answered or failed to."""
        return bool(self._feeds) and all(feed.facts is not None or feed.trouble for feed in self._feeds.values())

    async def close(self) -> None:
        """Stop reading, and close all clients, which ends their leases. Idempotent."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        feeds = list(self._feeds.values())
        self._feeds.clear()
        self._members.clear()
        for feed in feeds:
            self._end_feed(feed)
        await asyncio.gather(*self._chores, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Fleet({self._directory}, {len(self._columns)} caches, {len(self._left_out())} left out)"

    # ---------------------------------------------------------------- caches that come and go

    async def _keep_looking(self) -> None:
        refresh_at = self._loop.time() + _REFRESH_S
        while True:
            await asyncio.sleep(_LOOK_S if self._feeds else _LOOK_S / 10)
            await self._look()
            self._routes.expire()
            if self._loop.time() >= refresh_at:
                refresh_at = self._loop.time() + _REFRESH_S
                for feed in self._feeds.values():
                    if feed.column is not None:
                        self._begin_chore(self._refresh(feed))

    async def _look(self) -> None:
        try:
            self._note_caches(await self._directory.look())
        except (InvalidRequest, CacheUnavailable) as error:
            if str(error) != self._fault:
                logger.error("looking for the caches of %s: %s", self._directory, error)
            self._fault = str(error)
        else:
            self._fault = ""

    def _note_caches(self, found: dict[str, CacheSource]) -> None:
        """Take the caches that are there now.

        Raises:
            InvalidRequest: the name of one is wrong, or it is no cache; the others are taken.
        """
        fault: InvalidRequest | None = None
        gone = [name for name, feed in self._feeds.items() if _identity(found.get(name)) != feed.identity]
        for name in gone:
            self._end_feed(self._feeds.pop(name))
        for name, source in found.items():
            if name not in self._feeds:
                try:
                    self._feeds[checked_name(name)] = CacheFeed(
                        name, source, self.index, self._routes, self._decide, self._note_change
                    )
                except InvalidRequest as error:
                    fault = InvalidRequest(f"caches[{brief(name)}]: {error}")
        members = members_of(self._feeds, self._members)
        if members != self._members:
            self._members = members
            self._note_change()
        if gone:
            self._decide()
        if fault is not None:
            raise fault

    async def _refresh(self, feed: CacheFeed) -> None:
        """Ask a cache for its facts. If it does not answer, the task that reads its events acts."""
        with suppress(CacheError, TimeoutError):
            async with asyncio.timeout(_REFRESH_S):
                await feed.refresh()

    def _end_feed(self, feed: CacheFeed) -> None:
        feed.stop()
        self._begin_chore(feed.client.close())

    def _begin_chore(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step that nothing waits for."""
        chore = asyncio.create_task(step)
        self._chores.add(chore)
        chore.add_done_callback(self._note_chore)

    def _note_chore(self, chore: asyncio.Task[None]) -> None:
        self._chores.discard(chore)
        if not chore.cancelled() and (error := chore.exception()) is not None:
            logger.error("a background step of the fleet has failed", exc_info=error)

    def _decide(self) -> None:
        """Decide which caches are in."""
        if not self._may_decide:
            return
        facts = {name: feed.facts for name, feed in sorted(self._feeds.items()) if feed.facts is not None}
        shape, causes = left_out_causes(facts, self._shape, self._fingerprint)
        self._shape = shape or self._shape
        for name in facts:
            self._feeds[name].set_verdict(causes.get(name, ""))

    def _note_change(self) -> None:
        self._has_changed.set()
        self.num_changes += 1
        alive = {member.columns: member for member in self._members.values() if not member.cause}
        self._by_column = {columns[0]: member for columns, member in alive.items()}
        self._ranks = {columns[0]: columns for columns in alive if len(columns) > 1}
        self._columns = list(self._by_column)
        if self._columns:
            self._is_alive.set()
        else:
            self._is_alive.clear()

    async def _wait_alive(self) -> None:
        """Wait until a cache can get requests.

        Raises:
            CacheUnavailable: none could within `timeout_s`.
            InvalidRequest: the router was closed, or another event loop runs.
        """
        if self._closed or self._loop is not asyncio.get_running_loop():
            raise InvalidRequest("this fleet was closed, or belongs to another event loop: connect_fleet again")
        if self._columns:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._is_alive.wait()
        except TimeoutError:
            raise self._none_alive() from None

    def _none_alive(self) -> CacheUnavailable:
        """Return the error of a wait of `timeout_s` after which no cache can get requests."""
        causes = "; ".join(f"{name}: {cause}" for name, cause in self._left_out().items())
        return CacheUnavailable(
            f"no cache of {self._directory} could get requests within {self._timeout_s:g} s: "
            f"{causes or 'none was found'}"
        )

    def _left_out(self) -> dict[str, str]:
        return {name: member.cause for name, member in self._members.items() if member.cause}

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
        await self._wait_alive()
        columns = self._columns
        if among is not None:
            columns = [column for column, member in self._by_column.items() if member.name in among]
            if not columns:
                raise CacheUnavailable(f"none of the {len(among)} caches in `among` is alive: route among others")
        prompt = None if replaces is None else replaces.prompt
        if prompt is None or prompt.shape != self._shape:  # the caches may all have restarted with another shape
            prompt = self._prompt(packed, namespace)
        return self._send(prompt, columns, replaces)

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
        member = self._members.get(route.cache)
        if member is None:
            raise CacheUnavailable(f"cache {route.cache!r} is no longer one of the fleet: route again")
        return [feed.client for feed in member.feeds]

    @make_pending
    async def acquire(
        self,
        tokens: Any,
        *,
        extra_key: str | None = None,
        lora_id: str | None = None,
        cache_salt: str | None = None,
        new_tokens: int = 0,
        max_prefix_len: int | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        resumed: bool = False,
        boundary_state: bool = False,
    ) -> Lease:
        """Route a request, and acquire a lease at its cache; if that cache refuses, at the next best.

        First each cache is asked without waiting, 16 at most. If all have too few slots, the request waits at the best
        one. The request counts as pending until the lease has published the prompt, or has ended. The caches of an
        engine's ranks are not asked: for these, `route`, and `acquire_ranks` with `clients(route)`.

        Args:
            tokens: as in `PrefixCacheClient.acquire`, and so are the following.
            timeout_s: seconds to wait for slots; None: `LeaseConfig.acquire_timeout_s` of the cache; 0: do not wait.
            resumed: as in `PrefixCacheClient.acquire`, and so is `boundary_state`.

        Returns:
            The lease, to be awaited or entered once. `lease.client` is the client of its cache.

        Raises:
            PoolExhausted: no cache had enough slots in time; this is the last refusal.
            CacheBusy: as PoolExhausted, if the last refusal was that the queue of a cache is full.
            CacheUnavailable: no cache has answered, or none was alive for `timeout_s` of `connect_fleet`.
            InvalidRequest: an argument is wrong, or all caches are of ranks; the message says which and why.
        """
        packed, namespace = checked_tokens(tokens), checked_namespace(extra_key, lora_id, cache_salt)
        request = make_request(  # is checked here, and never sent: each client makes its own
            AcquireRequest,
            lease_id="fleet",
            tokens=packed,
            namespace=namespace,
            new_tokens=new_tokens,
            max_prefix_len=max_prefix_len,
            priority=priority,
            timeout_s=timeout_s,
            resumed=resumed,
            boundary_state=boundary_state,
        )
        await self._wait_alive()
        names = {"extra_key": extra_key, "lora_id": lora_id, "cache_salt": cache_salt}
        prompt = self._prompt(packed, namespace)
        deadline = self._loop.time() + self._timeout_s
        while True:
            try:
                lease = await self._acquire_anywhere(prompt, request, names)
                break
            except CacheUnavailable:
                if self._columns or self._loop.time() >= deadline:
                    raise
            await self._wait_alive()  # all caches were lost meanwhile
        lease.remember_packed(tokens)
        return lease

    async def _acquire_anywhere(self, prompt: _Prompt, request: AcquireRequest, names: dict[str, str | None]) -> Lease:
        """Ask one cache after the other, the best first, without waiting; then wait at the best."""
        failed: CacheError | None = None
        hopeless: set[str] = set()
        for waits in (False, True) if request.timeout_s != 0 else (False,):
            tried = set(hopeless)
            while len(tried) < MAX_ALL and (columns := self._single_columns(tried)):
                route = self._send(prompt, columns)
                try:
                    return await self._acquire_at(route, request, names, request.timeout_s if waits else 0.0)
                except CacheUnavailable as error:
                    failed = failed or error
                except (PoolExhausted, CacheBusy) as error:
                    failed = error
                    if isinstance(error, PoolExhausted) and not error.can_ever_fit:
                        hopeless.add(route.cache)
                    elif waits:
                        raise
                tried.add(route.cache)
        if failed is None and self._ranks:
            raise InvalidRequest(
                f"each of {self._directory} is an engine of several ranks: call route, and then "
                "acquire_ranks(fleet.clients(route), ...)"
            )
        raise failed or CacheUnavailable(f"no cache of {self._directory} is alive")

    async def _acquire_at(
        self, route: Route, request: AcquireRequest, names: dict[str, str | None], timeout_s: float | None
    ) -> Lease:
        """Acquire a lease at a route's cache; the route ends with it. If the cache refuses, the route has ended."""
        member = self._members[route.cache]
        (feed,) = member.feeds
        try:
            lease = await feed.client.acquire(
                request.tokens,
                **names,
                new_tokens=request.new_tokens,
                max_prefix_len=request.max_prefix_len,
                priority=request.priority,
                timeout_s=timeout_s,
                resumed=request.resumed,
                boundary_state=request.boundary_state,
            )
        except BaseException as error:
            route.cancel()
            if isinstance(error, (PoolExhausted, CacheBusy, CacheUnavailable)):
                member.num_refused += 1
            if isinstance(error, CacheUnavailable):
                feed.note_unavailable(error)
            raise
        member.missed_tokens += max(0, min(route.prefix_len, _limit(request)) - lease.prefix_len)
        whole = len(request.tokens) // feed.client.config.page_size * feed.client.config.page_size
        lease.on_change = partial(_note_lease, lease, route, whole)
        return lease

    def _single_columns(self, tried: Collection[str]) -> list[int]:
        """Return the columns of the members of one cache that were not tried."""
        if not tried and not self._ranks:
            return self._columns
        return [
            column
            for column, member in self._by_column.items()
            if column not in self._ranks and member.name not in tried
        ]

    def _prompt(self, packed: TokenIds, namespace: str | None) -> _Prompt:
        assert self._shape is not None, "a cache is alive, so its shape is known"
        key = RadixKey.from_packed(packed.data, packed.width, namespace)
        hashes = page_hashes(key, self._shape.page_size, self._shape.stride_tokens, namespace, self._shape.bigram)
        return _Prompt(len(packed), hashes, self._shape)

    def _send(self, prompt: _Prompt, columns: Sequence[int], replaces: Route | None = None) -> Route:
        """Choose one of these columns (empty: of all), and count the request there, in one step.

        Args:
            replaces: the earlier route of the request, which counts no more.
        """
        self._routes.expire()
        candidates, runs = self._compare(prompt, columns or self._columns)
        best = choose(candidates, self.config.weight, self._rng)
        stride = self._stride
        stored, expected = runs.get(best.cache, (0, 0))
        member = self._by_column[best.cache]
        member.num_routes += 1
        if replaces is None:
            self._num_routes += 1
        elif (earlier := self._members.get(replaces.cache)) is not None and earlier.num_routes:
            earlier.num_routes -= 1
        return Route(
            member.name,
            prefix_len=stored * stride,
            promised_len=expected * stride,
            uncached_tokens=int(best.uncached),
            pending_tokens=int(best.pending),
            next_best=self._names_of(candidates, best),
            why=f"least cost of {len(candidates)}: {best.pending:.0f} pending + {self.config.weight:g} * "
            f"{best.uncached:.0f} uncached tokens",
            end=self._count(prompt, best, expected),
            prompt=prompt,
        )

    def _count(self, prompt: _Prompt, best: Candidate, expected: int) -> Callable[[bool], None]:
        """Count a request at a candidate, at each of its ranks; return the function that ends it there."""
        column, hashes, uncached = best.cache, prompt.hashes, int(best.uncached)
        if column not in self._ranks:
            return self._routes.add(column, hashes, expected, uncached)
        columns = self._ranks[column]
        runs = self._runs(hashes, columns)
        ends = [self._routes.add(each, hashes, runs[each][1], uncached) for each in columns]

        def end(computed: bool) -> None:
            for end_one in ends:
                end_one(computed)

        return end

    def _names_of(self, candidates: list[Candidate], best: Candidate) -> tuple[str, ...]:
        """Return the names of the other candidates, the cheapest first."""
        others = [each for each in candidates if each is not best]
        others.sort(key=lambda each: cost(each, self.config.weight))
        return tuple(self._by_column[each.cache].name for each in others)

    @property
    def _stride(self) -> int:
        assert self._shape is not None
        return self._shape.stride_tokens

    def _compare(self, prompt: _Prompt, columns: Sequence[int]) -> _Choice:
        """Return the candidates among these columns."""
        runs = compared(self.index, prompt.hashes, columns, self.config.num_random, self._rng)
        if self._ranks:
            self._lower_to_least(prompt.hashes, runs)
        num_tokens, stride, pending = prompt.num_tokens, self._stride, self._pending
        candidates = [
            Candidate(column, pending(column), max(0, num_tokens - expected * stride))
            for column, (_, expected) in runs.items()
        ]
        return _Choice(candidates, runs)

    def _lower_to_least(self, hashes: Hashes, runs: dict[int, tuple[int, int]]) -> None:
        """Replace the pages that a member's first rank holds by those that all its ranks hold."""
        several = self._ranks.keys() & runs.keys()
        found = self._runs(hashes, [column for first in several for column in self._ranks[first]])
        for first in several:
            ranks = [found[column] for column in self._ranks[first]]
            runs[first] = min(stored for stored, _ in ranks), min(expected for _, expected in ranks)

    def _runs(self, hashes: Hashes, columns: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Return the leading pages that are stored, and those that are expected, at each of these columns."""
        found = dict.fromkeys(columns, (0, 0))
        found.update(
            (column, (stored, expected)) for column, stored, expected in self.index.longest_runs(hashes, 0, 0, columns)
        )
        return found

    def _pending(self, column: int) -> int:
        """Return the tokens that wait at a member, or are computed there: at the rank where they are most."""
        if column in self._ranks:
            return max(map(self._routes.pending, self._ranks[column]))
        return self._routes.pending(column)

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
        if not self._columns:
            raise CacheUnavailable(f"no cache of {self._directory} is alive")
        self._routes.expire()
        prompt = self._prompt(packed, namespace)
        choice = self._compare(prompt, self._columns)
        candidates = [
            RouteCandidate(
                cache=self._by_column[each.cache].name,
                prefix_len=choice.runs.get(each.cache, (0, 0))[0] * self._stride,
                promised_len=choice.runs.get(each.cache, (0, 0))[1] * self._stride,
                uncached_tokens=int(each.uncached),
                pending_tokens=int(each.pending),
                cost=cost(each, self.config.weight),
            )
            for each in choice.candidates
        ]
        return RouteExplanation(
            num_tokens=prompt.num_tokens,
            stride_tokens=self._stride,
            weight=self.config.weight,
            candidates=tuple(sorted(candidates, key=lambda each: (each.cost, each.cache))),
        )

    def stats(self) -> FleetStats:
        """Return the router's knowledge of each cache, and the caches that are left out."""
        self._routes.expire()
        caches = [self._stats_of(column, member) for column, member in self._by_column.items()]
        return FleetStats(
            page_size=None if self._shape is None else self._shape.page_size,
            stride_tokens=None if self._shape is None else self._shape.stride_tokens,
            caches=tuple(sorted(caches, key=lambda each: each.cache)),
            left_out=self._left_out(),
            routes=self._num_routes,
            open_routes=sum(each.open_routes for each in caches),
            indexed_pages=self.index.num_pages(),
            index_bytes=self.index.num_bytes,
        )

    def _stats_of(self, column: int, member: FleetMember) -> FleetCacheStats:
        load = self._routes.load(column)
        feeds = member.feeds
        return FleetCacheStats(
            cache=member.name,
            ranks=len(feeds),
            epoch=self.index.position(column)[0] or "",
            pages=min(map(self.index.num_pages, member.columns)),
            pending_tokens=self._pending(column),
            open_routes=self._routes.num_pending(column),
            routes=member.num_routes,
            refused=member.num_refused,
            missed_tokens=member.missed_tokens,
            waiting_tokens=load.waiting_tokens,
            leased_tokens=load.leased_tokens,
            unpublished_tokens=load.unpublished_tokens,
            private_slots=load.private_slots,
            batches=sum(feed.num_batches for feed in feeds),
            snapshots=sum(feed.num_snapshots for feed in feeds),
            silent_s=self._loop.time() - min(feed.heard_at for feed in feeds),
        )

    def places(self) -> list[CachePlace]:
        """Return the places of the caches that get requests; those of an engine's ranks have one name."""
        return [place for member in self._by_column.values() for place in member.places()]

    def columns(self) -> dict[str, int]:
        """Return the column of each cache in `index`, by name; of an engine's ranks, that of the first."""
        return {member.name: column for column, member in self._by_column.items()}


def _identity(source: CacheSource | None) -> Any:
    return None if source is None else source.identity


def _checked_names(among: Any) -> Collection[str]:
    """Return the names as they are; InvalidRequest unless they are a collection of texts."""
    if isinstance(among, (str, bytes)) or not isinstance(among, Collection):
        raise InvalidRequest(f"among must be a set or a list of names of caches, not {brief(among)}")
    if wrong := [each for each in among if not isinstance(each, str)]:
        raise InvalidRequest(f"among must have names of caches, not {brief(wrong[0])}")
    return among


def _limit(request: AcquireRequest) -> int:
    return len(request.tokens) if request.max_prefix_len is None else request.max_prefix_len


def _note_lease(lease: Lease, route: Route, whole: int) -> None:
    """End a route as soon as its lease has published the prompt's whole pages, or has ended."""
    if lease.published_len >= whole > lease.prefix_len or (lease.ended and lease.published_len > lease.prefix_len):
        route.first_token()
    elif lease.ended:
        route.cancel()
