"""`SpaceDeletions`: the deletions of retired spaces from a disk's index, and the futures that end with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_writer import DiskWriter
from raydix.actors.tiers.job_threads import Ended

logger = logging.getLogger(__name__)


IsMeant = Callable[[str | None], bool]  # whether a namespace is retired

_MOST_NAMED = 1024  # retirements before the index was read that are kept by name; one more means all namespaces


class SpaceDeletions:
    """Deletes spaces in the order of their retirements, and tries again until that is committed.

    Retirements that come before the index was read are predicates, until `begin` finds their spaces. A disk that cannot
    be opened may keep them for days, so more than 1,024 become one of all namespaces.

    Args:
        on_deleted: called on the loop with the numbers of spaces of which the deletion is committed.
        on_error: called with each end of the work.
        clock: seconds.

    Attributes:
        waiting: numbers of retired spaces of which the deletion is not committed.
    """

    def __init__(
        self,
        on_deleted: Callable[[Sequence[int]], object],
        on_error: Callable[[Exception | None], object],
        clock: Callable[[], float],
    ) -> None:
        self.waiting: dict[int, None] = {}
        self._on_deleted = on_deleted
        self._on_error = on_error
        self._clock = clock
        self._writer: DiskWriter | None = None
        self._is_begun = self._is_deleting = self._is_cleaning = self._is_closed = False
        self._before: list[IsMeant] = []  # retirements before `begin`
        self._future_before: asyncio.Future[None] | None = None  # theirs
        self._num_retired = 0  # spaces
        self._futures: dict[int, asyncio.Future[None]] = {}  # number of retired spaces -> ends when all are deleted
        self._since: float | None = None  # time of the first retirement that is not committed

    @property
    def uncommitted_s(self) -> float:
        """Seconds since the first retirement that is not committed; 0.0: all are."""
        return 0.0 if self._since is None else self._clock() - self._since

    def future(self) -> asyncio.Future[None] | None:
        """Return the future that ends when all retirements so far are committed: no crash can undo them then.

        None: they are. It is shared: shield it.
        """
        if self._before:
            if self._future_before is None:
                self._future_before = asyncio.get_running_loop().create_future()
            return self._future_before
        if not self.waiting:
            return None
        if self._num_retired not in self._futures:
            self._futures[self._num_retired] = asyncio.get_running_loop().create_future()
        return self._futures[self._num_retired]

    def retire(self, is_meant: IsMeant, find: Callable[[IsMeant], Sequence[int]]) -> None:
        """Delete the spaces of retired namespaces, which `find` returns; before `begin`, then."""
        if self._is_begun:
            self.delete(find(is_meant))
            return
        if len(self._before) >= _MOST_NAMED:
            self._before = [_is_any]
        if self._before != [_is_any]:
            self._before.append(is_meant)
        self._note_time()

    async def begin(self, writer: DiskWriter, find: Callable[[IsMeant], Sequence[int]]) -> None:
        """Delete the spaces of the retirements so far: the spaces of the index are known now.

        Each retirement looks at all spaces, so each has a step of the loop. Others may come meanwhile.
        """
        self._writer = writer
        while self._before:
            self.delete(find(self._before.pop(0)))
            if self._before:
                await asyncio.sleep(0)
        self._is_begun = True
        if self._future_before is not None:
            self._futures[self._num_retired], self._future_before = self._future_before, None
        self._settle()

    def delete(self, numbers: Iterable[int] = ()) -> None:
        """Delete spaces, and those that wait."""
        more = list(numbers)
        self.waiting |= dict.fromkeys(more)
        self._num_retired += len(more)
        if not self.waiting:
            return
        self._note_time()
        if not (self._is_deleting or self._is_closed):
            assert self._writer is not None
            self._is_deleting = True
            meant = list(self.waiting)
            self._writer.submit(lambda store: store.index.delete_spaces(meant), partial(self._end, meant))

    def _end(self, numbers: list[int], done: Ended) -> None:
        self._is_deleting = False
        self._on_error(done.error)
        if done.error is not None:
            if not self._is_closed:
                logger.warning("a retirement is not on the disk yet, and is tried again: %s", done.error)
                asyncio.get_running_loop().call_later(disk_errors.RETRY_S, self.delete)
            return
        for number in numbers:
            self.waiting.pop(number, None)
        self._on_deleted(numbers)
        self._settle()
        self.delete()
        if not self.waiting:
            self.clean()

    def clean(self) -> None:
        """Delete all rows of deleted spaces, in slices, also those that an earlier life has left."""
        if not (self._is_cleaning or self._is_closed):
            assert self._writer is not None
            self._is_cleaning = True
            self._writer.submit(lambda store: store.index.clean(), self._end_cleaning)

    def _end_cleaning(self, done: Ended) -> None:
        self._is_cleaning = False
        self._on_error(done.error)
        if done.error is not None and not self._is_closed:
            logger.warning("rows of retired pages are still on the disk, and are deleted later: %s", done.error)
            asyncio.get_running_loop().call_later(disk_errors.RETRY_S, self.clean)
        elif done.result:
            self.clean()

    def forget(self, writer: DiskWriter) -> None:
        """Confirm all retirements: the index was replaced by an empty one."""
        self._writer, self._is_begun = writer, True
        self.waiting.clear()
        self._before.clear()
        self._settle()

    def _note_time(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def _settle(self) -> None:
        """End the futures of the retirements that are committed."""
        num_deleted = self._num_retired - len(self.waiting)
        done = [self._futures.pop(number) for number in list(self._futures) if number <= num_deleted]
        if not self._before and self._future_before is not None:
            done.append(self._future_before)
            self._future_before = None
        for future in done:
            if not future.done():
                future.set_result(None)
        if not (self._before or self.waiting):
            self._since = None

    def close(self, writer: DiskWriter | None) -> None:
        """Try all retirements that are not committed for the last time, behind the writer's work."""
        self._is_closed = True
        numbers, before = list(self.waiting), list(self._before)
        if writer is None or not (numbers or before):
            return

        def delete(store: DiskStore) -> None:
            meant = [space.number for space in store.index.spaces() if any(is_in(space.namespace) for is_in in before)]
            store.index.delete_spaces([*numbers, *meant])

        writer.submit(delete, self._end_last)

    def _end_last(self, done: Ended) -> None:
        if done.error is not None:
            logger.warning("a retirement is not on the disk: %s", done.error)
            return
        self.waiting.clear()
        self._before.clear()
        self._settle()


def _is_any(namespace: str | None) -> bool:
    """Return True: all namespaces are meant."""
    return True
