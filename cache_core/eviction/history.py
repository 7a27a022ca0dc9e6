"""`EvictionHistory`: recent evictions with their causes, so that a miss can be explained."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from raydix.cache_core.tree.tree_node import TreeNode

MAX_ENTRIES = 16_384


class EvictionRecord(NamedTuple):
    """The eviction or retirement of one node or namespace."""

    at_s: float  # the time by the history's clock
    cause: str
    used_at: int = 0  # ticks of the tree's clock: the last use of the node
    num_tokens: int = 0
    was_dropped: bool = False  # the tier below did not have all of the node


class EvictionHistory:
    """The latest records of one tree, in order and by place: about 250 bytes each; the oldest are dropped.

    A node is recorded as the page that followed its parent. So a lookup that ends at a node finds whether the next page
    was evicted there, even if more nodes were evicted above that page. If the parent was evicted as well and inserted
    again, it is another node, and the records below the old one are not found.

    Args:
        clock: seconds.

    Attributes:
        cause: of the next evictions; the caller sets it before it evicts.
        began_at: by the clock: earlier evictions are not recorded.
        forgotten_until: the time of the latest dropped record; None if none was dropped.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        self.cause = "request"
        self.forgotten_until: float | None = None
        self.use_clock(clock)
        self._max_entries = max_entries
        self._evicted: OrderedDict[Hashable, EvictionRecord] = OrderedDict()
        self._latest: deque[EvictionRecord] = deque(maxlen=max_entries)  # each eviction of a place, not only the latest
        self._retired: OrderedDict[str | None, EvictionRecord] = OrderedDict()
        self._dropped: set[int] = set()  # ids of nodes of the eviction that is going on

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Take the time, in seconds, from this clock. Call it before the first record."""
        self.clock = clock
        self.began_at = clock()

    def note_dropped(self, node: TreeNode) -> None:
        """Note that a node is about to be evicted without being in the tier below; `record_evicted` ends the note."""
        self._dropped.add(node.id)

    def record_evicted(self, nodes: Iterable[TreeNode], page_size: int) -> None:
        """Record nodes that have left their tree, unless their namespace is retired: the retirement is recorded."""
        now, cause, dropped = self.clock(), self.cause, self._dropped
        for node in nodes:
            namespace, parent = node.namespace, node.parent
            assert parent is not None
            if namespace.live:
                num_tokens = node.end - parent.end
                departure = EvictionRecord(now, cause, node.own_access_time, num_tokens, node.id in dropped)
                self._latest.append(departure)
                page = node.data[: page_size * namespace.unit]
                self._note(self._evicted, (place_of(parent), hash(page)), departure)
        dropped.clear()

    def record_retired(self, extra_key: str | None) -> None:
        """Record that a namespace was made unmatchable."""
        self._note(self._retired, extra_key, EvictionRecord(self.clock(), "retired"))

    def evicted(self, above: Hashable, page: bytes) -> EvictionRecord | None:
        """Return the record of the page with the packed ids `page` that followed a place; None if there is none."""
        return self._evicted.get((above, hash(page)))

    def retired(self, extra_key: str | None) -> EvictionRecord | None:
        """Return the record of the last retirement of a namespace; None if there is none."""
        return self._retired.get(extra_key)

    def evictions(self) -> list[EvictionRecord]:
        """Return the latest evictions, the last one last."""
        return list(self._latest)

    def _note(self, departures: OrderedDict[Any, EvictionRecord], place: Hashable, departure: EvictionRecord) -> None:
        departures[place] = departure
        departures.move_to_end(place)
        if len(departures) > self._max_entries:
            _, forgotten = departures.popitem(last=False)
            self.forgotten_until = max(self.forgotten_until or forgotten.at_s, forgotten.at_s)


def place_of(node: TreeNode) -> Hashable:
    """Return the place of a node in the records. A namespace may get another top, so a top's place is not its id."""
    return node.id if node.data else (node.namespace.extra_key, node.namespace.arity)
