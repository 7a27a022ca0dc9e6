"""`Tier`: one pool of KV with its cache. `Readable`: what a load needs of the place that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from raydix.cache_core.leases.kv_cache import KVCache
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts
from raydix.cache_core.tree.radix_key import RadixKey


class Lock(Protocol):
    """A lock on pages that are read."""

    @property
    def retired(self) -> bool:
        """Whether the namespace was retired since: the pages may not be used."""


class Source(NamedTuple):
    """A cached prefix whose pages are locked, to be read.

    Attributes:
        lock: for `Readable.unlock`.
        stop: the token where the prefix ends.
        starts: first slots of its pages.
        live_from: the token from which it has window KV, too; `stop` if it has none.
        windows: first window slots of the pages from there.
        state: slot of the state at its end; None: there is none.
    """

    lock: Lock
    stop: int
    starts: Starts
    live_from: int
    windows: Starts = NO_STARTS
    state: int | None = None


class Readable(Protocol):
    """A place with KV that loads read. It names slots and prefixes as the pool's cache does.

    Attributes:
        name: in statistics and errors, such as "host".
        medium: of its KV, as events name it: "CPU" or "STORAGE".
    """

    name: str
    medium: str

    @property
    def page_size(self) -> int:
        """Tokens of a page; it must be that of the pool."""

    def longest_prefix(self, key: RadixKey, limit: int | None = None) -> int:
        """Return how many tokens of a request's key a load would find, at most `limit`. Changes nothing."""

    def lock(self, key: RadixKey, limit: int) -> Source:
        """Lock the cached prefix of a request's key, at most `limit` tokens, and note its use."""

    def unlock(self, lock: Lock) -> None:
        """Unlock a prefix, whose pages are no longer read."""


@dataclass(eq=False)
class Tier:
    """A pool of KV in one place, with the cache of its own that maps prefixes to its pages. Loads can read it.

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

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.cache.page_size

    def longest_prefix(self, key: RadixKey, limit: int | None = None) -> int:
        """Return how many tokens of a request's key a lease would find here, at most `limit`. Changes nothing."""
        cache = self.cache
        return cache.radix.cached_lens(cache.tree_key(key)[:limit])[0]

    def lock(self, key: RadixKey, limit: int) -> Source:
        """Lock the cached prefix of a request's key, at most `limit` tokens, and count a request."""
        cache, page = self.cache, self.page_size
        lease = cache.find_source(cache.tree_key(key), limit)
        stop, live_from, windows = lease.prefix_len, cache.radix.live_from(lease.node), NO_STARTS
        if cache.allocator.swa is not None:
            windows = cache.allocator.swa_starts(lease.starts[live_from // page :])
        return Source(lease, stop, lease.starts, live_from, windows, cache.tree.state_at(lease.node))

    def unlock(self, lock: Lock) -> None:
        """Unlock a prefix, whose pages are no longer read."""
        assert isinstance(lock, LeaseRecord), "a tier locks by leases"
        self.num_unlocks += 1
        self.cache.end_quietly(lock, is_use=True)
