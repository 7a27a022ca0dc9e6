"""`TriePrefixCache`: a `RadixTrie` as a `BasePrefixCache`, so that leases can be opened over it.

A block is a page, named by its first slot. Each lock marks its path as in use by a new sequence. All namespaces share
one trie and one eviction order: the first token of each prefix includes its namespace and how often that was retired.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import count
from operator import index
from typing import Any, NamedTuple, Protocol

import numpy as np
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
    Starts,
)
from raydix.cache_core.errors import LockError
from raydix.cache_core.outline import SHOWN, Outline, OutlineLimits, OutlineNode, num_alike, outline
from raydix.cache_core.pool.release import call_pool
from raydix.cache_core.radix_trie import RadixTrie
from raydix.cache_core.tree.packed_slots import as_slots, expand_pages
from raydix.cache_core.tree.radix_key import check_key
from raydix.cache_core.trie.trie_node import TrieNode


class PagePool(Protocol):
    """The pool that displaced and evicted pages are freed to."""

    def free_pages(self, starts: Starts) -> None:
        """Free pages, each named once by its first slot."""


class FirstToken(NamedTuple):
    """The first token of a prefix in the trie, so that equal tokens of two namespaces lie in different nodes."""

    extra_key: str | None
    times_retired: int
    token: Hashable


class TrieHandle:
    """The end of a prefix, in the current trie or in one that `retire_all` replaced."""

    __slots__ = ("end", "node", "trie")

    def __init__(self, trie: RadixTrie, node: TrieNode, end: int) -> None:
        self.trie = trie
        self.node = node
        self.end = end  # tokens from the root


class TriePrefixCache(BasePrefixCache):
    """A prefix cache over a `RadixTrie`.

    If an insert brings a page for tokens that are in the trie, the trie keeps its own page while a sequence uses it,
    and otherwise takes the new one. Displaced pages of the trie are freed; the caller keeps the rejected new pages.
    """

    def __init__(self, page_size: int = 1, token_to_kv_pool_allocator: PagePool | None = None) -> None:
        self.page_size = index(page_size)
        self.pool = token_to_kv_pool_allocator
        self._displaced: list[int] = []
        self._trie = self._new_trie()
        self._retired: list[RadixTrie] = []
        self._times_retired: dict[str | None, int] = {}  # namespace that is still in the trie -> count
        self._sequences = count(1)
        self._open: dict[int, TrieHandle] = {}

    @property
    def root(self) -> TrieHandle:
        """The node that a miss returns; locking it has no effect."""
        return TrieHandle(self._trie, self._trie.root, 0)

    def match_prefix(self, key: RadixKey) -> MatchResult:
        """Return the longest cached prefix, in whole pages. May split a node."""
        match = self.match_pages(key)
        slots = expand_pages(match.starts, self.page_size) if match.prefix_len else NO_SLOTS
        return MatchResult(slots, match.last_node, match.prefix_len, None, match.prefix_len)

    def peek_prefix(self, key: RadixKey) -> MatchResult:
        """Return the result of `match_prefix`, without any effect."""
        tokens = self._tokens(key)
        blocks = self._trie.peek_prefix(tokens) if tokens else []
        end = len(blocks) * self.page_size
        slots = expand_pages(np.array(blocks, np.int64), self.page_size) if blocks else NO_SLOTS
        return MatchResult(slots, self.root, end, None, end)

    def match_pages(self, key: RadixKey, limit: int | None = None, priority: int = 0) -> PageMatch:
        """Return the longest cached prefix of the first `limit` tokens, in pages."""
        tokens = self._tokens(key) if limit is None else self._tokens(key)[:limit]
        if not tokens:
            return PageMatch(0, self.root, np.empty(0, np.int64), 0, None)
        node, blocks = self._trie.match_prefix(tokens)
        end = len(blocks) * self.page_size
        return PageMatch(end, TrieHandle(self._trie, node, end), np.array(blocks, np.int64), end, None)

    def insert(self, key: RadixKey, value: torch.Tensor | None = None, **kwargs: Any) -> InsertResult:
        """Insert the whole pages of `key`; `value` must hold pages of consecutive slots.

        `duplicate_indices` of the result names the incoming slots that were rejected: the caller must free them.
        """
        check_key(key)
        aligned = len(key) - len(key) % self.page_size
        starts = as_slots(key, value, aligned).numpy()[: aligned : self.page_size]
        done = self.insert_pages(key[:aligned], starts, self.root)
        refused = starts[: len(done.existing)][starts[: len(done.existing)] != done.existing]
        duplicates = expand_pages(refused, self.page_size) if len(refused) else NO_SLOTS
        return InsertResult(done.prefix_len, done.last_node, False, duplicates)

    def insert_pages(
        self,
        key: RadixKey,
        starts: Starts,
        from_node: TrieHandle,
        swa_evicted_seqlen: int = 0,
        priority: int = 0,
        unnamed_from: int | None = None,
    ) -> PageInsert:
        """Insert the whole pages of `key` beyond `from_node`.

        Raises:
            SlotError: the pool refused to free displaced pages. The insert is complete.
        """
        start, stop = from_node.end, len(key) - len(key) % self.page_size
        if start == stop:
            return PageInsert(stop, stop, from_node, starts[:0])
        tokens = self._tokens(key[start:stop], start)
        there = len(self._trie.peek_prefix(tokens, from_node.node))
        node = self._trie.insert(tokens, starts.tolist(), from_node.node)
        incoming = set(starts.tolist())
        displaced, self._displaced = self._displaced, []
        freed = [block for block in displaced if block not in incoming]
        if freed and self.pool is not None:
            call_pool(self.pool.free_pages, np.array(freed, np.int64))
        held = np.array(self._trie.peek_prefix(tokens, from_node.node)[:there], np.int64)
        return PageInsert(start + there * self.page_size, stop, TrieHandle(self._trie, node, stop), held)

    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> EvictResult:
        """Free at least `num_tokens` unused slots, or all: least recently used leaves first, from their last page.

        Raises:
            SlotError: the pool refused to free the pages. The eviction is complete.
        """
        blocks = self._trie.evict_blocks(-(-index(num_tokens) // self.page_size))
        self._free(blocks)
        return EvictResult(len(blocks) * self.page_size)

    def inc_lock_ref(self, node: TrieHandle) -> int:
        """Mark the path as in use by a new sequence; return the receipt for `dec_lock_ref`.

        Raises:
            StaleNodeError: the node is no longer in the trie.
        """
        if not isinstance(node, TrieHandle):
            raise TypeError(f"a node is needed, not {type(node).__name__}")
        sequence = next(self._sequences)
        node.trie.mark_in_use_by(node.node, sequence)
        self._open[sequence] = node
        return sequence

    def dec_lock_ref(self, node: TrieHandle, receipt: Any = None, **kwargs: Any) -> None:
        """Undo one `inc_lock_ref`.

        Raises:
            LockError: the receipt is missing, used, or another lock's.
        """
        if receipt is None or self._open.get(receipt) is not node:
            raise LockError("an unlock needs the receipt of this very lock, once")
        del self._open[receipt]
        node.trie.mark_not_in_use_by(node.node, receipt)

    def reset(self) -> None:
        """Drop everything and free every page. All nodes become stale."""
        tries = (self._trie, *self._retired)
        self._trie, self._retired, self._times_retired = self._new_trie(), [], {}
        self._open.clear()
        self._free([block for trie in tries for node in trie.nodes() for block in node.blocks])

    def retire_all(self) -> None:
        """Make everything unmatchable; pages that a sequence uses stay until their lock is undone."""
        self._retired.append(self._trie)
        self._trie, self._times_retired = self._new_trie(), {}

    def retire(self, is_meant: Callable[[str | None], bool]) -> int:
        """Make the namespaces with a meant `extra_key` unmatchable; return how many there were.

        O(children of the root). Their pages are not matched any more, so they age and are evicted in LRU order.
        """
        firsts = [child.tokens[0] for child in self._trie.root.children.values()]
        present = {first[:2] for first in firsts if isinstance(first, FirstToken)}
        spaces = {extra_key for extra_key, _ in present}
        meant = {extra_key for extra_key, times in present if times == self._times_retired.get(extra_key, 0)}
        meant = {extra_key for extra_key in meant if is_meant(extra_key)}
        kept = {extra_key: times for extra_key, times in self._times_retired.items() if extra_key in spaces}
        self._times_retired = kept | {extra_key: kept.get(extra_key, 0) + 1 for extra_key in meant}
        return len(meant)

    def reclaim_retired(self, max_tokens: int | None = None) -> int:
        """Free about `max_tokens` unused tokens that `retire_all` retired, by default all; return their number."""
        blocks: list[int] = []
        left = index(max_tokens) // self.page_size + 1 if max_tokens is not None else None
        for trie in self._retired:
            wanted = trie.num_evictable_blocks if left is None else min(left - len(blocks), trie.num_evictable_blocks)
            blocks += trie.evict_blocks(wanted)
        self._retired = [trie for trie in self._retired if trie.num_blocks]
        self._free(blocks)
        return len(blocks) * self.page_size

    def evictable_size(self) -> int:
        """Return the number of tokens in unused pages, without the tries that `retire_all` replaced. O(1)."""
        return self._trie.num_evictable_blocks * self.page_size

    def protected_size(self) -> int:
        """Return the number of tokens in all other pages. O(tries that are still in use)."""
        return sum(trie.num_blocks for trie in (self._trie, *self._retired)) * self.page_size - self.evictable_size()

    def num_locks(self) -> int:
        """Return the number of locks below the root that were not undone."""
        return sum(handle.end > 0 for handle in self._open.values())

    def tree_starts(self) -> list[Starts]:
        """Return the pages of every node. O(n)."""
        tries = (self._trie, *self._retired)
        return [np.array(node.blocks, np.int64) for trie in tries for node in trie.nodes() if node.blocks]

    def outline(self, limits: OutlineLimits) -> Outline:
        """Return the largest branches, of all namespaces together. Bounded work."""
        return outline([self._trie.root], _outline_node, limits, self._trie.clock)

    def pretty_print(self) -> None:
        """Print the trie."""
        self._trie.pretty_print()

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of a trie is broken. O(n)."""
        for trie in (self._trie, *self._retired):
            trie.check_invariants()

    def _tokens(self, key: RadixKey, start: int = 0) -> list[Hashable]:
        """Return the tokens of a key as they are in the trie from token `start` on."""
        check_key(key)
        tokens: list[Hashable] = list(key.token_ids)
        if tokens and not start:
            tokens[0] = FirstToken(key.extra_key, self._times_retired.get(key.extra_key, 0), tokens[0])
        return tokens

    def _new_trie(self) -> RadixTrie:
        return RadixTrie(self.page_size, on_displaced=lambda block: self._displaced.append(block))

    def _free(self, blocks: list[int]) -> None:
        if blocks and self.pool is not None:
            call_pool(self.pool.free_pages, np.array(blocks, np.int64))


def _outline_node(node: TrieNode) -> OutlineNode:
    return OutlineNode(node, len(node.tokens), len(node.users), 0, node.last_access_time, None, _first_ids, _num_alike)


def _first_ids(node: TrieNode, num_skipped: int) -> list[int]:
    return list(map(_id_of, node.tokens[num_skipped : num_skipped + SHOWN]))


def _num_alike(nodes: list[TrieNode]) -> int:
    return num_alike([list(map(_id_of, node.tokens)) for node in nodes])


def _id_of(token: Any) -> int:
    """Return the id of a token in the trie; of a pair, the first id."""
    if isinstance(token, FirstToken):
        token = token.token
    return int(token[0] if isinstance(token, tuple) else token)
