"""`GhostCurve` as plainly as it can be written: a list of prefixes, the one used last in front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raydix.cache_core.leases.lease_table import LeaseRecord


class ReferenceGhost:
    """Counts hits as requests come, without hashes and without a bound."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tokens_requested = 0
        self.depths: list[int] = []  # of each page found: how many were above it
        self._stack: list[Any] = []
        self._stored: dict[LeaseRecord, int] = {}
        self._generations: dict[str | None, int] = {}
        self._generation_of: dict[LeaseRecord, int] = {}

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        page = self.page_size
        self.tokens_requested += len(lease.key)
        self._generation_of[lease] = self._generations.get(lease.key.extra_key, 0)
        self._stored[lease] = 0
        prefixes = self._prefixes(lease, len(lease.key) // page)
        counted = len(prefixes) if max_prefix_len is None else max_prefix_len // page
        found = [prefix for prefix in prefixes if prefix in self._stack]
        needed = -(-lease.num_slots // page)
        depths = [self._stack.index(prefix) for prefix in found if prefix in prefixes[:counted]]
        self.depths += [max(depth, needed - 1) for depth in depths]
        self._put_on_top(found)

    def published(self, lease: LeaseRecord) -> None:
        if not self._stored[lease]:
            self._store(lease)

    def ended(self, lease: LeaseRecord) -> None:
        if lease.num_published_pages > max(self._stored.pop(lease), lease.prefix_len // self.page_size):
            self._store(lease)

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        for extra_key in {lease.key.extra_key for lease in self._generation_of} | set(self._generations):
            if is_meant(extra_key):
                self._generations[extra_key] = self._generations.get(extra_key, 0) + 1

    def _store(self, lease: LeaseRecord) -> None:
        self._stored[lease] = lease.num_published_pages
        self._put_on_top(self._prefixes(lease, lease.num_published_pages))

    def _prefixes(self, lease: LeaseRecord, num_pages: int) -> list[Any]:
        ids, space = lease.key.token_ids, (lease.key.extra_key, self._generation_of[lease])
        return [(space, tuple(ids[: (place + 1) * self.page_size])) for place in range(num_pages)]

    def _put_on_top(self, prefixes: list[Any]) -> None:
        self._stack = prefixes + [prefix for prefix in self._stack if prefix not in prefixes]

    def hit_rate(self, size: int) -> float:
        found = sum(depth * self.page_size < size for depth in self.depths)
        return found * self.page_size / self.tokens_requested
