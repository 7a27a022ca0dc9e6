"""Routers of a simulated fleet: to which server each sends a request."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from raydix.actors.fleet.cost import Candidate, choose, compared
from raydix.actors.replay.arrivals import Arrival
from raydix.schemas import RouteConfig

if TYPE_CHECKING:
    from raydix.actors.replay.router_view import RouterView


class Choice(NamedTuple):
    """A server, and the tokens that it would have to compute, as the router estimates."""

    server: int
    uncached: float


Choose = Callable[[Arrival, int, "RouterView"], Choice]  # of a router, by its number, from its view


def random_server(num_servers: int, page_size: int, config: RouteConfig, rng: Random) -> Choose:
    """Return the choice of any server at random, whatever it holds."""
    return lambda arrival, router, view: Choice(int(rng.random() * num_servers), arrival.tokens)


def round_robin(num_servers: int, page_size: int, config: RouteConfig, rng: Random) -> Choose:
    """Return the choice of the servers in turn."""
    return lambda arrival, router, view: Choice(arrival.number % num_servers, arrival.tokens)


class LeastLoaded:
    """The server with the fewest pending tokens; among equals, a random one."""

    def __init__(self, page_size: int, rng: Random, *, is_shared: bool) -> None:
        """Make the policy.

        Args:
            page_size: tokens of a page.
            is_shared: all servers use cache 0, instead of one for each server.
        """
        self._page_size = page_size
        self._rng = rng
        self._is_shared = is_shared

    def choose(self, arrival: Arrival, router: int, view: RouterView) -> Choice:
        """Return the least loaded server."""
        pending = view.pending(router)
        least = min(pending)
        if pending.count(least) == 1:
            server = pending.index(least)
        else:
            server = self._rng.choice([candidate for candidate, tokens in enumerate(pending) if tokens == least])
        cache = 0 if self._is_shared else server
        _, expected = compared(view.index(router), arrival.hashes, (cache,), 0, self._rng)[cache]
        return Choice(server, arrival.tokens - self._page_size * expected)


class LeastCost:
    """The compared server with the least cost: the rule of Raydix's own router."""

    def __init__(self, num_servers: int, page_size: int, config: RouteConfig, rng: Random) -> None:
        self._servers = range(num_servers)
        self._page_size = page_size
        self._config = config
        self._rng = rng

    def choose(self, arrival: Arrival, router: int, view: RouterView) -> Choice:
        """Return the server with the least cost."""
        pending, tokens, size = view.pending(router), arrival.tokens, self._page_size
        runs = compared(view.index(router), arrival.hashes, self._servers, self._config.num_random, self._rng)
        candidates = [
            Candidate(server, pending[server], tokens - size * expected) for server, (_, expected) in runs.items()
        ]
        best = choose(candidates, self._config.weight, self._rng)
        return Choice(best.cache, best.uncached)


class RouterKind(NamedTuple):
    """A router by name."""

    # Arguments: the number of servers, the page size, the configuration, the random numbers.
    make: Callable[[int, int, RouteConfig, Random], Choose]
    is_informed: bool  # it looks at what caches hold, or at pending tokens
    has_promises: bool = False
    is_shared: bool = False  # one cache, of all capacity, for all servers


ROUTERS: dict[str, RouterKind] = {
    "random": RouterKind(random_server, False),
    "round_robin": RouterKind(round_robin, False),
    "least": RouterKind(lambda n, size, config, rng: LeastLoaded(size, rng, is_shared=False).choose, True),
    "ttft": RouterKind(lambda *arguments: LeastCost(*arguments).choose, True, has_promises=True),
    "shared": RouterKind(
        lambda n, size, config, rng: LeastLoaded(size, rng, is_shared=True).choose, True, is_shared=True
    ),
}
