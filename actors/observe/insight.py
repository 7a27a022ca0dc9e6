"""`Insight`: gathers the data of a report in the cache's process."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from raydix.actors.loop.loop_timer import LoopTimer
from raydix.actors.observe.count_history import History
from raydix.actors.observe.namespace_hits import NamespaceUse, namespace_label
from raydix.actors.observe.top_prefixes import top_prefixes
from raydix.cache_core import LeasedCache
from raydix.cache_core.outline import OutlineNode
from raydix.schemas import AgeCount, CacheReport, CacheStats, TreePart

_TICK_S = 1.0
_SAMPLED_NODES = 2048  # nodes visited for a report: a few ms
_NAMESPACES = 16
_PARTS = (16, 8)  # most parts of a namespace, and of each part
_PREFIXES = 12
_AGES_S = (1, 3, 10, 30, 60, 180, 600, 1800, 3600, 10_800, 36_000)


class Insight:
    """The history, the hit rates of namespaces, and samples of the tree. Costs half a microsecond per request.

    Args:
        core: the cache.
        clock: returns seconds, from any origin.
    """

    def __init__(self, core: LeasedCache, clock: Callable[[], float] = time.monotonic) -> None:
        self.namespaces = NamespaceUse()
        self._core = core
        self.history = self._new_history(clock)
        self._timer = LoopTimer(self._tick)
        core.observers.append(self.namespaces)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Restart the history with another clock."""
        self.history = self._new_history(clock)

    def _new_history(self, clock: Callable[[], float]) -> History:
        return History(self._core, clock, _TICK_S, lambda: self.namespaces.tokens_loaded)

    def start(self) -> None:
        """Start the timer on the running loop, unless it runs already."""
        if not self._timer.is_set:
            self._timer.schedule(self._tick())

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.stop()

    def _tick(self) -> float:
        self.history.note()
        return self.history.interval_s

    def unused_s(self, tick: int) -> float | None:
        """Return the seconds since a tick of the cache's logical clock, rounded up to a point of the history.

        None if the cache has no clock.
        """
        return max(0.0, self.history.now_s - self.history.time_of(tick)) if self._core.now else None

    def report(self, stats: CacheStats) -> CacheReport:
        """Return the report, with the given counts. O(1): it visits a sample of the nodes of a large tree."""
        sampled = self._core.sample_tree(_SAMPLED_NODES)
        seen = sum(node.tokens_below for node in sampled.nodes)
        scale = stats.tree_slots / seen if seen and len(sampled.nodes) == sampled.num_namespaces else 1.0
        return CacheReport(
            stats=stats,
            history=(*self.history.points, self.history.point()),
            namespaces=self.namespaces.stats(_NAMESPACES),
            prefixes=top_prefixes(sampled.nodes, _PREFIXES, scale),
            tree=tuple(self._part(node, scale, _PARTS) for node in sampled.nodes[:_NAMESPACES]),
            eviction_ages=self._eviction_ages(),
        )

    def _part(self, node: OutlineNode, scale: float, kept: tuple[int, ...]) -> TreePart:
        """Convert a node to a part, with at most `kept` parts in it at each level."""
        below = node.children[: kept[0]] if kept else ()
        return TreePart(
            namespace=namespace_label(node.extra_key),
            tokens=tuple(node.tokens),
            num_tokens=round(scale * node.tokens_below),
            own_tokens=round(scale * node.own_tokens),
            num_nodes=node.num_nodes,
            unused_s=self.unused_s(node.last_used) or 0.0,
            num_locks=node.num_locks,
            parts=tuple(self._part(child, scale, kept[1:]) for child in below),
        )

    def _eviction_ages(self) -> tuple[AgeCount, ...]:
        """Return the recently evicted tokens by their time without use."""
        gone = self._core.evictions()
        history = self.history
        ages = np.array([history.time_at(eviction.at_s) - history.time_of(eviction.used_at) for eviction in gone])
        counts = np.zeros(len(_AGES_S) + 1, np.int64)
        np.add.at(counts, np.searchsorted(_AGES_S, ages, side="right"), [eviction.num_tokens for eviction in gone])
        return tuple(
            AgeCount(below_s=age, num_tokens=int(num)) for age, num in zip((*_AGES_S, None), counts, strict=True)
        )
