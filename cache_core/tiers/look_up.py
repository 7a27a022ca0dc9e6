"""`LookUp`: how much of a request's key the pool and the places below it have."""

from __future__ import annotations

from raydix.cache_core.tiers.tier import Readable
from raydix.cache_core.tree.radix_key import RadixKey


class LookUp:
    """The lengths of the prefixes of one key, each looked up when it is asked for, once.

    It belongs to the step of the loop that has made it. Later the nodes may be evicted, and their pages used again.

    Args:
        key: of a request.
        limit: the request reuses at most so many tokens; None: all.
    """

    __slots__ = ("_lengths", "key", "limit")

    def __init__(self, key: RadixKey, limit: int | None = None) -> None:
        self.key = key
        self.limit = limit
        self._lengths: dict[Readable, int] = {}

    def length(self, place: Readable) -> int:
        """Return how many tokens of the key a lease, or a load, would find in a place."""
        length = self._lengths.get(place)
        if length is None:
            length = self._lengths[place] = place.longest_prefix(self.key, self.limit)
        return length
