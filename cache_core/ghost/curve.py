"""`GhostCurve`: the miss-ratio curve of a running cache, as hit rates of caches of other sizes.

The reuse distance of a page is how many other pages were used since its last use. With LRU, a cache that holds more
pages than that still has the page. This also holds if leaves are evicted in the order of their last use, because
no page is used less recently than the pages after it. Only pages with a hash below a threshold are followed (spatial
sampling, as in SHARDS, Waldspurger et al., FAST '15); distances are scaled up accordingly.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import neg

import numpy as np

from raydix.cache_core.ghost.prefix_hashes import PrefixHasher
from raydix.cache_core.ghost.reuse_stack import Depths, Group, ReuseStack
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.cache_core.tree.radix_key import RadixKey

_QUEUED_TOKENS = 65_536  # processed together
_QUEUED_PAGES = 65_536
_QUEUED_USES = 512
_SPREAD = 0x9E3779B97F4A7C15
_MAX_NAMESPACES = 65_536  # namespaces that have a seed; one more clears all seeds


@dataclass(slots=True, eq=False)
class _Use:
    """A lookup or a store of a prefix."""

    key: RadixKey
    num_pages: int
    seed: int
    num_counted: int | None = None  # leading pages with hits that count; None: a store only
    num_needed: int = 0  # pages of the whole lease: a smaller cache rejects it
    stores: bool = False
    of: _Use | None = None  # the earlier use that begins with the same pages
    pages: list[int] | None = None  # hashes of the sampled pages, the last one first; None until hashed
    places: list[int] | None = None  # positions of `pages` in the prefix


class GhostCurve(RequestObserver):
    """A `RequestObserver` that estimates the hit rates of caches of other sizes.

    Requests are queued, and processed many at a time. Memory is bounded: 200 bytes for each of `max_pages`, the keys in
    the queue, and the sampled pages of open leases.

    Args:
        page_size: tokens.
        max_size: tokens; the largest cache to estimate.
        max_pages: how many pages to follow; if `max_size` holds more, a sample of them.
        seed: of the sample.
        bigram: whether the tree's keys, and so the pages, are pairs of neighbouring tokens.
    """

    def __init__(
        self, page_size: int, max_size: int, max_pages: int = 16_384, seed: int = 0, bigram: bool = False
    ) -> None:
        self.page_size = page_size
        self._bigram = bigram
        self.max_size = max_size
        self.sample_rate = min(1.0, max_pages * page_size / max_size)
        self.tokens_requested = self.tokens_loaded = 0
        self._threshold = np.uint64(min(int(self.sample_rate * 2**64), 2**64 - 1))
        self._hasher = PrefixHasher(page_size, seed)
        self._stack = ReuseStack(max_pages)
        self._hits = np.zeros(max_pages + 1, np.int64)  # found pages by reuse distance; last: that or more
        self._num_sampled = 0  # sampled pages of lookups
        self._num_pages = 0  # all pages of lookups
        self._queue: list[_Use] = []
        self._queued_pages = 0
        self._max_queued_pages = min(_QUEUED_PAGES, _QUEUED_TOKENS // page_size)
        self._open: dict[LeaseRecord, tuple[_Use, int]] = {}  # its lookup, and how many of its pages are stored
        self._seeds: dict[str | None, int] = {}
        self._num_seeds = seed << 32

    # ---------------------------------------------------------------- requests

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """Look up the prompt of a lease. A resumed lease's prompt is not counted again."""
        page, key = self.page_size, lease.key
        num_pages = max(0, len(key) - self._bigram) // page
        if lease.resumed:
            counted = 0
        else:
            counted = num_pages if max_prefix_len is None else min(num_pages, max_prefix_len // page)
            self.tokens_requested += len(key)
            self._num_pages += counted
        use = _Use(key, num_pages, self._seed_of(key.extra_key), counted, -(-lease.num_slots // page))
        self._open[lease] = use, 0
        self._add(use)

    def loaded(self, lease: LeaseRecord, num_tokens: int) -> None:
        """Count tokens that are no hits of the curve: it is of pools without a tier below."""
        if not lease.resumed:
            self.tokens_loaded += num_tokens

    def published(self, lease: LeaseRecord) -> None:
        """Store the pages that a lease publishes first; `ended` stores the pages that it publishes later.

        Pages that a load publishes do not count as the first ones: without the load, they would be published with them.
        """
        if (found := self._open.get(lease)) is not None and not found[1]:
            self._store(lease, found[0])
            if lease.filling_for is not None:
                self._open[lease] = found

    def ended(self, lease: LeaseRecord) -> None:
        """Store the pages that the lease has published since `published`."""
        use, num_stored = self._open.pop(lease, (None, 0))
        if use is None:
            return
        if lease.filling_for and use.pages is None and not lease.resumed:  # The request begins again.
            self.tokens_requested -= len(use.key)
            self.tokens_loaded -= lease.loaded_len
            self._num_pages -= use.num_counted or 0
            use.num_counted = 0
        if lease.num_published_pages > max(num_stored, lease.prefix_len // self.page_size):
            self._store(lease, use)
            del self._open[lease]

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Forget the seeds of the retired namespaces, so that their pages are never found again."""
        self._seeds = {extra_key: seed for extra_key, seed in self._seeds.items() if not is_meant(extra_key)}

    def _store(self, lease: LeaseRecord, use: _Use) -> None:
        num_pages = lease.num_published_pages
        self._open[lease] = use, num_pages
        if num_pages == use.num_pages and self._queue and self._queue[-1] is use:
            use.stores = True
            return
        of = use if num_pages <= use.num_pages else None
        self._add(_Use(lease.key, num_pages, use.seed, stores=True, of=of))

    def _add(self, use: _Use) -> None:
        if not use.num_pages:
            return
        self._queue.append(use)
        if use.of is None:
            self._queued_pages += use.num_pages
        if self._queued_pages >= self._max_queued_pages or len(self._queue) >= _QUEUED_USES:
            self._process_queue()

    def _seed_of(self, extra_key: str | None) -> int:
        seed = self._seeds.get(extra_key)
        if seed is None:
            if len(self._seeds) >= _MAX_NAMESPACES:
                self._seeds.clear()
            self._num_seeds += 1
            seed = self._seeds[extra_key] = self._num_seeds * _SPREAD % 2**64
        return seed

    # ---------------------------------------------------------------- distances

    def _process_queue(self) -> None:
        queue, self._queue, self._queued_pages = self._queue, [], 0
        if not queue:
            return
        self._hash([use for use in queue if use.of is None])
        for use in queue:
            if use.of is not None:
                use.pages, use.places = _first_of(use.of, use.num_pages)
        groups = [Group(use.pages or [], use.num_counted is not None, use.stores) for use in queue]
        self._count([self._counted(use, depths) for use, depths in zip(queue, self._stack.use(groups), strict=True)])

    def _hash(self, uses: list[_Use]) -> None:
        """Set the sampled pages of each use, the last one first."""
        if not uses:
            return
        num_pages = [use.num_pages for use in uses]
        keys = [use.key.bigrams() if self._bigram else use.key for use in uses]
        hashes = self._hasher.hash_pages(keys, num_pages, [use.seed for use in uses])
        sampled = np.flatnonzero(hashes <= self._threshold)[::-1]
        ends = np.cumsum(num_pages)
        cuts = len(sampled) - np.searchsorted(sampled[::-1], ends)
        places = (sampled - np.repeat(ends - num_pages, num_pages)[sampled]).tolist()
        pages, stop = hashes[sampled].tolist(), len(sampled)
        for use, start in zip(uses, cuts.tolist(), strict=True):
            use.pages, use.places, stop = pages[start:stop], places[start:stop], start

    def _counted(self, use: _Use, depths: Depths) -> Depths:
        """Return the depths of the pages of a lookup that count as hits or misses.

        A found page is at least as deep as the last page that the lease needs: smaller caches reject the lease.
        """
        if use.num_counted is None:
            return depths
        if use.num_counted != use.num_pages:
            assert use.places is not None, "the use was looked up, so it was hashed before"
            depths = depths[np.array(use.places, np.int64) < use.num_counted]
        least = math.ceil(use.num_needed * self.sample_rate) - 1
        return np.where(depths >= 0, np.maximum(depths, least), depths)

    def _count(self, looked_up: list[Depths]) -> None:
        depths = np.concatenate(looked_up)
        self._num_sampled += len(depths)
        found = np.minimum(depths[depths >= 0], len(self._hits) - 1)
        np.add.at(self._hits, found, 1)

    def hit_rates(self, sizes: Sequence[int]) -> list[float]:
        """Return the share of prompt tokens that a cache of each size would have found.

        0 before the first request. Sizes are in tokens.
        """
        self._process_queue()
        if not self.tokens_requested:
            return [0.0] * len(sizes)
        rate, page = self.sample_rate, self.page_size
        found = np.concatenate(([0], np.cumsum(self._hits)))
        above = np.ceil(np.array(sizes, np.float64) * rate / page).astype(np.int64)
        # The sample may have more or less than its share of pages that are always in use: any cache finds them.
        missing = self._num_pages * rate - self._num_sampled
        pages = (found[np.minimum(above, len(found) - 1)] + missing) / rate
        tokens = np.clip(pages, 0, self._num_pages) * page
        rates: list[float] = (tokens / self.tokens_requested).tolist()
        return rates


def _first_of(use: _Use, num_pages: int) -> tuple[list[int], list[int]]:
    assert use.pages is not None and use.places is not None, "a prefix is stored before its lookup is hashed"
    later = bisect_left(use.places, -num_pages + 1, key=neg)  # places descend
    return use.pages[later:], use.places[later:]
