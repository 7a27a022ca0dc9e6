"""`DiskLoads`: the loads of prefixes from a disk tier to the leases of the first tier, on the cache's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from raydix.actors.tiers.copier import Copied, Copier, Copy
from raydix.actors.tiers.disk_copies import DiskCopies
from raydix.actors.tiers.disk_store import DiskStore
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.cache_core import KVPool, RadixKey, RecordPool
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.move import Move
from raydix.cache_core.tiers.moves import Finished, Moves
from raydix.cache_core.tiers.page_records import Kind

logger = logging.getLogger(__name__)

STALL_S = 30.0  # for which nothing is loaded after a chunk that did not come back
GRACE_S = 0.25  # for which the last chunk of a late load is waited for
_NUM_READERS = 2
_PREFETCH_SHARE = 0.25  # share of the pool that prefetches in flight may take


@dataclass(slots=True, eq=False)
class _Load:
    """A load in flight."""

    copier: Copier
    copy: Copy
    timer: asyncio.TimerHandle | None = None


class DiskLoads:
    """The loads of a disk tier. A cache without tensors loads in the call that asks.

    A load that is late ends behind its chunk, with the pages that were read. If that chunk does not come back either,
    the disk is stalled: the request begins again, and nothing is loaded for 30 s.

    Args:
        moves: between the first tier and the disk.
        on_end: called on the loop when a load has ended.
        clock: seconds.

    Attributes:
        num_late: loads that took too long.
        num_stalls: loads of which a chunk did not come back in time.
        num_damaged: records that had not the sum of their page.
    """

    def __init__(self, moves: Moves, on_end: Callable[[], object], clock: Callable[[], float] = monotonic) -> None:
        self.num_late = self.num_stalls = self.num_damaged = 0
        self._moves = moves
        self._on_end = on_end
        self._clock = clock
        self._copiers: list[Copier] = []
        self._copies: list[DiskCopies] = []
        self._store: DiskStore | None = None
        self._token_bytes = 0.0
        self._is_instant = False
        self._is_open = False
        self._stalled_until = float("-inf")
        self._loads: dict[Move, _Load] = {}
        self._owners: dict[Move, Callable[[Finished], object]] = {}
        self._waiting: dict[Move, list[Callable[[bool], object]]] = {}
        self._damaged: set[tuple[Kind, int]] = set()

    def open(self, pool: KVPool | RecordPool, store: DiskStore) -> None:
        """Let loads begin."""
        self._store, self._is_open = store, True
        self._copies = [DiskCopies(pool, store) for _ in range(_NUM_READERS)]
        self._copiers = [self.make_copier(copies) for copies in self._copies]
        page = pool.layout.page_size
        self._token_bytes = sum(file.stride for kind, file in store.files.items() if kind != "state") / page

    def make_copier(self, copies: DiskCopies) -> Copier:
        """Return a copier, which is closed with the loads."""
        return Copier(copies, clock=self._clock)

    def open_instant(self) -> None:
        """Let loads begin, which end in the call that begins them: there are no tensors."""
        self._is_instant = self._is_open = True

    @property
    def is_stalled(self) -> bool:
        """Whether nothing is loaded, as a chunk did not come back."""
        return self._clock() < self._stalled_until

    @property
    def is_ready(self) -> bool:
        """Whether loads may begin."""
        return self._is_open and not self.is_stalled

    @property
    def num_bytes(self) -> int:
        """The bytes that were loaded."""
        return sum(copier.counts(loads=True).num_bytes for copier in self._copiers)

    @property
    def seconds(self) -> float:
        """The time that the loads took."""
        return sum(copier.counts(loads=True).seconds for copier in self._copiers)

    @property
    def queued_bytes(self) -> int:
        """The bytes that are still to be loaded."""
        return sum(copier.queued_bytes(loads=True) for copier in self._copiers)

    # ---------------------------------------------------------------- loads

    def load(self, lease: LeaseRecord, limit: int | None, timeout_s: float) -> Move | None:
        """Begin to load the part of a new lease's prompt that the disk has and the lease lacks.

        Args:
            limit: the lease reuses at most so many tokens.
            timeout_s: the load ends after this time, with the pages that were read.

        Returns:
            The move in flight, for `when_loaded`; None: there is nothing to load, or it was loaded in this call.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; nothing has changed.
        """
        if not self.is_ready:
            return None
        wanted = len(lease.key) if limit is None else min(limit, len(lease.key))
        in_time = self._in_time(lease.prefix_len, timeout_s)
        move = self._moves.plan_load(lease, wanted if in_time is None else min(wanted, in_time))
        return move if move is not None and self._begin(move, timeout_s) else None

    def _in_time(self, prefix_len: int, timeout_s: float) -> int | None:
        """Return how long a prefix may be so that its load ends in time, at the rate of recent loads; None: any.

        A rate that allows no page is not believed while nothing is loaded: it would never be measured again.
        """
        rates = [copier.counts(loads=True).bytes_per_s for copier in self._copiers]
        known = [rate for rate in rates if rate is not None]
        if not known:
            return None
        queued = self._quietest().queued_bytes(loads=True)
        page = self._moves.upper.cache.page_size
        num_tokens = int(max(0.0, timeout_s * min(known) - queued) / max(1.0, self._token_bytes)) // page * page
        return prefix_len + num_tokens if num_tokens or self._loads else None

    def _quietest(self) -> Copier:
        return min(self._copiers, key=lambda copier: copier.queued_bytes(loads=True))

    def _begin(self, move: Move, timeout_s: float | None) -> bool:
        """Begin to copy a load; return False if it has ended already."""
        if self._is_instant:
            self._moves.finish(move, move.num_pages)
            return False
        copier, batch = self._quietest(), MoveBatch((move,))
        load = self._loads[move] = _Load(copier, copier.load(batch.plan, partial(self._end, batch)))
        if timeout_s is not None:
            load.timer = asyncio.get_running_loop().call_later(timeout_s, self._end_late, move)
        return True

    def when_loaded(self, move: Move, on_end: Callable[[Finished], object]) -> None:
        """Call `on_end` on the loop when the load of a lease has ended."""
        self._owners[move] = on_end

    def running_load(self, key: RadixKey, limit: int | None) -> Move | None:
        """Return the load in flight that brings the next page of a request's key; None if there is none."""
        return self._moves.running_load(key, limit) if self._loads else None

    def wait_for(self, move: Move, resume: Callable[[bool], object]) -> None:
        """Call `resume(is_whole)` when a load has ended. Callbacks run in the order of their registration."""
        self._waiting.setdefault(move, []).append(resume)

    def prefetch(self, key: RadixKey) -> int:
        """Begin to load the prefix of a key for no lease; return the number of tokens to load; 0: none, or no room."""
        if not self.is_ready:
            return 0
        cache = self._moves.upper.cache
        in_flight = sum(move.num_tokens for move in self._loads if move not in self._owners)
        room = max(0, int(_PREFETCH_SHARE * cache.num_slots) - in_flight)
        move = self._moves.plan_prefetch(key, self._moves.upper.longest_prefix(key) + room)
        if move is None:
            return 0
        num_tokens = move.num_tokens
        self._begin(move, None)
        return num_tokens

    # ---------------------------------------------------------------- ends

    def _end(self, batch: MoveBatch, copied: Copied) -> None:
        (move,) = batch.moves
        load = self._loads.pop(move, None)
        if load is None:  # `stop` has ended it
            return
        if load.timer is not None:
            load.timer.cancel()
        ((_, num_pages, is_whole),) = batch.results(copied)
        finished = self._moves.finish(move, num_pages, is_whole)
        self._drop_damaged(move)
        self._answer(move, finished, is_whole)
        self._on_end()

    def _answer(self, move: Move, finished: Finished, is_whole: bool) -> None:
        """Call back the owner of a load, then the requests that wait for it."""
        if (owner := self._owners.pop(move, None)) is not None:
            owner(finished)
        for resume in self._waiting.pop(move, ()):
            resume(is_whole)

    def _end_late(self, move: Move) -> None:
        """End a load that takes too long, behind its chunk."""
        load = self._loads[move]
        self.num_late += 1
        load.copier.cancel(load.copy)
        if load.copy.result is None:
            load.timer = asyncio.get_running_loop().call_later(GRACE_S, self._give_up, move)

    def _give_up(self, move: Move) -> None:
        """Let the request of a load begin again, as a chunk does not come back."""
        if self._loads[move].copy.result is not None:  # its end is on its way
            return
        self.num_stalls += 1
        if not self.is_stalled:
            logger.warning("the disk does not answer: nothing is loaded from it for %.0f s", STALL_S)
        self._stalled_until = self._clock() + STALL_S
        is_wanted = bool(move.target.filling_for)
        self._moves.give_up(move)
        self._answer(move, Finished(0, None, is_wanted), False)

    def _drop_damaged(self, move: Move) -> None:
        """Drop the pages of a load that were damaged, and all pages below them."""
        assert self._store is not None
        found = self._store.take_damaged()
        self.num_damaged += len(found)
        self._damaged.update(found)
        if not self._damaged:
            return
        lower, page = self._moves.lower.cache, self._moves.lower.cache.page_size
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
        num_tokens = lower.drop_page(move.key, first_token)
        logger.warning("a load met damaged records; %d tokens are dropped from the disk", num_tokens)

    # ---------------------------------------------------------------- the end

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all loads, without callbacks. It blocks for one chunk at most.

        Args:
            timeout_s: for which it waits for that chunk; None: without a limit.

        Returns:
            Whether all have ended. The leases of the others stay open.
        """
        self._waiting.clear()
        self._owners.clear()
        upper = self._moves.upper.cache
        for move, load in self._loads.items():
            if load.timer is not None:
                load.timer.cancel()
            if session_id := move.target.filling_for:
                upper.release(move.target.lease_id, session_id)
        for copier in self._copiers:
            copier.stop_all(timeout_s)
        for move, load in list(self._loads.items()):
            if load.copy.result is None:
                continue
            batch = MoveBatch((move,))
            ((_, num_pages, is_whole),) = batch.results(load.copy.result)
            self._moves.finish(move, num_pages, is_whole)
            self._drop_damaged(move)
            del self._loads[move]
        return not self._loads

    def close(self, timeout_s: float | None = None) -> bool:
        """End all loads, and let none begin. Return whether all have ended: the pool may be freed then."""
        self._is_open = False
        has_ended = self.stop(timeout_s)
        for copies in self._copies:
            copies.close()
        for copier in self._copiers:
            copier.close(timeout_s if has_ended else 0.0)
        return has_ended
