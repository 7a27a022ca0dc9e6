"""`RowAllocator`: taking rows for leases, with the prefix they want in them, and giving them back.

A row is `row_len` consecutive slots for one sequence; what `PrefixCacheManager` calls a slot is a row here. A row is
taken, or cached (free, and a prefix can be found in it), or empty. Rules, checked by `check`:

1. Each row is taken by one lease, or free in the allocator.
2. Of a taken row exactly what its lease has published can be found.
3. `cached_rows` counts the free rows of which something is recorded; every record can be found.
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

_MAX_LOOKED_AT = 64  # rows that hold a prefix


class RowAllocator:
    """The rows as leases draw on them.

    Args:
        num_rows: how many there are.
        row_len: slots of each.
        kv_cache: `(k_cache, v_cache)`, each `[row, position, layer, ...]`, in which prefixes are copied; None: there
            are no tensors, and nothing to copy.
        counters: told of evictions.
        check: of what the slots hold; None: nobody watches.
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
        self._records = PrefixCacheManager(num_rows * row_len, self._allocator)  # nodes for every slot: never short
        no_layers = torch.empty(num_rows, row_len, 0)
        self._kv_cache = kv_cache or (no_layers, no_layers)
        self._num_layers = self._kv_cache[0].shape[2]
        self._counters = counters
        self._check = check
        for row in range(num_rows):
            self._poison(row)

    def outline(self, limits: OutlineLimits) -> Outline:
        """The largest branches of what can be found."""
        return self._records.outline(limits)

    @property
    def taken_rows(self) -> int:
        """Rows of leases."""
        return self.num_rows - self._allocator.free_count

    @property
    def empty_rows(self) -> int:
        """Rows that nobody has taken and in which nothing can be found."""
        return self._allocator.free_count - self.cached_rows

    def peek(self, key: RadixKey) -> FoundRow:
        """The longest prefix of `key` that some row holds, taken or not, and that row; nothing changes."""
        return self._records.peek(key)

    def take(self, prefix: RadixKey) -> int:
        """Take a row whose first positions hold `prefix`, which was just found; it can be found there, and no more.

        A row that nobody has taken is reused in place, the one that holds least beyond the prefix. Where all that hold
        it are taken, it is copied into an empty row, or into one that is evicted for it: one copy per tensor. Of a
        prefix that more than 64 rows hold, those are looked at in which it was recorded last.

        Raises:
            OutOfSlotsError: every row is taken; nothing changed.
            ContentError: somebody wrote to the prefix in one of its rows; nothing changed. Only if that is checked.
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
        self.publish(row, prefix)  # in a reused row it is known, but used now
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
        """Make the tokens of `key`, whose KV is in the first positions of a taken row, findable there."""
        self._records.insert(key, row, self._allocator.version(row))
        if self._check is not None:
            self._check.publish(self._pages(row, 0, len(key)))

    def give_back(self, row: int) -> None:
        """Nobody has taken the row any more; what was published in it can still be found."""
        self._allocator.free(row)
        self.cached_rows += self._records.slot_is_findable(row)
        self._poison(row, self._records.recorded_len(row))

    def evict(self, num_slots: int) -> int:
        """Empty cached rows, least recently used first, of at least `num_slots` slots or all; returns of how many.

        O(log rows) for each, and what its record takes to drop.
        """
        evicted = 0
        while evicted < num_slots and (row := self._records.evict_lru_slot()) is not None:
            self._poison(row)
            self.cached_rows -= 1
            evicted += self._row_len
        self._counters.tokens_evicted += evicted
        return evicted

    def forget(self, is_meant: Callable[[str | None], bool]) -> int:
        """Nothing of these namespaces can be found any more; returns of how many anything could."""
        num_namespaces, rows = self._records.forget_namespaces(is_meant)
        released = [row for row in rows if self._allocator.is_free(row)]
        self.cached_rows -= len(released)
        for row in released:
            self._poison(row)
        return num_namespaces

    def forget_all(self) -> None:
        """Nothing can be found any more: cached rows are empty, taken ones stay taken."""
        self._records.reset()
        self.cached_rows = 0
        for row in filter(self._allocator.is_free, range(self.num_rows)):
            self._poison(row)

    def _poison(self, row: int, from_position: int = 0) -> None:
        """Nobody can find or owns what lies there, if that is checked."""
        if self._check is not None:
            self._check.poison(self._pages(row, from_position, self._row_len))

    def _pages(self, row: int, start: int, stop: int) -> Starts:
        """The pages of some positions of a row, the first of which starts one."""
        assert self._check is not None
        return np.arange(start, stop, self._check.page_size) + row * self._row_len

    def check(self, published: dict[int, RadixKey]) -> None:
        """Raise AssertionError if a rule is broken, given what each lease published, by row. O(everything)."""
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
        assert len(cached) == self.cached_rows, f"rule 3: {self.cached_rows=}, but {cached} are"
