"""`SentRequest`: a request on its way to a replica, until its prompt is computed or never will be."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from raydix.actors.fleet.replica_ranks import Ranked
from raydix.actors.fleet.route import Route


class SentRequest:
    """A request that has a route. The route ends once, with the first sign.

    Attributes:
        ranked: the replicas for the request.
    """

    def __init__(self, ranked: Ranked) -> None:
        self.ranked = ranked
        self._route = ranked.route
        self._computed: bool | None = None  # None: it is open
        self._lost: weakref.finalize[..., Any] | None = None

    def watch(self, request: Any, call: Callable[[Callable[[bool], None], bool], None]) -> None:
        """End the route if the request is dropped before a replica has accepted it.

        Args:
            request: the object that lives as long as the request waits.
            call: runs a function with its argument on the loop of the route, from any thread.
        """
        self._lost = weakref.finalize(request, call, self.end, False)
        self._lost.atexit = False

    def accept(self) -> None:
        """Note that a replica has accepted the request: its answer ends the route."""
        if self._lost is not None:
            self._lost.detach()

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
