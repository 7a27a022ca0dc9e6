"""The contract of every prefix cache: keys, results, and the operations that callers use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.tree.hashing import hash_bytes as hash_bytes
from raydix.cache_core.tree.hashing import hash_to_int64 as hash_to_int64
from raydix.cache_core.tree.hashing import hash_token_ids as hash_token_ids
from raydix.cache_core.tree.packed_slots import Starts as Starts
from raydix.cache_core.tree.page_events import Hashes, KVEventSink, PageRun
from raydix.cache_core.tree.radix_key import RadixKey as RadixKey

NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(slots=True)
class MatchResult:
    """The longest cached prefix of a key. It is not locked: lock `last_node` before the next eviction."""

    indices: torch.Tensor  # int64 on the CPU, one slot per matched token; a copy that the caller owns
    last_node: Any = None  # the node at the end of the match; the root on a miss
    prefix_len: int = 0  # tokens; a multiple of page_size; == len(indices)
    # tokens, if more than prefix_len: the longest prefix that a state or window at its end would make usable
    mamba_branching_seqlen: int | None = None
    full_prefix_len: int = 0  # leading tokens with full KV in the cache, usable or not


@dataclass(slots=True)
class InsertResult:
    """The result of an insert. The caller must free `duplicate_indices`: the cache frees no incoming slots."""

    prefix_len: int = 0  # leading tokens that the tree had already
    last_node: Any = None  # the node at the end of the inserted key; the root if it has no whole page
    mamba_exist: bool = False  # whether the last node had a state already
    duplicate_indices: torch.Tensor = NO_SLOTS  # int64; incoming slots that the tree did not adopt


@dataclass(slots=True)
class EvictResult:
    """The amounts that an eviction freed; they may exceed the request by part of a node."""

    full_evicted: int = 0  # tokens
    swa_evicted: int = 0  # tokens
    mamba_evicted: int = 0  # states


class PageMatch(NamedTuple):
    """The longest cached prefix of a key, in pages, for callers that hold whole pages of slots."""

    prefix_len: int  # tokens
    last_node: Any
    starts: Starts  # [prefix_len / page_size], a copy
    full_prefix_len: int  # leading tokens with full KV in the cache, usable or not
    branching_len: int | None  # `MatchResult.mamba_branching_seqlen`


class PageInsert(NamedTuple):
    """The result of an insert in pages."""

    prefix_len: int  # leading tokens that the tree had already
    end: int  # leading tokens that the tree has now; the caller still owns the pages beyond
    last_node: Any
    existing: Starts  # the pages of the tree from the end of `from_node` to prefix_len


class BasePrefixCache(ABC):
    """A map from token prefixes to KV slots, with locks and eviction. Synchronous; not thread-safe.

    `match_pages` and `insert_pages` are `match_prefix` and `insert` for callers that hold whole pages, named by their
    first slots; they skip the conversions.

    Integer arguments may have any type with `__index__`, such as numpy's integers; a float raises TypeError. A key must
    be a `RadixKey`, else InvalidKeyError is raised. Both are raised before anything changes.

    The methods for windows, states, tenants and events have defaults for a cache without them.

    Attributes:
        page_size: tokens of a page.
        sliding_window_size: tokens that a sliding-window layer attends to; None without a sliding window.
    """

    page_size: int
    sliding_window_size: int | None = None

    @abstractmethod
    def reset(self) -> None:
        """Remove everything and free every slot of the cache. All nodes become stale."""

    @abstractmethod
    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Return the longest cached prefix of `key`, in whole pages. Refreshes recency along it; may split a node."""

    @abstractmethod
    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """Return the result of `match_prefix` without any effect: no split, no recency, no hit count."""

    def explain(self, key: RadixKey) -> Explanation:
        """Explain where a match of `key` ends, and why. Changes nothing."""
        found = self.peek_prefix(key)
        return Explanation.of_lengths(len(key), found.prefix_len, found.full_prefix_len, self.page_size)

    def outline(self, limits: OutlineLimits) -> Outline:
        """Return the largest matchable branches, in bounded work; an empty outline by default."""
        return Outline([], 0, 0)

    def keep_history(self, history: EvictionHistory) -> None:  # noqa: B027 -- most kinds of cache need no history
        """Record evictions and retirements in `history` from now on, for `explain`."""

    @abstractmethod
    def insert(self, key: RadixKey, value: torch.Tensor | None = None, **kwargs: Any) -> InsertResult:
        """Insert the KV in `value`, one slot per token, under `key`."""

    @abstractmethod
    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Free at least `num_tokens` slots, or all unlocked ones. The same holds for window slots and states."""

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> Any:
        """Lock `node` and its ancestors against eviction; return the receipt for `dec_lock_ref`, if it needs one."""

    @abstractmethod
    def dec_lock_ref(self, node: Any, receipt: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`."""

    @abstractmethod
    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """Match the first `limit` tokens of `key`, in pages, for a request with this priority."""

    @abstractmethod
    def insert_pages(
        self,
        key: RadixKey,
        starts: Starts,
        from_node: Any,
        swa_evicted_seqlen: int = 0,
        priority: int = 0,
        unnamed_from: int | None = None,
    ) -> PageInsert:
        """Insert the whole pages of `key` beyond `from_node`; `starts` are their first slots.

        Does `name_end` at the last node, if `unnamed_from` is not None.
        """

    @abstractmethod
    def retire_all(self) -> None:
        """Make everything unmatchable immediately. Locked nodes stay until they are unlocked."""

    @abstractmethod
    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """Make the namespaces with a meant `extra_key` unmatchable, as `retire_all`; return their number."""

    @abstractmethod
    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free about `max_tokens` unlocked retired tokens, by default all; return their number."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise AssertionError if an invariant of the cache is broken. O(n)."""

    @abstractmethod
    def tree_starts(self) -> list[Starts]:
        """Return the first slots of all pages in the cache, for checks. O(n)."""

    @abstractmethod
    def num_locks(self) -> int:
        """Return the number of locks that were not undone, for checks. O(n)."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Return the number of unlocked tokens."""

    @abstractmethod
    def protected_size(self) -> int:
        """Return the number of locked tokens."""

    # ---------------------------------------------------------------- windows

    def swa_evictable_size(self) -> int:
        """Return the number of unlocked tokens with live sliding-window KV; 0 without a window."""
        return 0

    def swa_protected_size(self) -> int:
        """Return the number of locked tokens with live sliding-window KV; 0 without a window."""
        return 0

    @property
    def kept_tail(self) -> int:
        """How many tokens at the end of a prefix a lock holds with their window KV; 0 without a window."""
        return 0

    def window_start(self, receipt: Any) -> int | None:
        """Return where the window KV begins that the receipt's lock holds, in tokens; None if it holds none."""
        return None

    def use_window(self, node: Any) -> None:  # noqa: B027 -- no effect without a window
        """Note that the window KV at the end of a node is in use until now."""

    def release_window(self, node: Any, receipt: Any) -> None:  # noqa: B027 -- no effect without a window
        """Release the window of a lock before the lock itself; the full KV stays locked. Idempotent."""

    def check_window_locks(self, receipts: Iterable[Any]) -> None:  # noqa: B027 -- no effect without a window
        """Raise AssertionError unless the receipts' locks hold their tails, and no other locks do. O(n)."""

    # ---------------------------------------------------------------- states

    def mamba_evictable_size(self) -> int:
        """Return the number of unlocked states; 0 for a cache without states."""
        return 0

    def mamba_protected_size(self) -> int:
        """Return the number of locked states; 0 for a cache without states."""
        return 0

    def state_at(self, node: Any) -> int | None:
        """Return the slot of the state at a node; None if the node has none."""
        return None

    def attach_state(self, node: Any, mamba_value: int | None) -> bool:
        """Give a node the state in a slot, unless it has one; return whether it had one.

        If the node had none, the cache owns the slot afterwards; else the caller still does.

        Raises:
            InvalidKeyError: a state is given to a cache without states.
        """
        if mamba_value is not None:
            raise InvalidKeyError(f"this cache keeps no states: mamba_value must be None, not {mamba_value}")
        return False

    def state_slots(self) -> list[int]:
        """Return the slots of all states in the cache, for checks. O(n)."""
        return []

    # ---------------------------------------------------------------- tenants

    def divide(self, tenants: Tenants) -> None:
        """Guarantee the tenants' floors from now on, and count their tokens. The cache must be empty.

        Raises:
            ValueError: this kind of cache cannot be divided among tenants.
        """
        raise ValueError(f"a {type(self).__name__} cannot be divided among tenants")

    def evict_own(self, tenant: Tenant, num_tokens: int) -> int:
        """Free at least `num_tokens` unlocked slots of a tenant, which must have that many; return their number."""
        raise ValueError(f"a {type(self).__name__} is not divided among tenants")

    # ---------------------------------------------------------------- observation

    @property
    def now(self) -> int:
        """The current tick of the logical clock; 0 for a cache without one."""
        return 0

    def sample(self, max_nodes: int) -> Outline:
        """Return the size of each namespace and of its branches, estimated from about `max_nodes` nodes."""
        return Outline([], 0, 0)

    def publish_events_to(  # noqa: B027 -- without pages, no events
        self, sink: KVEventSink, stride: int | None = None
    ) -> None:
        """Publish to `sink` which pages are stored and removed from now on: all, or every `stride`-th of a path."""

    def resident_pages(self) -> Iterable[PageRun]:
        """Return the matchable pages, as stored events name them, parents before children. O(n)."""
        return ()

    def walk_pages(self) -> Iterator[Iterable[PageRun]]:
        """Yield the pages of `resident_pages` part by part; the tree may change in between.

        Each page that no event names meanwhile is there once.
        """
        yield self.resident_pages()

    def name_end(self, node: Any, unnamed_from: int) -> None:  # noqa: B027 -- optional
        """Publish, in a cache that publishes ends of matches, that a request's prompt or answer ends at a node.

        The request inserted the node's path from token `unnamed_from` on.
        """

    def usable_ends(self) -> Hashes | None:
        """Return the pages at which events say that a match may end; None if every stored page is such a page."""
        return None

    def total_size(self) -> int:
        """Return the number of tokens in the cache."""
        return self.evictable_size() + self.protected_size()
