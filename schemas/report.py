"""What a cache has been doing, for a report."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import Message
from raydix.schemas.stats import CacheStats


class HistoryPoint(Message):
    """Counts at one time: slots as they were, tokens since the start."""

    at_s: float = Field(description="since the cache began")
    private_slots: int
    evictable_slots: int
    protected_slots: int
    quarantined_slots: int
    tokens_requested: int
    tokens_reused: int
    tokens_evicted: int


class NamespaceStats(Message):
    """The requests of one namespace."""

    label: str = Field(description="the fields that make it, for people")
    requests: int
    tokens_requested: int
    tokens_reused: int


class TreePart(Message):
    """A run of cached tokens that all below it share, and what hangs below it; estimates, in a large tree."""

    namespace: str
    num_tokens: int = Field(description="with all below")
    own_tokens: int = Field(description="of the run itself")
    num_nodes: int
    unused_s: float = Field(description="since the latest use seen in it")
    num_locks: int = Field(description="leases that hold some of it")
    parts: tuple[TreePart, ...] = Field(description="the largest of those below, largest first")


class AgeCount(Message):
    """Tokens that were evicted after so long without use."""

    below_s: float | None = Field(description="less than this (None: any), and no less than that of the count before")
    num_tokens: int


class CacheReport(Message):
    """A cache's life so far, in bounded size."""

    stats: CacheStats
    history: tuple[HistoryPoint, ...] = Field(description="512 points at most, the last one for now")
    namespaces: tuple[NamespaceStats, ...] = Field(description="those with the most tokens, then all others together")
    tree: tuple[TreePart, ...] = Field(
        description="the largest namespaces; of more than 1,024, every second, third and so on is looked at"
    )
    eviction_ages: tuple[AgeCount, ...] = Field(description="of the latest evictions, 16,384 at most")
