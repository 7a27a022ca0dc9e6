"""`Tier`: one pool of KV with its cache."""

from __future__ import annotations

from dataclasses import dataclass

from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.tree.radix_key import RadixKey


@dataclass(eq=False)
class Tier:
    """A pool of KV in one place, with the cache of its own that maps prefixes to its pages.

    Attributes:
        name: in statistics and errors, such as "device" or "host".
        medium: of its events: "GPU", "CPU" or "STORAGE".
        cache: the cache over its pool. It must have a tree of nodes with pages.
        num_unlocks: how many moves have locked pages of it, or had private ones, and do so no more.
    """

    name: str
    medium: str
    cache: KVCache
    num_unlocks: int = 0

    def longest_prefix(self, key: RadixKey) -> int:
        """Return how many tokens of a request's key a lease would find here. Changes nothing."""
        cache = self.cache
        return cache.radix.cached_lens(cache.tree_key(key))[0]
