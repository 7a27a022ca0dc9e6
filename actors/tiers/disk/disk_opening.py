"""`DiskOpening`: the start of a disk tier, and the repair of its index.

opening ──> reading ──> ready
   │ └──> locked by pid N, and again
   └──> failed: ...
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from raydix.actors.tiers.disk import disk_errors
from raydix.actors.tiers.disk.disk_errors import DiskError, FolderInUse, IndexDamaged, index_values
from raydix.actors.tiers.disk.disk_files import CLOSED, READY, DiskFiles
from raydix.actors.tiers.disk.disk_folder import PREDECESSOR_S
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.space_bindings import SpaceBindings
from raydix.actors.tiers.disk.space_deletions import SpaceDeletions
from raydix.cache_core import KVCache
from raydix.cache_core.tiers.disk_spaces import DiskSpaces
from raydix.cache_core.tiers.index_row import FIRST, RowPlace
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import Numbers
from raydix.schemas import CacheUnavailable

logger = logging.getLogger(__name__)

_RECORDS_AT_ONCE = 2048  # rows of which one task reads the records: 2 ms of the loop, if each has a space


class DiskOpening:
    """Opens the files of a disk tier, and reads which records have rows. It makes a new index for a damaged one.

    Args:
        files: of the tier.
        spaces, bindings, deletions: of the tier.
        cache: of the disk.
        opened: called when the files are open, before the index is read.
        ready: called when requests can use the disk, and again when it has a new index.
        in_use: the folder, which another process has; None: it has not.
    """

    def __init__(
        self,
        files: DiskFiles,
        cache: KVCache,
        spaces: DiskSpaces,
        bindings: SpaceBindings,
        deletions: SpaceDeletions,
        opened: Callable[[], object],
        ready: Callable[[], object],
        in_use: FolderInUse | None,
    ) -> None:
        self._files = files
        self._cache = cache
        self._spaces = spaces
        self._bindings = bindings
        self._deletions = deletions
        self._opened = opened
        self._ready = ready
        self._is_begun = False
        files.on_error = self.note_error
        if in_use is not None:
            files.state = _in_use(in_use)

    def start(self) -> None:
        """Open the disk in the background; no effect if that has begun. Call it on the running loop."""
        if not self._is_begun and not self._files.is_closed:
            self._is_begun = True
            self._files.run(self._open())

    async def _open(self) -> None:
        """Open the disk, and read its rows. Try again while another process has it."""
        try:
            while (in_use := await self._open_files()) is not None:
                if self._files.state != (state := _in_use(in_use)):
                    self._files.state = state
                    logger.warning("the cache serves without its disk: %s; it goes on trying", in_use)
                await asyncio.sleep(PREDECESSOR_S)
            self._opened()
            self._files.state = "reading"
            await self._read()
        except (CacheUnavailable, DiskError) as error:
            self._fail(error)
        except Exception as error:  # the cache serves without its disk
            logger.exception("the disk tier could not be opened")
            self._fail(error)

    async def _open_files(self) -> FolderInUse | None:
        """Open the files; return the error if another process has the folder."""
        try:
            await self._files.open()
        except FolderInUse as error:
            return error
        return None

    def _fail(self, error: Exception) -> None:
        self._files.state = f"failed: {error}"
        self._bindings.settle()
        logger.warning("the cache serves without its disk: %s", error)

    # ---------------------------------------------------------------- reading

    async def _read(self) -> None:
        """Note which records have rows, then let all others be used."""
        try:
            await self._read_records()
        except IndexDamaged as error:
            await self._renew_index(error)
        self._spaces.end_reading()
        self._files.state = READY
        self._deletions.clean()
        self._bindings.bind()
        self._bindings.settle()
        self._ready()

    async def _read_records(self) -> None:
        """Read the spaces, and the numbers of their records."""
        await self._bindings.read()
        assert self._files.writer is not None
        await self._deletions.begin(self._files.writer, self._spaces.retire)
        place: RowPlace | None = FIRST
        while place is not None:
            spaces, kinds, records, place = await self._files.do_surely(partial(_records, place=place))
            with index_values("reading the index"):
                refused = self._spaces.read(spaces, kinds, records)
            await self._delete_refused(refused)

    async def _delete_refused(self, refused: list[tuple[Kind, int]]) -> None:
        """Delete rows that name no record of this disk, such as one beyond its end."""
        try:
            if refused:
                await self._files.do(lambda store: store.index.commit(removed=refused))
        except IndexDamaged:
            raise
        except DiskError as error:  # the next start meets them again
            logger.warning("%d useless rows of the disk's index could not be deleted: %s", len(refused), error)

    # ---------------------------------------------------------------- a damaged index

    def note_error(self, error: Exception | None) -> None:
        """Replace the index if an error of the disk's work says that it is damaged."""
        if isinstance(error, IndexDamaged) and self._files.is_ready:
            self._files.state = "reading"
            self._files.run(self._serve_without_pages(error))

    async def _serve_without_pages(self, error: IndexDamaged) -> None:
        """Lose all pages of the disk, as its index is damaged, and begin with a new one."""
        self._cache.retire(lambda namespace: True)
        await self._renew_index(error)
        self._files.state = READY
        self._bindings.bind()
        self._ready()

    async def _renew_index(self, error: IndexDamaged) -> None:
        """Make a new index. Try again if that fails: no retirement can be confirmed before."""
        logger.warning("the index of the disk is damaged, so its records are lost: %s", error)
        while True:
            try:
                await self._files.do(DiskStore.renew_index)
                break
            except DiskError as failure:
                if self._files.state != (state := f"failed: {failure}"):
                    self._files.state = state
                    logger.warning("the cache serves without its disk: %s; it goes on trying", failure)
                await asyncio.sleep(disk_errors.RETRY_S)
        self._files.state = "reading"
        self._spaces.lose_all()
        assert self._files.writer is not None
        self._deletions.forget(self._files.writer)

    def close(self) -> None:
        """End the work in the background."""
        self._files.state = CLOSED
        self._bindings.settle()
        for task in self._files.tasks:
            if not task.get_loop().is_closed():  # else it does not go on
                task.cancel()


def _in_use(error: FolderInUse) -> str:
    """Return the state of a tier of which another process has the folder."""
    return "locked by another process" if error.pid is None else f"locked by pid {error.pid}"


def _records(store: DiskStore, *, place: RowPlace) -> tuple[Numbers, Numbers, Numbers, RowPlace | None]:
    return store.index.records(place, _RECORDS_AT_ONCE)
