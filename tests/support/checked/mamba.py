"""`MambaRadixCache` and its reference model side by side, with ledgers for KV slots and for state slots."""

from __future__ import annotations

from random import Random

import torch
from support.checked.radix_cache import (
    CheckedRadixCache,
    Held,
    LedgerPool,
    PagedLedgerPool,
    agree,
    as_argument,
    make_key,
    refusal,
    spoil,
)
from support.reference.mamba import ReferenceMambaCache
from support.reference.models import ROOT, Node, Tokens

from raydix.cache_core import EvictResult, InvalidKeyError, MambaRadixCache, MatchResult, RadixKey, TreeNode


class StateLedger:
    """State slots, each free, lent to the caller, or the tree's. Any other way to change hands is a fault."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = set(range(1, num_slots + 1))
        self.lent: set[int] = set()
        self.tree: set[int] = set()

    def alloc_track_slot(self) -> int:
        """A slot for the caller."""
        slot = self.free.pop()
        self.lent.add(slot)
        return slot

    def take_back(self, slot: int) -> None:
        """The caller returns what was lent to it."""
        self.lent.remove(slot)
        self.free.add(slot)

    def adopt(self, slot: int) -> None:
        """Move slots from the caller to the tree."""
        self.lent.remove(slot)
        self.tree.add(slot)

    def free_track_slot(self, slot: int) -> None:
        """The method that the cache calls: each slot must belong to the tree, once."""
        assert slot in self.tree, f"state slot {slot} was freed by no right"
        self.tree.remove(slot)
        self.free.add(slot)


class CheckedMambaCache(CheckedRadixCache):
    """A cache with states, its model, and the ledgers. Raises AssertionError where they part."""

    def __init__(
        self, page_size: int, chunk_size: int, num_pages: int, num_states: int, rng: Random, *, paged_pool: bool = False
    ) -> None:
        self.chunk_size = chunk_size
        self.states = StateLedger(num_states)
        super().__init__(page_size, num_pages, rng, paged_pool=paged_pool)

    def _make(self, num_pages: int, rng: Random, paged_pool: bool) -> None:
        self.pool = (PagedLedgerPool if paged_pool else LedgerPool)(num_pages, self.page_size, rng)
        self.mamba = MambaRadixCache(
            self.page_size, self.pool, self.states, self.told.append, chunk_size=self.chunk_size
        )
        self.reference = ReferenceMambaCache(self.page_size, self.chunk_size)
        self.cache, self.model = self.mamba, self.reference

    # ---------------------------------------------------------------- lookups and inserts

    def match(self, tokens: Tokens, namespace: str | None) -> Held:
        found = self.cache.match_prefix(make_key(tokens, namespace))
        self._check_lengths(found, tokens, namespace)
        expected = self.model.match(tokens, namespace)
        self._check_found(found, expected)
        return Held(found.last_node, expected.handle)

    def peek(self, tokens: Tokens, namespace: str | None) -> list[int]:
        found = self.cache.peek_prefix(make_key(tokens, namespace))
        self._check_lengths(found, tokens, namespace)
        expected = self.model.peek(tokens, namespace)
        self._check_found(found, expected)
        return expected.slots

    def _check_lengths(self, found: MatchResult, tokens: Tokens, namespace: str | None) -> None:
        model = self.reference
        agree("full_prefix_len", found.full_prefix_len, model.full_prefix_len(tokens, namespace))
        agree("mamba_branching_seqlen", found.mamba_branching_seqlen, model.branching_seqlen(tokens, namespace))

    def insert(
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: list[int],
        prev_prefix_len: int = 0,
        held: Held | None = None,
        *,
        with_state: bool = False,
    ) -> Held:
        """An insert, with a state if there is one to lend and the key is whole pages."""
        with_state = with_state and bool(self.states.free) and bool(tokens) and len(tokens) % self.page_size == 0
        state = self.states.alloc_track_slot() if with_state else None
        ids, value = as_argument(tokens), torch.tensor(slots, dtype=torch.int64)
        node, handle = (None, ROOT) if held is None else held
        result = self.mamba.insert(
            RadixKey(ids, namespace), value, mamba_value=state, prev_prefix_len=prev_prefix_len, from_node=node
        )
        spoil(ids)
        spoil(value)
        expected = self.reference.insert(tokens, namespace, slots, prev_prefix_len, handle)
        agree("prefix_len", result.prefix_len, expected.prefix_len)
        agree("duplicate_indices", result.duplicate_indices.tolist(), expected.duplicates)
        agree("slots freed by an insert", self.pool.take_freed(), [])
        agree("last_node", self.place_of(result.last_node), expected.handle.place)
        self.pool.adopt(expected.adopted)
        self.reference.use_state(expected.handle.place)
        self._attached(Held(result.last_node, expected.handle), state, result.mamba_exist)
        self.pool.take_back([slot for slot in slots if slot in self.pool.lent])
        return Held(result.last_node, expected.handle)

    def attach(self, held: Held) -> None:
        """A state for a node that is there."""
        state = self.states.alloc_track_slot()
        self._attached(held, state, self.mamba.attach_state(held.node, state))

    def _attached(self, held: Held, state: int | None, existed: bool) -> None:
        expected = self.reference.attach(held.handle, state)
        agree("mamba_exist", existed, expected)
        if state is not None and expected:
            self.states.take_back(state)
        elif state is not None:
            self.states.adopt(state)
        self.check()

    def refuse_state_within_a_page(self, tokens: Tokens, namespace: str | None) -> None:
        """A state stands after the last token of a page, or nowhere."""
        state = self.states.alloc_track_slot()
        with refusal(InvalidKeyError):
            self.mamba.insert(make_key(tokens, namespace), torch.arange(len(tokens)), mamba_value=state)
        self.states.take_back(state)
        self.check()

    # ---------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, num_states: int = 0) -> list[Node]:
        """As for full attention, and of states."""
        num_tokens = max(num_tokens, self.model.reclaimable_size())
        sizes = self.cache.evictable_size(), self.mamba.mamba_evictable_size()
        before = len(self.reference.states)
        result = self.cache.evict(num_tokens, num_states)
        victims = self.reference.evict_both(num_tokens, num_states)
        assert result.full_evicted >= min(num_tokens, sizes[0]), f"{result} of {sizes}"
        assert result.mamba_evicted >= min(num_states, sizes[1]), f"{result} of {sizes}"
        agree("result", result, EvictResult(self._count(victims), 0, before - len(self.reference.states)))
        self._check_eviction(victims)
        return victims

    # ---------------------------------------------------------------- what must hold at all times

    def check(self) -> None:
        super().check()
        model, states = self.reference, self.states
        agree("mamba_evictable_size", self.mamba.mamba_evictable_size(), model.mamba_evictable_size())
        agree("mamba_protected_size", self.mamba.mamba_protected_size(), model.mamba_protected_size())
        agree("states of the tree", sorted(model.states.values()), sorted(states.tree))
        agree("all states", len(states.free) + len(states.lent) + len(states.tree), states.num_slots)
        by_use = [model.states[place] for place in model.by_use]
        agree("states by use", [node.mamba_value for node in self.mamba.mamba_lru], by_use)
        agree("states by use, from the other end", self._states_from_the_head(), by_use[::-1])

    def _states_from_the_head(self) -> list[int | None]:
        lru = self.mamba.mamba_lru
        node, slots = lru.head.mamba_next, []
        while node is not None and node is not lru.tail:
            slots.append(node.mamba_value)
            node = node.mamba_next
        return slots

    def _extra(self, node: TreeNode) -> tuple[int | None, ...]:
        return (node.mamba_value,)  # type: ignore[attr-defined]
