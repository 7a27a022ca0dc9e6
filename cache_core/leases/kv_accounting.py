"""`check_accounting`: the rules of slot ownership in a `KVCache`.

1. Each page has exactly one owner: it is free, private to one lease, in quarantine, in the tree, or kept by the
   allocator's keeper. So `free + private + quarantined + tree + kept == num_slots`.
2. A lease's published pages are in the tree and locked. The last of them ends at the lease's node.
3. The tree has one lock for each open lease with published pages, and no other locks.
4. Each window slot and each state slot has exactly one owner, as in rule 1.
5. `private` of a tenant counts the private slots of its leases, including leases in quarantine. A tenant holds at
   most its cap.
6. An open lease holds the window KV at the end of its published pages until it releases that, and no other lock does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raydix.cache_core.base_prefix_cache import BasePrefixCache
from raydix.cache_core.eviction.tenants import Tenants
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.pool.mamba_pool import MambaPool
from raydix.cache_core.pool.page_allocator import TokenToKVPoolAllocator


def check_accounting(
    tree: BasePrefixCache,
    allocator: TokenToKVPoolAllocator,
    states: MambaPool | None,
    tenants: Tenants,
    leases: Sequence[LeaseRecord],
    withheld: Sequence[LeaseRecord],
) -> None:
    """Raise AssertionError if a rule of this module is broken. O(n).

    Args:
        leases: the open leases.
        withheld: the leases in quarantine.
    """
    everyone, page_size = [*leases, *withheld], allocator.page_size
    private, cached = [lease.private_starts for lease in everyone], tree.tree_starts()
    pages = np.concatenate((allocator.free_starts(), allocator.kept_starts(), *private, *cached)) // page_size
    assert len(pages) * page_size == allocator.num_slots, f"rule 1: {len(pages)} pages have an owner"
    assert len(np.unique(pages)) == len(pages), "rule 1: a page has two owners"
    _check_published(tree, leases, set(np.concatenate(cached).tolist()) if cached else set(), page_size)
    _check_windows_and_states(tree, allocator, states, everyone)
    tree.check_window_locks(lease.receipt for lease in leases)
    for tenant in tenants:
        mine = [lease for lease in everyone if tenants.of(lease.key.extra_key) is tenant]
        num_private = sum(len(lease.private_starts) for lease in mine) * page_size
        where = f"rule 5 at tenant {tenant.name!r}"
        assert tenant.private == num_private, f"{where}: {tenant.private=}, but its leases have {num_private}"
        assert tenant.cap is None or tenant.held <= tenant.cap, f"{where}: {tenant.held=} exceeds {tenant.cap=}"


def _check_published(tree: BasePrefixCache, leases: Sequence[LeaseRecord], in_tree: set[int], page_size: int) -> None:
    locks = 0
    for lease in leases:
        published = lease.starts[: lease.num_published_pages].tolist()
        assert in_tree.issuperset(published), f"rule 2 at lease {lease.lease_id}: a page is not in the tree"
        end = lease.node.end if lease.node is not None else 0
        assert end == len(published) * page_size, f"rule 2 at lease {lease.lease_id}: its node ends at {end}"
        assert lease.num_slots <= len(lease.starts) * page_size, f"lease {lease.lease_id} covers more than its pages"
        locks += bool(end)
    assert locks == tree.num_locks(), f"rule 3: {locks} leases hold {tree.num_locks()} locks"


def _check_windows_and_states(
    tree: BasePrefixCache,
    allocator: TokenToKVPoolAllocator,
    states: MambaPool | None,
    leases: Sequence[LeaseRecord],
) -> None:
    if (swa := allocator.swa) is not None:
        halves = sum(int((allocator.swa_starts(lease.private_starts) > 0).sum()) for lease in leases)
        held = halves * allocator.page_size + tree.swa_evictable_size() + tree.swa_protected_size()
        kept = len(swa.kept_starts()) * swa.page_size
        assert held + kept + swa.available_size() == swa.num_slots, f"rule 4: {held=} and {kept=} of the window slots"
    if states is not None:
        own = [slot for lease in leases for slot in lease.state_slots]
        slots = [*own, *states.free_slots(), *states.kept_slots(), *tree.state_slots()]
        assert len(set(slots)) == len(slots) == states.num_slots, "rule 4: a state slot has no owner, or two"
        states.check_invariants()
