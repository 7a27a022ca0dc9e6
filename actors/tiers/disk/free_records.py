"""`FreeRecords`: the records of a disk tier that are evicted and given back, so that the next writes find some."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from raydix.cache_core import KVCache
from raydix.cache_core.tiers.disk_spaces import DiskSpaces
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import RecordKeeper

_FREED_AT_ONCE = 1024  # deleted spaces of which one slice frees the records
_EVICTED_AT_ONCE = 256  # records of a kind that one slice evicts: 0.5 ms
_FREE_SHARE = 0.01  # of the records, kept free


class FreeRecords:
    """Keeps some records of each kind free.

    Args:
        cache: of the disk.
        keepers: of its records.
        spaces: of the tier.
        batch: pages of a write, those of a window included.

    Attributes:
        deleted: spaces of which the records are to be freed.
        is_short: whether records were to be evicted in the last slice.
    """

    def __init__(self, cache: KVCache, keepers: Mapping[Kind, RecordKeeper], spaces: DiskSpaces, batch: int) -> None:
        self.deleted: deque[int] = deque()
        self.is_short = False
        self._cache = cache
        self._keepers = keepers
        self._spaces = spaces
        self._batch = batch

    @property
    def num_leaving(self) -> int:
        """The records of which the rows are being deleted."""
        return sum(keeper.num_leaving for keeper in self._keepers.values())

    def free_deleted(self) -> bool:
        """Free the records of some deleted spaces; return whether there were any."""
        numbers = [self.deleted.popleft() for _ in range(min(_FREED_AT_ONCE, len(self.deleted)))]
        self._spaces.deleted(numbers)
        return bool(numbers)

    def evict(self) -> bool:
        """Evict so that the next writes find records: dormant ones first. Return whether this slice has left some."""
        most_missing, before = 0, self.num_leaving
        for kind, keeper in self._keepers.items():
            batch = 1 if kind == "state" else self._batch
            goal = max(int(_FREE_SHARE * keeper.num_records), min(batch, keeper.num_records // 2), 1)
            missing = goal - keeper.num_leaving - keeper.num_free
            if missing > 0:
                self._evict(kind, min(missing, _EVICTED_AT_ONCE))
            most_missing = max(most_missing, missing)
        self.is_short = most_missing > 0
        # Nothing more is evicted while all is locked: the end of a load wakes the disk.
        return self.num_leaving > before and most_missing > _EVICTED_AT_ONCE

    def _evict(self, kind: Kind, num_records: int) -> None:
        if kind == "state":
            self._cache.evict_states(num_records)
        elif kind == "swa":
            self._cache.evict_window(num_records * self._cache.page_size)
        elif (left := num_records - self._spaces.drop_dormant(num_records)) > 0:
            self._cache.evict(left * self._cache.page_size, "watermark")
