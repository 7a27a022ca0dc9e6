"""`HostTier`: the tier in host memory below a cache's pool, on the cache's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from raydix.actors.memory.pool_shapes import layout_below
from raydix.actors.tiers.copier import Copier, Copy
from raydix.actors.tiers.host.host_memory import RESERVING, HostMemory
from raydix.actors.tiers.job_threads import Ended, JobThreads
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.cache_core import KVCache, KVPool, RecordPool
from raydix.cache_core.tiers.loads import Filled, Loads
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies
from raydix.cache_core.tiers.tier import Tier
from raydix.cache_core.tiers.writes import Plan, Writes
from raydix.schemas import CacheConfig

_MOST_BATCHES = 2  # batches of writes in flight: one is copied while the next is planned


class Progress(Enum):
    """The state of the writes ahead of need."""

    AHEAD = auto()  # nothing is to be written until the pool changes
    WORKING = auto()  # writes are in flight; their end calls `on_change`
    MORE = auto()  # a part of the pool was not looked at yet


class HostTier:
    """The host tier of one cache: it gets the KV that the pool will evict soon, and prefixes are loaded from it.

    Attributes:
        tier: the tier.
        writes: from the pool to the tier, without copies; `all_writes` has them alone.
        loads: from the tier to the pool.
        memory: of the tier.

    Args:
        config: the cache's configuration; it has `host`.
        device: the pool.
        cache: of the tier, empty; as `build_host_cache` returns it.
        pool: the tensors of the device.
        name: name of the tier's memory, such as the cache's epoch.
        on_change, on_load: called on the loop when writes have ended or the tier's memory is ready, or when a load has
            ended: slots may have become free.
        may_begin: returns whether writes and prefetches may begin, as no request needs the slots.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: Tier,
        cache: KVCache,
        pool: KVPool | RecordPool,
        name: str,
        on_change: Callable[[], object],
        on_load: Callable[[], object],
        may_begin: Callable[[], bool],
    ) -> None:
        assert config.host is not None, "the configuration has no host tier"
        self.config = config.host
        self.tier = Tier("host", "CPU", cache)
        layout = layout_below(config, config.host_sizes)
        page_bytes = config.page_size * (layout.slot_bytes + layout.swa_slot_bytes)
        self.writes = writes = Writes(device, self.tier, page_bytes)
        self.all_writes = (writes,)
        self._pool: KVPool | RecordPool | None = pool
        self._on_change = on_change
        self._no_request_needs_slots = may_begin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._batches: dict[MoveBatch, Copy] = {}
        self._after_writes: list[Callable[[], object]] = []
        self._has_written = False  # whether a write has begun since the last look at the whole pool
        self._verifies = config.validate and pool.storage.device.type == "cpu"
        self._difference: str | None = None  # first difference between a copy and its source
        # The background task evicts down to the low watermark, so at least this share is written first.
        share, upper = max(self.config.reserve, 1 - config.eviction.low_watermark), device.cache
        swa, states = upper.allocator.swa, upper.pools.states
        self._reserves: list[tuple[Callable[[int], Plan], int]] = [
            (writes.prepare, int(share * upper.num_slots)),
            (writes.prepare_windows, 0 if swa is None else int(share * swa.num_slots)),
            (writes.prepare_states, 0 if states is None else int(share * states.num_slots)),
        ]
        self.copier: Copier | None = None
        self._threads: JobThreads | None = None  # the copier's thread
        self._copies: PageCopies | None = None
        loads = Loads(self.tier, device)
        timeout_s = self.config.load_timeout_s
        self.loads = TierLoads(loads, timeout_s, self._complete_load, on_load, self._is_ready, self._may_begin)
        upper.watch_victims(writes.count_dropped)
        self.memory = HostMemory(layout, name, pin=self.config.pin, on_change=self._memory_changed)

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """The tier's state: "ready", "reserving", "closed", or the reason why it is not there."""
        return "closed" if self._is_closed else self.memory.state

    def start(self) -> None:
        """Report changes of the tier's memory to the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def _memory_changed(self) -> None:
        """Post `on_change` to the loop. Called in a thread."""
        if (loop := self._loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._on_change)

    def _is_ready(self) -> bool:
        """Return whether moves may begin; make the copier once the memory is there."""
        if self._is_closed:
            return False
        if self.copier is not None:
            return True
        assert self._pool is not None
        if (lower := self.memory.pool) is None:
            return False
        self._copies = PageCopies(self._pool, lower)
        self.copier = self.make_copier(self._copies)
        self.loads.open(self.copier, lower.layout.slot_bytes + lower.layout.swa_slot_bytes)
        return True

    def make_copier(self, copies: PageCopies) -> Copier:
        """Return a copier, which the tier closes, with a thread of its own: copies in memory are bound by it."""
        self._threads = JobThreads("raydix-copier", 1)
        return Copier(copies, self._threads, write_mib_s=self.config.write_mib_s)

    def _may_begin(self) -> bool:
        """Return whether writes and prefetches may begin.

        None may begin while a request waits for the end of writes.
        """
        return not self._after_writes and self._no_request_needs_slots()

    # ---------------------------------------------------------------- writes

    @property
    def locks_pool(self) -> bool:
        """Whether writes are in flight: they lock pages of the pool."""
        return bool(self._batches)

    @property
    def needs_threads(self) -> bool:
        """Whether threads are at work: memory is reserved, or writes or loads are in flight."""
        return bool(self._batches) or self.loads.has_any or self.state == RESERVING

    @property
    def has_work(self) -> bool:
        """Whether the tier goes on when the loop runs: threads are at work for it."""
        return self.needs_threads

    def write_ahead(self) -> Progress:
        """Begin to write the KV that the pool would evict next; at most two batches are in flight."""
        if not self._is_ready() or not self._may_begin():
            return Progress.AHEAD
        for plan_writes, reserve in self._reserves:
            if not reserve:
                continue
            if len(self._batches) >= _MOST_BATCHES:
                return Progress.WORKING
            plan = plan_writes(reserve)
            if plan.moves:
                self._has_written = True
                self._write(plan.moves)
            if not plan.is_ahead:
                return Progress.WORKING if self._batches else Progress.MORE
        if self._batches:
            return Progress.WORKING
        # Requests may have used, evicted or cancelled nodes behind the walk. Look at the whole pool once more.
        has_written, self._has_written = self._has_written, False
        return Progress.MORE if has_written else Progress.AHEAD

    def _write(self, moves: Sequence[Move]) -> None:
        assert self.copier is not None
        batch = MoveBatch(moves)
        self._batches[batch] = self.copier.write(batch.plan, partial(self._end_write, batch))

    def _end_write(self, batch: MoveBatch, copied: Ended) -> None:
        if batch in self._batches:  # `cancel_writes` and `stop_copies` end writes before they are reported
            self._finish_write(batch, copied)
        self._on_change()

    def _finish_write(self, batch: MoveBatch, copied: Ended) -> None:
        del self._batches[batch]
        if copied.end == "failed":
            self._has_written = False  # a failed write is not tried again before the pool changes
        self._verify(batch, copied)
        for move, num_pages, is_whole in batch.results(copied):
            self.writes.complete(move, num_pages, is_whole)
        if not self._batches:
            waiting, self._after_writes = self._after_writes, []
            for resume in waiting:
                resume()

    def cancel_writes(self) -> bool:
        """Cancel all writes, because a request lacks slots; return True if all have ended and their pages are unlocked.

        If False, one chunk is still being copied: `after_writes` calls back when it has ended.
        """
        assert self.copier is not None
        for batch, copy in list(self._batches.items()):
            self.copier.cancel(copy)
            if copy.result is not None:
                self._finish_write(batch, copy.result)
        return not self._batches

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no write is in flight any more."""
        self._after_writes.append(resume)

    # ---------------------------------------------------------------- the end

    def _complete_load(self, batch: MoveBatch, copied: Ended) -> tuple[Filled, bool]:
        """End the only move of a batch; return its result, and whether all of it was copied."""
        self._verify(batch, copied)
        ((move, num_pages, is_whole),) = batch.results(copied)
        return self.loads.moves.complete(move, num_pages, is_whole), is_whole

    def stop_copies(self) -> None:
        """End all moves, without callbacks. It blocks for one chunk at most.

        Leases that were being filled end, so no request may wait for them any more.
        """
        self._after_writes.clear()
        self.loads.stop()
        for batch, copy in list(self._batches.items()):
            assert copy.result is not None
            self._finish_write(batch, copy.result)

    def close(self, timeout_s: float | None = None) -> bool:
        """End all moves, and give the tier's memory back; return True: the pool may be freed. One chunk is waited for.

        Args:
            timeout_s: not used, as copies between memories end.
        """
        if self._is_closed:
            return True
        self.stop_copies()
        self._is_closed = True
        self.loads.close()
        if self.copier is not None:
            self.copier.close()
        if self._threads is not None:
            self._threads.close()
        self._copies = self._pool = self.copier = self._threads = None  # These have the memory.
        self.memory.close()
        return True

    # ---------------------------------------------------------------- checks

    def _verify(self, batch: MoveBatch, copied: Ended) -> None:
        """Compare copied pages with their source, if `CacheConfig.validate` is set. O(bytes).

        Later the two may differ: a page that was evicted from the pool is computed again with other roundings.
        """
        if not self._verifies or self._copies is None or self._difference is not None:
            return
        plan, num_pages = batch.plan, copied.num_pages
        confirmed = plan if copied.end == "whole" else CopyPlan(plan.upper[:num_pages], plan.lower[:num_pages])
        if (num_pages or copied.end == "whole") and (page := self._copies.first_difference(confirmed)) is not None:
            key = batch.moves[0].key
            self._difference = f"page {page} of a copy differs between the tiers; its first move is of {key}"

    def check_invariants(self) -> None:
        """Raise AssertionError if a copy differed from its source.

        Copies are compared as they end, and with `CacheConfig.validate` alone. `check_all` checks the moves.
        """
        assert self._difference is None, self._difference
