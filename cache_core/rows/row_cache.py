"""`RowCache`: the `LeasedCache` of kind "slots": leases over a pool of rows, with one row for each sequence.

A row is `max_seq_len` consecutive slots, and a lease owns one whole row:

    acquire(1 2 3 4)    row 0 [. . . . . .]  leased
    insert(1 2 3 4)     row 0 [1 2 3 4 . .]  still leased; other leases may copy from it now
    acquire(1 2 3 5)    row 1 [1 2 3 . . .]  1 2 3 was copied from row 0
    release both                             both are cached: 1 2 3 can be found in either
    acquire(1 2 3 4 6)  row 0 [1 2 3 4 . .]  it has no lease, so it is reused in place
    acquire(1 2 9)      row 1 [1 2 . . . .]  reused also; the tokens after 1 2 are forgotten

Sizes count the slots of whole rows. A leased row is private. A released row with a prefix that can be found is cached.
Any other row is free. `PrefixCacheManager` finds the prefixes; it calls a row a slot. Rules, checked by
`check_invariants`:

1. A lease's published tokens are whole pages of its own row, and the lease covers them. A reset forgets them.
2. A lease covers at most the slots of its row.
3. Each row is taken by one lease, or free in the allocator.
4. In a taken row, exactly the tokens that its lease published can be found.
5. The empty rows are the free ones without a record. Every record can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import index

import numpy as np
import torch

from raydix.cache_core.base_prefix_cache import MatchResult
from raydix.cache_core.errors import LeaseRangeError, OutOfSlotsError
from raydix.cache_core.explanation import Explanation
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.leases.leased_cache import LeasedCache
from raydix.cache_core.leases.results import Published
from raydix.cache_core.outline import Outline, OutlineLimits
from raydix.cache_core.pool.content_check import ContentCheck
from raydix.cache_core.pool.kv_pool import wait_for_device
from raydix.cache_core.rows.prefix_cache_manager import PrefixCacheManager
from raydix.cache_core.rows.slot_allocator import SlotAllocator, SlotMask
from raydix.cache_core.tree.packed_slots import NO_STARTS, Starts
from raydix.cache_core.tree.radix_key import RadixKey, check_key

_MAX_LOOKED_AT = 64  # most rows with a prefix that `acquire` compares


class RowLease(LeaseRecord):
    """The slots of one request: a whole private row. `starts` has only its first slot."""

    __slots__ = ("published_len", "row")

    def __init__(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        row: int,
        first_slot: int,
        prefix_len: int,
        num_slots: int,
        priority: int,
    ) -> None:
        starts = np.array([first_slot], np.int64)
        super().__init__(lease_id, session_id, key, None, None, prefix_len, starts, 0, num_slots, priority)
        self.row = row
        self.published_len = prefix_len  # leading tokens that other leases may copy; whole pages


class RowCache(LeasedCache):
    """Prefix reuse with leases over a pool of rows.

    Args:
        num_slots: slots of the pool; whole rows.
        max_seq_len: slots of a row; whole pages.
        page_size: tokens of a page; prefixes are found and published in whole pages.
        kv_cache: `(k_cache, v_cache)`, each `[row, position, layer, ...]`, in which prefixes are copied. None: the pool
            has no tensors, and no prefix is copied.
        pressure_floor: `on_pressure` is called after an operation that leaves fewer free slots than this.
        on_pressure: called without arguments when slots are short.
        remembered_leases: the number of ended lease ids to remember. No lease is opened under a remembered id.
        check: the check of the slots' content, or None. With a check, `acquire` and `lock` raise ContentError if the
            prefix was written after it was published.

    Raises:
        ValueError: a size is not a positive multiple of the next smaller one.
    """

    def __init__(
        self,
        num_slots: int,
        max_seq_len: int,
        page_size: int = 1,
        kv_cache: tuple[torch.Tensor, torch.Tensor] | None = None,
        pressure_floor: int = 0,
        on_pressure: Callable[[], None] | None = None,
        remembered_leases: int = 0,
        check: ContentCheck | None = None,
    ) -> None:
        num_slots, max_seq_len, page_size = index(num_slots), index(max_seq_len), index(page_size)
        if not 0 < page_size <= max_seq_len <= num_slots or num_slots % max_seq_len or max_seq_len % page_size:
            raise ValueError(f"{num_slots=} must be a multiple of {max_seq_len=}, and that a multiple of {page_size=}")
        super().__init__(remembered_leases)
        self.num_slots = num_slots
        self.max_seq_len = max_seq_len
        self.page_size = page_size
        num_rows = num_slots // max_seq_len
        self._allocator = SlotAllocator(num_rows)
        self._records = PrefixCacheManager(num_slots, self._allocator)  # every slot fits, so `insert` evicts nothing
        self._empty = SlotMask(num_rows, full=True)  # the free rows without a record
        no_layers = torch.empty(num_rows, max_seq_len, 0)
        self._kv_cache = kv_cache or (no_layers, no_layers)
        self._check = check
        for row in range(num_rows):
            self._poison(row)
        self._pressure_floor = pressure_floor
        self._on_pressure = on_pressure

    # ---------------------------------------------------------------- sizes

    @property
    def free_slots(self) -> int:
        """Slots of rows without a lease in which no prefix can be found."""
        return self._empty.count * self.max_seq_len

    @property
    def private_slots(self) -> int:
        """Slots of leased rows, published or not."""
        return self.num_slots - self._allocator.free_count * self.max_seq_len - self.quarantined_slots

    def evictable_size(self) -> int:
        """Return the number of slots of cached rows."""
        return (self._allocator.free_count - self._empty.count) * self.max_seq_len

    def protected_size(self) -> int:
        """Return 0: no two leases share a row."""
        return 0

    # ---------------------------------------------------------------- requests

    def match(self, key: RadixKey) -> MatchResult:
        self.counters.probes += 1
        prefix_len, row = self._longest_prefix(key)
        return MatchResult(torch.arange(prefix_len) + row * self.max_seq_len, None, prefix_len, None, prefix_len)

    def check_len(self, num_tokens: int, key: RadixKey) -> None:
        self._check_fits(num_tokens)

    def _check_fits(self, num_tokens: int) -> None:
        if num_tokens > self.max_seq_len:
            raise LeaseRangeError(f"{num_tokens} tokens do not fit into a row: max_seq_len is {self.max_seq_len}")

    def _open_lease(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        num_slots: int | None,
        max_prefix_len: int | None,
        priority: int,
    ) -> RowLease:
        """Take a row and fill it with the cached prefix of `key`, if there is one.

        If a row with the prefix has no lease, it is reused in place, and its tokens beyond the prefix are forgotten.
        Else the prefix is copied into a free or evicted row. Rows are evicted by recency alone: `priority` is noted,
        but has no effect.
        """
        if num_slots is not None:
            self._check_fits(num_slots)
        check_key(key)
        prefix_len, _ = self._longest_prefix(key[:max_prefix_len])
        row, num_slots = self._take(key[:prefix_len]), prefix_len if num_slots is None else num_slots
        self._notify_pressure()
        return RowLease(lease_id, session_id, key, row, row * self.max_seq_len, prefix_len, num_slots, priority)

    def _extend(self, lease: LeaseRecord, num_tokens: int) -> Starts:
        """Cover `num_tokens` more tokens of the lease's row. `starts` does not change."""
        self._check_fits(lease.num_slots + num_tokens)
        lease.num_slots += num_tokens
        return NO_STARTS

    def insert(
        self,
        lease_id: str,
        session_id: str,
        num_tokens: int,
        suffix: RadixKey,
        publish_state: bool = False,
        boundary_len: int | None = None,
    ) -> Published:
        """Record the lease's pages in its row. No state can be published.

        Other leases may copy the published pages, so the lease must not write them any more. No two leases share a row,
        so no page is a duplicate. `prefix_len` counts the tokens that any row held before, and `num_inserted` the
        tokens that are new in this row.
        """
        lease, num_tokens = as_row_lease(self.leases.get(lease_id, session_id)), index(num_tokens)
        key = lease.known_key(num_tokens, suffix)
        if publish_state:
            raise LeaseRangeError("publish_state must be False: this cache keeps no states")
        if boundary_len is not None:
            raise LeaseRangeError("boundary_len must be None: this cache keeps no states")
        lease.key = key
        before, stop = lease.published_len, self._whole_pages(num_tokens)
        if lease.retired or stop <= before:
            return Published(before, 0, 0, lease.retired, NO_STARTS)
        prefix_len, _ = self._longest_prefix(key[:stop])
        self._publish(lease.row, key[:stop])
        lease.published_len = stop
        self.counters.tokens_inserted += stop - before
        return Published(prefix_len, stop - before, 0, False, NO_STARTS)

    def _unlock(self, lease: LeaseRecord) -> None:
        """Do nothing: no two leases share a row."""

    def _free_private(self, lease: LeaseRecord) -> None:
        row = as_row_lease(lease).row
        self._allocator.free(row)
        if not self._records.slot_is_findable(row):
            self._empty.add(row)
        self._poison(row, self._records.recorded_len(row))

    def _private_size(self, lease: LeaseRecord) -> int:
        return self.max_seq_len

    def lease_sizes(self, leases: Iterable[LeaseRecord]) -> Iterator[int]:
        return (self.max_seq_len for _ in leases)

    def evict(self, num_tokens: int, cause: str = "request") -> int:
        """Evict whole rows, least recently used first; return the number of slots."""
        evicted, num_tokens = 0, index(num_tokens)
        while evicted < num_tokens and (row := self._records.evict_lru_slot()) is not None:
            self._empty_free([row])
            evicted += self.max_seq_len
        self.counters.tokens_evicted += evicted
        return evicted

    def _retire_all(self) -> None:
        self._records.reset()
        self._empty_free(range(self._allocator.max_slots))

    def _retire(self, is_meant: Callable[[str | None], bool]) -> int:
        num_namespaces, rows = self._records.forget_namespaces(is_meant)
        self._empty_free(rows)
        return num_namespaces

    def _empty_free(self, rows: Iterable[int]) -> None:
        """Note that the free ones among some rows have no record any more."""
        for row in filter(self._allocator.is_free, rows):
            self._empty.add(row)
            self._poison(row)

    def explain(self, key: RadixKey) -> Explanation:
        prefix_len, _ = self._longest_prefix(key)
        return Explanation.of_lengths(len(key), prefix_len, prefix_len, self.page_size)

    def outline(self, limits: OutlineLimits) -> Outline:
        return self._records.outline(limits)

    # ---------------------------------------------------------------- what a lease holds

    def published_len(self, lease: LeaseRecord) -> int:
        return as_row_lease(lease).published_len

    def covers(self, lease: LeaseRecord, slots: Starts) -> bool:
        return self._lie_in(lease, slots, 0)

    def holds_privately(self, lease: LeaseRecord, slots: Starts) -> bool:
        return self._lie_in(lease, slots, as_row_lease(lease).published_len)

    def _lie_in(self, lease: LeaseRecord, slots: Starts, first: int) -> bool:
        positions = slots - lease.starts[0]
        return bool(((positions >= first) & (positions < lease.num_slots)).all())

    # ---------------------------------------------------------------- rows

    def _take(self, prefix: RadixKey) -> int:
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
                self._records.copy_kv(prefix, row, self._kv_cache, self._kv_cache[0].shape[2])
                wait_for_device(self._kv_cache[0])
        self._publish(row, prefix)  # a reused row has the record already, but becomes the most recently used
        return row

    def _reuse(self, row: int, prefix_len: int) -> int:
        self._allocator.occupy(row)
        self._records.invalidate(row, prefix_len)
        self._poison(row, prefix_len)
        return row

    def _take_empty(self) -> int:
        if not self._empty.count and not self.evict(self.max_seq_len):
            raise OutOfSlotsError(self.max_seq_len, 0, 0, self.num_slots)
        row = self._empty.lowest()
        self._allocator.alloc_at(row)
        self._empty.discard(row)
        return row

    def _publish(self, row: int, key: RadixKey) -> None:
        """Record the tokens of `key` in a taken row. Their KV must be in its first positions."""
        self._records.insert(key, row, self._allocator.version(row))
        if self._check is not None:
            self._check.publish(self._pages(row, 0, len(key)))

    def _poison(self, row: int, from_position: int = 0) -> None:
        """Poison the positions from `from_position` on, which must be unused. No effect without a check."""
        if self._check is not None:
            self._check.poison(self._pages(row, from_position, self.max_seq_len))

    def _pages(self, row: int, start: int, stop: int) -> Starts:
        """Return the pages of positions [start, stop) of a row. A page must begin at `start`."""
        assert self._check is not None
        return np.arange(start, stop, self._check.page_size) + row * self.max_seq_len

    # ---------------------------------------------------------------- parts, checks

    def _longest_prefix(self, key: RadixKey) -> tuple[int, int]:
        """Return the length of the longest prefix of `key` in any row, in whole pages, and such a row."""
        found = self._records.peek(key)
        return self._whole_pages(found.prefix_len), found.slot

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.page_size

    def _notify_pressure(self) -> None:
        if self._on_pressure is not None and self.free_slots < self._pressure_floor:
            self._on_pressure()

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the module docstring is broken. O(n)."""
        published: dict[int, RadixKey] = {}
        for lease in map(as_row_lease, (*self.leases, *self.quarantine)):
            where = f"at lease {lease.lease_id}"
            assert lease.row not in published, f"two leases hold row {lease.row}"
            assert lease.starts.tolist() == [lease.row * self.max_seq_len], f"{lease.starts=} {where}"
            published[lease.row] = lease.key[: 0 if lease.retired else lease.published_len]
            assert lease.published_len % self.page_size == 0, f"rule 1: {lease.published_len=} {where}"
            assert lease.published_len <= lease.num_slots, f"rule 1: {lease.published_len=} {where}"
            assert lease.num_slots <= self.max_seq_len, f"rule 2: {lease.num_slots=} {where}"
        self._check_rows(published)
        counted = self.free_slots + self.private_slots + self.total_size() + self.quarantined_slots
        assert counted == self.num_slots, f"a slot has no owner: {counted=}"

    def _check_rows(self, published: dict[int, RadixKey]) -> None:
        """Raise AssertionError if a rule from 3 on is broken, given the tokens that each lease published, by row."""
        self._records.check_invariants()
        self._allocator.check_invariants()
        self._empty.check_invariants()
        rows = range(self._allocator.max_slots)
        free = [row for row in rows if self._allocator.is_free(row)]
        assert sorted([*published, *free]) == list(rows), f"rule 3: {published.keys()} are leased, {free=}"
        for row, key in published.items():
            known = self._records.recorded_key(row)
            assert known == key if key else known is None, f"rule 4: row {row} should hold {key}, not {known}"
        recorded = [row for row in rows if self._records.recorded_len(row)]
        assert all(map(self._records.slot_is_findable, recorded)), f"rule 5: stale records among rows {recorded}"
        empty = [row for row in rows if row in self._empty]
        assert empty == sorted({*free}.difference(recorded)), f"rule 5: {empty=}, {free=}, {recorded=}"


def as_row_lease(lease: LeaseRecord) -> RowLease:
    """Return a lease of a `RowCache` as its own type."""
    assert isinstance(lease, RowLease)
    return lease
