"""`SentRequest`: a request on its way to a replica, until its prompt is computed or never will be."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from raydix.actors.fleet.route import Route
from raydix.actors.serve.replica_ranks import Ranked


class SentRequest:
    """A request that has a route. The route ends once, with the first sign.

    Each call of a replica completes once: it is answered, rejected, cancelled or fails. The call of an earlier attempt
    may complete after the request was ranked again, so it is counted, and does not end the later route.

    Args:
        earlier: the attempt before, if a replica has rejected the request.

    Attributes:
        ranked: the replicas for the request.
    """

    def __init__(self, ranked: Ranked, earlier: SentRequest | None = None) -> None:
        self.ranked = ranked
        self._calls: int = 0  # calls of this attempt that are not completed yet
        self._earlier_calls: int = 0 if earlier is None else earlier._earlier_calls + earlier._calls
        self._route = ranked.route
        self._computed: bool | None = None  # None: the route is open
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

    def note_call(self) -> None:
        """Note that a replica is called."""
        self._calls += 1

    def note_choice(self, future: asyncio.Future[Any]) -> None:
        """End the route if the caller cancelled the request before a replica was called.

        The task that calls the replica waits for this future before the router does. So it runs first, and calls the
        replica unless it is cancelled, though the future has a result.
        """
        if not self._calls:
            self.end(computed=False)

    def note_completion(self) -> None:
        """End the route if the call of this attempt completes before a replica has accepted it."""
        if self._earlier_calls:
            self._earlier_calls -= 1
        else:
            self._calls = 0
            self.end(computed=False)

    def _end_route(self, computed: bool) -> None:
        if self._route is None:
            return
        if computed:
            self._route.first_token()
        else:
            self._route.cancel()
