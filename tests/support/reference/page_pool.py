"""A pool of whole pages under "lru" or "2q", evicted one at a time: the rule, without nodes, leases and hashes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

REMEMBERED = 4  # times the pool's pages
PROBATION, PROTECTED = "probation", "protected"


class PagePool:
    """Pages by number; a page has one parent at most, whatever request it is in.

    Args:
        num_pages: that the pool holds.
        policy: "lru" or "2q".
    """

    def __init__(self, num_pages: int, policy: str) -> None:
        assert policy in ("lru", "2q"), policy
        self._num_pages = num_pages
        self._is_2q = policy == "2q"
        self._queues: dict[str, OrderedDict[int, None]] = {PROBATION: OrderedDict(), PROTECTED: OrderedDict()}
        self._parents: dict[int, int | None] = {}  # of the resident pages
        self._num_children: Counter[int] = Counter()
        self._remembered: OrderedDict[int, None] = OrderedDict()

    def request(self, pages: Sequence[int]) -> int:
        """Insert the pages of a prompt that are not resident, and use all; return how many leading ones were."""
        num_hits = next((place for place, page in enumerate(pages) if page not in self._parents), len(pages))
        pinned = set(pages)
        kept = num_hits
        while kept < len(pages) and self._make_room(pinned):
            self._add(pages[kept], pages[kept - 1] if kept else None)
            kept += 1
        for page in reversed(pages[:kept]):  # a page goes after those below it
            self._queue_of(page).move_to_end(page)
        return num_hits

    def _add(self, page: int, parent: int | None) -> None:
        self._parents[page] = parent
        if parent is not None:
            self._num_children[parent] += 1
        self._queues[PROBATION][page] = None
        if page in self._remembered:
            del self._remembered[page]
            self._protect(page)

    def _protect(self, page: int | None) -> None:
        while page is not None and page in self._queues[PROBATION]:
            del self._queues[PROBATION][page]
            self._queues[PROTECTED][page] = None
            page = self._parents[page]

    def _make_room(self, pinned: set[int]) -> bool:
        """Evict a page if the pool is full; return whether there is a free one."""
        if len(self._parents) < self._num_pages:
            return True
        names = [PROBATION, PROTECTED]
        if 2 * len(self._queues[PROBATION]) <= self._num_pages:
            names.reverse()
        for name in names:
            leaf = self._first_leaf(self._queues[name], pinned)
            if leaf is not None:
                self._evict(leaf, name)
                return True
        return False

    def _first_leaf(self, queue: Iterable[int], pinned: set[int]) -> int | None:
        return next((page for page in queue if not self._num_children[page] and page not in pinned), None)

    def _evict(self, leaf: int, name: str) -> None:
        del self._queues[name][leaf]
        parent = self._parents.pop(leaf)
        if parent is not None:
            self._num_children[parent] -= 1
        if self._is_2q and name == PROBATION:
            self._remembered[leaf] = None
            if len(self._remembered) > REMEMBERED * self._num_pages:
                self._remembered.popitem(last=False)

    def _queue_of(self, page: int) -> OrderedDict[int, None]:
        return next(queue for queue in self._queues.values() if page in queue)
