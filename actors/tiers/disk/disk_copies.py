"""`DiskCopies`: loads of pages from a disk to a pool, for a `Copier`."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from raydix.actors.tiers.disk.disk_errors import DiskError
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.record_file import aligned_bytes
from raydix.actors.tiers.job_threads import Help
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.page_records import CHUNK_BYTES, KINDS, Chunk, CopyPlan, Kind, PageRecords
from raydix.cache_core.tiers.record_keeper import Numbers
from raydix.cache_core.tree.packed_slots import Starts

PART_BYTES = 2**20  # read and copied in one piece
NUM_LANES = 2  # threads of one load


class DiskCopies:
    """Reads records to buffers, checks them, and copies them to a pool.

    A second thread shares the parts of a load if one is free: while one copies, the other reads.

    Args:
        pool: the pool of the upper tier.
        store: of the disk tier, with records of the pool's sizes.
        have_help: has another thread work, as `JobThreads.help`; None: no second thread shares a load.

    Raises:
        ValueError: the records of the pool and of the store differ in size.
    """

    def __init__(self, pool: KVPool | RecordPool, store: DiskStore, have_help: Help | None = None) -> None:
        self._pool, self._upper = pool, PageRecords(pool)
        self._sizes: dict[Kind, int] = {kind: self._upper.num_bytes(kind) for kind in KINDS}
        found = {kind: file.record_bytes for kind, file in store.files.items()}
        wanted = {kind: num_bytes for kind, num_bytes in self._sizes.items() if num_bytes}
        if found != wanted:
            raise ValueError(f"store must have records of the pool's sizes in bytes, {wanted}, not {found}")
        self._step = {kind: max(1, PART_BYTES // file.stride) for kind, file in store.files.items()}
        self._store = store
        self._have_help = have_help
        self._lanes: deque[_Lane] = deque()  # buffers that no thread uses
        self._is_closed = False

    def chunks(self, plan: CopyPlan, max_bytes: int = CHUNK_BYTES) -> list[Chunk]:
        """Return the parts in which a plan is copied: as many pages as `max_bytes` have room for, one at least."""
        return plan.chunks(self._sizes, max_bytes)

    def load(self, plan: CopyPlan, start: int, stop: int) -> None:
        """Copy pages [start, stop) of a plan from the disk to the pool.

        Raises:
            RecordDamaged: the checksum of a record does not match.
            DiskError: a record could not be read.
        """
        parts = deque[_Part]()
        for kind, upper, lower in plan.parts(start, stop):
            if kind in self._step:
                parts += self._parts(kind, upper, lower)
        others = []
        if self._have_help is not None and len(parts) > 1:
            others.append(self._have_help(partial(self._share, parts)))
        errors = [self._share(parts), *[other.result() for other in others if not other.cancel()]]
        for error in errors:
            if error is not None:
                raise error

    def _share(self, parts: deque[_Part]) -> Exception | None:
        """Take parts and load them until there are none; return the error that has ended it, for all threads."""
        try:
            lane = self._lanes.pop()
        except IndexError:
            lane = _Lane(PageRecords(self._pool), self._store, self._step)
        try:
            while (part := _next(parts)) is not None:
                self._load(lane, *part)
        except Exception as error:
            parts.clear()
            return error
        finally:
            self._lanes.append(lane)
        return None

    def _load(self, lane: _Lane, kind: Kind, rows: Starts, numbers: Numbers) -> None:
        places = np.arange(len(numbers))
        if kind == "state":  # The lease and the tree get one each.
            numbers, places = np.unique(numbers, return_inverse=True)
        self._store.read(kind, numbers, lane.rows[kind][: len(numbers)])
        if self._is_closed:
            raise DiskError("the disk is closed")
        lane.copies[kind].load(rows, places)

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
        self._is_closed = True

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
        self.rows = {}
        self.copies = {}
        for kind, file in store.files.items():
            self.rows[kind] = aligned_bytes(step[kind] * file.stride).reshape(step[kind], file.stride)
            self.copies[kind] = upper.copies(torch.from_numpy(self.rows[kind])[:, : file.record_bytes], kind)


def _next(parts: deque[_Part]) -> _Part | None:
    """Take the next part; another thread may take the last one meanwhile."""
    try:
        return parts.popleft()
    except IndexError:
        return None
