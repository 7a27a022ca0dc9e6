"""`EvictionHistory`: what was evicted of late, and why, so that a miss can be explained."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from raydix.cache_core.tree.tree_node import TreeNode

MAX_ENTRIES = 16_384


class EvictionRecord(NamedTuple):
    """When something went, and what for."""

    at_s: float  # by the history's clock
    cause: str
    used_at: int = 0  # ticks of the tree's clock: the last use of what went
    num_tokens: int = 0


class EvictionHistory:
    """The latest departures from one tree, in order and by where they hung: some 250 bytes each, the oldest forgotten.

    A node is remembered as the page that followed its parent. So the lookup of a key that ends at a node can ask
    whether what came next there was evicted, however much of it is gone by now. Where the parent went, too, and came
    again, it is another node, and what followed the old one is forgotten.

    Args:
        clock: seconds.

    Attributes:
        cause: why nodes are leaving now; set by whoever evicts, before.
        began_at: by the clock: nothing left before.
        forgotten_until: when the latest departure that is forgotten was; None if none is.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause = "request"
        self.forgotten_until: float | None = None
        self.use_clock(clock)
        self._max_entries = max_entries
        self._evicted: OrderedDict[Hashable, EvictionRecord] = OrderedDict()
        self._latest: deque[EvictionRecord] = deque(maxlen=max_entries)  # what went time and again is here each time
        self._retired: OrderedDict[str | None, EvictionRecord] = OrderedDict()

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time, in seconds, from this clock; before the first departure."""
        self.clock = clock
        self.began_at = clock()

    def record_evicted(self, nodes: Iterable[TreeNode], page_size: int) -> None:
        """Nodes have left their tree, of which those of retired namespaces went when these did."""
        now, cause = self.clock(), self.cause
        for node in nodes:
            space, parent = node.space, node.parent
            assert parent is not None
            if space.live:
                departure = EvictionRecord(now, cause, node.own_access_time, node.end - parent.end)
                self._latest.append(departure)
                page = node.data[: page_size * space.unit]
                self._note(self._evicted, (place_of(parent), hash(page)), departure)

    def record_retired(self, extra_key: str | None) -> None:
        """A namespace was made unmatchable."""
        self._note(self._retired, extra_key, EvictionRecord(self.clock(), "retired"))

    def evicted(self, above: Hashable, page: bytes) -> EvictionRecord | None:
        """When the page with these packed ids that followed a place was evicted, if that is remembered."""
        return self._evicted.get((above, hash(page)))

    def retired(self, extra_key: str | None) -> EvictionRecord | None:
        """When a namespace was last retired, if that is remembered."""
        return self._retired.get(extra_key)

    def evictions(self) -> list[EvictionRecord]:
        """The latest evictions, the last one last."""
        return list(self._latest)

    def _note(self, departures: OrderedDict[Any, EvictionRecord], place: Hashable, departure: EvictionRecord) -> None:
        departures[place] = departure
        departures.move_to_end(place)
        if len(departures) > self._max_entries:
            _, forgotten = departures.popitem(last=False)
            self.forgotten_until = max(self.forgotten_until or forgotten.at_s, forgotten.at_s)


def place_of(node: TreeNode) -> Hashable:
    """What a node is remembered as. A namespace may be emptied and begun anew, so for its top that is not its id."""
    return node.id if node.data else (node.space.extra_key, node.space.arity)
