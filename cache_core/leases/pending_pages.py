"""`PendingPages`: the pages that open leases have promised to publish."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.cache_core.radix.prefix_cache import PrefixCache
from raydix.cache_core.tree.hashing import hash_pages, namespace_seed
from raydix.cache_core.tree.page_events import Hashes, SlimEventSink
from raydix.cache_core.tree.radix_key import RadixKey


class _Promise(NamedTuple):
    """The pages that one lease has not published yet."""

    extra_key: str | None
    ends: list[int]  # the end of each page, in pages from the start of the lease
    hashes: list[int]


class PendingPages(RequestObserver):
    """Publishes the pages of open leases as pending, until they are published or the lease ends.

    A `RequestObserver`. A lease has pending pages for its tokens behind the cached prefix: whole pages, at the ends of
    strides. A page is pending while any lease has it. Costs SHA-256 of each uncached page when a lease begins.

    Args:
        tree: of the leases' nodes.
        tree_key: returns the tree's key of a lease's tokens.
        stride: pages of a stride.
        sink: receives the events.
    """

    def __init__(
        self, tree: PrefixCache, tree_key: Callable[[RadixKey], RadixKey], stride: int, sink: SlimEventSink
    ) -> None:
        self._tree = tree
        self._tree_key = tree_key
        self._stride = stride
        self._sink = sink
        self._promises: dict[str, _Promise] = {}  # lease id -> promise
        self._counts: dict[int, int] = {}  # hash of a page -> leases that have it

    def hashes(self) -> Hashes:
        """Return the pending pages, each once."""
        return np.fromiter(self._counts, np.int64)

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """Publish the pages of a lease that it will compute. A lease that only locks has none."""
        if lease.only_locks:
            return
        key, page = self._tree_key(lease.key), self._tree.page_size
        first, stop = lease.num_published_pages, len(key) // page // self._stride * self._stride
        if stop <= first:
            return
        assert not first or lease.node.end == first * page, "a lease's node ends where its cached prefix does"
        size = page * key.unit
        prior = self._tree.digest_at(lease.node) if first else namespace_seed(key.extra_key)
        ids, skipped = key.data[first * size : stop * size], -(first + 1) % self._stride
        hashes: list[int] = hash_pages(
            ids, size, key.width, key.arity, prior, skipped=skipped, stride=self._stride
        ).tolist()
        ends = list(range(first + skipped + 1, stop + 1, self._stride))
        self._promises[lease.lease_id] = _Promise(key.extra_key, ends, hashes)
        new = [page for page in dict.fromkeys(hashes) if page not in self._counts]
        for page in hashes:
            self._counts[page] = self._counts.get(page, 0) + 1
        if new:
            self._sink.pending(np.array(new, np.int64))

    def published(self, lease: LeaseRecord) -> None:
        """End the pages that a lease has published. They were published as stored before."""
        promise = self._promises.get(lease.lease_id)
        if promise is None:
            return
        count = sum(end <= lease.num_published_pages for end in promise.ends)
        ended = promise.hashes[:count]
        if count == len(promise.ends):
            del self._promises[lease.lease_id]
        else:
            self._promises[lease.lease_id] = _Promise(promise.extra_key, promise.ends[count:], promise.hashes[count:])
        self._end(ended)

    def ended(self, lease: LeaseRecord) -> None:
        """End the pages of a lease that has ended."""
        promise = self._promises.pop(lease.lease_id, None)
        if promise is not None:
            self._end(promise.hashes)

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """End the pages of the leases of retired namespaces: they publish nothing any more."""
        gone = [lease_id for lease_id, promise in self._promises.items() if is_meant(promise.extra_key)]
        self._end([page for lease_id in gone for page in self._promises.pop(lease_id).hashes])

    def _end(self, hashes: list[int]) -> None:
        ended: list[int] = []
        for page in hashes:
            self._counts[page] -= 1
            if not self._counts[page]:
                del self._counts[page]
                ended.append(page)
        if ended:
            self._sink.not_pending(np.array(ended, np.int64))
