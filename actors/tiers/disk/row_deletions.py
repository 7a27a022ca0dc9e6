"""`RowDeletions`: the deletion of the rows of records that a disk tier has evicted."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_writer import DiskWriter
from raydix.actors.tiers.job_threads import Ended
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import Numbers, RecordKeeper

logger = logging.getLogger(__name__)

_DELETED_AT_ONCE = 1024  # rows that one commit deletes


class RowDeletions:
    """Deletes the rows of records that are leaving. A record can be used again when that is committed.

    Args:
        keepers: of the disk's records.
        on_change: called on the loop when records are free, or rows are to be deleted again.
        on_error: called with each error of a commit.
    """

    def __init__(
        self,
        keepers: Mapping[Kind, RecordKeeper],
        on_change: Callable[[], object],
        on_error: Callable[[Exception], object],
    ) -> None:
        self._keepers = keepers
        self._on_change = on_change
        self._on_error = on_error
        self._waiting: deque[tuple[Kind, Numbers]] = deque()
        self._is_committing = False

    def delete(self, writer: DiskWriter) -> None:
        """Delete some of the rows in one commit, unless one is under way."""
        for kind, keeper in self._keepers.items():
            if len(numbers := keeper.take_leaving()):
                self._waiting.append((kind, numbers))
        if self._is_committing or not self._waiting:
            return
        kind, numbers = self._waiting.popleft()
        if len(numbers) > _DELETED_AT_ONCE:
            self._waiting.appendleft((kind, numbers[_DELETED_AT_ONCE:]))
            numbers = numbers[:_DELETED_AT_ONCE]
        removed = [(kind, number) for number in numbers.tolist()]
        self._is_committing = True
        writer.submit(lambda store: store.index.commit(removed=removed), partial(self._end, kind, numbers))

    def _end(self, kind: Kind, numbers: Numbers, done: Ended) -> None:
        self._is_committing = False
        if done.error is None:
            self._keepers[kind].rows_deleted(numbers)
            self._on_change()
            return
        self._keepers[kind].rows_not_deleted(numbers)
        logger.warning("rows of the disk's index could not be deleted: %s", done.error)
        self._on_error(done.error)
        asyncio.get_running_loop().call_later(disk_errors.RETRY_S, self._on_change)

    def check_invariants(self) -> None:
        """Raise AssertionError if more rows are to be deleted than records are leaving."""
        for kind, keeper in self._keepers.items():
            waiting = sum(len(numbers) for name, numbers in self._waiting if name == kind)
            assert waiting <= keeper.num_leaving, f"{waiting} rows of kind {kind} are to be deleted"
