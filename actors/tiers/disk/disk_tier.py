"""`DiskTier`: a tier on a local disk, on the cache's event loop. It is warm after a restart.

`DiskOpening` opens its files and reads the index, `SpaceBindings` knows the spaces of the bound models, and `DiskWork`
does its own work in slices. Pages are written at their second use, from the tier in memory where they lie, and loaded
straight into the leases of the first tier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from raydix.actors.memory.pool_shapes import layout_below
from raydix.actors.tiers.copier import CopyCounts
from raydix.actors.tiers.disk.disk_errors import FolderInUse
from raydix.actors.tiers.disk.disk_files import READY, DiskFiles
from raydix.actors.tiers.disk.disk_layout import index_layout, record_bytes
from raydix.actors.tiers.disk.disk_opening import DiskOpening
from raydix.actors.tiers.disk.disk_readers import DiskReaders
from raydix.actors.tiers.disk.disk_store import DiskStore
from raydix.actors.tiers.disk.disk_work import DiskWork, Why
from raydix.actors.tiers.disk.disk_writer import BUFFER_BYTES
from raydix.actors.tiers.disk.disk_writes import MOST_PAGES, DiskWrites, Source
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.actors.tiers.disk.free_records import FreeRecords
from raydix.actors.tiers.disk.last_day import LastDay
from raydix.actors.tiers.disk.record_file import stride_of
from raydix.actors.tiers.disk.row_deletions import RowDeletions
from raydix.actors.tiers.disk.space_bindings import SpaceBindings
from raydix.actors.tiers.disk.space_deletions import SpaceDeletions
from raydix.actors.tiers.disk.unbound_namespaces import UnboundNamespaces
from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.actors.tiers.tier_stats import disk_pools, move_stats, without_zeros
from raydix.cache_core import KVCache, RadixKey
from raydix.cache_core.leases.request_observer import RequestObserver
from raydix.cache_core.tiers.disk_spaces import DiskSpaces, Models
from raydix.cache_core.tiers.loads import Filled, Loads
from raydix.cache_core.tiers.page_records import Kind
from raydix.cache_core.tiers.record_keeper import RecordKeeper
from raydix.cache_core.tiers.second_use import SecondUse
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.use_counter import UseCounter
from raydix.cache_core.tiers.writes import Writes
from raydix.schemas import CacheConfig, DiskTierStats
from raydix.schemas.config import TierSizes
from raydix.schemas.shown import counted

logger = logging.getLogger(__name__)

STALLED = "stalled"


class DiskTier(RequestObserver):
    """The disk tier of one cache with tensors.

    It observes the disk's own cache for retirements; its parts observe the first tier's.

    Args:
        config: of the cache; it has `disk`.
        name: of the cache: of its folder.
        sources: the tiers in memory, the pool first.
        cache: of the disk, empty; as `build_disk_cache` returns it.
        models_of: returns the models that compute the KV of a namespace now: the fingerprints of the base and of the
            adapter, and the label of the weights; None: none are bound.
        on_change, on_load: called on the loop when writes, or a load, have ended.
        opened: of the disk, as `open_disk` returned it; None: `start` opens it.
        calls: of the operating system.
        clock: seconds.

    Attributes:
        tier: the disk's tier.
        all_writes: from each source to the disk.
        keepers: of its records.
        spaces: on the disk; `bindings` are those of the models that are bound, and `deletions` those of retired ones.
        files, opening: the store, and its start.
        work: the disk's own work.
        writes: to the disk.
        uses: counts the uses of pages; None: all that leaves memory is written.
        unbound: namespaces of which nothing is kept.
        loads: from the disk to the first tier.
        readers: of the loads.
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
        on_load: Callable[[], object],
        calls: FileCalls | None = None,
        clock: Callable[[], float] = monotonic,
        opened: DiskStore | FolderInUse | None = None,
    ) -> None:
        assert config.disk is not None, "the configuration has no disk tier"
        self.config = config.disk
        self.tier = Tier("disk", "STORAGE", cache)
        self.may_begin: Callable[[], bool] = lambda: True
        layout = layout_below(config, TierSizes(cache.num_slots, *_sizes_of(cache)))
        strides = {kind: stride_of(num_bytes) for kind, num_bytes in record_bytes(layout).items()}
        page_bytes = strides.get("full", 0) + strides.get("swa", 0)
        self.all_writes = [
            Writes(source.tier, self.tier, page_bytes, are_neighbours=source is sources[-1]) for source in sources
        ]
        for writes in self.all_writes:
            writes.batch_pages = min(writes.batch_pages, MOST_PAGES)
        self.keepers = _make_keepers(cache)
        self.spaces = DiskSpaces(cache, self.keepers)
        # The tier above is evicted down to its low watermark, so at least this share is written first.
        low_watermark = (config.eviction if config.host is None else config.host).low_watermark
        reserve = int(max(self.config.reserve, 1 - low_watermark) * sources[-1].tier.cache.num_slots)
        if self.config.admit != "all":
            reserve = 0
        self.writes = DiskWrites(sources, self.all_writes, self.keepers, strides, LastDay(clock), reserve)
        # The largest move that is not divided must fit.
        buffer_bytes = max(BUFFER_BYTES, (self.writes.window_pages + 1) * page_bytes + strides.get("state", 0))
        in_use = opened if isinstance(opened, FolderInUse) else None
        first = opened if isinstance(opened, DiskStore) else None
        self.files = DiskFiles(
            self.config, name, layout, index_layout(config), buffer_bytes, sources[0].pool, first, calls, clock
        )
        self.bindings = SpaceBindings(
            self.spaces,
            models_of,
            cache.page_size,
            self.files,
            lambda: self.work.wake(Why.BUILD),
            lambda error: self.work.note_error(error),
        )
        self.readers = DiskReaders(clock)
        self.loads = TierLoads(
            Loads(self.tier, sources[0].tier),
            self.config.load_timeout_s,
            self._finish_load,
            lambda: self.work.end_load(),
            lambda: self.readers.copier is not None and not self.files.is_closed,
            lambda: self.may_begin(),
            may_stall=True,
            clock=clock,
        )
        records = FreeRecords(
            cache, self.keepers, self.spaces, self.all_writes[-1].batch_pages + self.writes.window_pages
        )
        leaving = RowDeletions(
            self.keepers, lambda: self.work.end_deletion(), lambda error: self.opening.note_error(error)
        )
        self.work = DiskWork(
            self.files,
            records,
            leaving,
            self.bindings,
            self.writes,
            self.loads,
            lambda: self.may_begin(),
            on_change,
            on_load,
            clock,
        )
        self.writes.on_end = self.work.end_write
        self.deletions = SpaceDeletions(self._end_deletion, lambda error: self.opening.note_error(error), clock)
        self.opening = DiskOpening(
            self.files, cache, self.spaces, self.bindings, self.deletions, self._opened, self._ready, in_use
        )
        self._observe(sources)

    def _observe(self, sources: Sequence[Source]) -> None:
        """Count uses, and see retirements."""
        first, lowest = sources[0].tier.cache, self.all_writes[-1]
        self.tier.cache.observers.append(self)
        self.unbound = UnboundNamespaces(self.bindings.has_models)
        first.observers.append(self.unbound)
        self.uses: UseCounter | None = None
        if self.config.admit == "second_use":
            slots = sum(tier.cache.num_slots for tier in (*(source.tier for source in sources), self.tier))
            second_use = SecondUse(max(1, slots // first.page_size))
            self.uses = UseCounter(first, second_use, self.bindings.has_models, self._offer)
            first.observers.append(self.uses)
        else:
            first.observers.append(self.work)
            lowest.is_kept = self.bindings.is_ready
            lowest.upper.cache.watch_victims(lowest.count_dropped)

    def _offer(self, key: RadixKey) -> None:
        self.writes.offer(key)
        self.work.wake(Why.DUE)

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """The tier's state: "stalled", or that of `DiskFiles`."""
        return STALLED if self.files.state == READY and self.loads.is_stalled else self.files.state

    @property
    def needs_threads(self) -> bool:
        """Whether threads are at work: the disk is opened or read, or writes or loads are in flight."""
        return self.writes.has_batches or self.loads.has_any or self.bindings.may_find_more

    @property
    def has_work(self) -> bool:
        """Whether the disk goes on when the loop runs: it opens, or something is to be read, written or deleted."""
        if self.files.is_closed:
            return False
        is_working = self.work.is_scheduled or self.files.tasks or self.loads.has_any
        return bool(is_working) or not self.writes.is_idle

    def stats(self) -> DiskTierStats:
        """Return the statistics."""
        cache, writes, copier = self.tier.cache, self.writes.counts, self.readers.copier
        loads = CopyCounts() if copier is None else copier.counts(loads=True)
        dropped = {"queue_full": writes.due_dropped, "left_memory": writes.due_gone, "no_room": writes.no_room}
        return DiskTierStats(
            state=self.state,
            admit=self.config.admit,
            **disk_pools(cache, self.keepers),
            **move_stats(self.loads.moves, self.all_writes),
            num_spaces=len(self.spaces),
            unbound_namespaces=self.unbound.count(),
            due_prefixes=self.writes.num_due,
            pages_used=0 if self.uses is None else self.uses.num_uses,
            pages_refused=0 if self.uses is None else self.uses.num_first_uses,
            writes=without_zeros({"committed": writes.num_writes, "failed": writes.num_failed}),
            prefixes_dropped=without_zeros(dropped),
            last_error=self.work.last_error or None,
            written_bytes=writes.num_bytes,
            written_bytes_day=self.writes.last_day.total,
            loads_in_flight=len(self.loads.moves.in_flight),
            loaded_bytes=loads.num_bytes,
            load_s=loads.seconds,
            queued_bytes=0 if copier is None else copier.queued_bytes(loads=True),
            loads_late=self.loads.num_late,
            stalls=self.loads.num_stalls,
            damaged_records=self.readers.num_damaged,
            failed_reads=self.readers.num_failed,
            read_error_s=self.readers.error_s,
            bad_rows=0 if self.files.store is None else self.files.store.num_bad_rows,
            uncommitted_s=self.deletions.uncommitted_s,
        )

    # ---------------------------------------------------------------- opening

    def start(self) -> None:
        """Open the disk in the background; no effect if that has begun. Call it on the running loop."""
        self.opening.start()

    def _opened(self) -> None:
        """Let loads use the files, which are open now."""
        writer, store, pool = self.files.writer, self.files.store, self.files.pool()
        assert writer is not None and store is not None and pool is not None
        writer.on_free = self.work.note_free
        token_bytes = self.readers.open(pool, store, writer.threads)
        assert self.readers.copier is not None
        self.loads.open(self.readers.copier, token_bytes)

    def _ready(self) -> None:
        logger.info(
            "the disk tier is ready: it keeps %s of %s",
            counted(self.keepers["full"].num_dormant * self.tier.cache.page_size, "token"),
            counted(len(self.spaces), "space"),
        )
        self.wake()
        self.work.end_deletion()

    def wake(self) -> None:
        """Do all of the disk's work soon."""
        self.work.wake()

    # ---------------------------------------------------------------- requests

    @property
    def locks_pool(self) -> bool:
        """Whether pages of the pool are locked, as they are being copied to a buffer."""
        return self.writes.locks_pool

    def cancel_writes(self) -> bool:
        """Cancel the writes that lock pages of the pool; return True if there are none. See `DiskWrites.cancel`."""
        return self.files.writer is None or self.writes.cancel(self.files.writer)

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no page of the pool is locked by a write any more."""
        self.writes.after_writes(resume)

    def _finish_load(self, batch: MoveBatch, copied: Ended) -> tuple[Filled, bool]:
        """End the only move of a batch; return its result, and whether all of it was read."""
        ((move, num_pages, is_whole),) = batch.results(copied)
        finished = self.loads.moves.complete(move, num_pages, is_whole)
        num_failed = self.readers.num_failed
        if self.readers.end(move, copied, self.tier.cache):
            self.loads.stall()
        if self.readers.num_failed > num_failed:
            self.work.last_error = self.readers.last_error
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

    def retired(self, is_meant: Callable[[str | None], bool]) -> None:
        """Delete the spaces of namespaces, which the disk's cache is about to retire: see `deletions.future`."""
        self.writes.forget(is_meant)
        self.deletions.retire(partial(_is_meant_or_damaged, is_meant), self.spaces.retire)
        self.bindings.settle()

    def _end_deletion(self, numbers: Sequence[int]) -> None:
        """Give the records of deleted spaces back soon: after all rows have been read."""
        self.work.records.deleted += numbers
        self.work.end_deletion()

    # ---------------------------------------------------------------- the end

    async def flush(self, timeout_s: float) -> bool:
        """Write all that is due, without a limit of the rate; return whether it was done within the time."""
        if self.files.state != READY or self.files.writer is None:
            return self.writes.is_idle
        self.files.writer.end_limit()
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
        if self.files.is_closed:
            return True
        self.deletions.close(self.files.writer)
        self.files.is_closed = True
        self.opening.close()
        self.work.close()
        has_ended = self.loads.close(timeout_s)
        self.readers.close(timeout_s if has_ended else 0.0)
        return self.files.close(timeout_s) and has_ended

    # ---------------------------------------------------------------- checks

    def check_invariants(self) -> None:
        """Raise AssertionError if a rule of the records is broken. `check_all` checks the moves. O(n)."""
        for keeper in self.keepers.values():
            keeper.check_invariants()
        self.work.leaving.check_invariants()
        self.bindings.check_invariants()


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


def _is_meant_or_damaged(is_meant: Callable[[str | None], bool], namespace: str | None) -> bool:
    """Return whether a space is to be deleted: its namespace is meant; or is none, as the index may be damaged."""
    try:
        return is_meant(namespace)
    except ValueError:
        return True
