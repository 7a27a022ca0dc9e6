"""`SessionReaper`: ends the sessions of clients that close, fall silent or die, and frees what they held."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from raydix.actors.loop.loop_timer import LoopTimer
from raydix.actors.sessions.session_table import Session, SessionTable
from raydix.actors.sessions.wait_queue import WaitQueue
from raydix.cache_core import LeasedCache
from raydix.schemas import CacheError, LeaseConfig, LeaseExpired, OpenSession
from raydix.schemas.shown import shown

logger = logging.getLogger(__name__)

_MAX_TICK_S = 1.0  # most time between two checks of the clock and of the clients' processes
_DEATH_TICK_S = 0.02  # time between two checks, if a process is about to end


class SessionReaper:
    """The sessions of a cache. When one ends, its leases end and its queued requests fail.

    Args:
        config: how long a client may be silent, and how long its slots are withheld afterwards.
        core: has the leases.
        wait_queue: of the requests that find no room.
        after_end: called with the id of each session that has ended; slots may have become free.
        clock: seconds, of any origin.
    """

    def __init__(
        self,
        config: LeaseConfig,
        core: LeasedCache,
        wait_queue: WaitQueue,
        after_end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions = SessionTable(config, clock)
        self.num_expired = 0  # sessions that were silent for too long
        self.num_dead = 0  # sessions that ended because their process or their owner died
        self.on_end: Callable[[str], None] | None = None  # called with each session that is gone
        self._core = core
        self._wait_queue = wait_queue
        self._after_end = after_end
        self._clock = clock
        self._ttl_s = config.session_ttl_s
        self._tick_s = min(_MAX_TICK_S, config.session_ttl_s / 4)
        self._next_tick = self._looked_at = clock()
        self._timer = LoopTimer(self._tick)

    def open(self, request: OpenSession) -> Session:
        """Begin a session, or go on with it if it is open; return it. Close the session that it replaces.

        Raises:
            LeaseExpired: the session was open and has expired.
        """
        session = self.sessions.open(request)
        if request.replaces is not None:
            self.close(request.replaces)
        if not self._timer.is_set:
            self._set_timer(self._tick_s)
        return session

    def close(self, session_id: str, error: CacheError | None = None) -> None:
        """End a session's leases, and free its slots in quarantine. No effect if the session is gone.

        Its queued requests fail with `error`; None: `UnknownLease`.
        """
        if self.sessions.close(session_id) is not None:
            self._wait_queue.withdraw(session_id, error=error)
            self._core.end_session(session_id)
            self._core.free_withheld(session_id)
            self._after_end(session_id)
            if self.on_end is not None:
                self.on_end(session_id)

    def close_all(self, error: CacheError) -> None:
        """Close every session, and stop looking at the clock."""
        for session_id in self.sessions.ids:
            self.close(session_id, error)
        self.stop()

    def stop(self) -> None:
        """Look at the clock no more, until the next session begins."""
        self._timer.stop()

    async def ends_within(self, session: Session, seconds: float) -> bool:
        """Wait for a session to end; return whether it has."""
        if session.end is None:
            session.end = asyncio.get_running_loop().create_future()
        await asyncio.wait((session.end,), timeout=seconds)
        return session.end.done()

    def owner_unavailable(self, session_id: str, is_dead: bool) -> bool:
        """End the session of an owner that has died; return whether the session has ended.

        Its leases end immediately. Slots that could still be written through them are freed as soon as the owner's
        process has ended, if that can be seen from here: Ray may report a death seconds before it.

        Args:
            is_dead: Ray says that the owner has died; False: it does not answer, and may only be out of reach.
        """
        session = self.sessions.find(session_id)
        if session is None:
            return True
        if not is_dead and session.life is not None and not session.life.has_ended():
            return False
        if session_id in self.sessions:
            self._die(session, f"the actor that owns it {'has ended' if is_dead else 'cannot be reached'}")
        session.is_dead = True
        self.reap()
        if self.sessions.any_dead:
            self._set_timer(_DEATH_TICK_S)
        return True

    def reap(self) -> None:
        """End sessions that were silent for too long, and free slots that need not be withheld any longer."""
        for session in self.sessions.overdue():
            self.num_expired += 1
            self._vanish(session, f"it was silent for {self._ttl_s:g} s")
        for session_id in self.sessions.gone():
            self.close(session_id)

    def _die(self, session: Session, cause: str) -> None:
        self.num_dead += 1
        session.is_dead = True
        self._vanish(session, cause)

    def _vanish(self, session: Session, cause: str) -> None:
        error = LeaseExpired(f"session {session.session_id!r} is over: {cause}")
        self.sessions.vanish(session, cause)
        self._wait_queue.withdraw(session.session_id, error=error)
        self._core.quarantine_session(session.session_id)
        session.is_withheld = session.session_id in self._core.quarantine
        about = {"session": session.session_id, "owner": session.owner}
        logger.warning("%s (%s); its leases have ended%s", error, shown(session.owner), _writer(session), extra=about)
        self._after_end(session.session_id)

    def _tick(self) -> float | None:
        """Look at the clock; return the seconds to the next look."""
        late_s = self._clock() - self._next_tick
        if late_s > self._tick_s:
            self.sessions.put_off(late_s)  # messages may have come meanwhile that this loop has not seen
        if self._clock() - self._looked_at >= self._tick_s / 2:  # seldom, though the clock is looked at often
            self._looked_at = self._clock()
            for session in self.sessions.ended():  # no process writes their slots, so `reap` frees them
                self._die(session, "its process has ended")
        self.reap()
        if not len(self.sessions) and not self.sessions.any_vanished:
            return None
        tick_s = _DEATH_TICK_S if self.sessions.any_dead else self._tick_s
        self._next_tick = self._clock() + tick_s
        return tick_s

    def _set_timer(self, tick_s: float) -> None:
        self._next_tick = self._clock() + tick_s
        self._timer.schedule(tick_s)


def _writer(session: Session) -> str:
    """Return the part of a log line that names the process that slots in quarantine wait for; empty: none is seen."""
    if not session.is_withheld or session.life is None or session.life.has_ended():
        return ""
    return f". Process {session.life.pid} lives: slots that it may still write stay in quarantine until it ends"
