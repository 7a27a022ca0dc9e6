"""`RequestObserver`: the notifications of a cache with leases about its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tree.radix_key import RadixKey


class RequestObserver(Protocol):
    """An observer of a cache's requests. The cache waits for each call, which must be quick and must not raise.

    An observer that derives from it has the calls that do nothing.
    """

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """Note that a lease began. It may reuse at most `max_prefix_len` tokens; None: all that are cached.

        If it is `resumed`, its request was noted before.
        """
        return

    def loaded(self, lease: LeaseRecord, num_tokens: int) -> None:
        """Note that a lease, before its session gets it, was given more cached tokens by a load: `num_tokens`."""
        return

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Note that a request for a lease of `key` over `num_tokens` tokens was refused for lack of slots."""
        return

    def published(self, lease: LeaseRecord) -> None:
        """Note that other leases can find more pages of a lease: `num_published_pages` in all."""
        return

    def ended(self, lease: LeaseRecord) -> None:
        """Note that a lease has ended. If it has `filling_for`, its request was not answered, and begins again."""
        return

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Note that namespaces were made unmatchable. `is_meant(extra_key)` is True for each of them."""
        return
