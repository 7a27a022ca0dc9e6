"""A fleet on a virtual clock: recorded requests, routers that know of the caches, and queues at the servers.

Each cache has one server, which computes one prompt at a time, first come first served, in 5 ms and the time of its
uncached tokens. A prompt is matched when its service starts, and its pages are stored when it ends: at its first token.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydix.actors.replay.arrivals import Arrival, Arrivals
from raydix.actors.replay.leaf_lru import LeafLru
from raydix.actors.replay.policies import ROUTERS
from raydix.actors.replay.router_view import Routed, RouterView
from raydix.cache_core import PageIndex
from raydix.schemas import RouteConfig

OVERHEAD_S = 0.005  # fixed part of the time that a request takes at its server
LEFT_OUT = (
    "The model computes one prompt at a time at each cache, first come first served. It leaves out chunked prefill, "
    "decoding, cached outputs, page sizes other than the trace's blocks, and requests that wait for slots."
)
MEASURED_ERROR = (
    "Medians of 5 seeds, against reference tables of an independent simulation of 8 caches: hits within 0.3 points, "
    "mean time to first token within 5 %, if the servers are busy less than 90 % of the time. Without queues, hits are "
    "equal."
)
_STEP = 256  # requests between two calls of `progress`


@dataclass(frozen=True)
class FleetSetup:
    """A fleet and its routers.

    The servers' speed follows from the trace: `load` is the share of their time that the prompts would take without any
    hit. `prefill_rate`, in tokens a second of each server, replaces it.
    """

    router: str  # a name of ROUTERS
    num_caches: int
    capacity: int  # pages of each cache
    config: RouteConfig = field(default_factory=RouteConfig)
    num_routers: int = 1
    event_delay_s: float = 0.1  # time that an event takes from a cache to the routers
    load: float = 0.8
    prefill_rate: float | None = None


@dataclass(frozen=True)
class FleetOutcome:
    """The results of a fleet on a trace, on the clock of one seed. Arrays are in the order of arrival."""

    setup: FleetSetup
    seed: int
    tokens: NDArray[np.int64]  # lengths of the prompts
    hit_tokens: NDArray[np.int64]
    wait_s: NDArray[np.float64]  # times from the arrival to the start of the service
    first_token_s: NDArray[np.float64]  # times from the arrival to the first token
    busy_s: NDArray[np.float64]  # busy time of each server
    span_s: float  # time from the first arrival to the last
    max_queue: int  # requests at one server, the one in service included
    prefill_rate: float  # tokens a second of each server

    def figures(self) -> dict[str, float]:
        """Return hit rate, times in seconds, and balance; each is comparable between routers."""
        wait, first = self.wait_s, self.first_token_s
        return {
            "hit_rate_percent": 100 * float(self.hit_tokens.sum()) / float(self.tokens.sum()),
            "first_token_mean_s": float(first.mean()),
            "first_token_p50_s": float(np.percentile(first, 50)),
            "first_token_p99_s": float(np.percentile(first, 99)),
            "wait_mean_s": float(wait.mean()),
            "wait_p99_s": float(np.percentile(wait, 99)),
            "max_queue": float(self.max_queue),
            "busy_max_over_mean": float(self.busy_s.max() / self.busy_s.mean()),
            "utilisation": float(self.busy_s.mean() / self.span_s),
        }


class RouterResult:
    """The results of a router on a trace, over several seeds."""

    def __init__(self, router: str) -> None:
        self.router = router
        self.by_seed: list[dict[str, float]] = []  # figures
        self.first_token_s: NDArray[np.float64] = np.zeros(0)  # percentiles 0 to 100 of the first seed

    def add(self, outcome: FleetOutcome) -> None:
        """Add the figures of a seed. Its arrays are not kept."""
        if not self.by_seed:
            self.first_token_s = np.percentile(outcome.first_token_s, np.arange(101))
        self.by_seed.append({"seed": outcome.seed, **outcome.figures()})

    def medians(self) -> dict[str, float]:
        """Return the median of each figure over the seeds."""
        names = [name for name in self.by_seed[0] if name != "seed"]
        return {name: float(np.median([figures[name] for figures in self.by_seed])) for name in names}


def simulate(
    arrivals: Arrivals,
    setup: FleetSetup,
    seed: int,
    *,
    make_index: Callable[[], PageIndex] = PageIndex,
    progress: Callable[[int], Any] = lambda done: None,
) -> FleetOutcome:
    """Run a trace through a fleet.

    Args:
        seed: of the arrivals' times within the trace's rounding step, and of the routers' random choices.
        make_index: returns an empty index; called once for each router.
        progress: called periodically with the number of routed requests.
    """
    return _Simulation(arrivals, setup, seed, make_index).run(progress)


class _Simulation:
    """One run: the servers' queues, the caches, and the routers' view of them."""

    def __init__(self, arrivals: Arrivals, setup: FleetSetup, seed: int, make_index: Callable[[], PageIndex]) -> None:
        self._arrivals, self._setup, self._seed = arrivals, setup, seed
        self._kind = kind = ROUTERS[setup.router]
        self._times_s = arrivals.times_s(seed)
        self._span_s = float(np.ptp(self._times_s)) or arrivals.rounding_s
        even_rate = arrivals.tokens / self._span_s / setup.num_caches
        self._rate = setup.prefill_rate or even_rate / setup.load
        self._rng = Random(seed)
        self._choose = kind.make(setup.num_caches, arrivals.page_size, setup.config, self._rng)
        num_caches, capacity = setup.num_caches, setup.capacity
        if kind.is_shared:
            num_caches, capacity = 1, num_caches * capacity
        self._caches = [LeafLru(capacity) for _ in range(num_caches)]
        self._view = RouterView(
            [make_index() for _ in range(setup.num_routers)],
            num_caches,
            setup.num_caches,
            delay_s=setup.event_delay_s,
            ttl_s=setup.config.promise_ttl_s if kind.has_promises else 0,
        )
        self._queues: list[deque[tuple[Arrival, Routed]]] = [deque() for _ in range(setup.num_caches)]
        self._ends: list[tuple[float, int]] = []  # a heap: (end of a service, server)
        self._busy_s = np.zeros(setup.num_caches)
        self._max_queue = 0
        zeros = bytes(8 * len(arrivals))
        self._tokens, self._hit_tokens = array("q", zeros), array("q", zeros)
        self._wait_s, self._first_token_s = array("d", zeros), array("d", zeros)

    def run(self, progress: Callable[[int], Any]) -> FleetOutcome:
        """Route all requests and finish them."""
        for arrival in self._arrivals.each(self._times_s):
            self._finish_until(arrival.time_s)
            self._route(arrival)
            if arrival.number % _STEP == 0:
                progress(arrival.number)
        self._finish_until(float("inf"))
        progress(len(self._arrivals))
        return FleetOutcome(
            setup=self._setup,
            seed=self._seed,
            tokens=np.frombuffer(self._tokens, np.int64),
            hit_tokens=np.frombuffer(self._hit_tokens, np.int64),
            wait_s=np.frombuffer(self._wait_s, np.float64),
            first_token_s=np.frombuffer(self._first_token_s, np.float64),
            busy_s=self._busy_s,
            span_s=self._span_s,
            max_queue=self._max_queue,
            prefill_rate=self._rate,
        )

    def _route(self, arrival: Arrival) -> None:
        now_s, informed = arrival.time_s, self._kind.is_informed
        num_routers = self._setup.num_routers
        router = self._rng.randrange(num_routers) if num_routers > 1 else 0
        if informed:
            self._view.advance(now_s)
        server, uncached = self._choose(arrival, router, self._view)
        cache = 0 if self._kind.is_shared else server
        routed = Routed(router, server, cache, uncached, arrival.hashes)
        if informed:
            self._view.route(now_s, routed)
        queue = self._queues[server]
        queue.append((arrival, routed))
        self._max_queue = max(self._max_queue, len(queue))
        if len(queue) == 1:
            self._start(server, now_s)

    def _start(self, server: int, now_s: float) -> None:
        """Start the service of the first request in a server's queue."""
        arrival, routed = self._queues[server][0]
        hit_tokens = self._arrivals.page_size * self._caches[routed.cache].match(arrival.pages)
        service_s = OVERHEAD_S + (arrival.tokens - hit_tokens) / self._rate
        self._tokens[arrival.number] = arrival.tokens
        self._hit_tokens[arrival.number] = hit_tokens
        self._wait_s[arrival.number] = now_s - arrival.time_s
        self._busy_s[server] += service_s
        heappush(self._ends, (now_s + service_s, server))

    def _finish_until(self, now_s: float) -> None:
        """End the services that end until now, and start the next requests in their queues."""
        ends = self._ends
        while ends and ends[0][0] <= now_s:
            end_s, server = heappop(ends)
            queue = self._queues[server]
            arrival, routed = queue.popleft()
            self._first_token_s[arrival.number] = end_s - arrival.time_s
            stored, removed = self._caches[routed.cache].insert(arrival.pages)
            if self._kind.is_informed:
                self._view.finish(end_s, routed, stored, removed)
            if queue:
                self._start(server, end_s)
