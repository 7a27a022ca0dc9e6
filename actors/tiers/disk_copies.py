"""`DiskCopies`: loads of pages from a disk to a pool, for a `Copier`."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from raydix.actors.tiers.disk_errors import DiskError
from raydix.actors.tiers.disk_store import DiskStore
from raydix.actors.tiers.record_file import aligned_bytes
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.page_records import CHUNK_BYTES, KINDS, Chunk, CopyPlan, Kind, PageRecords
from raydix.cache_core.tiers.record_keeper import Numbers
from raydix.cache_core.tree.packed_slots import Starts

PART_BYTES = 2**20  # read and copied in one piece
NUM_LANES = 2  # of one load


class DiskCopies:
    """Reads records to buffers, checks them, and copies them to a pool. One thread may use it.

    That thread and a second one share the parts of a load: while one copies, the other reads.

    Args:
        pool: the pool of the upper tier.
        store: of the disk tier, with records of the pool's sizes.

    Raises:
        ValueError: the records of the pool and of the store differ in size.
    """

    def __init__(self, pool: KVPool | RecordPool, store: DiskStore) -> None:
        self._upper = PageRecords(pool)
        self._sizes: dict[Kind, int] = {kind: self._upper.num_bytes(kind) for kind in KINDS}
        found = {kind: file.record_bytes for kind, file in store.files.items()}
        wanted = {kind: num_bytes for kind, num_bytes in self._sizes.items() if num_bytes}
        if found != wanted:
            raise ValueError(f"store must have records of the pool's sizes in bytes, {wanted}, not {found}")
        self._step = {kind: max(1, PART_BYTES // file.stride) for kind, file in store.files.items()}
        self._lanes = [_Lane(PageRecords(pool), store, self._step) for _ in range(NUM_LANES)]
        self._to_help: SimpleQueue[deque[_Part] | None] = SimpleQueue()
        self._helped: SimpleQueue[Exception | None] = SimpleQueue()
        # The thread does not know this object, so that it ends if this is dropped without being closed.
        threading.Thread(
            target=_help, args=(self._lanes[1], self._to_help, self._helped), name="raydix-disk-reader", daemon=True
        ).start()
        weakref.finalize(self, self._to_help.put, None)

    def chunks(self, plan: CopyPlan, max_bytes: int = CHUNK_BYTES) -> list[Chunk]:
        """Return the parts in which a plan is copied: as many pages as `max_bytes` have room for, one at least."""
        return plan.chunks(self._sizes, max_bytes)

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan from the disk to the pool.

        Raises:
            RecordDamaged: a record has not the sum of its page.
            DiskError: a record could not be read.
        """
        parts = deque[_Part]()
        for kind, upper, lower in plan.parts(start, stop):
            if kind in self._step:
                parts += self._parts(kind, upper, lower)
        has_help = len(parts) > 1
        if has_help:
            self._to_help.put(parts)
        errors = [self._lanes[0].load(parts), self._helped.get() if has_help else None]
        for error in errors:
            if error is not None:
                raise error

    def _parts(self, kind: Kind, upper: Starts, lower: Starts) -> list[_Part]:
        """Return the records of a kind in the order of their file, as many together as are read in one piece."""
        rows, step = self._upper.rows(upper, kind), self._step[kind]
        numbers = lower if kind == "state" else lower // self._upper.page_size
        order = np.argsort(numbers, kind="stable")
        return [
            _Part(kind, rows[order[first : first + step]], numbers[order[first : first + step]])
            for first in range(0, len(order), step)
        ]

    def close(self) -> None:
        """Copy nothing to the pool any more: a read that does not come back may outlive it."""
        for lane in self._lanes:
            lane.is_closed = True
        self._to_help.put(None)

    def write(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Refuse: pages are written by a `DiskWriter`, from buffers."""
        raise TypeError("a DiskWriter writes to a disk")


class _Part(NamedTuple):
    """Records that are read and copied in one piece."""

    kind: Kind
    rows: Starts  # numbers of the pages in the pool
    numbers: Numbers  # of the records


class _Lane:
    """The buffers of one thread."""

    def __init__(self, upper: PageRecords, store: DiskStore, step: dict[Kind, int]) -> None:
        self.is_closed = False
        self._store = store
        self._rows = {}
        self._copies = {}
        for kind, file in store.files.items():
            self._rows[kind] = aligned_bytes(step[kind] * file.stride).reshape(step[kind], file.stride)
            self._copies[kind] = upper.copies(torch.from_numpy(self._rows[kind])[:, : file.record_bytes], kind)

    def load(self, parts: deque[_Part]) -> Exception | None:
        """Take parts and load them until there are none; return the error that has ended it, for all threads."""
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return None
            try:
                self._load(*part)
            except Exception as error:
                parts.clear()
                return error

    def _load(self, kind: Kind, rows: Starts, numbers: Numbers) -> None:
        places = np.arange(len(numbers))
        if kind == "state":  # The lease and the tree get one each.
            numbers, places = np.unique(numbers, return_inverse=True)
        self._store.read(kind, numbers, self._rows[kind][: len(numbers)])
        if self.is_closed:
            raise DiskError("the disk is closed")
        self._copies[kind].load(rows, places)


def _help(lane: _Lane, to_help: SimpleQueue[deque[_Part] | None], helped: SimpleQueue[Exception | None]) -> None:
    """Load parts of each load, until there is none."""
    while (parts := to_help.get()) is not None:
        helped.put(lane.load(parts))
        del parts
