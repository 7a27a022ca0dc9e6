"""`TierManager`: the moves between a cache's pool and the tier in host memory below it, on the cache's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto
from functools import partial

from raydix.actors.tiers.copier import Copied, Copier, Copy
from raydix.actors.tiers.host_memory import READY, HostMemory
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.actors.transport.pool_shapes import layout_below
from raydix.actors.transport.validation import unknown_tier
from raydix.cache_core import KVPool, RadixKey, RecordPool
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import Finished, Moves, Plan
from raydix.cache_core.tiers.page_records import CopyPlan, PageCopies
from raydix.cache_core.tiers.tier import Tier
from raydix.schemas import CacheConfig

_MOST_BATCHES = 2  # batches of writes in flight: one is copied while the next is planned
_PREFETCH_SHARE = 0.25  # share of the pool that prefetches in flight may take


_NOT_HELD = nullcontext()


class Progress(Enum):
    """The state of the writes ahead of need."""

    AHEAD = auto()  # nothing is to be written until the pool changes
    WORKING = auto()  # writes are in flight; their end calls `on_change`
    MORE = auto()  # a part of the pool was not looked at yet


class TierManager:
    """The moves of one cache: writes of the KV that the pool will evict soon, and loads of prefixes for leases.

    A cache without tensors has no copier: a move ends in the call that begins it, and a node is written just before it
    is evicted.

    Attributes:
        moves: the moves between the two tiers.
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
        self._loads: dict[Move, Copy] = {}
        self._owners: dict[Move, Callable[[Finished], object]] = {}
        self._waiting: dict[Move, list[Callable[[bool], object]]] = {}
        self._after_writes: list[Callable[[], object]] = []
        self._has_written = False  # whether a write has begun since the last look at the whole pool
        self._load_bytes_per_s: float | None = None
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
        self._token_bytes = 0
        self.is_instant = pool is None or not config.pool.has_tensors
        if self.is_instant:
            upper.watch_victims(moves.write_before_eviction)
            return
        upper.watch_victims(moves.count_dropped)
        layout = layout_below(config, config.host_sizes)
        self._token_bytes = layout.slot_bytes + layout.swa_slot_bytes
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
        self._loop = asyncio.get_running_loop()

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
        return True

    def make_copier(self, copies: PageCopies) -> Copier:
        """Return a copier, which the manager closes."""
        return Copier(copies, write_mib_s=self.config.write_mib_s)

    def tier(self, name: str) -> Tier:
        """Return the tier of that name.

        Raises:
            InvalidRequest: there is no such tier.
        """
        tiers = {tier.name: tier for tier in (self.moves.upper, self.moves.lower)}
        if name not in tiers:
            raise unknown_tier(name, tiers)
        return tiers[name]

    def longest_prefix(self, key: RadixKey) -> int:
        """Return the length of the prefix that the tier has of a request's key. Nothing changes."""
        return self.moves.lower.longest_prefix(key)

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

    def _end_write(self, batch: MoveBatch, copied: Copied) -> None:
        if batch in self._writes:  # `cancel_writes` and `stop_copies` end writes before they are reported
            self._finish_write(batch, copied)
        self._on_change()

    def _finish_write(self, batch: MoveBatch, copied: Copied) -> None:
        del self._writes[batch]
        if copied.end == "failed":
            self._has_written = False  # a failed write is not tried again before the pool changes
        self._finish(batch, copied)
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

    # ---------------------------------------------------------------- loads

    def holding(self, key: RadixKey, limit: int | None) -> AbstractContextManager[None]:
        """Lock the tier's prefix of a key while a lease is opened, as `Moves.holding` says."""
        return self.moves.holding(key, limit) if self.is_instant else _NOT_HELD

    def has_more(self, key: RadixKey) -> bool:
        """Return whether the tier has a longer prefix of a request's key than the pool."""
        return self.longest_prefix(key) > self.moves.upper.longest_prefix(key)

    def check_room(self, key: RadixKey) -> None:
        """Raise OutOfSlotsError if a lease that only locks would find no room for its load."""
        upper = self.moves.upper
        missing = self.longest_prefix(key) - upper.longest_prefix(key)
        upper.cache.pools.check_pages(missing // upper.cache.page_size, upper.cache.tenants.of(key.extra_key))

    def load(self, lease: LeaseRecord, limit: int | None, timeout_s: float) -> Move | None:
        """Begin to load the part of a new lease's prompt that the tier has and the pool lacks.

        Args:
            limit: the lease reuses at most so many tokens.
            timeout_s: the load ends after this time, with the pages that were copied.

        Returns:
            The move in flight, for `when_loaded`; None: there is nothing to load, or it was loaded in this call.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; nothing has changed.
        """
        if not self._is_ready():
            return None
        wanted = len(lease.key) if limit is None else min(limit, len(lease.key))
        in_time = wanted if self._load_bytes_per_s is None else self._in_time(lease.prefix_len, timeout_s)
        move = self.moves.plan_load(lease, min(wanted, in_time))
        if move is not None:
            return move if self._begin_load(move, timeout_s) else None
        if in_time < wanted and not self._loads:
            self._load_bytes_per_s = None  # A rate that allows no load would never be measured again.
        return None

    def when_loaded(self, move: Move, on_end: Callable[[Finished], object]) -> None:
        """Call `on_end` on the loop when the load of a lease has ended."""
        self._owners[move] = on_end

    def _in_time(self, prefix_len: int, timeout_s: float) -> int:
        """Return how long a prefix may be so that its load ends in time, at the rate of recent loads."""
        assert self._load_bytes_per_s is not None and self.copier is not None
        queued = self.copier.queued_bytes(loads=True) if self._loads else 0
        num_bytes = max(0.0, timeout_s * self._load_bytes_per_s - queued)
        page = self.moves.upper.cache.page_size
        return prefix_len + int(num_bytes / max(1, self._token_bytes)) // page * page

    def _begin_load(self, move: Move, timeout_s: float | None) -> bool:
        """Begin to copy a load; return False if it has ended already."""
        if self.copier is None:
            self.moves.finish(move, move.num_pages)
            return False
        batch = MoveBatch((move,))
        self._loads[move] = self.copier.load(batch.plan, partial(self._end_load, batch), timeout_s)
        return True

    def _end_load(self, batch: MoveBatch, copied: Copied) -> None:
        (move,) = batch.moves
        if self._loads.pop(move, None) is None:  # `stop_copies` has ended it
            return
        assert self.copier is not None
        self._load_bytes_per_s = self.copier.counts(loads=True).bytes_per_s
        ((finished, is_whole),) = self._finish(batch, copied)
        if (owner := self._owners.pop(move, None)) is not None:
            owner(finished)
        for resume in self._waiting.pop(move, ()):
            resume(is_whole)
        self._on_change()

    def running_load(self, key: RadixKey, limit: int | None) -> Move | None:
        """Return the load in flight that brings the next page of a request's key; None if there is none."""
        return self.moves.running_load(key, limit) if self._loads else None

    def wait_for(self, move: Move, resume: Callable[[bool], object]) -> None:
        """Call `resume(is_whole)` when a load has ended. Callbacks run in the order of their registration."""
        self._waiting.setdefault(move, []).append(resume)

    def prefetch(self, key: RadixKey) -> int:
        """Begin to load the prefix of a key for no lease; return the number of tokens to load.

        0: nothing to load, no room, or requests wait for room.
        """
        if not self._is_ready() or not self._may_begin():
            return 0
        cache = self.moves.upper.cache
        in_flight = sum(move.num_tokens for move in self._loads if move not in self._owners)
        room = max(0, int(_PREFETCH_SHARE * cache.num_slots) - in_flight)
        move = self.moves.plan_prefetch(key, self.moves.upper.longest_prefix(key) + room)
        if move is None:
            return 0
        self._begin_load(move, None)
        return move.num_tokens

    # ---------------------------------------------------------------- the end

    def _finish(self, batch: MoveBatch, copied: Copied) -> list[tuple[Finished, bool]]:
        """End the moves of a batch; return the result of each, and whether all of it was copied."""
        self._verify(batch, copied)
        return [
            (self.moves.finish(move, num_pages, is_whole), is_whole)
            for move, num_pages, is_whole in batch.results(copied)
        ]

    def stop_copies(self) -> None:
        """End all moves, without callbacks. Blocks for one chunk at most.

        Leases that were being filled end, so no request may wait for them any more.
        """
        self._after_writes.clear()
        self._waiting.clear()
        self._owners.clear()
        if self.copier is None:
            return
        upper = self.moves.upper.cache
        for move in self._loads:
            if session_id := move.target.filling_for:
                upper.release(move.target.lease_id, session_id)
        self.copier.stop_all()
        for move, copy in self._loads.items():
            assert copy.result is not None
            self._finish(MoveBatch((move,)), copy.result)
        self._loads.clear()
        for batch, copy in list(self._writes.items()):
            assert copy.result is not None
            self._finish_write(batch, copy.result)

    def close(self) -> None:
        """End all moves, and give the tier's memory back. The pool may be freed afterwards."""
        if self._is_closed:
            return
        self.stop_copies()
        self._is_closed = True
        if self.copier is not None:
            self.copier.close()
        self._copies = self._pool = self.copier = None  # These have the memory.
        if self._memory is not None:
            self._memory.close()

    # ---------------------------------------------------------------- checks

    def _verify(self, batch: MoveBatch, copied: Copied) -> None:
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
