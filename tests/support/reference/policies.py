"""The leaf that each policy evicts first, page by page; and a cache that runs with this model."""

from __future__ import annotations

from random import Random

from support.checked.radix_cache import CheckedRadixCache, LedgerPool, PagedLedgerPool
from support.reference.models import Place, ReferenceRadixCache

from raydix.cache_core import RadixCache

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "slru", "priority")
LOWEST = -(2**31)


class ReferencePolicyCache(ReferenceRadixCache):
    """A prefix cache that evicts leaves in the order of a policy. No two leaves have the same rank.

    Attributes:
        request_priority: of the match or insert that comes next.
    """

    def __init__(self, page_size: int, policy: str) -> None:
        super().__init__(page_size)
        self.policy = policy
        self.request_priority = 0
        self._priorities: dict[tuple[Place, int], int] = {}  # by page and birth

    def priority(self, place: Place) -> int:
        """The highest of the requests that went through a page."""
        return self._priorities[place, self.pages[place].birth]

    def _rank(self, leaf: Place) -> tuple[int, ...]:
        page = self.pages[leaf]
        return {
            "lru": (page.tick,),
            "lfu": (page.hits, page.tick),
            "fifo": (page.birth,),
            "mru": (-page.tick,),
            "filo": (-page.birth,),
            "slru": (int(page.hits > 1), page.tick),
            "priority": (self.priority(leaf), page.tick),
        }[self.policy]

    def note_request(self) -> None:
        """Stamp the pages on the path of an operation with its time."""
        for place, page in self.pages.items():
            known = self._priorities.get((place, page.birth), LOWEST)
            used = page.tick == self._clock
            self._priorities[place, page.birth] = max(known, self.request_priority) if used else known


class PairedPolicyCache(CheckedRadixCache):
    """As for LRU; requests have priorities, and each node has that of its model."""

    def __init__(self, page_size: int, num_pages: int, rng: Random, policy: str, *, paged_pool: bool) -> None:
        self._policy, self._rng = policy, rng
        super().__init__(page_size, num_pages, rng, paged_pool=paged_pool)

    def _make(self, num_pages: int, rng: Random, paged_pool: bool) -> None:
        self.pool = (PagedLedgerPool if paged_pool else LedgerPool)(num_pages, self.page_size, rng)
        self.cache = RadixCache(self.page_size, None, self.pool, self.told.append, eviction_policy=self._policy)
        self.model = self._policies = ReferencePolicyCache(self.page_size, self._policy)

    def _request(self) -> dict[str, int]:
        self._policies.request_priority = self._rng.randint(-2, 3)
        return {"priority": self._policies.request_priority}

    def check(self) -> None:
        self._policies.note_request()
        super().check()
        for node in self.cache.parts.tree.nodes():
            page = self.place_of(node)
            assert node.priority == self._policies.priority(page), f"priority of {node}"
