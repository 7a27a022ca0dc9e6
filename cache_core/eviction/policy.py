"""Which unlocked leaf of a radix tree goes first: small classes that only rank.

Stamps are ticks of the cache's own clock, so equal operations have equal outcomes. Of equal ranks the node made first
goes first. A leaf has nothing below it, so that its own uses are all there were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from raydix.cache_core.kernels import last_use
from raydix.cache_core.tree.tree_node import TreeNode

Rank = int | tuple[int, ...]


class EvictionPolicy(ABC):
    """Ranks leaves for eviction: the lowest rank goes first.

    Attributes:
        name: as configured.
    """

    name: str

    @abstractmethod
    def rank(self, node: TreeNode) -> Rank:
        """Return the rank of a node now. Only a match or an insert that ends at the node may change it.

        It must not raise, and all ranks must be comparable: else a leaf may be in no queue, and is not evicted.
        """


class LRU(EvictionPolicy):
    """The least recently used goes first."""

    name = "lru"
    rank = staticmethod(last_use)  # type: ignore[assignment]


class MRU(EvictionPolicy):
    """The most recently used goes first: for scans in a loop over more than fits."""

    name = "mru"

    def rank(self, node: TreeNode) -> int:
        """Its last use, backwards."""
        return -node.own_access_time


class LFU(EvictionPolicy):
    """The least often matched goes first; of equals, the least recently used."""

    name = "lfu"

    def rank(self, node: TreeNode) -> tuple[int, int]:
        """Its hits and its last use."""
        return node.own_hits, node.own_access_time


class FIFO(EvictionPolicy):
    """The oldest goes first, however often it is used."""

    name = "fifo"

    def rank(self, node: TreeNode) -> int:
        """When it was made. Both halves of a split node are as old as it was."""
        return node.creation_time


class FILO(EvictionPolicy):
    """The newest goes first: early nodes stay."""

    name = "filo"

    def rank(self, node: TreeNode) -> int:
        """When it was made, backwards."""
        return -node.creation_time


class SLRU(EvictionPolicy):
    """Segmented LRU: nodes with fewer than `hits` matches go before the others, each least recently used first.

    So a scan, which uses each prefix once, does not evict the prefixes in use.
    """

    name = "slru"

    def __init__(self, hits: int = 2) -> None:
        if hits < 1:
            raise ValueError(f"hits must be at least 1, not {hits}")
        self.hits = hits

    def rank(self, node: TreeNode) -> tuple[int, int]:
        """Its segment and its last use."""
        return int(node.own_hits >= self.hits), node.own_access_time


class Priority(EvictionPolicy):
    """The lowest priority of the requests that used it goes first, of that the least recently used.

    A node's priority is the highest of all the requests that went through it.
    """

    name = "priority"

    def rank(self, node: TreeNode) -> tuple[int, int]:
        """Its priority and its last use."""
        return node.own_priority, node.own_access_time


class TwoQ(LRU):
    """2q: nodes on probation, and nodes with pages that came back after their eviction: see `TwoQueues`.

    Each of the two queues is in the order of last use. The cache must have no tenants.

    Args:
        num_slots: of the pool; None: as its `num_slots` says.
    """

    name = "2q"

    def __init__(self, num_slots: int | None = None) -> None:
        if num_slots is not None and num_slots < 1:
            raise ValueError(f"num_slots must be at least 1, not {num_slots}")
        self.num_slots = num_slots


POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (LRU, LFU, FIFO, MRU, FILO, SLRU, Priority, TwoQ)
}


def make_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy of that name, or the one given.

    Raises:
        ValueError: there is no policy of that name.
    """
    if isinstance(policy, EvictionPolicy):
        return policy
    if policy not in POLICIES:
        raise ValueError(f"no eviction policy is called {policy!r}; there are {', '.join(POLICIES)}")
    return POLICIES[policy]()
