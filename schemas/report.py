"""The data of the report page."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import PydanticMessage
from raydix.schemas.stats import CacheStats


class HistoryPoint(PydanticMessage):
    """Counts at one time: slots then, tokens since the start."""

    at_s: float = Field(description="since the cache began")
    private_slots: int
    evictable_slots: int
    protected_slots: int
    quarantined_slots: int
    tokens_requested: int
    tokens_reused: int
    tokens_loaded: int = Field(
        default=0, description="of tokens_reused, those that were loaded from tiers below the pool"
    )
    tokens_evicted: int


class NamespaceStats(PydanticMessage):
    """The requests of one namespace."""

    label: str = Field(description="the fields of the namespace, as text")
    requests: int = Field(description="granted ones")
    tokens_requested: int = Field(description="prompt tokens of these")
    tokens_reused: int = Field(description="of tokens_requested, the tokens with cached KV")
    tokens_loaded: int = Field(
        default=0, description="of tokens_reused, those that were loaded from tiers below the pool"
    )
    tokens_refused: int = Field(default=0, description="prompt tokens of refused requests, each time")


class TreePart(PydanticMessage):
    """Cached tokens that all parts below share, and the parts; in a large tree the counts are estimates."""

    namespace: str
    tokens: tuple[int, ...] = Field(
        default=(), description="the first few ids of the run after those that it shares with its siblings"
    )
    num_tokens: int = Field(description="with all below")
    own_tokens: int = Field(description="of the run itself")
    num_nodes: int
    unused_s: float = Field(description="since the latest use seen in it")
    num_locks: int = Field(description="leases that hold some of it")
    parts: tuple[TreePart, ...] = Field(description="the largest of those below, largest first")


class PrefixUse(PydanticMessage):
    """A cached prefix that many prompts begin with, or that much continues; it ends where its continuations differ."""

    namespace: str = Field(description="the fields of the namespace, as text")
    tokens: tuple[int, ...] = Field(description="its first few ids")
    run_tokens: tuple[int, ...] = Field(
        description="the first few ids after the tokens it shares with other prefixes; the same as `tokens` if none"
    )
    num_tokens: int = Field(description="its length")
    num_hits: int = Field(description="matches that ended in its last run or beyond")
    num_slots: int = Field(description="that its tokens and all its cached continuations take")
    num_leases: int = Field(description="leases that hold some of its last run or of its continuations")
    is_whole: bool = Field(description="all continuations were counted; otherwise hits and slots are estimates")


class AgeCount(PydanticMessage):
    """Tokens that were evicted after so long without use."""

    below_s: float | None = Field(description="less than this (None: any), and no less than that of the count before")
    num_tokens: int


class CacheReport(PydanticMessage):
    """A cache's life so far, in bounded size."""

    stats: CacheStats
    history: tuple[HistoryPoint, ...] = Field(description="512 points at most, the last one for now")
    namespaces: tuple[NamespaceStats, ...] = Field(description="those with the most tokens, then all others together")
    prefixes: tuple[PrefixUse, ...] = Field(
        default=(), description="those through which the most tokens were reused, then the largest; 12 at most"
    )
    tree: tuple[TreePart, ...] = Field(
        description="the largest namespaces; of more than 1,024, only every k-th is sampled"
    )
    eviction_ages: tuple[AgeCount, ...] = Field(description="of the latest evictions, 16,384 at most")
