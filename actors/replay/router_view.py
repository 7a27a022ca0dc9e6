"""The knowledge of the routers in a simulated fleet: stored and promised pages, and pending tokens, some of it late.

Each router has the index of a running router, `PageIndex`. A running router's `OpenRoutes` is not used: it takes
pending tokens from the loads that caches report of their leases, and the simulated servers have neither leases nor
slots. Here a router learns of the others' requests, and of their first tokens, as late as of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raydix.cache_core import Applied, PageIndex
from raydix.schemas.events import SLIM_EVENT_KINDS

_KINDS = bytes((SLIM_EVENT_KINDS.index("PagesStored"), SLIM_EVENT_KINDS.index("PagesRemoved")))  # a batch's events


class Routed:
    """A request on its way, as its router has announced it."""

    __slots__ = ("cache", "is_promised", "is_shared", "pages", "router", "server", "uncached")

    def __init__(self, router: int, server: int, cache: int, uncached: float, pages: NDArray[np.int64]) -> None:
        self.router = router
        self.server = server
        self.cache = cache  # the server's cache
        self.uncached = uncached  # tokens to compute, as estimated by the router
        self.pages = pages
        self.is_promised = False
        self.is_shared = False  # other routers know of the promise


class RouterView:
    """The knowledge of one or more routers, on a virtual clock.

    Events of a cache reach all routers `delay_s` after they happen. A router knows of its own requests immediately:
    that their pages are promised, and how many tokens are pending until their first token. Other routers learn this
    `delay_s` later, as the caches' events carry it. A promise ends when the router learns that the pages are stored, or
    after `ttl_s`.
    """

    def __init__(
        self, indexes: Sequence[PageIndex], num_caches: int, num_servers: int, *, delay_s: float, ttl_s: float
    ) -> None:
        """Start with empty caches.

        Args:
            indexes: one for each router, without columns; they belong to the view from now on.
            num_caches: the columns that each index gets, from 0.
            num_servers: servers that compute prompts, each with pending tokens of its own.
            delay_s: from an event to the routers.
            ttl_s: life of a promise; 0: there are no promises.
        """
        self._indexes = indexes
        for index in indexes:
            columns = [index.add_column() for _ in range(num_caches)]
            assert columns == list(range(num_caches)), "a new index numbers its columns from 0"
        self._delay_s = delay_s
        self._ttl_s = ttl_s
        self._seqs = [0] * num_caches  # number of each cache's last event
        self._pending = [[0.0] * num_servers for _ in indexes]
        self._shares: deque[tuple[float, Routed]] = deque()
        self._first_tokens: deque[tuple[float, Routed]] = deque()
        self._events: deque[tuple[float, Routed, Sequence[int], Sequence[int]]] = deque()
        self._expiries: deque[tuple[float, Routed]] = deque()

    def pending(self, router: int) -> list[float]:
        """Return the pending tokens of each server, as a router knows them. The list must not be changed."""
        return self._pending[router]

    def index(self, router: int) -> PageIndex:
        """Return a router's index, for lookups; a cache's column is its number."""
        return self._indexes[router]

    def route(self, now_s: float, routed: Routed) -> None:
        """Note that a router has sent a request to a server."""
        self._pending[routed.router][routed.server] += routed.uncached
        if len(self._indexes) > 1:
            self._shares.append((now_s + self._delay_s, routed))
        if self._ttl_s:
            routed.is_promised = True
            self._expiries.append((now_s + self._ttl_s, routed))
            self._indexes[routed.router].promise(routed.cache, routed.pages)

    def finish(self, now_s: float, routed: Routed, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Note the first token of a request, and the pages that its cache has stored and removed then."""
        self._pending[routed.router][routed.server] -= routed.uncached
        if len(self._indexes) > 1:
            self._first_tokens.append((now_s + self._delay_s, routed))
        self._events.append((now_s + self._delay_s, routed, stored, removed))

    def advance(self, now_s: float) -> None:
        """Let everything reach the routers that does so until now."""
        while self._shares and self._shares[0][0] <= now_s:
            self._share(self._shares.popleft()[1])
        while self._first_tokens and self._first_tokens[0][0] <= now_s:
            _, routed = self._first_tokens.popleft()
            for router in self._others(routed):
                self._pending[router][routed.server] -= routed.uncached
        while self._events and self._events[0][0] <= now_s:
            _, routed, stored, removed = self._events.popleft()
            self._apply(routed.cache, stored, removed)
            self._end_promise(routed)
        while self._expiries and self._expiries[0][0] <= now_s:
            self._end_promise(self._expiries.popleft()[1])

    def _others(self, routed: Routed) -> list[int]:
        """Return the routers that have not sent a request."""
        return [router for router in range(len(self._indexes)) if router != routed.router]

    def _share(self, routed: Routed) -> None:
        """Let the other routers learn of a request."""
        routed.is_shared = routed.is_promised
        for router in self._others(routed):
            self._pending[router][routed.server] += routed.uncached
            if routed.is_promised:
                self._indexes[router].promise(routed.cache, routed.pages)

    def _apply(self, cache: int, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Give a batch of a cache's events to every router."""
        self._seqs[cache] += len(_KINDS)
        counts = np.array([len(stored), len(removed)], np.int32)
        hashes = np.array([*stored, *removed], np.int64)
        for index in self._indexes:
            applied = index.apply(cache, "", self._seqs[cache], _KINDS, counts, hashes)
            assert applied is Applied.DONE, "no event is lost, and none comes twice"

    def _end_promise(self, routed: Routed) -> None:
        if not routed.is_promised:
            return
        routed.is_promised = False
        for router in range(len(self._indexes)) if routed.is_shared else (routed.router,):
            self._indexes[router].withdraw(routed.cache, routed.pages)
