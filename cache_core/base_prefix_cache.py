"""The contract of every prefix cache: keys, results, and the operations that callers use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.eviction.history import EvictionHistory
from raydix.cache_core.eviction.tenants import Tenant, Tenants
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.kernels import maker
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.tree.hashing import hash_bytes, hash_to_int64, hash_token_ids
from raydix.cache_core.tree.packed_slots import Starts
from raydix.cache_core.tree.page_events import KVEventSink, PageRun
from raydix.cache_core.tree.radix_key import RadixKey

__all__ = [
    "BasePrefixCache",
    "EvictResult",
    "InsertResult",
    "MatchResult",
    "PageInsert",
    "PageMatch",
    "RadixKey",
    "Starts",
    "hash_bytes",
    "hash_to_int64",
    "hash_token_ids",
]

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

    The methods for windows, states, tenants and events have defaults, which are those of a cache without them.

    Attributes:
        page_size: tokens of a page.
        sliding_window_size: tokens that a sliding-window layer attends to; None without a sliding window.
    """

    page_size: int
    sliding_window_size: int | None = None

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

    # ---------------------------------------------------------------- windows

    def swa_evictable_size(self) -> int:
        """Tokens with live sliding-window KV that nobody has locked; 0 without a window."""
        return 0

    def swa_protected_size(self) -> int:
        """Tokens with live sliding-window KV that somebody has locked; 0 without a window."""
        return 0

    def window_start(self, receipt: Any) -> int | None:
        """Return the first token of the window that the lock of this receipt holds; None if it holds no window."""
        return None

    def release_window(self, node: Any, receipt: Any) -> None:  # noqa: B027 -- no effect without a window
        """Release the window of a lock before the lock itself; the full KV stays locked. Idempotent."""

    # ---------------------------------------------------------------- states

    def mamba_evictable_size(self) -> int:
        """Return the number of states without a lock; 0 for a cache without states."""
        return 0

    def mamba_protected_size(self) -> int:
        """Return the number of locked states; 0 for a cache without states."""
        return 0

    def state_at(self, node: Any) -> int | None:
        """Return the slot of the state at a node; None if the node has none."""
        return None

    def attach_state(self, node: Any, mamba_value: int | None) -> bool:
        """Give a node the state in a slot, unless it has one; return whether it had one. The cache then owns the slot.

        Raises:
            InvalidKeyError: a state is given to a cache without states.
        """
        if mamba_value is not None:
            raise InvalidKeyError(f"this cache keeps no states, so it cannot take the one in slot {mamba_value}")
        return False

    def state_slots(self) -> list[int]:
        """Return the slots of all states in the cache, for checks. O(n)."""
        return []

    # ---------------------------------------------------------------- tenants

    def divide(self, tenants: Tenants) -> None:
        """Keep the floors of these tenants from now on, and count their tokens. The cache must be empty.

        Raises:
            ValueError: a cache of this kind cannot be divided among tenants.
        """
        raise ValueError(f"a {type(self).__name__} cannot be divided among tenants")

    def evict_own(self, tenant: Tenant, num_tokens: int) -> int:
        """Free at least `num_tokens` slots of a tenant's unlocked tokens; return their number. There must be enough."""
        raise ValueError(f"a {type(self).__name__} is not divided among tenants")

    # ---------------------------------------------------------------- observation

    @property
    def now(self) -> int:
        """The cache's clock, in ticks; 0 for a cache without one."""
        return 0

    def sample(self, max_nodes: int) -> Outline:
        """Return the size of each namespace and of its branches, estimated from about `max_nodes` nodes."""
        return Outline([], 0, 0)

    def publish_events_to(self, sink: KVEventSink) -> None:  # noqa: B027 -- no pages, no events
        """Publish to `sink` which pages are stored and removed from now on."""

    def resident_pages(self) -> Iterable[PageRun]:
        """Return the pages that events name and that can be matched now, parents before children. O(n)."""
        return ()

    def total_size(self) -> int:
        """Tokens in the cache."""
        return self.evictable_size() + self.protected_size()
