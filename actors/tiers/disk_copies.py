"""`DiskCopies`: loads of pages from a disk to a pool, for a `Copier`."""

from __future__ import annotations

import numpy as np
import torch

from raydix.actors.tiers.disk_errors import DiskError
from raydix.actors.tiers.disk_store import DiskStore
from raydix.actors.tiers.record_file import aligned_bytes
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.page_records import CHUNK_BYTES, KINDS, Chunk, CopyPlan, Kind, PageRecords
from raydix.cache_core.tree.packed_slots import Starts


class DiskCopies:
    """Reads records to a buffer, checks them, and copies them to a pool. One thread may use it.

    Args:
        pool: the pool of the upper tier.
        store: of the disk tier, with records of the pool's sizes.

    Raises:
        ValueError: the records of the pool and of the store differ in size.
    """

    def __init__(self, pool: KVPool | RecordPool, store: DiskStore) -> None:
        self._upper, self._store = PageRecords(pool), store
        self._sizes: dict[Kind, int] = {kind: self._upper.num_bytes(kind) for kind in KINDS}
        found = {kind: file.record_bytes for kind, file in store.files.items()}
        wanted = {kind: num_bytes for kind, num_bytes in self._sizes.items() if num_bytes}
        if found != wanted:
            raise ValueError(f"store must have records of the pool's sizes in bytes, {wanted}, not {found}")
        self._is_closed = False
        self._rows = {}
        self._copies = {}
        for kind, file in store.files.items():
            number = max(1, CHUNK_BYTES // file.stride)
            self._rows[kind] = aligned_bytes(number * file.stride).reshape(number, file.stride)
            records = torch.from_numpy(self._rows[kind])[:, : file.record_bytes]
            self._copies[kind] = self._upper.copies(records, kind)

    @property
    def is_empty(self) -> bool:
        """Whether the pool is index-only: there is nothing to copy."""
        return not self._copies

    def chunks(self, plan: CopyPlan, max_bytes: int = CHUNK_BYTES) -> list[Chunk]:
        """Return the parts in which a plan is copied: as many pages as `max_bytes` have room for, one at least."""
        return plan.chunks(self._sizes, max_bytes)

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan from the disk to the pool.

        Raises:
            RecordDamaged: a record has not the sum of its page.
            DiskError: a record could not be read.
        """
        for kind, upper, lower in plan.parts(start, stop):
            if kind in self._copies:
                self._load(kind, upper, lower)

    def _load(self, kind: Kind, upper: Starts, lower: Starts) -> None:
        rows, most = self._upper.rows(upper, kind), len(self._rows[kind])
        numbers = lower if kind == "state" else lower // self._upper.page_size
        for start in range(0, len(numbers), most):
            part = slice(start, start + most)
            number = len(numbers[part])
            self._store.read(kind, numbers[part], self._rows[kind][:number])
            if self._is_closed:
                raise DiskError("the disk is closed")
            self._copies[kind].load(rows[part], np.arange(number))

    def close(self) -> None:
        """Copy nothing to the pool any more: a read that does not come back may outlive it."""
        self._is_closed = True

    def write(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Refuse: pages are written by a `DiskWriter`, from buffers."""
        raise TypeError("a DiskWriter writes to a disk")
