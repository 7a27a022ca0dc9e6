"""The knowledge of the routers in a simulated fleet: stored and promised pages, and pending tokens, some of it late."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raydix.actors.fleet.residency import ResidencyIndex


class Routed:
    """A request on its way, as its router has announced it."""

    __slots__ = ("cache", "is_promised", "is_shared", "pages", "router", "server", "uncached")

    def __init__(self, router: int, server: int, cache: int, uncached: float, pages: Sequence[int]) -> None:
        self.router = router
        self.server = server
        self.cache = cache  # of the server
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
        self, index: ResidencyIndex, num_servers: int, *, num_routers: int, delay_s: float, ttl_s: float
    ) -> None:
        """Start with empty caches.

        Args:
            index: where all routers look up pages; it belongs to the view from now on.
            num_servers: servers that compute prompts, each with pending tokens of its own.
            num_routers: with only one, nothing about its own requests is late.
            delay_s: from an event to the routers.
            ttl_s: life of a promise; 0: there are no promises.
        """
        self._index = index
        self._delay_s = delay_s
        self._ttl_s = ttl_s
        self._has_others = num_routers > 1 and delay_s > 0
        self._pending = [0.0] * num_servers  # known to all routers
        self._own_pending = [[0.0] * num_servers for _ in range(num_routers)]  # not yet known to others
        self._own_promises: list[list[Routed]] = [[] for _ in range(num_routers)]  # the same
        self._shares: deque[tuple[float, Routed]] = deque()
        self._first_tokens: deque[tuple[float, Routed]] = deque()
        self._events: deque[tuple[float, Routed, Sequence[int], Sequence[int]]] = deque()
        self._expiries: deque[tuple[float, Routed]] = deque()

    def pending(self, router: int) -> list[float]:
        """Return the pending tokens of each server, as a router knows them. The list must not be changed."""
        if not self._has_others:
            return self._pending
        return [known + own for known, own in zip(self._pending, self._own_pending[router], strict=True)]

    def lengths(self, router: int, pages: Sequence[int]) -> dict[int, int]:
        """Return the leading pages that each cache holds or is promised, as a router knows; 0 pages are left out."""
        lengths = self._index.runs(pages)
        for routed in self._own_promises[router]:
            common = _common(routed.pages, pages)
            if common > lengths.get(routed.cache, 0):
                lengths[routed.cache] = common
        return lengths

    def route(self, now_s: float, routed: Routed) -> None:
        """Note that a router has sent a request to a server."""
        if self._has_others:
            self._own_pending[routed.router][routed.server] += routed.uncached
            self._shares.append((now_s + self._delay_s, routed))
        else:
            self._pending[routed.server] += routed.uncached
        if self._ttl_s:
            routed.is_promised = True
            self._expiries.append((now_s + self._ttl_s, routed))
            if self._has_others:
                self._own_promises[routed.router].append(routed)
            else:
                self._share(routed)

    def finish(self, now_s: float, routed: Routed, stored: Sequence[int], removed: Sequence[int]) -> None:
        """Note the first token of a request, and the pages that its cache has stored and removed then."""
        if self._has_others:
            self._own_pending[routed.router][routed.server] -= routed.uncached
            self._first_tokens.append((now_s + self._delay_s, routed))
        else:
            self._pending[routed.server] -= routed.uncached
        self._events.append((now_s + self._delay_s, routed, stored, removed))

    def advance(self, now_s: float) -> None:
        """Let everything reach the routers that does so until now."""
        while self._shares and self._shares[0][0] <= now_s:
            _, routed = self._shares.popleft()
            self._move(routed, routed.uncached)
            if routed.is_promised:
                self._own_promises[routed.router].remove(routed)
                self._share(routed)
        while self._first_tokens and self._first_tokens[0][0] <= now_s:
            _, routed = self._first_tokens.popleft()
            self._move(routed, -routed.uncached)
        while self._events and self._events[0][0] <= now_s:
            _, routed, stored, removed = self._events.popleft()
            self._index.store(routed.cache, stored)
            self._index.remove(routed.cache, removed)
            self._end_promise(routed)
        while self._expiries and self._expiries[0][0] <= now_s:
            self._end_promise(self._expiries.popleft()[1])

    def _move(self, routed: Routed, tokens: float) -> None:
        """Let the other routers learn of a change of a server's pending tokens."""
        self._own_pending[routed.router][routed.server] -= tokens
        self._pending[routed.server] += tokens

    def _share(self, routed: Routed) -> None:
        routed.is_shared = True
        self._index.promise(routed.cache, routed.pages)

    def _end_promise(self, routed: Routed) -> None:
        if not routed.is_promised:
            return
        routed.is_promised = False
        if routed.is_shared:
            self._index.withdraw(routed.cache, routed.pages)
        else:
            self._own_promises[routed.router].remove(routed)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading pages that two paths have in common. Equal pages have equal parents."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
