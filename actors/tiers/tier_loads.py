"""`TierLoads`: the loads of prefixes from one tier to the pool, on the cache's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from raydix.actors.tiers.copier import Copier, Copy
from raydix.actors.tiers.job_threads import Ended
from raydix.actors.tiers.move_batch import MoveBatch
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tiers.loads import Filled, Loads
from raydix.cache_core.tiers.look_up import LookUp
from raydix.cache_core.tiers.move import Move

logger = logging.getLogger(__name__)

STALL_S = 30.0  # pause of loads after a chunk that did not come back
GRACE_S = 0.25  # grace for the last chunk of a late load
_PREFETCH_SHARE = 0.25  # share of the pool that prefetches in flight may take

# Ends the only move of a batch; returns its result, and whether all of it was copied.
Finish = Callable[[MoveBatch, Ended], tuple[Filled, bool]]


@dataclass(slots=True, eq=False)
class _Load:
    """A load in flight."""

    copy: Copy
    timer: asyncio.TimerHandle | None = None
    is_given_up: bool = False  # no request waits for it any more, as its chunk does not come back


class TierLoads:
    """The loads from one tier to the pool.

    A load that is late ends behind its chunk, with the pages that were copied. A tier that may stall does not wait
    for that chunk longer than 0.25 s, and for a chunk of a prefetch no longer than the tier's time limit: then nothing
    is loaded from it for 30 s, all its loads end, and the requests of those that cannot end begin again.

    Prefetches give way to loads that requests wait for.

    Args:
        moves: the loads from the tier, without copies.
        timeout_s: time limit of a load of which the request has none, and of each chunk of a prefetch; 0: nothing is
            loaded for them.
        finish: ends a move that was copied.
        on_end: called on the loop when a load has ended.
        is_ready: returns whether loads may begin; it opens them if the tier has become ready.
        may_prefetch: returns whether prefetches may begin, as no request needs the slots.
        may_stall: whether the device below may stop to answer.
        clock: seconds.

    Attributes:
        num_late: loads that took too long.
        num_stalls: how often the tier was stalled.
    """

    def __init__(
        self,
        moves: Loads,
        timeout_s: float,
        finish: Finish,
        on_end: Callable[[], object],
        is_ready: Callable[[], bool],
        may_prefetch: Callable[[], bool],
        *,
        may_stall: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.num_late = self.num_stalls = 0
        self.timeout_s = timeout_s
        self.moves = moves
        self._finish = finish
        self._on_end = on_end
        self._is_ready = is_ready
        self._may_prefetch = may_prefetch
        self._may_stall = may_stall
        self._clock = clock
        self._copier: Copier | None = None
        self._rate: float | None = None  # bytes a second of recent loads
        self._token_bytes = 0.0
        self._stalled_until = float("-inf")
        self._loads: dict[Move, _Load] = {}
        self._owners: dict[Move, Callable[[Filled], object]] = {}
        self._waiting: dict[Move, list[Callable[[bool], object]]] = {}

    def open(self, copier: Copier, token_bytes: float) -> None:
        """Load with this copier from now on.

        Args:
            copier: its owner closes it.
            token_bytes: that are read for a token.
        """
        self._copier, self._token_bytes = copier, max(1.0, token_bytes)

    @property
    def is_stalled(self) -> bool:
        """Whether nothing is loaded, as a chunk did not come back."""
        return self._clock() < self._stalled_until

    # ---------------------------------------------------------------- loads

    def load(self, lease: LeaseRecord, look_up: LookUp, timeout_s: float | None) -> Move | None:
        """Begin to load the part of a new lease's prompt that the tier has and the lease lacks.

        Args:
            look_up: of the lease's key, in this step.
            timeout_s: the load ends after this time, with the pages that were copied; 0: nothing is loaded; None: the
                tier's own.

        Returns:
            The move in flight, for `when_loaded`; None: there is nothing to load.

        Raises:
            OutOfSlotsError: a lease that only locks finds no room; nothing has changed.
        """
        if timeout_s is None:
            timeout_s = self.timeout_s
        if not timeout_s or self.is_stalled or not self._is_ready():
            return None
        wanted = look_up.length(self.moves.source)
        if wanted <= lease.prefix_len:
            return None
        in_time = wanted if self._rate is None else self._in_time(lease.prefix_len, timeout_s, self._rate)
        move = self.moves.prepare(lease, look_up, in_time)
        if move is not None:
            self._begin(move, timeout_s)
        elif in_time < wanted and not self._loads:
            self._rate = None  # A rate that allows no load would never be measured again.
        return move

    def _in_time(self, prefix_len: int, timeout_s: float, rate: float) -> int:
        """Return how long a prefix may be so that its load ends in time, at the rate of recent loads."""
        assert self._copier is not None
        queued = self._copier.bytes_ahead() if self._loads else 0
        page = self.moves.pool.page_size
        num_bytes = max(0.0, timeout_s * rate - queued)
        return prefix_len + int(num_bytes / self._token_bytes) // page * page

    def _begin(self, move: Move, timeout_s: float | None) -> None:
        """Begin to copy a load.

        Args:
            timeout_s: None: it is a prefetch.
        """
        assert self._copier is not None
        batch = MoveBatch((move,))

        def end(copied: Ended) -> None:
            self._end(batch, copied)

        copy = self._copier.load(batch.plan, end, timeout_s, is_awaited=timeout_s is not None)
        load = self._loads[move] = _Load(copy)
        if self._may_stall:
            wait_s, check = (
                (self.timeout_s, self._watch) if timeout_s is None else (timeout_s + GRACE_S, self._end_late)
            )
            load.timer = asyncio.get_running_loop().call_later(wait_s, check, move)

    def when_loaded(self, move: Move, on_end: Callable[[Filled], object]) -> None:
        """Call `on_end` on the loop when the load of a lease has ended."""
        self._owners[move] = on_end

    @property
    def has_any(self) -> bool:
        """Whether loads are in flight."""
        return bool(self._loads)

    def running_load(self, look_up: LookUp) -> Move | None:
        """Return the load in flight that brings the next page of a request's key; None if there is none.

        A load that was given up, or of a stalled tier, may never end: no request may wait for it.
        """
        if not self._loads or self.is_stalled:
            return None
        move = self.moves.running(look_up)
        return None if move is None or self._loads[move].is_given_up else move

    def wait_for(self, move: Move, resume: Callable[[bool], object]) -> None:
        """Call `resume(is_whole)` when a load has ended. Callbacks run in the order of their registration."""
        self._waiting.setdefault(move, []).append(resume)

    def hurry(self, move: Move) -> None:
        """Let a load give way to no other one any more, as a request waits for it."""
        self._loads[move].copy.is_awaited = True

    def prefetch(self, look_up: LookUp) -> Move | None:
        """Begin to load the prefix of a key for no lease, and return the move.

        None: there is nothing to load, or no room, or requests wait for room, or the time limit of the tier is 0.
        """
        if not self.timeout_s or self.is_stalled or not self._is_ready() or not self._may_prefetch():
            return None
        pool = self.moves.pool
        in_flight = sum(move.num_tokens for move in self._loads if move not in self._owners)
        room = max(0, int(_PREFETCH_SHARE * pool.cache.num_slots) - in_flight)
        move = self.moves.prepare_prefetch(look_up, look_up.length(pool) + room)
        if move is not None:
            self._begin(move, None)
        return move

    # ---------------------------------------------------------------- ends

    def _end(self, batch: MoveBatch, copied: Ended) -> None:
        (move,) = batch.moves
        load = self._loads.pop(move, None)
        if load is None:  # `stop` has ended it
            return
        if load.timer is not None:
            load.timer.cancel()
        if self._copier is not None and (rate := self._copier.counts(loads=True).bytes_per_s) is not None:
            self._rate = rate
        self.num_late += copied.end == "late"
        finished, is_whole = self._finish(batch, copied)
        self._answer(move, finished, is_whole)
        self._on_end()

    def _answer(self, move: Move, finished: Filled, is_whole: bool) -> None:
        """Call back the owner of a load, then the requests that wait for it."""
        if (owner := self._owners.pop(move, None)) is not None:
            owner(finished)
        for resume in self._waiting.pop(move, ()):
            resume(is_whole)

    def _end_late(self, move: Move) -> None:
        """End a load that is late; if its chunk has not come back, the tier is stalled."""
        load = self._loads[move]
        self._cancel(load)
        if load.copy.result is None:  # else its end is on its way
            self._stall_as_silent()

    def _watch(self, move: Move) -> None:
        """Look whether the present chunk of a prefetch has come back in time, now and again."""
        load = self._loads[move]
        began, timeout_s = load.copy.chunk_began, self.timeout_s
        left_s = timeout_s if began is None else began + timeout_s - self._clock()
        if left_s > 0:
            load.timer = asyncio.get_running_loop().call_later(left_s, self._watch, move)
        else:
            self._stall_as_silent()

    def _cancel(self, load: _Load) -> None:
        if self._copier is not None:
            self._copier.cancel(load.copy)

    def _stall_as_silent(self) -> None:
        if not self.is_stalled:
            logger.warning("tier %s does not answer: nothing is loaded from it for %.0f s", self.name, STALL_S)
        self.num_late += 1
        self.stall()

    def stall(self) -> None:
        """Load nothing for 30 s, and end all loads: no request waits for one meanwhile.

        A load of which a chunk is being copied is given up: its request begins again, and its slots stay locked until
        the chunk has come back.
        """
        self.num_stalls += 1
        self._stalled_until = self._clock() + STALL_S
        for move, load in list(self._loads.items()):
            self._cancel(load)
            if load.copy.result is None and not load.is_given_up:
                self._give_up(move, load)

    def _give_up(self, move: Move, load: _Load) -> None:
        """Let the request of a load begin again, as its chunk does not come back."""
        load.is_given_up = True
        if load.timer is not None:
            load.timer.cancel()
        is_wanted = bool(move.target.filling_for)
        self.moves.abandon(move)
        self._answer(move, Filled(0, None, is_wanted), False)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.moves.source.name

    # ---------------------------------------------------------------- the end

    def stop(self, timeout_s: float | None = None) -> bool:
        """End all loads, without callbacks. It blocks for the chunks that are being copied.

        Leases that were being filled end, so no request may wait for them any more.

        Args:
            timeout_s: for which it waits for a chunk; None: without a limit.

        Returns:
            Whether all have ended. The leases of the others stay open.
        """
        self._waiting.clear()
        self._owners.clear()
        pool = self.moves.pool.cache
        for move, load in self._loads.items():
            if load.timer is not None:
                load.timer.cancel()
            if session_id := move.target.filling_for:
                pool.release(move.target.lease_id, session_id)
        if self._copier is not None:
            self._copier.stop_all(timeout_s)
        for move, load in list(self._loads.items()):
            if load.copy.result is not None:
                self._finish(MoveBatch((move,)), load.copy.result)
                del self._loads[move]
        return not self._loads

    def close(self, timeout_s: float | None = None) -> bool:
        """End all loads, as `stop` does, and let none begin. The copier may be closed and freed afterwards."""
        has_ended = self.stop(timeout_s)
        self._copier = self._rate = None
        return has_ended
