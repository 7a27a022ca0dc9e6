"""What a cache tells whoever watches its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tree.radix_key import RadixKey


class RequestObserver(Protocol):
    """Watches a cache's requests. Each call is on the cache's path: it must be quick and must not raise."""

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """A lease began; it was to reuse `max_prefix_len` tokens at most."""

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """A request for a lease of `key` over `num_tokens` tokens was refused for want of room."""

    def published(self, lease: LeaseRecord) -> None:
        """More of a lease's pages can be found by others: `num_published_pages` in all."""

    def ended(self, lease: LeaseRecord) -> None:
        """A lease is over."""

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Nothing of these namespaces, by `extra_key`, can be found any more."""
