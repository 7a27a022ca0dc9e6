"""`FleetMembers`: the members of a fleet, which come and go; some are left out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from raydix.actors.fleet.cache_directory import CacheDirectory, CacheSource
from raydix.actors.fleet.cache_feed import CacheFeed
from raydix.actors.fleet.cost import TierColumns
from raydix.actors.fleet.fleet_member import FleetMember, members_of
from raydix.actors.fleet.membership import PageShape, left_out_causes
from raydix.actors.fleet.open_routes import OpenRoutes
from raydix.actors.transport.validation import checked_name
from raydix.cache_core import PageIndex
from raydix.schemas import CacheError, CacheUnavailable, InvalidRequest, RouteConfig
from raydix.schemas.requests import DEVICE, HOST
from raydix.schemas.shown import brief

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # time between two looks for new caches and gone ones
_REFRESH_S = 5.0  # time between two questions for a cache's fingerprint
_GATHER_S = 2.0  # time limit of the caches' first answers


class FleetMembers:
    """The members of a fleet, kept up to date: each is a cache, or the caches of an engine's ranks.

    It looks for caches each second, and begins to read the events of a new one. It decides which members get requests.
    A member is known by a column: its cache's, or the column of its first rank's cache.

    Args:
        directory: lists the caches.
        fingerprint: of the base model; None: the one of most caches.
        timeout_s: seconds to wait for a member that gets requests.
        config: how a member is chosen.

    Attributes:
        directory: lists the caches.
        loop: the event loop to which all of it belongs.
        index: the pages of the caches.
        routes: the open routes, and the load of the caches.
        feeds: name -> cache.
        by_name: name -> member; also the members that are left out.
        by_column: column -> member that gets requests. A change replaces the dictionary.
        ranks: column -> columns of all ranks, of the members with several ranks that get requests.
        columns: the columns of the members that get requests.
        hosts: column of a pool -> column of its host tier, of all ranks of the members that get requests.
        tiers: the columns of the members and of the tiers below them; None: no member has a host tier.
        shape: the shape of the members' pages; None: it is not known yet.
        fault: the error of the directory's last look; empty: there was none.
        num_changes: rises whenever a member begins or ceases to get requests.
    """

    def __init__(
        self, directory: CacheDirectory, fingerprint: str | None, timeout_s: float, config: RouteConfig
    ) -> None:
        self.directory = directory
        self.loop = asyncio.get_running_loop()
        self.index = PageIndex()
        self.routes = OpenRoutes(self.index, config.promise_ttl_s, self.loop.time, config.tier_cost["CPU"])
        self.feeds: dict[str, CacheFeed] = {}
        self.by_name: dict[str, FleetMember] = {}
        self.by_column: dict[int, FleetMember] = {}
        self.ranks: dict[int, tuple[int, ...]] = {}
        self.columns: list[int] = []
        self.hosts: dict[int, int] = {}
        self.tiers: TierColumns | None = None
        self.shape: PageShape | None = None
        self.fault = ""
        self.num_changes = 0
        self._fingerprint = fingerprint
        self._timeout_s = timeout_s
        self._may_decide = False
        self._has_changed = asyncio.Event()  # set when a feed has changed
        self._is_alive = asyncio.Event()  # set while a member can get requests
        self._chores: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # ---------------------------------------------------------------- life

    async def open(self, *, needs_one: bool = True) -> None:
        """Find the caches, and wait for them as `Fleet.open` does."""
        self._note_caches(await self.directory.look())
        self._looking = asyncio.create_task(self._keep_looking())
        deadline = self.loop.time() + min(_GATHER_S, self._timeout_s)
        await self._wait_until(self._has_answers, deadline)
        self._may_decide = True
        self._decide()
        if needs_one:
            await self.wait_alive()
        else:
            await self._wait_until(lambda: bool(self.feeds) and self._is_settled(), self.loop.time() + self._timeout_s)
            if not self.feeds:
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
        return all(feed.is_settled for feed in self.feeds.values())

    def _has_answers(self) -> bool:
        """Return whether every cache has answered or failed to."""
        return bool(self.feeds) and all(feed.facts is not None or feed.trouble for feed in self.feeds.values())

    async def wait_alive(self) -> None:
        """Wait until a member can get requests.

        Raises:
            CacheUnavailable: none could within `timeout_s`.
            InvalidRequest: the fleet was closed, or another event loop runs.
        """
        if self._closed or self.loop is not asyncio.get_running_loop():
            raise InvalidRequest("this fleet was closed, or belongs to another event loop: connect_fleet again")
        if self.columns:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._is_alive.wait()
        except TimeoutError:
            raise self._none_alive() from None

    def _none_alive(self) -> CacheUnavailable:
        """Return the error of a wait of `timeout_s` after which no cache can get requests."""
        causes = "; ".join(f"{name}: {cause}" for name, cause in self.left_out().items())
        return CacheUnavailable(
            f"no cache of {self.directory} could get requests within {self._timeout_s:g} s: "
            f"{causes or 'none was found'}"
        )

    def left_out(self) -> dict[str, str]:
        """Return why members get no requests, by their names."""
        return {name: member.cause for name, member in self.by_name.items() if member.cause}

    async def close(self) -> None:
        """Stop reading, and close all clients, which ends their leases. Idempotent."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        feeds = list(self.feeds.values())
        self.feeds.clear()
        self.by_name.clear()
        for feed in feeds:
            self._end_feed(feed)
        await asyncio.gather(*self._chores, return_exceptions=True)

    # ---------------------------------------------------------------- caches that come and go

    async def _keep_looking(self) -> None:
        refresh_at = self.loop.time() + _REFRESH_S
        while True:
            await asyncio.sleep(_LOOK_S if self.feeds else _LOOK_S / 10)
            await self._look()
            self.routes.expire()
            if self.loop.time() >= refresh_at:
                refresh_at = self.loop.time() + _REFRESH_S
                for feed in self.feeds.values():
                    if feed.column is not None:
                        self._begin_chore(self._refresh(feed))

    async def _look(self) -> None:
        try:
            self._note_caches(await self.directory.look())
        except (InvalidRequest, CacheUnavailable) as error:
            if str(error) != self.fault:
                logger.error("looking for the caches of %s: %s", self.directory, error)
            self.fault = str(error)
        else:
            self.fault = ""

    def _note_caches(self, found: dict[str, CacheSource]) -> None:
        """Take the caches that are there now.

        Raises:
            InvalidRequest: the name of one is wrong, or it is no cache; the others are taken.
        """
        fault: InvalidRequest | None = None
        gone = [name for name, feed in self.feeds.items() if name not in found or found[name].identity != feed.identity]
        for name in gone:
            self._end_feed(self.feeds.pop(name))
        for name, source in found.items():
            if name not in self.feeds:
                try:
                    self.feeds[checked_name(name)] = CacheFeed(
                        name, source, self.index, self.routes, self._decide, self._note_change
                    )
                except InvalidRequest as error:
                    fault = InvalidRequest(f"caches[{brief(name)}]: {error}")
        members = members_of(self.feeds, self.by_name)
        if members != self.by_name:
            self.by_name = members
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

    # ---------------------------------------------------------------- the members that get requests

    def _decide(self) -> None:
        """Decide which caches are in."""
        if not self._may_decide:
            return
        facts = {name: feed.facts for name, feed in sorted(self.feeds.items()) if feed.facts is not None}
        shape, causes = left_out_causes(facts, self.shape, self._fingerprint)
        self.shape = shape or self.shape
        for name in facts:
            self.feeds[name].set_verdict(causes.get(name, ""))

    def _note_change(self) -> None:
        self._has_changed.set()
        self.num_changes += 1
        alive = {member.columns: member for member in self.by_name.values() if not member.cause}
        self.by_column = {columns[0]: member for columns, member in alive.items()}
        self.ranks = {columns[0]: columns for columns in alive if len(columns) > 1}
        self.columns = list(self.by_column)
        found = [feed.columns for member in alive.values() for feed in member.feeds if HOST in feed.columns]
        self.hosts = {columns[DEVICE]: columns[HOST] for columns in found}
        self.tiers = self.tiers_of(self.columns) if self.hosts else None
        if self.columns:
            self._is_alive.set()
        else:
            self._is_alive.clear()

    def tiers_of(self, columns: Iterable[int]) -> TierColumns:
        """Return the columns of the host tiers of some members."""
        return TierColumns({column: self.hosts[column] for column in columns if column in self.hosts})
