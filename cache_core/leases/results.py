"""The results and counts of a cache with leases: `Published`, `PoolSizes` and `Counters`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from raydix.cache_core.tree.packed_slots import Starts


@dataclass(slots=True)
class Published:
    """The result of an insert."""

    prefix_len: int  # leading tokens that were in the tree before
    num_inserted: int  # tokens added to the tree
    num_duplicates: int  # private slots freed, because the tree already had their tokens
    retired: bool  # the namespace was retired after the lease began: nothing was published
    repointed: Starts  # the tree's pages that replaced the duplicates


class PoolSizes(NamedTuple):
    """The sizes of one pool, in slots of that pool. The remaining slots are private to leases."""

    num_slots: int
    free: int
    evictable: int
    protected: int
    quarantined: int = 0
    kept: int = 0  # unlocked, but kept by the floors of other tenants


@dataclass(slots=True)
class Counters:
    """Counts of events and tokens since the start."""

    acquires: int = 0  # leases of requests that had no lease before
    hits: int = 0
    tokens_requested: int = 0  # prompt tokens of `acquires`
    tokens_refused: int = 0
    num_too_large: int = 0  # refused requests that can never fit
    tokens_too_large: int = 0
    largest_too_large: int = 0  # slots
    tokens_reused: int = 0
    num_resumed: int = 0  # leases of preempted requests
    tokens_resumed: int = 0
    tokens_reused_resumed: int = 0
    tokens_inserted: int = 0
    tokens_duplicate: int = 0
    tokens_evicted: int = 0
    window_slots_evicted: int = 0
    states_evicted: int = 0
    boundary_states_refused: int = 0  # leases that were to have a slot for one, and began without
    probes: int = 0
