"""The contract of every prefix cache: keys, results, and the operations that callers use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.kernels import maker
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.tree.hashing import hash_bytes, hash_to_int64, hash_token_ids
from raydix.cache_core.tree.radix_key import RadixKey

__all__ = [
    "BasePrefixCache",
    "EvictResult",
    "InsertResult",
    "MatchResult",
    "PageInsert",
    "PageMatch",
    "RadixKey",
    "hash_bytes",
    "hash_to_int64",
    "hash_token_ids",
]

Starts = NDArray[np.int64]  # the first slot of each page, in token order


NO_SLOTS = torch.empty(0, dtype=torch.int64)  # an empty row of slot indices


@dataclass(slots=True)
class MatchResult:
    """The longest cached prefix of a key. Nothing is locked: lock `last_node` before anything may evict."""

    indices: torch.Tensor  # int64 on the CPU, one slot per matched token; a copy, the caller's to keep
    last_node: Any = None  # where the match ends; the root on a miss
    prefix_len: int = 0  # tokens; a multiple of page_size; == len(indices)
    mamba_branching_seqlen: int | None = None  # where a state or window is worth publishing, beyond prefix_len
    full_prefix_len: int = 0  # leading tokens whose full KV is there, usable or not


@dataclass(slots=True)
class InsertResult:
    """What became of an insert. The cache frees nothing it was given: `duplicate_indices` are the caller's to free."""

    prefix_len: int = 0  # leading tokens that were in the tree before
    last_node: Any = None  # where the inserted key ends; the root if it has no whole page
    mamba_exist: bool = False  # the final node had a state already
    duplicate_indices: torch.Tensor = NO_SLOTS  # incoming slots the tree did not take over


@dataclass(slots=True)
class EvictResult:
    """What an eviction really freed; it may exceed the request by part of a node."""

    full_evicted: int = 0  # tokens
    swa_evicted: int = 0  # tokens
    mamba_evicted: int = 0  # states


# for the hot paths: every field is given
match_result, insert_result, evict_result = maker(MatchResult), maker(InsertResult), maker(EvictResult)


class PageMatch(NamedTuple):
    """A match in pages, for callers whose slots come in whole pages."""

    prefix_len: int  # tokens
    last_node: Any
    starts: Starts  # [prefix_len / page_size], a copy
    full_prefix_len: int  # leading tokens whose full KV is there, usable or not
    branching_len: int | None  # where a state or window is worth publishing, beyond prefix_len


class PageInsert(NamedTuple):
    """An insert in pages."""

    prefix_len: int  # leading tokens that were in the tree before
    end: int  # tokens the tree now covers: the caller's later pages stay its own
    last_node: Any
    existing: Starts  # the tree's pages from where the insert resumed up to prefix_len


class BasePrefixCache(ABC):
    """A map from token prefixes to KV slots, with locks and eviction. Synchronous; not thread-safe.

    `match_pages` and `insert_pages` are `match_prefix` and `insert` for callers that hold whole pages, named by their
    first slots; they skip the conversions.

    What stands for an int, as numpy's integers do, is taken as one. A float raises TypeError, and what is no `RadixKey`
    InvalidKeyError, before anything changes.
    """

    page_size: int

    @abstractmethod
    def reset(self) -> None:
        """Forget everything and give back every slot the cache holds. Nodes from before are stale."""

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, in whole pages. Refreshes recency along it; may split a node."""

    @abstractmethod
    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """As `match_prefix`, without any effect: no split, no recency, no hit count."""

    def explain(self, key: RadixKey) -> Explanation:
        """Where a match of `key` ends, and why it goes no further. Changes nothing."""
        found = self.peek_prefix(key)
        return Explanation.of_lengths(len(key), found.prefix_len, found.full_prefix_len, self.page_size)

    def outline(self, limits: OutlineLimits) -> Outline:
        """The largest branches of what can be matched, in bounded work; of a cache that keeps nothing, none."""
        return Outline([], 0, 0)

    def keep_history(self, history: EvictionHistory) -> None:  # noqa: B027 -- most kinds of cache have no use for it
        """Note in `history` what is evicted and retired from now on, for `explain`."""

    @abstractmethod
    def insert(self, key: RadixKey, value: torch.Tensor | None = None, **kwargs: Any) -> InsertResult:
        """Make the KV in `value`, one slot per token, findable under `key`."""

    @abstractmethod
    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Free at least `num_tokens` slots, or all that nobody has locked; so for window KV and states."""

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> Any:
        """Keep `node` and its ancestors from eviction. Returns what `dec_lock_ref` needs back, if anything."""

    @abstractmethod
    def dec_lock_ref(self, node: Any, receipt: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`."""

    @abstractmethod
    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """`match_prefix` of the first `limit` tokens of `key`, in pages, by a request of that priority."""

    @abstractmethod
    def insert_pages(
        self, key: RadixKey, starts: Starts, from_node: Any, swa_evicted_seqlen: int = 0, priority: int = 0
    ) -> PageInsert:
        """`insert` of the whole pages of `key`, resumed at `from_node`: `starts` are the pages beyond it."""

    @abstractmethod
    def retire_all(self) -> None:
        """Make everything unmatchable at once; what is locked stays until it is unlocked."""

    @abstractmethod
    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """`retire_all` of the namespaces whose `extra_key` is meant; returns how many there were."""

    @abstractmethod
    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free what was retired and nobody has locked, about `max_tokens` of it; returns tokens."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if any rule the cache keeps is broken. O(n)."""

    @abstractmethod
    def tree_starts(self) -> list[Starts]:
        """The pages the cache holds, for checks of conservation. O(n)."""

    @abstractmethod
    def num_locks(self) -> int:
        """Locks taken and not given back, for checks. O(n)."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens that nobody has locked."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens that somebody has locked."""

    def swa_evictable_size(self) -> int:
        """Tokens with live sliding-window KV that nobody has locked; 0 without a window."""
        return 0

    def swa_protected_size(self) -> int:
        """Tokens with live sliding-window KV that somebody has locked; 0 without a window."""
        return 0

    def total_size(self) -> int:
        """Tokens in the cache."""
        return self.evictable_size() + self.protected_size()
