"""`ChunkCache`: the prefix cache that caches nothing, for when reuse is switched off."""

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
    """Every match is a miss and every insert leaves all slots with the caller. Nothing is ever held.

    Nodes are None throughout; locking them is a no-op.
    """

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = index(page_size)

    def reset(self) -> None:
        """Nothing is held, so nothing happens."""

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """A miss."""
        check_key(key)
        return MatchResult(NO_SLOTS)

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """A miss."""
        check_key(key)
        return MatchResult(NO_SLOTS)

    def explain(self, key: RadixKey) -> Explanation:
        """Nothing is shared."""
        check_key(key)
        return Explanation(len(key), 0, 0, "not_shared")

    def insert(self, key: RadixKey, value: torch.Tensor | None = None, **kwargs: Any) -> InsertResult:
        """Nothing is taken over: the caller keeps every slot of `value`."""
        check_key(key)
        return InsertResult()

    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """A miss."""
        check_key(key)
        return PageMatch(0, None, NO_STARTS, 0, None)

    def insert_pages(
        self, key: RadixKey, starts: Starts, from_node: None, swa_evicted_seqlen: int = 0, priority: int = 0
    ) -> PageInsert:
        """Nothing is taken over."""
        return PageInsert(0, 0, None, NO_STARTS)

    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Nothing is held, so nothing is freed."""
        index(num_tokens)
        return EvictResult()

    def inc_lock_ref(self, node: None) -> None:
        """A no-op."""

    def dec_lock_ref(self, node: None, receipt: object = None, **kwargs: Any) -> None:
        """A no-op."""

    def retire_all(self) -> None:
        """A no-op."""

    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """No namespace holds anything."""
        return 0

    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Nothing is held, so nothing is freed."""
        return 0

    def check_invariants(self) -> None:
        """There is nothing to break."""

    def tree_starts(self) -> list[Starts]:
        """Nothing."""
        return []

    def num_locks(self) -> int:
        """Always 0."""
        return 0

    def evictable_size(self) -> int:
        """Always 0."""
        return 0

    def protected_size(self) -> int:
        """Always 0."""
        return 0
