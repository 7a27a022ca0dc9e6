"""`ChunkCache`: a prefix cache without reuse, for deployments that switch reuse off."""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any

import torch

from raydix.cache_core.base_prefix_cache import (
    NO_SLOTS,
    BasePrefixCache,
    EvictResult,
    InsertResult,
    MatchResult,
    PageInsert,
    PageMatch,
    RadixKey,
)
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts
from raydix.cache_core.tree.radix_key import check_key


class ChunkCache(BasePrefixCache):
    """A prefix cache that stores nothing: every match misses, and the caller keeps all slots of an insert.

    All nodes are None; locking them has no effect.
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = index(page_size)

    def reset(self) -> None:
        """Do nothing: the cache is always empty."""

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Return a miss."""
        check_key(key)
        return MatchResult(NO_SLOTS)

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """Return a miss."""
        check_key(key)
        return MatchResult(NO_SLOTS)

    def explain(self, key: RadixKey) -> Explanation:
        """Return the reason "not_shared"."""
        check_key(key)
        return Explanation(len(key), 0, 0, "not_shared")

    def insert(self, key: RadixKey, value: torch.Tensor | None = None, **kwargs: Any) -> InsertResult:
        """Adopt no slot: the caller keeps all of `value`."""
        check_key(key)
        return InsertResult()

    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """Return a miss."""
        check_key(key)
        return PageMatch(0, None, NO_STARTS, 0, None)

    def insert_pages(
        self,
        key: RadixKey,
        starts: Starts,
        from_node: None,
        swa_evicted_seqlen: int = 0,
        priority: int = 0,
        unnamed_from: int | None = None,
    ) -> PageInsert:
        """Adopt no page: the caller keeps all of `starts`."""
        return PageInsert(0, 0, None, NO_STARTS)

    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Free nothing."""
        index(num_tokens)
        return EvictResult()

    def inc_lock_ref(self, node: None) -> None:
        """Do nothing."""

    def dec_lock_ref(self, node: None, receipt: object = None, **kwargs: Any) -> None:
        """Do nothing."""

    def retire_all(self) -> None:
        """Do nothing."""

    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """Return 0: there are no namespaces."""
        return 0

    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free nothing; return 0."""
        return 0

    def check_invariants(self) -> None:
        """Do nothing: the cache has no invariants."""

    def tree_starts(self) -> list[Starts]:
        """Return an empty list."""
        return []

    def num_locks(self) -> int:
        """Return 0."""
        return 0

    def evictable_size(self) -> int:
        """Return 0."""
        return 0

    def protected_size(self) -> int:
        """Return 0."""
        return 0
