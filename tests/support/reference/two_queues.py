"""Policy "2q", page by page: two queues and an exact set of remembered pages; and a cache that runs with this model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from random import Random

from support.checked.radix_cache import CheckedRadixCache, LedgerPool, PagedLedgerPool, agree
from support.reference.models import ROOT, Handle, Inserted, Node, Place, ReferenceRadixCache, Tokens

from raydix.cache_core import RadixCache
from raydix.cache_core.eviction.two_queues import TwoQueues
from raydix.cache_core.kernels import PageMemory

CAPACITY = 40  # remembered pages, so few that pages are forgotten often


class ReferenceTwoQueues(ReferenceRadixCache):
    """A prefix cache that protects pages that come back while they are remembered, and all pages above them.

    Attributes:
        protected: the resident pages that are protected.
    """

    def __init__(self, page_size: int, num_slots: int) -> None:
        super().__init__(page_size)
        self.protected: set[Place] = set()
        self._num_slots = num_slots
        self._remembered: OrderedDict[Place, None] = OrderedDict()  # the page that was evicted first is the first one

    def insert(
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: Sequence[int],
        prev_prefix_len: int = 0,
        from_handle: Handle = ROOT,
    ) -> Inserted:
        """Forget the new pages that are remembered, and protect all up to the last of them; a node ends there."""
        path = self._resident_path(tokens, namespace)
        places = self._places(tokens, namespace)
        known = [place for place in places[len(path) :] if place in self._remembered]
        done = super().insert(tokens, namespace, slots, prev_prefix_len, from_handle)
        if known:
            self.protected.update(places[: places.index(known[-1]) + 1])
            self.pages[known[-1]].ends_node = True
        for place in known:
            del self._remembered[place]
        return done

    def _rank(self, leaf: Place) -> tuple[int, ...]:
        """The queue that gives the victim, then the last use."""
        num_protected = sum(len(self.pages[place].slots) for place in self.protected)
        victim_is_protected = 2 * num_protected >= self._num_slots
        return int((leaf in self.protected) != victim_is_protected), self.pages[leaf].tick

    def _remove_node(self, end: Place) -> Node:
        places = self._pages_of_node(end)
        node = super()._remove_node(end)
        for place in reversed(places):
            if place in self.protected:
                self.protected.remove(place)
            elif self.is_current(place):
                self._remember(place)
        return node

    def _remember(self, place: Place) -> None:
        assert place not in self._remembered, "a page that is resident was forgotten as it was inserted"
        self._remembered[place] = None
        if len(self._remembered) > CAPACITY:
            self._remembered.popitem(last=False)

    def retire_all(self) -> None:
        """Forget every page, too."""
        super().retire_all()
        self._remembered.clear()

    def reset(self) -> list[int]:
        """Forget every page, too."""
        self.protected.clear()
        self._remembered.clear()
        return super().reset()


class PairedTwoQueues(CheckedRadixCache):
    """As for LRU; each node is in the queue of its model."""

    def __init__(self, page_size: int, num_pages: int, rng: Random, *, paged_pool: bool) -> None:
        super().__init__(page_size, num_pages, rng, paged_pool=paged_pool)
        for queue in (self._queues.probation, self._queues.protected):
            queue.search_limit = 64 if paged_pool else 1

    def _make(self, num_pages: int, rng: Random, paged_pool: bool) -> None:
        self.pool = (PagedLedgerPool if paged_pool else LedgerPool)(num_pages, self.page_size, rng)
        self.cache = RadixCache(self.page_size, None, self.pool, self.told.append, eviction_policy="2q")
        self._queues = two_queues_of(self.cache)
        self._queues.memory = PageMemory(self.page_size, CAPACITY)
        self.model = self._two_queues = ReferenceTwoQueues(self.page_size, self.pool.num_slots)

    def check(self) -> None:
        super().check()
        for node in self.cache.parts.tree.nodes():
            agree(f"queue of {node}", node.is_protected, self.place_of(node) in self._two_queues.protected)


def two_queues_of(cache: object) -> TwoQueues:
    """Return the two queues of a cache with policy "2q"."""
    queues = cache.parts.two_queues  # type: ignore[attr-defined]
    assert isinstance(queues, TwoQueues)
    return queues


def protected_pages(cache: RadixCache, namespaces: Iterable[str | None] = (None,)) -> int:
    """Return the number of protected pages that can be matched, in some namespaces."""
    wanted = set(namespaces)
    nodes = [node for node in cache.parts.tree.nodes() if node.namespace.extra_key in wanted]
    return sum(len(node) for node in nodes if node.is_protected) // cache.page_size
