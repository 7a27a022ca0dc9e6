"""`MambaRadixCache` with a sliding window and its reference model side by side, with the ledgers of all three pools."""

from __future__ import annotations

from random import Random

import torch
from support.checked.mamba import CheckedMambaCache, StateLedger
from support.checked.radix_cache import CheckedRadixCache, Held, agree, as_argument, make_key, spoil
from support.checked.swa import CheckedSwaCache, PagedSwaLedgerPool, SwaLedgerPool
from support.reference.hybrid import ReferenceHybridCache
from support.reference.models import ROOT, Node, Tokens

from raydix.cache_core import EvictResult, MambaRadixCache, RadixKey, TreeNode


class CheckedHybridCache(CheckedMambaCache, CheckedSwaCache):
    """A cache with a window and states, its model, and the ledgers. Raises AssertionError where they part."""

    mamba: MambaRadixCache
    reference: ReferenceHybridCache

    def __init__(
        self,
        page_size: int,
        window: int,
        chunk_size: int,
        num_pages: int,
        num_states: int,
        rng: Random,
        *,
        paged_pool: bool = False,
        transfers: bool = True,
    ) -> None:
        self.window = window
        self.chunk_size = chunk_size
        self.transfers = transfers
        self.states = StateLedger(num_states)
        self.open = []
        CheckedRadixCache.__init__(self, page_size, num_pages, rng, paged_pool=paged_pool)

    def _make(self, num_pages: int, rng: Random, paged_pool: bool) -> None:
        self.ledger = (PagedSwaLedgerPool if paged_pool else SwaLedgerPool)(num_pages, self.page_size, rng)
        if not self.transfers:
            vars(self.ledger)["transfer_swa"] = None
        self.pool = self.ledger
        self.mamba = MambaRadixCache(
            self.page_size,
            self.pool,
            self.states,
            self.told.append,
            chunk_size=self.chunk_size,
            sliding_window_size=self.window,
        )
        self.reference = ReferenceHybridCache(
            self.page_size, self.window, self.chunk_size, heals_under_locks=self.transfers
        )
        self.cache = self.radix = self.mamba
        self.model = self.reference

    def insert(  # type: ignore[override]
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: list[int],
        prev_prefix_len: int = 0,
        held: Held | None = None,
        swa_evicted_seqlen: int = 0,
        *,
        with_state: bool = False,
    ) -> Held:
        """An insert as with a window, with a state if there is one to lend and the key is whole pages."""
        gone = -(-swa_evicted_seqlen // self.page_size) * self.page_size
        whole = len(tokens) - len(tokens) % self.page_size
        self.ledger.drop_halves([slot for slot in slots[:gone] if slot in self.pool.lent])
        all_lent = self.pool.lent.issuperset(slots)
        with_state = with_state and bool(self.states.free) and bool(tokens) and len(tokens) == whole
        state = self.states.alloc_track_slot() if with_state else None
        ids, value = as_argument(tokens), torch.tensor(slots, dtype=torch.int64)
        node, handle = (None, ROOT) if held is None else held
        result = self.mamba.insert(
            RadixKey(ids, namespace),
            value,
            mamba_value=state,
            prev_prefix_len=prev_prefix_len,
            swa_evicted_seqlen=swa_evicted_seqlen,
            from_node=node,
        )
        spoil(ids)
        spoil(value)
        expected = self.reference.insert(tokens, namespace, slots, prev_prefix_len, handle, swa_evicted_seqlen)
        self._check_inserted(result, expected)
        self.reference.use_state(expected.handle.place)
        self._attached(Held(result.last_node, expected.handle), state, result.mamba_exist)
        known = max(prev_prefix_len, len(handle.place.prefix), gone)
        has_state = state is not None or result.mamba_exist
        if has_state and all_lent and self.transfers and known <= whole - self.reference.tail:
            found = self.cache.peek_prefix(make_key(tokens, namespace)).prefix_len
            agree("a lookup of what was inserted", found, whole)
        self.pool.take_back([slot for slot in slots if slot in self.pool.lent])
        return Held(result.last_node, expected.handle)

    def evict(self, num_tokens: int, swa_num_tokens: int = 0, num_states: int = 0) -> list[Node]:
        """As for full attention, and of window halves and states."""
        num_tokens = max(num_tokens, self.model.reclaimable_size())
        wanted = EvictResult(num_tokens, swa_num_tokens, num_states)
        there = EvictResult(self.cache.evictable_size(), *self._evictable())
        states = len(self.reference.states)
        result = self.mamba.evict(num_tokens, swa_num_tokens, num_states)
        victims = self.reference.evict_all(num_tokens, swa_num_tokens, num_states)
        for kind in ("full_evicted", "swa_evicted", "mamba_evicted"):
            enough = min(getattr(wanted, kind), getattr(there, kind))
            assert getattr(result, kind) >= enough, f"{result} of {there}, where {wanted} was wanted"
        gone = EvictResult(self._count(victims), self.reference.swa_freed, states - len(self.reference.states))
        agree("result", result, gone)
        agree("halves freed alone", self.ledger.take_freed_alone(), sorted(self.reference.tombstoned))
        self._check_eviction(victims)
        return victims

    def _evictable(self) -> tuple[int, int]:
        return self.mamba.swa_evictable_size(), self.mamba.mamba_evictable_size()

    def _extra(self, node: TreeNode) -> tuple[int | None, ...]:
        return (*CheckedSwaCache._extra(self, node), *CheckedMambaCache._extra(self, node))
