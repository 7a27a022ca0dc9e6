"""`DiskTier`: a tier on a local disk, on the cache's event loop. It is warm after a restart.

    opening ──> reading ──> ready <──> stalled
       │ └──> locked by pid N, and again
       └──> failed: ...

Pages are written at their second use, from the tier in memory where they lie, and loaded straight into the leases of
the first tier. A cache without tensors has no files: a prefix is written in the call in which it is due.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from raydix.actors.tiers import disk_errors
from raydix.actors.tiers.copier import Copied
from raydix.actors.tiers.disk_deletions import DiskDeletions
from raydix.actors.tiers.disk_errors import DiskError, FolderInUse, IndexDamaged, index_values
from raydix.actors.tiers.disk_folder import PREDECESSOR_S
from raydix.actors.tiers.disk_layout import index_layout, record_bytes
from raydix.actors.tiers.disk_readers import DiskReaders
from raydix.actors.tiers.disk_store import DiskStore
from raydix.actors.tiers.disk_writer import BUFFER_BYTES, DiskWriter, Done
from raydix.actors.tiers.disk_writes import MOST_PAGES, DiskWrites, Source
from raydix.actors.tiers.file_calls import FileCalls
from raydix.actors.tiers.last_day import LastDay
from raydix.actors.tiers.leaving_rows import LeavingRows, delete_rows
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.actors.tiers.record_file import stride_of
from raydix.actors.tiers.space_bindings import SpaceBindings
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.actors.tiers.tier_stats import disk_pools, move_stats, without_zeros
from raydix.actors.transport.pool_shapes import layout_below
from raydix.cache_core import KVCache, KVPool, RadixKey, RecordPool
from raydix.cache_core.leases.lease_table import TIERS, LeaseRecord
from raydix.cache_core.tiers.disk_spaces import DiskSpaces, Models
from raydix.cache_core.tiers.index_row import FIRST, RowPlace
from raydix.cache_core.tiers.moves import Finished, Moves
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import Numbers, RecordKeeper
from raydix.cache_core.tiers.second_use import SecondUse
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.use_counter import UseCounter
from raydix.schemas import CacheConfig, CacheUnavailable, DiskTierStats
from raydix.schemas.config import TierSizes
from raydix.schemas.shown import counted

logger = logging.getLogger(__name__)

READY, STALLED, CLOSED = "ready", "stalled", "closed"
_RECORDS_AT_ONCE = 2048  # rows of which one task of the writer reads the records: 2 ms of the loop, if each has a space
_FREED_AT_ONCE = 1024  # deleted spaces of which one slice frees the records
_EVICTED_AT_ONCE = 256  # records of a kind that one slice evicts: 0.5 ms
_FREE_SHARE = 0.01  # of the records, kept free


class DiskTier:
    """The disk tier of one cache.

    It observes the caches: the first tier's for uses, the disk's own for retirements.

    Args:
        config: of the cache; it has `disk`.
        name: of the cache: of its folder.
        sources: the tiers in memory, the pool first.
        cache: of the disk, empty; as `build_disk_cache` returns it.
        models_of: returns the models that compute the KV of a namespace now: the fingerprints of the base and of the
            adapter, and the label of the weights; None: none are bound.
        on_change: called on the loop when loads or writes have ended.
        opened: of the disk, as `open_disk` returned it; None: `start` opens it.
        calls: of the operating system.
        clock: seconds.

    Attributes:
        tier: the disk's tier.
        all_moves: from each source to the disk; the loads are those of the first.
        loads: from the disk to the first tier.
        readers: the threads of the loads.
        writes: to the disk.
        deletions: of retired spaces.
        may_begin: returns whether writes and prefetches may begin, as no request needs the slots. Call `wake` when it
            is true again.
    """

    def __init__(
        self,
        config: CacheConfig,
        name: str,
        sources: Sequence[Source],
        cache: KVCache,
        models_of: Callable[[str | None], Models | None],
        on_change: Callable[[], object],
        calls: FileCalls | None = None,
        clock: Callable[[], float] = monotonic,
        opened: DiskStore | FolderInUse | None = None,
    ) -> None:
        assert config.disk is not None, "the configuration has no disk tier"
        self.config = config.disk
        self.tier = Tier("disk", "STORAGE", cache)
        self.is_instant = not config.pool.has_tensors
        self.may_begin: Callable[[], bool] = lambda: True
        self._name = name
        self._sources = sources
        self._on_change = on_change
        self._calls = self._first_calls = calls
        self._clock = clock
        self._page = cache.page_size
        self._state = READY if self.is_instant else "opening"
        self._first_store: DiskStore | None = None
        if isinstance(opened, FolderInUse):
            self._state = _in_use(opened)
        else:
            self._first_store = opened
        self._layout = layout_below(config, TierSizes(cache.num_slots, *_sizes_of(cache)))
        self._index_layout = index_layout(config)
        strides = {kind: stride_of(num_bytes) for kind, num_bytes in record_bytes(self._layout).items()}
        page_bytes = strides.get("full", 0) + strides.get("swa", 0)
        self.all_moves = [
            Moves(source.tier, self.tier, page_bytes, are_neighbours=source is sources[-1]) for source in sources
        ]
        for moves in self.all_moves:
            moves.batch_pages = min(moves.batch_pages, MOST_PAGES)
        self.keepers = {} if self.is_instant else _make_keepers(cache)
        self.spaces = DiskSpaces(cache, self.keepers)
        self.bindings = SpaceBindings(
            self.spaces,
            models_of,
            self._page,
            self._do_surely,
            self._run,
            self.wake,
            self._end_commit,
            lambda: self._state,
        )
        # The tier above is evicted down to its low watermark, so at least this share is written first.
        low_watermark = (config.eviction if config.host is None else config.host).low_watermark
        reserve = int(max(self.config.reserve, 1 - low_watermark) * sources[-1].tier.cache.num_slots)
        has_reserve = self.config.admit == "all" and not self.is_instant
        self.writes = DiskWrites(sources, self.all_moves, self.keepers, reserve if has_reserve else 0)
        self.writes.on_end = self._after_write
        self._buffer_bytes = max(BUFFER_BYTES, self.writes.set_sizes(record_bytes(self._layout)))
        self.readers = DiskReaders(clock)
        self.loads = TierLoads(
            self.all_moves[0],
            self.config.load_timeout_s,
            self._finish_load,
            self._after_work,
            self._may_load,
            self._may_prefetch,
            may_stall=True,
            clock=clock,
        )
        self._writer: DiskWriter | None = None
        self._store: DiskStore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_scheduled = self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._paused_until = float("-inf")
        self._last_day = LastDay(clock)
        self._last_error = ""  # of a write or a read
        self._noted_bytes = 0  # bytes of writes that `_last_day` has
        self.deletions = DiskDeletions(self._end_deletion, self._note_error, clock)
        self._deleted: deque[int] = deque()  # spaces of which the records are to be freed
        self._leaving = LeavingRows(self.keepers, self._after_work, self._note_error)
        self._observe()

    def _observe(self) -> None:
        """Count uses, and see retirements."""
        first, lowest = self._sources[0].tier.cache, self.all_moves[-1]
        self.tier.cache.observers.append(_Retirements(self))
        first.observers.append(_Changes(self))
        pages = sum(tier.cache.num_slots for tier in (*(source.tier for source in self._sources), self.tier))
        self.uses: UseCounter | None = None
        if self.config.admit == "second_use":
            offer = self.writes.write_instantly if self.is_instant else self._offer
            self.uses = UseCounter(first, SecondUse(max(1, pages // self._page)), self.bindings.has_models, offer)
            first.observers.append(self.uses)
        elif self.is_instant:
            lowest.is_kept = self.bindings.has_models
            lowest.upper.cache.watch_victims(lowest.write_before_eviction)
        else:
            lowest.is_kept = self.bindings.is_ready
            lowest.upper.cache.watch_victims(lowest.count_dropped)
        if self.is_instant:
            self.loads.open_instant()

    def _offer(self, key: RadixKey) -> None:
        self.writes.offer(key)
        self.wake()

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """The tier's state: "ready", "stalled", "opening", "reading", "closed", "locked by pid N" or "failed: ..."."""
        return STALLED if self._state == READY and self.loads.is_stalled else self._state

    @property
    def needs_threads(self) -> bool:
        """Whether threads are at work: the disk is opened or read, or writes or loads are in flight."""
        return self.writes.has_batches or self.loads.has_any or self.bindings.may_find_more

    @property
    def has_work(self) -> bool:
        """Whether the disk goes on when the loop runs: it opens, or something is to be read, written or deleted."""
        if self.is_instant or self._is_closed:
            return False
        return bool(self._is_scheduled or self._tasks or self.loads.has_any or not self.writes.is_idle)

    def stats(self, num_unbound: int = 0) -> DiskTierStats:
        """Return the statistics.

        Args:
            num_unbound: namespaces without models in which pages were published.
        """
        cache, writes = self.tier.cache, self.writes.counts
        dropped = {"queue_full": writes.due_dropped, "left_memory": writes.due_gone, "no_room": writes.no_room}
        return DiskTierStats(
            state=self.state,
            admit=self.config.admit,
            **disk_pools(cache, self.keepers),
            **move_stats(self.all_moves),
            num_spaces=len(self.spaces),
            unbound_namespaces=num_unbound,
            due_prefixes=self.writes.num_due,
            pages_used=0 if self.uses is None else self.uses.num_uses,
            pages_refused=0 if self.uses is None else self.uses.num_first_uses,
            writes=without_zeros({"committed": writes.num_writes, "failed": writes.num_failed}),
            prefixes_dropped=without_zeros(dropped),
            last_error=self._last_error or None,
            written_bytes=writes.num_bytes,
            written_bytes_day=self._last_day.total,
            loads_in_flight=sum(move.is_load for moves in self.all_moves for move in moves.in_flight),
            loaded_bytes=self.readers.num_bytes,
            load_s=self.readers.seconds,
            queued_bytes=self.readers.queued_bytes,
            loads_late=self.loads.num_late,
            stalls=self.loads.num_stalls,
            damaged_records=self.readers.num_damaged,
            failed_reads=self.readers.num_failed,
            read_error_s=self.readers.error_s,
            bad_rows=0 if self._store is None else self._store.num_bad_rows,
            uncommitted_s=self.deletions.uncommitted_s,
        )

    # ---------------------------------------------------------------- opening

    def start(self) -> None:
        """Open the disk in the background; no effect if that has begun. Call it on the running loop."""
        if self.is_instant or self._loop is not None or self._is_closed:
            return
        self._loop = asyncio.get_running_loop()
        self._run(self._open())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(work, name="raydix-disk")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        """Open the disk, and read its rows. Try again while another process has it."""
        try:
            found = await self._open_store()
            while isinstance(found, FolderInUse):
                if self._state != (state := _in_use(found)):
                    self._state = state
                    logger.warning("the cache serves without its disk: %s; it goes on trying", found)
                await asyncio.sleep(PREDECESSOR_S)
                found = await self._open_store()
            if isinstance(found, Exception):
                raise found
            self._store = found
            pool = self._sources[0].pool()
            assert pool is not None
            token_bytes = self.readers.open(pool, found)
            self.loads.open(self.readers.copiers, token_bytes)
            self._state = "reading"
            await self._read()
        except (CacheUnavailable, DiskError) as error:
            self._fail(error)
        except Exception as error:  # the cache serves without its disk
            logger.exception("the disk tier could not be opened")
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._state = f"failed: {error}"
        self.bindings.settle()
        logger.warning("the cache serves without its disk: %s", error)

    async def _open_store(self) -> DiskStore | Exception:
        """Open the files in a thread, unless they are open. Return the error if that fails."""
        pool, loop = self._sources[0].pool(), asyncio.get_running_loop()
        assert pool is not None, "a pool with tensors has them from the start"
        opened: asyncio.Future[DiskStore | Exception] = loop.create_future()
        first = self._take_first()
        open_new = partial(
            DiskStore,
            self.config.path,
            self._name,
            self._layout,
            self._index_layout,
            direct_io=self.config.direct_io,
            is_given_up=lambda: self._is_closed,
            calls=self._calls,
        )

        def open_store() -> DiskStore:
            return open_new() if first is None else first

        self._writer = writer = self.make_writer(open_store, partial(_settle, opened), pool)
        writer.on_free = self.wake
        found = await opened
        if isinstance(found, Exception):
            writer.close()
            self._writer = None
        return found

    def make_writer(
        self,
        open_store: Callable[[], DiskStore],
        opened: Callable[[DiskStore | Exception], object],
        pool: KVPool | RecordPool,
    ) -> DiskWriter:
        """Return a writer, which the tier closes."""
        limit, buffer_bytes = self.config.write_mib_s, self._buffer_bytes
        return DiskWriter(open_store, opened, pool, write_mib_s=limit, buffer_bytes=buffer_bytes, clock=self._clock)

    def _take_first(self) -> DiskStore | None:
        """Return the store that was open from the start; None from the second call on."""
        store, self._first_store = self._first_store, None
        if store is not None and (self._is_closed or self._calls is not self._first_calls):
            store.close()
            return None
        return store

    async def _read(self) -> None:
        """Note which records have rows, then let all others be used."""
        try:
            await self._read_records()
        except IndexDamaged as error:
            await self._renew_index(error)
        self.spaces.end_reading()
        self._state = READY
        self.deletions.clean()
        logger.info(
            "the disk tier is ready: it keeps %s of %s",
            counted(self.keepers["full"].num_dormant * self._page, "token"),
            counted(len(self.spaces), "space"),
        )
        self.bindings.bind()
        self.bindings.settle()
        self.wake()
        self._on_change()

    async def _read_records(self) -> None:
        """Read the spaces, and the numbers of their records."""
        await self.bindings.read()
        assert self._writer is not None
        self.deletions.begin(self._writer, self.spaces.retire)
        place: RowPlace | None = FIRST
        while place is not None:
            spaces, kinds, records, place = await self._do_surely(partial(_records, place=place))
            with index_values("reading the index"):
                refused = self.spaces.read(spaces, kinds, records)
            await self._delete_refused(refused)

    async def _delete_refused(self, refused: list[tuple[Kind, int]]) -> None:
        """Delete rows that name no record of this disk, such as one beyond its end."""
        try:
            if refused:
                await self._do(partial(delete_rows, removed=refused))
        except IndexDamaged:
            raise
        except DiskError as error:  # the next start meets them again
            logger.warning("%d useless rows of the disk's index could not be deleted: %s", len(refused), error)

    async def _do(self, task: Callable[[DiskStore], Any]) -> Any:
        """Do work in the writer's thread; return its result.

        Raises:
            DiskError: it failed.
        """
        assert self._writer is not None
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._writer.submit(task, partial(_settle, done))
        result, error = await done
        if error is not None:
            self._note_error(error)
            raise error
        return result

    async def _do_surely(self, task: Callable[[DiskStore], Any]) -> Any:
        """Do work until the disk does not fail; return its result.

        Raises:
            IndexDamaged: the index is damaged.
        """
        while True:
            try:
                return await self._do(task)
            except IndexDamaged:
                raise
            except DiskError as error:
                logger.warning("the disk's index could not be read, and is tried again: %s", error)
                await asyncio.sleep(disk_errors.RETRY_S)

    # ---------------------------------------------------------------- a damaged index

    def _note_error(self, error: Exception | None) -> None:
        """Replace the index if an error of the disk's work says that it is damaged."""
        if isinstance(error, IndexDamaged) and self._state == READY and not self._is_closed:
            self._state = "reading"
            self._run(self._serve_without_pages(error))

    async def _serve_without_pages(self, error: IndexDamaged) -> None:
        """Lose all pages of the disk, as its index is damaged, and begin with a new one."""
        self.tier.cache.retire(lambda namespace: True)
        await self._renew_index(error)
        self._state = READY
        self.bindings.bind()
        self.wake()
        self._on_change()

    async def _renew_index(self, error: IndexDamaged) -> None:
        """Make a new index. Try again if that fails: no retirement can be confirmed before."""
        logger.warning("the index of the disk is damaged, so its records are lost: %s", error)
        while True:
            try:
                await self._do(DiskStore.renew_index)
                break
            except DiskError as failure:
                if self._state != (state := f"failed: {failure}"):
                    self._state = state
                    logger.warning("the cache serves without its disk: %s; it goes on trying", failure)
                await asyncio.sleep(disk_errors.RETRY_S)
        self._state = "reading"
        self.spaces.lose_all()
        self._deleted.clear()
        assert self._writer is not None
        self.deletions.forget(self._writer)

    # ---------------------------------------------------------------- models

    def bind(self, lora_id: str | None = None) -> None:
        """Let pages be found of models that have been bound: see `SpaceBindings.bind`."""
        self.bindings.bind(lora_id)

    def built(self) -> asyncio.Future[None] | None:
        """Return the future that ends when they can be found: see `SpaceBindings.built`."""
        return self.bindings.built()

    # ---------------------------------------------------------------- the disk's own work

    def note_change(self) -> None:
        """Look at the reserve of the lowest tier in memory soon, as pages were published or unlocked."""
        if self.config.admit == "all" and not self.is_instant:
            self.wake()

    def wake(self) -> None:
        """Do the disk's work soon."""
        if self._loop is not None and not self._is_scheduled and not self._is_closed and self._state == READY:
            self._is_scheduled = True
            self._loop.call_soon(self._run_slice)

    def _run_slice(self) -> None:
        """Do a part of the disk's work: about 1 ms."""
        self._is_scheduled = False
        if self._is_closed or self._state != READY:
            return
        assert self._writer is not None
        built, has_more = self.bindings.build()
        self.writes.resume([space.namespace for space in built])
        if built and not has_more:
            self.writes.ask_again()
        has_more |= self.bindings.delete_emptied(self._writer)
        self.spaces.deleted([self._deleted.popleft() for _ in range(min(_FREED_AT_ONCE, len(self._deleted)))])
        has_more |= bool(self._deleted)
        has_more |= self._keep_free()
        self._leaving.delete(self._writer)
        may_begin = self._clock() >= self._paused_until and self.may_begin()
        if may_begin:
            self.writes.begin(self._writer, self.bindings)
        self._set_timer()
        if has_more or (may_begin and self.writes.may_look_on and self._writer.may_write):
            self.wake()

    def _set_timer(self) -> None:
        """Wake when the limit of writes allows the next one."""
        assert self._writer is not None and self._loop is not None
        wait_s = max(self._writer.wait_s, self._paused_until - self._clock())
        has_more = self.writes.num_due or not self.writes.is_ahead
        if self._timer is None and has_more and 0 < wait_s < float("inf"):
            self._timer = self._loop.call_later(wait_s, self._end_timer)

    def _end_timer(self) -> None:
        self._timer = None
        self.wake()

    def _end_commit(self, error: DiskError | None) -> None:
        """Begin no write for a while after an error."""
        if error is not None:
            self._last_error = str(error)
            self._note_error(error)
            self._paused_until = self._clock() + disk_errors.RETRY_S

    def _after_write(self, error: DiskError | None) -> None:
        self._end_commit(error)
        self._last_day.add(self.writes.counts.num_bytes - self._noted_bytes)
        self._noted_bytes = self.writes.counts.num_bytes
        self.wake()
        self._on_change()

    def _after_work(self) -> None:
        self.wake()
        self._on_change()

    def _keep_free(self) -> bool:
        """Evict so that the next writes find records: dormant ones first. Return whether this slice has left some."""
        cache, page = self.tier.cache, self._page
        most, before = _EVICTED_AT_ONCE * page, sum(keeper.num_leaving for keeper in self.keepers.values())
        missing = [self._missing("full", cache.free_slots)]
        if missing[-1] > 0:
            pages = -(-min(missing[-1], most) // page)
            left = pages - self.spaces.drop_dormant(pages)
            if left > 0:
                cache.evict(left * page, "watermark")
        if (swa := cache.allocator.swa) is not None:
            missing.append(self._missing("swa", swa.available_size()))
            if missing[-1] > 0:
                cache.evict_window(min(missing[-1], most))
        if (states := cache.pools.states) is not None:
            missing.append(self._missing("state", states.available_size()) * page)
            if missing[-1] > 0:
                cache.evict_states(min(missing[-1], most) // page)
        # Nothing more is evicted while all is locked: the end of a load wakes the disk.
        has_evicted = sum(keeper.num_leaving for keeper in self.keepers.values()) > before
        return has_evicted and max(missing) > most

    def _missing(self, kind: Kind, num_free: int) -> int:
        """Return how many slots of a kind are to be evicted."""
        keeper = self.keepers[kind]
        step = 1 if kind == "state" else self._page
        batch = 1 if kind == "state" else self.all_moves[-1].batch_pages + self.writes.window_pages
        goal = max(int(_FREE_SHARE * keeper.num_records), min(batch, keeper.num_records // 2), 1)
        return (goal - keeper.num_leaving) * step - num_free

    # ---------------------------------------------------------------- requests

    @property
    def locks_pool(self) -> bool:
        """Whether pages of the pool are locked, as they are being copied to a buffer."""
        return self.writes.lock_pool

    def cancel_writes(self) -> bool:
        """Cancel the writes that lock pages of the pool; return True if there are none. See `DiskWrites.cancel`."""
        return self._writer is None or self.writes.cancel(self._writer)

    def _may_load(self) -> bool:
        """Return whether loads may begin."""
        return self.is_instant or (bool(self.readers.copiers) and not self._is_closed)

    def _may_prefetch(self) -> bool:
        return self.may_begin()

    def _finish_load(self, batch: MoveBatch, copied: Copied) -> tuple[Finished, bool]:
        """End the only move of a batch; return its result, and whether all of it was read."""
        ((move, num_pages, is_whole),) = batch.results(copied)
        finished = self.all_moves[0].finish(move, num_pages, is_whole)
        num_failed = self.readers.num_failed
        if self.readers.end(move, copied, self.tier.cache):
            self.loads.stall()
        if self.readers.num_failed > num_failed:
            self._last_error = self.readers.last_error
        return finished, is_whole

    def left_s(self, key: RadixKey, longest: int) -> float | None:
        """Return the seconds since the next page of a request's key was evicted from the disk.

        Args:
            longest: the tokens of the key that can be used now or loaded.

        Returns:
            None: the page was not there, or that is forgotten.
        """
        found = self.tier.cache.explain(key)
        return found.seconds_ago if found.reason == "evicted" and found.full_prefix_len >= longest else None

    # ---------------------------------------------------------------- retirements

    def retire(self, is_meant: Callable[[str | None], bool]) -> None:
        """Delete the spaces of namespaces, which the disk's cache is about to retire: see `deletions.future`."""
        self.writes.forget(is_meant)
        if self.is_instant:
            return
        self.deletions.retire(is_meant, self.spaces.retire)
        self.bindings.settle()

    def _end_deletion(self, numbers: Sequence[int]) -> None:
        """Give the records of deleted spaces back soon: after all rows have been read."""
        self._deleted += numbers
        self.wake()
        self._on_change()

    # ---------------------------------------------------------------- the end

    async def flush(self, timeout_s: float) -> bool:
        """Write all that is due, without a limit of the rate; return whether it was done within the time."""
        if self._state != READY or self._writer is None:
            return self.writes.is_idle
        self._writer.end_limit()
        deadline = monotonic() + timeout_s
        while not self.writes.is_idle and monotonic() < deadline:
            self.wake()
            await asyncio.sleep(0.01)
        return self.writes.is_idle

    def close(self, timeout_s: float | None = None) -> bool:
        """End all loads and writes, and give the folder back. It waits for the writes that were copied.

        Args:
            timeout_s: for which it waits for the disk; None: without a limit.

        Returns:
            Whether all has ended: the pools may be freed then.
        """
        if self._is_closed:
            return True
        self.deletions.close(self._writer)
        self._is_closed = True
        self._state = CLOSED
        self.bindings.settle()
        for task in self._tasks:
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._take_first()
        has_ended = self.loads.close(timeout_s)
        self.readers.close(timeout_s if has_ended else 0.0)
        if self._writer is not None:
            has_ended = self._writer.close(timeout_s) and has_ended
        return has_ended

    # ---------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the records is broken. `check_all` checks the moves. O(n)."""
        for keeper in self.keepers.values():
            keeper.check_invariants()
        self._leaving.check_invariants()
        self.bindings.check_invariants()


class _Retirements:
    """Observes the disk's cache."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def granted(self, lease: LeaseRecord, max_prefix_len: int | None) -> None:
        """Do nothing."""

    def loaded(self, lease: LeaseRecord, num_tokens: int) -> None:
        """Do nothing."""

    def refused(self, key: RadixKey, num_tokens: int, can_ever_fit: bool) -> None:
        """Do nothing."""

    def published(self, lease: LeaseRecord) -> None:
        """Do nothing."""

    def ended(self, lease: LeaseRecord) -> None:
        """Do nothing."""

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Delete the spaces before the cache retires their namespaces."""
        self._disk.retire(is_meant)


class _Changes(_Retirements):
    """Observes the first tier's cache."""

    def published(self, lease: LeaseRecord) -> None:
        """Look at the pool's reserve, and at the models of the lease's namespace."""
        self._disk.note_change()
        if lease.session_id != TIERS:
            self._disk.bindings.note_published(lease.key.extra_key)

    def ended(self, lease: LeaseRecord) -> None:
        """Look at the pool's reserve."""
        self._disk.note_change()

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Do nothing: the disk's cache is retired, too."""


def _sizes_of(cache: KVCache) -> tuple[int, int]:
    """Return the window slots and the states of a cache."""
    swa, states = cache.allocator.swa, cache.pools.states
    return 0 if swa is None else swa.num_slots, 0 if states is None else states.num_slots


def _make_keepers(cache: KVCache) -> Mapping[Kind, RecordKeeper]:
    """Return the keepers of a new cache's records."""
    keepers: dict[Kind, RecordKeeper] = {"full": RecordKeeper.of_pages(cache.allocator)}
    if cache.allocator.swa is not None:
        keepers["swa"] = RecordKeeper.of_pages(cache.allocator.swa)
    if cache.pools.states is not None:
        keepers["state"] = RecordKeeper.of_states(cache.pools.states)
    return keepers


def _in_use(error: FolderInUse) -> str:
    """Return the state of a tier of which another process has the folder."""
    return "locked by another process" if error.pid is None else f"locked by pid {error.pid}"


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


# ---------------------------------------------------------------- tasks of the writer's thread


def _records(store: DiskStore, *, place: RowPlace) -> tuple[Numbers, Numbers, Numbers, RowPlace | None]:
    return store.index.records(place, _RECORDS_AT_ONCE)
