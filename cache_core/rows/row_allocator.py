"""`RowAllocator`: allocates rows for leases, filled with the prefix that a lease needs.

A row is `row_len` consecutive slots for one sequence; `PrefixCacheManager` calls it a slot. A row is taken by a lease,
cached (free, with a prefix that can be found in it), or empty. Rules, checked by `check`:

1. Each row is taken by one lease, or free in the allocator.
2. In a taken row, exactly the tokens that its lease published can be found.
3. `cached_rows` counts the free rows with a record. Every record can be found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from raydix.cache_core.errors import OutOfSlotsError
from raydix.cache_core.leases.results import Counters
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.pool.content_check import ContentCheck
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.cache_core.rows.prefix_cache_manager import FoundRow, PrefixCacheManager
from raydix.cache_core.rows.slot_allocator import SlotAllocator
from raydix.cache_core.tree.packed_slots import Starts
from raydix.cache_core.tree.radix_key import RadixKey

_MAX_LOOKED_AT = 64  # most rows with a prefix that `take` compares


class RowAllocator:
    """The allocator of rows for leases.

    Args:
        num_rows: the number of rows.
        row_len: slots of each row.
        kv_cache: `(k_cache, v_cache)`, each `[row, position, layer, ...]`, in which prefixes are copied. None: the pool
            has no tensors, and no prefix is copied.
        counters: counts the evicted tokens.
        check: the check of the slots' content, or None.
    """

    def __init__(
        self,
        num_rows: int,
        row_len: int,
        kv_cache: tuple[torch.Tensor, torch.Tensor] | None,
        counters: Counters,
        check: ContentCheck | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.cached_rows = 0
        self._row_len = row_len
        self._allocator = SlotAllocator(num_rows)
        self._records = PrefixCacheManager(
            num_rows * row_len, self._allocator
        )  # every slot fits, so `insert` evicts nothing
        no_layers = torch.empty(num_rows, row_len, 0)
        self._kv_cache = kv_cache or (no_layers, no_layers)
        self._num_layers = self._kv_cache[0].shape[2]
        self._counters = counters
        self._check = check
        for row in range(num_rows):
            self._poison(row)

    def outline(self, limits: OutlineLimits) -> Outline:
        """Return the largest branches of the recorded prefixes."""
        return self._records.outline(limits)

    @property
    def taken_rows(self) -> int:
        """The number of rows that leases have taken."""
        return self.num_rows - self._allocator.free_count

    @property
    def empty_rows(self) -> int:
        """The number of free rows without a record."""
        return self._allocator.free_count - self.cached_rows

    def peek(self, key: RadixKey) -> FoundRow:
        """Return the longest prefix of `key` that any row holds, taken or free, and that row. Changes nothing."""
        return self._records.peek(key)

    def take(self, prefix: RadixKey) -> int:
        """Take a row with `prefix` in its first positions. Afterwards exactly `prefix` can be found in the row.

        A row must hold the prefix. If such a row is free, it is reused in place; of several, the one with the fewest
        recorded tokens. If all are taken, the prefix is copied into an empty or evicted row, with one copy per
        tensor. If more than 64 rows hold the prefix, only the 64 recorded last are compared.

        Raises:
            OutOfSlotsError: every row is taken; nothing changed.
            ContentError: the prefix was overwritten in one of its rows; nothing changed. Only with `check`.
        """
        holders = self._records.peek_slots(prefix, _MAX_LOOKED_AT)[1]
        if self._check is not None:
            for row in holders:
                self._check.verify(self._pages(row, 0, len(prefix)))
        released = [row for row in holders if self._allocator.is_free(row)]
        if released:
            row = self._reuse(min(released, key=self._records.recorded_len), len(prefix))
        else:
            row = self._take_empty()
            if holders:
                self._records.copy_kv(prefix, row, self._kv_cache, self._num_layers)
                wait_for_device(self._kv_cache[0])
        self.publish(row, prefix)  # a reused row has the record already, but becomes the most recently used
        return row

    def _reuse(self, row: int, prefix_len: int) -> int:
        self._allocator.occupy(row)
        self._records.invalidate(row, prefix_len)
        self._poison(row, prefix_len)
        self.cached_rows -= 1
        return row

    def _take_empty(self) -> int:
        row = self._records.lowest_empty_slot()
        if row < 0 and self.evict(self._row_len):
            row = self._records.lowest_empty_slot()
        if row < 0:
            raise OutOfSlotsError(self._row_len, 0, 0, self.num_rows * self._row_len)
        self._allocator.alloc_at(row)
        return row

    def publish(self, row: int, key: RadixKey) -> None:
        """Record the tokens of `key` in a taken row. Their KV must be in its first positions."""
        self._records.insert(key, row, self._allocator.version(row))
        if self._check is not None:
            self._check.publish(self._pages(row, 0, len(key)))

    def give_back(self, row: int) -> None:
        """Free a taken row. Its published tokens can still be found."""
        self._allocator.free(row)
        self.cached_rows += self._records.slot_is_findable(row)
        self._poison(row, self._records.recorded_len(row))

    def evict(self, num_slots: int) -> int:
        """Evict cached rows of at least `num_slots` slots, or all; return the number of slots.

        The least recently used rows go first. O(log rows) per row, and O(depth in nodes) for its record.
        """
        evicted = 0
        while evicted < num_slots and (row := self._records.evict_lru_slot()) is not None:
            self._poison(row)
            self.cached_rows -= 1
            evicted += self._row_len
        self._counters.tokens_evicted += evicted
        return evicted

    def forget(self, is_meant: Callable[[str | None], bool]) -> int:
        """Drop the records of each namespace for which `is_meant(extra_key)` is True; return their number."""
        num_namespaces, rows = self._records.forget_namespaces(is_meant)
        released = [row for row in rows if self._allocator.is_free(row)]
        self.cached_rows -= len(released)
        for row in released:
            self._poison(row)
        return num_namespaces

    def forget_all(self) -> None:
        """Drop all records. Cached rows become empty; taken rows stay taken."""
        self._records.reset()
        self.cached_rows = 0
        for row in filter(self._allocator.is_free, range(self.num_rows)):
            self._poison(row)

    def _poison(self, row: int, from_position: int = 0) -> None:
        """Poison the positions from `from_position` on, which must be unused. No effect without a check."""
        if self._check is not None:
            self._check.poison(self._pages(row, from_position, self._row_len))

    def _pages(self, row: int, start: int, stop: int) -> Starts:
        """Return the pages of positions [start, stop) of a row. A page must begin at `start`."""
        assert self._check is not None
        return np.arange(start, stop, self._check.page_size) + row * self._row_len

    def check(self, published: dict[int, RadixKey]) -> None:
        """Raise AssertionError if a rule is broken. O(n).

        Args:
            published: the tokens that each lease published, by row.
        """
        records, rows = self._records, range(self.num_rows)
        records.check_invariants()
        self._allocator.check_invariants()
        free = [row for row in rows if self._allocator.is_free(row)]
        assert sorted([*published, *free]) == list(rows), f"rule 1: {published.keys()} are leased, {free=}"
        for row, key in published.items():
            known = records.recorded_key(row)
            assert known == key if key else known is None, f"rule 2: row {row} should hold {key}, not {known}"
        recorded = [row for row in rows if records.recorded_len(row)]
        assert all(map(records.slot_is_findable, recorded)), f"rule 3: stale records among rows {recorded}"
        cached = set(recorded).intersection(free)
        assert len(cached) == self.cached_rows, f"rule 3: {self.cached_rows=}, but the cached rows are {cached}"
