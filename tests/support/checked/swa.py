"""`RadixCache` with a sliding window and its reference model side by side, with a ledger for both halves of a slot."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import NamedTuple

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
from support.reference.models import ROOT, Found, Inserted, Node, Place, Tokens
from support.reference.swa import ReferenceSwaCache, Window

from raydix.cache_core import (
    EvictResult,
    InsertResult,
    LockError,
    MatchResult,
    RadixCache,
    RadixKey,
    StaleNodeError,
    TreeNode,
)


class SwaLedgerPool(LedgerPool):
    """A ledger of slots with window halves from a second pool. A half is freed alone, or with its slot."""

    def __init__(self, num_pages: int, page_size: int, rng: Random) -> None:
        super().__init__(num_pages, page_size, rng)
        self.num_halves = max(1, num_pages * 3 // 4) * page_size
        self.free_halves = set(range(1, self.num_halves + 1))
        self.half_of: dict[int, int] = {}  # by slot
        self.moved: list[tuple[int, int]] = []  # by the cache, since the last `take_moved`
        self.freed_alone: list[int] = []  # slots that lost their half alone, since the last `take_freed_alone`

    def lend(self, num_slots: int) -> list[int]:
        slots = super().lend(num_slots)
        for slot in slots:
            self.half_of[slot] = self.free_halves.pop()
        return slots

    def take_back(self, slots: list[int]) -> None:
        super().take_back(slots)
        self._free_halves(slots)

    def free(self, indices: torch.Tensor) -> None:
        super().free(indices)
        self._free_halves(indices.tolist())

    def drop_halves(self, slots: list[int]) -> None:
        """Free the window halves of the caller's slots."""
        assert self.lent.issuperset(slots) and self.half_of.keys() >= set(slots)
        self._free_halves(slots)

    def free_swa(self, indices: torch.Tensor) -> None:
        """The method that the cache calls for tombstones: each half must exist, on a slot of the tree."""
        slots = indices.tolist()
        assert len(set(slots)) == len(slots), f"halves freed twice at once: {slots}"
        assert self.tree.issuperset(slots), f"halves freed by no right: {sorted(set(slots) - self.tree)}"
        assert self.half_of.keys() >= set(slots), f"halves freed again: {sorted(set(slots) - self.half_of.keys())}"
        self._free_halves(slots)
        self.freed_alone += slots

    def transfer_swa(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """The method that the cache calls to heal under a lock: move halves from the caller's slots to the tree's."""
        for source, target in zip(src.tolist(), dst.tolist(), strict=True):
            assert source in self.lent and source in self.half_of, f"{source} has no half to give"
            assert target in self.tree and target not in self.half_of, f"{target} takes no half"
            self.half_of[target] = self.half_of.pop(source)
            self.moved.append((source, target))

    def take_moved(self) -> list[tuple[int, int]]:
        """Return the halves moved since the last call."""
        moved, self.moved = self.moved, []
        return moved

    def take_freed_alone(self) -> list[int]:
        """The slots that lost their half alone since the last call, sorted."""
        freed, self.freed_alone = sorted(self.freed_alone), []
        return freed

    def _free_halves(self, slots: list[int]) -> None:
        self.free_halves.update(self.half_of.pop(slot) for slot in slots if slot in self.half_of)


class PagedSwaLedgerPool(SwaLedgerPool, PagedLedgerPool):
    """The same for callers that free in pages."""


class SwaLock(NamedTuple):
    """A lock, its receipt, and the model's lock."""

    held: Held
    receipt: object
    window: Window
    live_slots: frozenset[int]  # of its window, when it was taken


class CheckedSwaCache(CheckedRadixCache):
    """A cache with a window, its model, and the ledger. Raises AssertionError where they part."""

    def __init__(
        self,
        page_size: int,
        window: int,
        num_pages: int,
        rng: Random,
        *,
        paged_pool: bool = False,
        transfers: bool = True,
    ) -> None:
        self.window = window
        self.transfers = transfers
        self.open: list[SwaLock] = []
        super().__init__(page_size, num_pages, rng, paged_pool=paged_pool)

    def _make(self, num_pages: int, rng: Random, paged_pool: bool) -> None:
        self.ledger = (PagedSwaLedgerPool if paged_pool else SwaLedgerPool)(num_pages, self.page_size, rng)
        if not self.transfers:
            vars(self.ledger)["transfer_swa"] = None
        self.pool = self.ledger
        self.radix = RadixCache(self.page_size, self.window, self.pool, self.told.append)
        self.reference = ReferenceSwaCache(self.page_size, self.window, heals_under_locks=self.transfers)
        self.cache, self.model = self.radix, self.reference

    # ---------------------------------------------------------------- lookups and inserts

    def match(self, tokens: Tokens, namespace: str | None) -> Held:
        full = self.reference.full_prefix_len(tokens, namespace)
        found = self.cache.match_prefix(make_key(tokens, namespace))
        return self._found(found, self.model.match(tokens, namespace), full)

    def peek(self, tokens: Tokens, namespace: str | None) -> list[int]:
        full = self.reference.full_prefix_len(tokens, namespace)
        expected = self.model.peek(tokens, namespace)
        self._found(self.cache.peek_prefix(make_key(tokens, namespace)), expected, full)
        return expected.slots

    def _found(self, found: MatchResult, expected: Found, full: int) -> Held:
        agree("full_prefix_len", found.full_prefix_len, full)
        branching = full if full > len(expected.slots) else None
        agree("branching", found.mamba_branching_seqlen, branching)
        self._check_found(found, expected)
        return Held(found.last_node, expected.handle)

    def insert(
        self,
        tokens: Tokens,
        namespace: str | None,
        slots: list[int],
        prev_prefix_len: int = 0,
        held: Held | None = None,
        swa_evicted_seqlen: int = 0,
    ) -> Held:
        """An insert of slots that are lent or the tree's own; the lent ones before `swa_evicted_seqlen`, rounded up to
        whole pages, come without their halves."""
        gone = -(-swa_evicted_seqlen // self.page_size) * self.page_size
        self.ledger.drop_halves([slot for slot in slots[:gone] if slot in self.pool.lent])
        all_lent = self.pool.lent.issuperset(slots)
        ids, value = as_argument(tokens), torch.tensor(slots, dtype=torch.int64)
        node, handle = (None, ROOT) if held is None else held
        result = self.radix.insert(
            RadixKey(ids, namespace),
            value,
            prev_prefix_len=prev_prefix_len,
            swa_evicted_seqlen=swa_evicted_seqlen,
            from_node=node,
        )
        spoil(ids)
        spoil(value)
        expected = self.reference.insert(tokens, namespace, slots, prev_prefix_len, handle, swa_evicted_seqlen)
        self._check_inserted(result, expected)
        self.check()
        known = max(prev_prefix_len, len(handle.place.prefix), gone)
        whole = len(tokens) - len(tokens) % self.page_size
        if all_lent and self.transfers and known <= whole - self.reference.tail:
            agree(
                "a lookup of what was inserted", self.cache.peek_prefix(make_key(tokens, namespace)).prefix_len, whole
            )
        self.pool.take_back([slot for slot in slots if slot in self.pool.lent])
        return Held(result.last_node, expected.handle)

    def _check_inserted(self, result: InsertResult, expected: Inserted) -> None:
        agree("prefix_len", result.prefix_len, expected.prefix_len)
        agree("duplicate_indices", result.duplicate_indices.tolist(), expected.duplicates)
        agree("slots freed by an insert", self.pool.take_freed(), sorted(self.reference.replaced))
        agree("halves moved by an insert", self.ledger.take_moved(), self.reference.moved)
        agree("halves freed alone by an insert", self.ledger.take_freed_alone(), [])
        agree("last_node", self.place_of(result.last_node), expected.handle.place)
        self.pool.adopt(expected.adopted)

    # ---------------------------------------------------------------- locks

    def lock_window(self, held: Held) -> SwaLock | None:
        """One lock on a node; None, as refused, if the node is stale."""
        if self.model.is_stale(held.handle):
            with refusal(StaleNodeError):
                self.radix.inc_lock_ref(held.node)
            self.check()
            return None
        prefix_slots = [slot for place in self.reference._path_to(held.handle.place) for slot in self._slots_at(place)]
        live_slots = frozenset(prefix_slots[-self.window :]) & self.ledger.half_of.keys()
        receipt = self.radix.inc_lock_ref(held.node)
        assert receipt is not None, "a lock with a window gives a receipt"
        lock = SwaLock(held, receipt, self.reference.lock_window(held.handle), live_slots)
        self.open.append(lock)
        self.check()
        return lock

    def _slots_at(self, place: Place) -> tuple[int, ...]:
        return self.model.pages[place].slots

    def unlock_window(self, lock: SwaLock) -> None:
        """One unlock, refused if its receipt was used or its node is gone."""
        if self.model.is_gone(lock.held.handle):
            with refusal(StaleNodeError):
                self.radix.dec_lock_ref(lock.held.node, lock.receipt)
        elif lock.window.used:
            with refusal(LockError):
                self.radix.dec_lock_ref(lock.held.node, lock.receipt)
        else:
            if len(self.open) % 2:
                self.radix.dec_lock_ref(lock.held.node, lock.receipt)
            else:
                self.radix.dec_lock_ref(lock.held.node, swa_boundary_id=lock.receipt)
            self.reference.unlock_window(lock.window)
        self.open = [other for other in self.open if other is not lock]
        self.check()

    def refuse_unlock(self, held: Held, receipt: object) -> None:
        """An unlock without its own receipt is refused, and nothing changes."""
        with refusal(LockError, StaleNodeError):
            self.radix.dec_lock_ref(held.node, receipt)
        self.check()

    def release_window(self, lock: SwaLock) -> None:
        """The window goes before the lock; once more has no effect."""
        self.radix.release_window(lock.held.node, lock.receipt)  # type: ignore[arg-type]
        self.reference.release_window(lock.window)
        self.check()

    # ---------------------------------------------------------------- eviction

    def evict(self, num_tokens: int, swa_num_tokens: int = 0) -> list[Node]:
        """As for full attention, and of window halves."""
        num_tokens = max(num_tokens, self.model.reclaimable_size())
        sizes = self.cache.evictable_size(), self.cache.swa_evictable_size()
        result = self.cache.evict(num_tokens, swa_num_tokens)
        victims = self.reference.evict_both(num_tokens, swa_num_tokens)
        assert result.full_evicted >= min(num_tokens, sizes[0]), f"{result} of {sizes}"
        assert result.swa_evicted >= min(swa_num_tokens, sizes[1]), f"{result} of {sizes}"
        agree("result", result, EvictResult(self._count(victims), self.reference.swa_freed, 0))
        agree("halves freed alone", self.ledger.take_freed_alone(), sorted(self.reference.tombstoned))
        self._check_eviction(victims)
        return victims

    def reset(self) -> None:
        self.open.clear()
        super().reset()

    # ---------------------------------------------------------------- what must hold at all times

    def check(self) -> None:
        super().check()
        ledger, model = self.ledger, self.reference
        agree("swa_evictable_size", self.cache.swa_evictable_size(), model.swa_evictable_size())
        agree("swa_protected_size", self.cache.swa_protected_size(), model.swa_protected_size())
        live = Counter(slot for place, page in model.pages.items() if model.is_live(place) for slot in page.slots)
        agree("slots of live pages", live, Counter(slot for slot in ledger.tree if slot in ledger.half_of))
        agree("all halves", sorted([*ledger.free_halves, *ledger.half_of.values()]), [*range(1, ledger.num_halves + 1)])
        agree("slots without an owner that have halves", ledger.half_of.keys() & ledger.free_slots, set())
        agree("halves moved or freed unasked", (ledger.moved, ledger.freed_alone), ([], []))
        for lock in self.open:
            assert lock.window.released or ledger.half_of.keys() >= lock.live_slots, f"a hole in the window of {lock}"

    def _extra(self, node: TreeNode) -> tuple[int | None, ...]:
        return (not node.swa_tombstone, node.swa_lock_ref)
