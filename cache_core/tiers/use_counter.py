"""`UseCounter`: counts which pages requests use, and finds those that are used for the second time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from zlib import crc32

import numpy as np

from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.cache_core.tiers.second_use import SecondUse
from raydix.cache_core.tree.hashing import int64s
from raydix.cache_core.tree.page_hashes import path_hashes
from raydix.cache_core.tree.radix_key import RadixKey

_MOST_RETIREMENTS = 64  # that are remembered: clients choose names of namespaces, so there is no table of these


class UseCounter(RequestObserver):
    """Counts the uses of pages: an observer of the first tier.

    A request uses the pages that it publishes, and those that it hits, in whatever tier they lay. The former are
    counted when they are published, the latter when its lease ends. A request that was preempted and resumed counts
    once. Pages are known by the hashes that their nodes keep. A retirement forgets the uses of its namespaces.

    Args:
        cache: of the first tier.
        uses: the memory of uses.
        is_counted: returns whether pages of a namespace are counted now; None: all are.
        on_due: called with a tree's key when its last page, and perhaps others, are used for the second time.

    Attributes:
        num_uses: pages that were counted.
        num_first_uses: pages that were counted and not known.
    """

    def __init__(
        self,
        cache: KVCache,
        uses: SecondUse,
        is_counted: Callable[[str | None], bool] | None,
        on_due: Callable[[RadixKey], object],
    ) -> None:
        self.num_uses = 0
        self.num_first_uses = 0
        self._cache = cache
        self._uses = uses
        self._is_counted = is_counted
        self._retirements: deque[tuple[int, Callable[[str | None], bool]]] = deque(maxlen=_MOST_RETIREMENTS)
        self._num_retirements = 0
        self._on_due = on_due
        self._counted: dict[str, int] = {}  # lease id -> published pages that were counted, or hit

    def published(self, lease: LeaseRecord) -> None:
        """Count the pages that a lease has published for its request."""
        if lease.session_id == TIERS or lease.retired:
            return
        first = max(lease.prefix_len // self._cache.page_size, self._counted.get(lease.lease_id, 0))
        if lease.num_published_pages > first:
            self._counted[lease.lease_id] = lease.num_published_pages
            self._count(lease, first, lease.num_published_pages)

    def ended(self, lease: LeaseRecord) -> None:
        """Count the pages that a lease has hit, unless its request begins again."""
        self._counted.pop(lease.lease_id, None)
        if lease.session_id != TIERS and not lease.retired:
            self._count(lease, 0, lease.prefix_len // self._cache.page_size)

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Begin the next generation of namespaces, and so forget their uses."""
        self._num_retirements += 1
        self._retirements.append((self._num_retirements, is_meant))

    def _salt_of(self, namespace: str | None) -> int:
        """Return a hash of a namespace and its generation: the number of the last retirement that meant it.

        After 64 other retirements it is that of the first generation again.
        """
        generation = next((number for number, is_meant in reversed(self._retirements) if is_meant(namespace)), 0)
        return crc32((namespace or "").encode("utf-8", "surrogatepass"), generation)

    def _count(self, lease: LeaseRecord, first: int, stop: int) -> None:
        """Count pages [first, stop) of a lease. If leading ones were used before, they are due."""
        namespace = lease.key.extra_key
        if lease.resumed or stop <= first or not (self._is_counted is None or self._is_counted(namespace)):
            return
        hashes = path_hashes(lease.node, self._cache.page_size, first, stop)
        digests = [bytes.fromhex(digest[:16]) for digest in hashes]
        known = self._uses.count(int64s(digests), self._salt_of(namespace))
        num_known = int(np.count_nonzero(known))
        self.num_uses += len(known)
        self.num_first_uses += len(known) - num_known
        leading = num_known if num_known == len(known) else int(np.argmin(known))
        if leading:
            self._on_due(self._cache.tree_key(lease.key)[: (first + leading) * self._cache.page_size])
