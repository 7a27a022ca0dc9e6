"""`CacheFacts`: what a cache of leases tells of itself, and of what its leases hold. Nothing here changes anything."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from raydix.cache_core.base_prefix_cache import MatchResult, RadixKey, Starts
from raydix.cache_core.eviction.history import EvictionRecord
from raydix.cache_core.eviction.tenants import Tenant
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.quarantine import Quarantine
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.radix.page_events import PageRun

NO_STARTS: Starts = np.empty(0, np.int64)


class PoolSizes(NamedTuple):
    """One pool of a cache, in slots of its own; what is left is private to leases."""

    num_slots: int
    free: int
    evictable: int
    protected: int
    quarantined: int = 0
    kept: int = 0  # what no lease holds, but a floor of another tenant keeps


class CacheFacts(ABC):
    """The half of a `LeasedCache` that is asked.

    Attributes:
        num_slots: of the pool.
        page_size: tokens; what is published and found is whole pages.
        quarantine: the leases of vanished sessions, whose private slots are withheld.
    """

    num_slots: int
    page_size: int

    def __init__(self) -> None:
        self.quarantine = Quarantine()

    # ---------------------------------------------------------------- sizes

    @property
    @abstractmethod
    def free_slots(self) -> int:
        """Slots that can be handed out as they are."""

    @property
    @abstractmethod
    def private_slots(self) -> int:
        """Slots of leases that nobody shares."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Slots of what is cached that no lease holds."""

    @abstractmethod
    def protected_size(self) -> int:
        """Slots of what is cached that leases hold, shared."""

    @property
    def quarantined_slots(self) -> int:
        """Slots withheld because a vanished owner may still be writing them. O(leases in quarantine)."""
        return sum(map(self._private_size, self.quarantine))

    def total_size(self) -> int:
        """Slots of what is cached."""
        return self.evictable_size() + self.protected_size()

    def held_slots(self) -> int:
        """Slots that cannot be evicted because leases hold them."""
        return self.private_slots + self.protected_size()

    def configured_tenants(self) -> Sequence[Tenant]:
        """The tenants with a floor or a cap, then the rest; empty without such tenants."""
        return ()

    def tenant_of(self, extra_key: str | None) -> str | None:
        """The tenant whose namespace that is; None: nobody's in particular."""
        return None

    def share_of(self, name: str) -> PoolSizes:
        """The share of a tenant that has a cap, as if it were a pool of that size."""
        raise AssertionError(f"there is no tenant {name!r}")

    def is_within_floor(self, key: RadixKey, num_tokens: int) -> bool:
        """Whether the tenant of `key` holds no more than its floor with a lease over so many tokens."""
        return False

    def sizes_of(self, pool: str, extra_key: str | None = None) -> PoolSizes:
        """The pool that an `OutOfSlotsError` names, as a request of that namespace finds it."""
        sizes = {"window slots": self.swa_sizes, "states": self.state_sizes}.get(pool, lambda: None)()
        return sizes or PoolSizes(self.num_slots, self.free_slots, self.evictable_size(), self.protected_size())

    def swa_sizes(self) -> PoolSizes | None:
        """The pool of window slots, if there is one."""
        return None

    def state_sizes(self) -> PoolSizes | None:
        """The pool of recurrent states, if there is one."""
        return None

    # ---------------------------------------------------------------- what is cached

    @abstractmethod
    def match(self, key: RadixKey) -> MatchResult:
        """A probe: what `acquire` would find, without any effect."""

    @abstractmethod
    def explain(self, key: RadixKey) -> Explanation:
        """Where a match of `key` ends, and why it goes no further. Changes nothing."""

    @property
    def now(self) -> int:
        """The cache's own clock, in ticks; 0 where it has none."""
        return 0

    def sample_tree(self, max_nodes: int) -> Outline:
        """What each namespace holds and where, from so many nodes or a few more; nothing where there is no tree."""
        return Outline([], 0, 0)

    def evictions(self) -> list[EvictionRecord]:
        """What was evicted of late, the latest last, as far as that is remembered."""
        return []

    @abstractmethod
    def outline(self, limits: OutlineLimits) -> Outline:
        """The largest branches of what can be matched. Bounded work, however much is cached."""

    def resident_pages(self) -> Iterable[PageRun]:
        """The pages that events tell of and that can be matched now, parents before children. O(n)."""
        return ()

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the cache or of what it is made of is broken. O(everything)."""

    # ---------------------------------------------------------------- what a lease holds

    def lease_sizes(self, leases: Iterable[LeaseRecord]) -> Iterator[int]:
        """Yield the slots that each lease holds and no lease before it: their sum is what all of them hold."""
        seen = np.zeros(self.num_slots // self.page_size + 1, np.bool_)  # pages; the first is reserved
        for lease in leases:
            shared = lease.starts[: lease.num_published_pages] // self.page_size
            num_pages = len(lease.private_starts) + np.count_nonzero(~seen[shared])
            seen[shared] = True
            yield int(num_pages) * self.page_size

    def holds(self, lease: LeaseRecord, pool: str) -> bool:
        """Whether a lease holds anything of the pool that an `OutOfSlotsError` names, shared or by itself."""
        match pool:
            case "window slots":
                return bool(self.swa_starts(lease).any())
            case "states":
                return lease.state_slot is not None
        return len(lease.starts) > 0

    @abstractmethod
    def published_len(self, lease: LeaseRecord) -> int:
        """Leading tokens of a lease that others may read; whole pages."""

    @abstractmethod
    def covers(self, lease: LeaseRecord, slots: Starts) -> bool:
        """Whether all of these slots are the lease's to read."""

    @abstractmethod
    def holds_privately(self, lease: LeaseRecord, slots: Starts) -> bool:
        """Whether all of these slots are the lease's to write: nothing that others may read."""

    def swa_starts(self, lease: LeaseRecord) -> Starts:
        """The first window slot of each page of a lease, 0 where the lease does not hold its window KV."""
        return NO_STARTS

    def swa_slots(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The window slot of each slot, 0 where it has none; None without a sliding window."""
        return None

    @abstractmethod
    def _private_size(self, lease: LeaseRecord) -> int:
        """Slots that a lease holds by itself."""
