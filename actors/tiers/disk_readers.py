"""`DiskReaders`: the threads that read the records of a disk tier, and the damaged records that they found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from raydix.actors.tiers.copier import Copier
from raydix.actors.tiers.disk_copies import DiskCopies
from raydix.actors.tiers.disk_store import DiskStore
from raydix.cache_core import KVCache, KVPool, RecordPool
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.page_records import Kind

logger = logging.getLogger(__name__)

NUM_READERS = 2


class DiskReaders:
    """Reads records of a disk straight into the pool.

    Args:
        clock: seconds.

    Attributes:
        copiers: one for each thread; none before `open`.
        num_damaged: records that had not the sum of their page.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.copiers: list[Copier] = []
        self.num_damaged = 0
        self._clock = clock
        self._copies: list[DiskCopies] = []
        self._store: DiskStore | None = None
        self._damaged: set[tuple[Kind, int]] = set()

    def open(self, pool: KVPool | RecordPool, store: DiskStore) -> float:
        """Start the threads; return the bytes that they read for a token."""
        self._store = store
        self._copies = [DiskCopies(pool, store) for _ in range(NUM_READERS)]
        self.copiers = [self.make_copier(copies) for copies in self._copies]
        return sum(file.stride for kind, file in store.files.items() if kind != "state") / pool.layout.page_size

    def make_copier(self, copies: DiskCopies) -> Copier:
        """Return a copier, which `close` closes."""
        return Copier(copies, clock=self._clock)

    @property
    def num_bytes(self) -> int:
        """The bytes that were read."""
        return sum(copier.counts(loads=True).num_bytes for copier in self.copiers)

    @property
    def seconds(self) -> float:
        """The time that the threads read."""
        return sum(copier.counts(loads=True).seconds for copier in self.copiers)

    @property
    def queued_bytes(self) -> int:
        """The bytes that are still to be read."""
        return sum(copier.queued_bytes(loads=True) for copier in self.copiers)

    def drop_damaged(self, move: Move, disk: KVCache) -> None:
        """Drop the pages of a load that has ended which were damaged, and all pages below them."""
        assert self._store is not None
        found = self._store.take_damaged()
        self.num_damaged += len(found)
        self._damaged.update(found)
        if not self._damaged:
            return
        page = disk.page_size
        places: list[int] = []  # pages of the move
        for kind, starts, first in (
            ("full", move.source_starts, 0),
            ("swa", move.source_windows, move.num_pages - len(move.source_windows)),
        ):
            numbers = (starts // page).tolist()
            places += [first + at for at, number in enumerate(numbers) if (kind, number) in self._damaged]
            self._damaged.difference_update((kind, number) for number in numbers)
        if ("state", move.source_state) in self._damaged:
            places.append(move.num_pages - 1)
            self._damaged.discard(("state", move.source_state))
        if not places:
            return
        first_token = move.first + min(places) * page
        num_tokens = disk.drop_page(move.key, first_token)
        logger.warning("a load met damaged records; %d tokens are dropped from the disk", num_tokens)

    def close(self, timeout_s: float | None = None) -> None:
        """End the threads, and give their buffers back.

        Args:
            timeout_s: for which it waits for each thread; None: without a limit.
        """
        for copies in self._copies:
            copies.close()
        for copier in self.copiers:
            copier.close(timeout_s)
