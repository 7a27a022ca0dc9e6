"""`TierManager`: the tier in host memory below a cache's pool, on the cache's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial

from raydix.actors.tiers.copier import Copier, Copy
from raydix.actors.tiers.due_writes import DueWrites
from raydix.actors.tiers.host_memory import READY, RESERVING, HostMemory
from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.actors.tiers.tier_loads import TierLoads
from raydix.actors.transport.pool_shapes import layout_below
from raydix.cache_core import KVPool, RecordPool
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import Finished, Moves, Plan
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies
from raydix.schemas import CacheConfig

_MOST_BATCHES = 2  # batches of writes in flight: one is copied while the next is planned


class Progress(Enum):
    """The state of the writes ahead of need."""

    AHEAD = auto()  # nothing is to be written until the pool changes
    WORKING = auto()  # writes are in flight; their end calls `on_change`
    MORE = auto()  # a part of the pool was not looked at yet


class TierManager:
    """The moves of one cache: writes of the KV that the pool will evict soon, and loads of prefixes for leases.

    A cache without tensors has no copier: a move ends in the call that begins it, and a node is written just before it
    is evicted. A tier that takes pages at their second use alone gets those that are due, and eviction writes nothing.

    Attributes:
        moves: the moves between the two tiers.
        loads: from the tier to the pool.
        may_begin: returns whether writes and prefetches may begin, as no request needs the slots.

    Args:
        config: the cache's configuration; it has `host`.
        moves: the moves between the pool and the tier.
        pool: the tensors; None: there are none.
        name: name of the tier's memory, such as the cache's epoch.
        on_change: called on the loop when moves have ended, or the tier's memory is ready: slots may have become free.
    """

    def __init__(
        self,
        config: CacheConfig,
        moves: Moves,
        pool: KVPool | RecordPool | None,
        name: str,
        on_change: Callable[[], object],
    ) -> None:
        assert config.host is not None, "the configuration has no host tier"
        self.config = config.host
        self.moves = moves
        self.may_begin: Callable[[], bool] = lambda: True
        self._pool = pool
        self._on_change = on_change
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._writes: dict[MoveBatch, Copy] = {}
        self._after_writes: list[Callable[[], object]] = []
        self._has_written = False  # whether a write has begun since the last look at the whole pool
        self._verifies = config.validate and pool is not None and pool.storage.device.type == "cpu"
        self._difference: str | None = None  # first difference between a copy and its source
        # The background task evicts down to the low watermark, so at least this share is written first.
        share, upper = max(self.config.reserve, 1 - config.eviction.low_watermark), moves.upper.cache
        swa, states = upper.allocator.swa, upper.pools.states
        self._reserves: list[tuple[Callable[[int], Plan], int]] = [
            (moves.plan_demotion, int(share * upper.num_slots)),
            (moves.plan_windows, 0 if swa is None else int(share * swa.num_slots)),
            (moves.plan_states, 0 if states is None else int(share * states.num_slots)),
        ]
        self.copier: Copier | None = None
        self._copies: PageCopies | None = None
        self._memory: HostMemory | None = None
        self.is_instant = pool is None or not config.pool.has_tensors
        self._due: DueWrites | None = None
        self._is_woken = False  # whether `on_change` is posted to the loop
        if self.config.admit == "second_use":
            self._due = DueWrites(moves, self._wake, is_instant=self.is_instant)
            self._reserves = [(self._due.plan, upper.num_slots)]
        timeout_s = self.config.load_timeout_s
        self.loads = TierLoads(moves, timeout_s, self._finish_load, on_change, self._is_ready, self._may_begin)
        if self.is_instant:
            self.loads.open_instant()
            if self._due is None:
                upper.watch_victims(moves.write_before_eviction)
            return
        if self._due is None:
            upper.watch_victims(moves.count_dropped)
        layout = layout_below(config, config.host_sizes)
        self._memory = HostMemory(layout, name, pin=self.config.pin, on_change=self._memory_changed)

    # ---------------------------------------------------------------- state

    @property
    def state(self) -> str:
        """The tier's state: "ready", "reserving", "closed", or the reason why it is not there."""
        if self._is_closed:
            return "closed"
        return READY if self._memory is None else self._memory.state

    @property
    def pinned(self) -> bool:
        """Whether the tier's memory is registered with CUDA."""
        return self._memory is not None and self._memory.pinned

    @property
    def lower_pool(self) -> RecordPool | None:
        """The tensors of the tier; None: they are not ready, or there are none."""
        return None if self._memory is None else self._memory.pool

    def start(self) -> None:
        """Report changes of the tier's memory to the running loop from now on."""
        if (loop := asyncio.get_running_loop()) is not self._loop:
            self._loop, self._is_woken = loop, False

    def _wake(self) -> None:
        """Post `on_change` to the loop, as a prefix is to be written."""
        if self._loop is not None and not self._loop.is_closed() and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._end_wake)

    def _end_wake(self) -> None:
        self._is_woken = False
        self._on_change()

    def _memory_changed(self) -> None:
        """Post `on_change` to the loop. Called in a thread."""
        if (loop := self._loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._on_change)

    def _is_ready(self) -> bool:
        """Return whether moves may begin; make the copier once the memory is there."""
        if self._is_closed:
            return False
        if self.is_instant or self.copier is not None:
            return True
        assert self._memory is not None and self._pool is not None
        if (lower := self._memory.pool) is None:
            return False
        self._copies = PageCopies(self._pool, lower)
        self.copier = self.make_copier(self._copies)
        self.loads.open(self.copier, lower.layout.slot_bytes + lower.layout.swa_slot_bytes)
        return True

    def make_copier(self, copies: PageCopies) -> Copier:
        """Return a copier, which the manager closes."""
        return Copier(copies, write_mib_s=self.config.write_mib_s)

    def _may_begin(self) -> bool:
        """Return whether writes and prefetches may begin.

        None may begin while a request waits for the end of writes.
        """
        return not self._after_writes and self.may_begin()

    # ---------------------------------------------------------------- writes

    @property
    def has_writes(self) -> bool:
        """Whether writes are in flight: they lock pages of the pool."""
        return bool(self._writes)

    @property
    def needs_threads(self) -> bool:
        """Whether threads are at work: memory is reserved, or writes or loads are in flight."""
        return bool(self._writes) or self.loads.has_any or self.state == RESERVING

    def write_ahead(self) -> Progress:
        """Begin to write the KV that the pool would evict next; at most two batches are in flight."""
        if self.is_instant or not self._is_ready() or not self._may_begin():
            return Progress.AHEAD
        for plan_writes, reserve in self._reserves:
            if not reserve:
                continue
            if len(self._writes) >= _MOST_BATCHES:
                return Progress.WORKING
            plan = plan_writes(reserve)
            if plan.moves:
                self._has_written = True
                self._write(plan.moves)
            if not plan.is_ahead:
                return Progress.WORKING if self._writes else Progress.MORE
        if self._writes:
            return Progress.WORKING
        # Requests may have used, evicted or cancelled nodes behind the walk. Look at the whole pool once more.
        has_written, self._has_written = self._has_written, False
        return Progress.MORE if has_written else Progress.AHEAD

    def _write(self, moves: Sequence[Move]) -> None:
        assert self.copier is not None
        batch = MoveBatch(moves)
        self._writes[batch] = self.copier.write(batch.plan, partial(self._end_write, batch))

    def _end_write(self, batch: MoveBatch, copied: Ended) -> None:
        if batch in self._writes:  # `cancel_writes` and `stop_copies` end writes before they are reported
            self._finish_write(batch, copied)
        self._on_change()

    def _finish_write(self, batch: MoveBatch, copied: Ended) -> None:
        del self._writes[batch]
        if copied.end == "failed":
            self._has_written = False  # a failed write is not tried again before the pool changes
        self._finish(batch, copied)
        if self._due is not None:
            self._due.end_writes(has_failed=copied.end == "failed")
        if not self._writes:
            waiting, self._after_writes = self._after_writes, []
            for resume in waiting:
                resume()

    def cancel_writes(self) -> bool:
        """Cancel all writes, because a request lacks slots; return True if all have ended and their pages are unlocked.

        If False, one chunk is still being copied: `after_writes` calls back when it has ended.
        """
        assert self.copier is not None
        for batch, copy in list(self._writes.items()):
            self.copier.cancel(copy)
            if copy.result is not None:
                self._finish_write(batch, copy.result)
        return not self._writes

    def after_writes(self, resume: Callable[[], object]) -> None:
        """Call `resume` once, when no write is in flight any more."""
        self._after_writes.append(resume)

    # ---------------------------------------------------------------- the end

    def _finish(self, batch: MoveBatch, copied: Ended) -> list[tuple[Finished, bool]]:
        """End the moves of a batch; return the result of each, and whether all of it was copied."""
        self._verify(batch, copied)
        return [
            (self.moves.finish(move, num_pages, is_whole), is_whole)
            for move, num_pages, is_whole in batch.results(copied)
        ]

    def _finish_load(self, batch: MoveBatch, copied: Ended) -> tuple[Finished, bool]:
        """End the only move of a batch; return its result, and whether all of it was copied."""
        ((finished, is_whole),) = self._finish(batch, copied)
        return finished, is_whole

    def stop_copies(self) -> None:
        """End all moves, without callbacks. It blocks for one chunk at most.

        Leases that were being filled end, so no request may wait for them any more.
        """
        self._after_writes.clear()
        self.loads.stop()
        for batch, copy in list(self._writes.items()):
            assert copy.result is not None
            self._finish_write(batch, copy.result)

    def close(self) -> None:
        """End all moves, and give the tier's memory back. The pool may be freed afterwards."""
        if self._is_closed:
            return
        self.stop_copies()
        self._is_closed = True
        self.loads.close()
        if self.copier is not None:
            self.copier.close()
        self._copies = self._pool = self.copier = None  # These have the memory.
        if self._memory is not None:
            self._memory.close()

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
        """Raise AssertionError if a rule of either tier or of a move is broken, or a copy differs from its source.

        O(n). Copies are compared as they end, and with `CacheConfig.validate` alone.
        """
        self.moves.check_invariants()
        self.check_copies()

    def check_copies(self) -> None:
        """Raise AssertionError if a copy differed from its source."""
        assert self._difference is None, self._difference
