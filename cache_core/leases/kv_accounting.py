"""`KVLedger`: who holds which slots of a pool, and how many; the half of `KVCache` that tells.

Rules, checked by `check_invariants`:

1. Each page is free, private to one lease, in quarantine, or in the tree, once:
   `free + private + quarantined + tree == num_slots`.
2. A lease's published pages are the tree's, locked; its node ends them.
3. The locks on the tree's nodes are those of the open leases, no more and no fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from raydix.cache_core.base_prefix_cache import BasePrefixCache, RadixKey, Starts
from raydix.cache_core.eviction.history import EvictionRecord
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.leases.cache_facts import NO_STARTS, PoolSizes
from raydix.cache_core.leases.lease_allocator import LeaseAllocator
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator
from raydix.cache_core.pool.pool_checks import PoolChecks
from raydix.cache_core.radix.page_events import KVEventSink, PageRun
from raydix.cache_core.tree.radix_key import check_key


class KVLedger(LeasedCache):
    """Tree, allocator and leases of a `KVCache`: how much there is, what a lease holds, what is cached and why not.

    Args:
        tree: the empty cache that maps prefixes to pages; it must free to `allocator`.
        allocator: the slots.
        pressure_floor: `on_pressure` is called after an operation that leaves fewer free slots than this, or fewer
            window slots or states than `swa_pressure_floor` and `state_pressure_floor`.
        on_pressure: told that slots run short.
        states: the state slots of a hybrid model, to which `tree` frees; each lease holds one of its own.
        bigram: the tree's keys are pairs of neighbouring tokens (as EAGLE drafts need them): n tokens make n - 1 units.
        remembered_leases: how many ended ids are remembered, so that none of them is granted again.
        checks: of what the slots hold; None: nobody watches. With them `acquire` and `lock` raise ContentError if
            somebody wrote to the prefix since it was published.
        tenants: the tenants that share the slots; None: the rest alone. Their floors add up to `num_slots` at most.
    """

    def __init__(
        self,
        tree: BasePrefixCache,
        allocator: TokenToKVPoolAllocator,
        pressure_floor: int = 0,
        on_pressure: Callable[[], None] | None = None,
        *,
        states: MambaPool | None = None,
        bigram: bool = False,
        swa_pressure_floor: int = 0,
        state_pressure_floor: int = 0,
        remembered_leases: int = 0,
        checks: PoolChecks | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        super().__init__(remembered_leases)
        self.tree = tree
        self.allocator = allocator
        self.page_size = allocator.page_size
        self.num_slots = allocator.num_slots
        self.tenants = Tenants() if tenants is None else tenants
        self.room = LeaseAllocator(tree, allocator, states, self.tenants, self.counters, self._is_pressed, on_pressure)
        self.room.checks = checks
        self._on_pressure = on_pressure
        self._pressure_floor = pressure_floor
        self._swa_pressure_floor = swa_pressure_floor
        self._state_pressure_floor = state_pressure_floor
        self._bigram = bigram

    # ---------------------------------------------------------------- sizes

    @property
    def free_slots(self) -> int:
        """Slots that can be handed out as they are."""
        return self.allocator.available_size()

    @property
    def private_slots(self) -> int:
        """Slots of leases that no tree holds, in whole pages."""
        return self.room.private_slots - self.quarantined_slots

    def _is_pressed(self) -> bool:
        swa, states = self.allocator.swa, self.room.states
        return (
            self.allocator.available_size() < self._pressure_floor
            or (swa is not None and swa.available_size() < self._swa_pressure_floor)
            or (states is not None and states.available_size() < self._state_pressure_floor)
        )

    def evictable_size(self) -> int:
        """Tokens of the tree that nobody has locked."""
        return self.tree.evictable_size()

    def protected_size(self) -> int:
        """Tokens of the tree that leases have locked."""
        return self.tree.protected_size()

    def configured_tenants(self) -> Sequence[Tenant]:
        """The tenants with a floor or a cap, then the rest; empty without such tenants."""
        return tuple(self.tenants) if self.tenants.configured else ()

    def tenant_of(self, extra_key: str | None) -> str | None:
        """Return the name of a namespace's tenant; None for the rest."""
        return self.tenants.of(extra_key).name

    def sizes_of(self, pool: str, extra_key: str | None = None) -> PoolSizes:
        """Return the sizes of the pool that an `OutOfSlotsError` names, for requests of a namespace."""
        sizes = super().sizes_of(pool, extra_key)
        if pool != "slots":
            return sizes
        evictable = self.room.evictable_for(self.tenants.of(extra_key))
        return sizes._replace(evictable=evictable, kept=sizes.evictable - evictable)

    def share_of(self, name: str) -> PoolSizes:
        """Return the share of a tenant that has a cap, as if it were a pool of that size."""
        tenant = next(tenant for tenant in self.tenants if tenant.name == name)
        assert tenant.cap is not None, f"tenant {name!r} has no cap"
        return PoolSizes(tenant.cap, tenant.cap - tenant.held, tenant.evictable, tenant.cached - tenant.evictable)

    def is_within_floor(self, key: RadixKey, num_tokens: int) -> bool:
        """Return whether the tenant of `key` holds at most its floor with a lease over so many tokens."""
        tenant = self.tenants.of(key.extra_key)
        if not tenant.floor:
            return False
        new_tokens = num_tokens - self.tree.peek_prefix(self._tree_key(key)).prefix_len
        return tenant.held + -(-new_tokens // self.page_size) * self.page_size <= tenant.floor

    def swa_sizes(self) -> PoolSizes | None:
        """The pool of window slots, if there is one."""
        sizes = self.room.swa_sizes()
        if sizes is None:
            return None
        withheld = sum(int((self.allocator.swa_starts(lease.private_starts) > 0).sum()) for lease in self.quarantine)
        return sizes._replace(quarantined=withheld * self.page_size)

    def state_sizes(self) -> PoolSizes | None:
        """The pool of recurrent states, if there is one."""
        sizes = self.room.state_sizes()
        withheld = sum(lease.state_slot is not None for lease in self.quarantine)
        return None if sizes is None else sizes._replace(quarantined=withheld)

    # ---------------------------------------------------------------- what a lease holds

    def swa_starts(self, lease: LeaseRecord) -> Starts:
        """The first window slot of each page of a lease, 0 where the lease does not hold its window KV."""
        if self.allocator.swa is None:
            return NO_STARTS
        halves = self.allocator.swa_starts(lease.starts)
        window_start = self.tree.window_start(lease.receipt)
        held_from = lease.num_published_pages if window_start is None else window_start // self.page_size
        halves[:held_from] = 0
        return halves

    def swa_slots(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The window slot of each slot, 0 where it has none; None without a sliding window."""
        return self.allocator.swa_slots(slots)

    def published_len(self, lease: LeaseRecord) -> int:
        """Leading tokens of a lease that are in the tree."""
        return lease.num_published_pages * self.page_size

    def covers(self, lease: LeaseRecord, slots: Starts) -> bool:
        """Whether all of these slots lie in the lease's pages."""
        return bool(np.isin(slots - slots % self.page_size, lease.starts).all())

    def holds_privately(self, lease: LeaseRecord, slots: Starts) -> bool:
        """Whether all of these slots lie in pages of the lease that no tree holds."""
        return bool(np.isin(slots - slots % self.page_size, lease.private_starts).all())

    def _private_size(self, lease: LeaseRecord) -> int:
        return len(lease.private_starts) * self.page_size

    # ---------------------------------------------------------------- what is cached, and why not

    def explain(self, key: RadixKey) -> Explanation:
        """Where a match of `key` ends, and why it goes no further. Changes nothing. O(namespaces) at most."""
        found = self.tree.explain(self._tree_key(key))
        found.num_tokens = len(key)
        return found

    def _tree_key(self, key: RadixKey) -> RadixKey:
        if not self._bigram:
            return key
        check_key(key)
        return key.bigrams()

    @property
    def now(self) -> int:
        """The tree's clock, in ticks; 0 where it has none."""
        return self.tree.now

    def sample_tree(self, max_nodes: int) -> Outline:
        """What each namespace holds and where, from so many nodes or a few more."""
        return self.tree.sample(max_nodes)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Tell the times of evictions by this clock, in seconds."""
        self.room.history.use_clock(clock)

    def evictions(self) -> list[EvictionRecord]:
        """What was evicted of late, the latest last; 16,384 of it are remembered."""
        return self.room.history.evictions()

    def outline(self, limits: OutlineLimits) -> Outline:
        """The largest branches of what can be matched. Bounded work, however much is cached."""
        return self.tree.outline(limits)

    # ---------------------------------------------------------------- events, checks

    def publish_events_to(self, sink: KVEventSink) -> None:
        """Tell of pages that come and go in the tree, from now on; one that shares nothing has nothing to tell."""
        self.tree.publish_events_to(sink)

    def resident_pages(self) -> Iterable[PageRun]:
        """The pages that events tell of and that can be matched now, parents before children. O(n)."""
        return self.tree.resident_pages()

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of this module, the tree or the allocator is broken. O(everything)."""
        self.tree.check_invariants()
        self.allocator.check_invariants()
        private = [lease.private_starts for lease in (*self.leases, *self.quarantine)]
        tree = self.tree.tree_starts()
        pages = np.concatenate((self.allocator.free_starts(), *private, *tree)) // self.page_size
        assert len(pages) * self.page_size == self.num_slots, f"rule 1: {len(pages)} pages accounted for"
        assert len(np.unique(pages)) == len(pages), "rule 1: a page has two owners"
        self.room.check([*self.leases, *self.quarantine])
        in_tree = set(np.concatenate(tree).tolist()) if tree else set()
        locks = 0
        for lease in self.leases:
            published = lease.starts[: lease.num_published_pages].tolist()
            assert in_tree.issuperset(published), f"rule 2 at lease {lease.lease_id}: its pages left the tree"
            end = lease.node.end if lease.node is not None else 0
            assert end == len(published) * self.page_size, f"rule 2 at lease {lease.lease_id}"
            assert lease.num_slots <= len(lease.starts) * self.page_size, f"lease {lease.lease_id} covers too much"
            locks += bool(end)
        assert locks == self.tree.num_locks(), f"rule 3: {locks} leases hold {self.tree.num_locks()} locks"
