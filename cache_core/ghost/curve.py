"""`GhostCurve`: the hit rate that a cache of another size would have had, from the requests of a running one.

The reuse distance of a page is how many other pages were used since its last use: least recently used first, a cache
that holds more pages than that still has it. Whole leaves that leave a tree in the order of their last use do so, too,
and so does a whole prefix: no page lies above the page before it. Only pages whose hash falls below a threshold are
followed (spatial sampling, as in SHARDS, Waldspurger et al., FAST '15); distances are scaled up by it.
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
from raydix.cache_core.tree.radix_key import RadixKey

_QUEUED_TOKENS = 65_536  # looked at together
_QUEUED_PAGES = 65_536
_QUEUED_USES = 512
_SPREAD = 0x9E3779B97F4A7C15
_MAX_NAMESPACES = 65_536  # whose seeds are remembered; beyond it all begin anew


@dataclass(slots=True, eq=False)
class _Use:
    """A prefix that was looked up or stored."""

    key: RadixKey
    num_pages: int
    seed: int
    num_counted: int | None = None  # leading pages whose hits count; None: nothing was looked up
    num_needed: int = 0  # pages of the whole lease: a smaller cache refuses it
    stores: bool = False
    of: _Use | None = None  # the use that these pages are the first of
    pages: list[int] | None = None  # the sampled ones, once they are hashed, the last one first
    places: list[int] | None = None  # where these stand in the prefix


class GhostCurve:
    """Watches requests (`RequestObserver`) and tells what caches of other sizes would have hit.

    What is seen is queued, and looked at many requests at a time. Memory is bounded: 200 bytes for each of `max_pages`,
    the keys of the queue, and the sampled pages of open leases.

    Args:
        page_size: tokens.
        max_size: tokens; the largest cache to tell of.
        max_pages: how many pages to follow; where `max_size` holds more, a sample of them.
        seed: of the sample.
        bigram: the tree's keys are pairs of neighbouring tokens, and so are the pages.
    """

    def __init__(
        self, page_size: int, max_size: int, max_pages: int = 16_384, seed: int = 0, bigram: bool = False
    ) -> None:
        self.page_size = page_size
        self._bigram = bigram
        self.max_size = max_size
        self.sample_rate = min(1.0, max_pages * page_size / max_size)
        self.tokens_requested = 0
        self._threshold = np.uint64(min(int(self.sample_rate * 2**64), 2**64 - 1))
        self._hasher = PrefixHasher(page_size, seed)
        self._stack = ReuseStack(max_pages)
        self._hits = np.zeros(max_pages + 1, np.int64)  # sampled pages found, by how many lay above; last: that or more
        self._num_sampled = 0  # sampled pages that were looked up
        self._num_pages = 0  # all pages that were
        self._queue: list[_Use] = []
        self._queued_pages = 0
        self._max_queued_pages = min(_QUEUED_PAGES, _QUEUED_TOKENS // page_size)
        self._open: dict[LeaseRecord, tuple[_Use, int]] = {}  # the lookup, and how many pages were stored
        self._seeds: dict[str | None, int] = {}
        self._num_seeds = seed << 32

    # ---------------------------------------------------------------- what it watches

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """The prompt of a lease is looked up."""
        use = self._look_up(lease.key, lease.num_slots, max_prefix_len)
        self._open[lease] = use, 0
        self._add(use)

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """A request was refused: a cache with room for it looks it up and stores its prompt.

        One that can ever fit found the room taken by other leases, and comes again: a miss, whatever the size.
        """
        if can_ever_fit:
            self.tokens_requested += len(key)
            return
        use = self._look_up(key.kept(), num_tokens, None)
        use.stores = True
        self._add(use)

    def _look_up(self, key: RadixKey, num_tokens: int, max_prefix_len: int | None) -> _Use:
        """The use of a prompt by a lease over so many tokens, counted as requested."""
        page = self.page_size
        num_pages = max(0, len(key) - self._bigram) // page
        counted = num_pages if max_prefix_len is None else min(num_pages, max_prefix_len // page)
        self.tokens_requested += len(key)
        self._num_pages += counted
        return _Use(key, num_pages, self._seed_of(key.extra_key), counted, -(-num_tokens // page))

    def published(self, lease: LeaseRecord) -> None:
        """The first pages that a lease publishes are stored at once, what it publishes later at its end."""
        if (found := self._open.get(lease)) is not None and not found[1]:
            self._store(lease, found[0])

    def ended(self, lease: LeaseRecord) -> None:
        """What the lease has published since is stored."""
        use, num_stored = self._open.pop(lease, (None, 0))
        if use is not None and lease.num_published_pages > max(num_stored, lease.prefix_len // self.page_size):
            self._store(lease, use)
            del self._open[lease]

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """The pages of these namespaces will not be found again."""
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
            self._look_at_queue()

    def _seed_of(self, extra_key: str | None) -> int:
        seed = self._seeds.get(extra_key)
        if seed is None:
            if len(self._seeds) >= _MAX_NAMESPACES:
                self._seeds.clear()
            self._num_seeds += 1
            seed = self._seeds[extra_key] = self._num_seeds * _SPREAD % 2**64
        return seed

    # ---------------------------------------------------------------- what it makes of it

    def _look_at_queue(self) -> None:
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
        """Give each use its sampled pages, the last one first."""
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
        """The depths of the pages whose hits count, of those that a use looked up.

        A page found is at least as deep as the last one that the lease needs: smaller caches refuse the lease.
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
        """The share of prompt tokens that caches of so many tokens would have found; 0 before the first request."""
        self._look_at_queue()
        if not self.tokens_requested:
            return [0.0] * len(sizes)
        rate, page = self.sample_rate, self.page_size
        found = np.concatenate(([0], np.cumsum(self._hits)))
        above = np.ceil(np.array(sizes, np.float64) * rate / page).astype(np.int64)
        # Pages that are used all the time, sampled or not by chance, are found by caches of any size.
        missing = self._num_pages * rate - self._num_sampled
        pages = (found[np.minimum(above, len(found) - 1)] + missing) / rate
        tokens = np.clip(pages, 0, self._num_pages) * page
        rates: list[float] = (tokens / self.tokens_requested).tolist()
        return rates


def _first_of(use: _Use, num_pages: int) -> tuple[list[int], list[int]]:
    assert use.pages is not None and use.places is not None, "a prefix is stored before it was looked up"
    later = bisect_left(use.places, -num_pages + 1, key=neg)  # places fall
    return use.pages[later:], use.places[later:]
