"""A fleet without time: each request is routed, matched and inserted immediately, as in `cluster_instant.csv`.

The pages, the index and the cost are those of the simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

import numpy as np

from raydix.actors.fleet.cost import Candidate, choose
from raydix.actors.observe.trace import TracedRequest
from raydix.actors.replay.arrivals import Arrivals
from raydix.actors.replay.leaf_lru import LeafLru
from raydix.actors.replay.router_view import Routed, RouterView
from raydix.cache_core import PageIndex

WINDOW_MS = 60_000


def hit_percent(trace: Sequence[TracedRequest], num_caches: int, capacity: int, router: str) -> tuple[float, float]:
    """The hit rate in percent of prompt tokens, and the computed tokens of the busiest cache / mean."""
    arrivals, shared = Arrivals(trace), router == "shared_pool"
    size = arrivals.page_size
    caches = [LeafLru(num_caches * capacity if shared else capacity) for _ in range(1 if shared else num_caches)]
    view = RouterView([PageIndex()], len(caches), len(caches), delay_s=0, ttl_s=0)
    computed = [0] * len(caches)
    recent: deque[tuple[float, int, int]] = deque()
    load = [0] * len(caches)
    times = np.arange(len(trace), dtype=np.float64)[None]  # the order of the trace
    for arrival, request in zip(arrivals.each(times), trace, strict=True):
        while recent and recent[0][0] <= request.timestamp - WINDOW_MS:
            _, old, tokens = recent.popleft()
            load[old] -= tokens
        uncached = [arrival.tokens] * len(caches)
        for cache, stored, _ in view.index(0).prefix_runs(arrival.hashes):
            uncached[cache] -= size * stored
        cache = _chosen(router, arrival.number, request, uncached, load)
        new, evicted = caches[cache].insert(arrival.pages)
        view.finish(0, Routed(0, cache, cache, 0, arrival.hashes), new, evicted)
        view.advance(0)
        computed[cache] += uncached[cache]
        load[cache] += uncached[cache]
        recent.append((request.timestamp, cache, uncached[cache]))
    return 100 * (1 - sum(computed) / arrivals.tokens), max(computed) * len(caches) / sum(computed)


def _chosen(router: str, number: int, request: TracedRequest, uncached: list[int], load: list[int]) -> int:
    kind, _, detail = router.partition("_")
    caches = range(len(load))
    if kind == "round":
        return number % len(load)
    if kind == "hash":
        num_blocks = request.input_length // request.block_size
        key = request.hash_ids[min(int(detail), num_blocks) - 1] if num_blocks else None
        return (number if key is None else key * 2654435761 % 2**32) % len(load)
    if kind == "affinity":
        return min(caches, key=lambda cache: (uncached[cache], load[cache]))
    weight = float(detail.removeprefix("w")) if kind == "cost" else 0
    return choose([Candidate(cache, load[cache], uncached[cache]) for cache in caches], weight).cache


class NaiveLeafLru:
    """A cache's pages by their definition: at capacity, one unlocked leaf is evicted for each new page."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[tuple[int, ...], int] = {}  # path -> the last request that used it
        self.now = 0

    def match(self, path: tuple[int, ...]) -> int:
        return next((n for n in range(len(path)) if path[: n + 1] not in self.used), len(path))

    def insert(self, path: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        self.now += 1
        own = [path[: n + 1] for n in range(len(path))]
        new, evicted = [], []
        for page in own[: self.match(path)]:
            self.used[page] = self.now
        for page in own[self.match(path) :]:
            if len(self.used) == self.capacity:
                parents = {each[:-1] for each in self.used}
                leaves = [each for each in self.used if each not in parents and each not in own]
                if not leaves:
                    break
                victim = min(leaves, key=lambda each: (self.used[each], -len(each)))
                del self.used[victim]
                evicted.append(victim)
            self.used[page] = self.now
            new.append(page)
        return new, evicted


def random_paths(seed: int, count: int) -> list[tuple[int, ...]]:
    """Paths that share prefixes, of 1 to 6 pages."""
    rng = Random(seed)
    return [tuple(rng.choice((0, 0, 1, 2)) for _ in range(rng.randint(1, 6))) for _ in range(count)]
