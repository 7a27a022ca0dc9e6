"""`SessionTable`: the open and the vanished sessions of a cache.

    open ──── closes ─────────────────────────────> gone
      └─ silent, or it has died ────> vanished ───> gone: its process has ended, or it came back. If no process of it is
                                                    seen, or it holds nothing in quarantine: or a time has passed

A vanished session has no leases any more; slots that it could still be writing are in quarantine until it is gone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from raydix.actors.transport.process_liveness import ProcessLiveness
from raydix.schemas import InvalidRequest, LeaseConfig, LeaseExpired, OpenSession

_MAX_REMEMBERED = 16_384  # sessions that expired: their messages are answered LeaseExpired


@dataclass(eq=False, slots=True)
class Session:
    """One client: the owner of leases."""

    session_id: str
    owner: str  # name for people
    deadline: float  # time of the table's clock; a session that is silent until then expires
    life: ProcessLiveness | None  # its process; None: not known here
    executed_seq: int = 0  # the last of its numbered batches that was executed
    batch_order: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # number of a batch -> the wait for it
    end: asyncio.Future[None] | None = None  # result of a client's wait for the end
    is_dead: bool = False  # its process or its owner has died
    cause: str = ""  # of its end, in words, once it has vanished
    is_withheld: bool = False  # it has vanished, and slots that it could still be writing are in quarantine

    def notify_end(self) -> None:
        """Wake the session's client, if it waits for the end."""
        if self.end is not None and not self.end.done():
            self.end.set_result(None)


class SessionTable:
    """The sessions of a cache.

    Args:
        config: how long they may be silent, and how long their slots are withheld afterwards.
        clock: seconds, of any origin.
    """

    def __init__(self, config: LeaseConfig, clock: Callable[[], float]) -> None:
        self._ttl_s = config.session_ttl_s
        self._grace_s = config.quarantine_grace_s
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._vanished: dict[str, tuple[Session, float]] = {}  # id -> session, and the end of its grace
        self._expired: OrderedDict[str, str] = OrderedDict()  # id -> cause; the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._open

    @property
    def ids(self) -> list[str]:
        """Return the ids of the open sessions."""
        return list(self._open)

    @property
    def any_vanished(self) -> bool:
        """Return whether any session has vanished and is not gone yet."""
        return bool(self._vanished)

    @property
    def any_dead(self) -> bool:
        """Return whether the process of a vanished session is about to end."""
        return any(session.is_dead for session, _ in self._vanished.values())

    def open(self, request: OpenSession) -> Session:
        """Return the session that a client asks for, which is the open one if it asks again."""
        session = self._open.get(request.session_id)
        if session is None:
            self._check_not_expired(request.session_id)
            life = ProcessLiveness.find(request.liveness_path) if request.liveness_path is not None else None
            session = Session(request.session_id, request.owner, 0.0, life)
            self._open[request.session_id] = session
        session.deadline = self._clock() + self._ttl_s
        return session

    def heard_of(self, session_id: str) -> Session:
        """Return the open session of that id, which has just sent a message, and move its deadline.

        Raises:
            LeaseExpired: the session was silent for too long, or its owner died.
            InvalidRequest: no such session is known.
        """
        session = self._open.get(session_id)
        if session is None:
            self._check_not_expired(session_id)
            raise InvalidRequest(f"session {session_id!r} is not open: open a client first")
        session.deadline = self._clock() + self._ttl_s
        return session

    def find(self, session_id: str) -> Session | None:
        """Return the session of that id, open or vanished; None if there is none."""
        if session_id in self._vanished:
            return self._vanished[session_id][0]
        return self._open.get(session_id)

    def close(self, session_id: str) -> Session | None:
        """Remove and return a session that its client ends, or replaces; None if it is gone."""
        session = self._open.pop(session_id, None) or self._vanished.pop(session_id, (None, 0.0))[0]
        if session is not None:
            session.notify_end()
        return session

    def vanish(self, session: Session, cause: str) -> None:
        """Move an open session to the vanished ones. The caller sets `is_withheld` if slots of it are in quarantine.

        Args:
            cause: in words, for its client: it was silent for too long, or its process or owner has ended.
        """
        session.cause = cause
        del self._open[session.session_id]
        self._vanished[session.session_id] = (session, self._clock() + self._grace_s)
        self._expired[session.session_id] = cause
        while len(self._expired) > _MAX_REMEMBERED:
            self._expired.popitem(last=False)
        session.notify_end()

    def ended(self) -> list[Session]:
        """Return the open sessions of processes that have ended. About 1 us for each open session."""
        return [session for session in self._open.values() if session.life is not None and session.life.has_ended()]

    def overdue(self) -> list[Session]:
        """Return the open sessions that were silent for too long."""
        now = self._clock()
        return [session for session in self._open.values() if session.deadline <= now]

    def gone(self) -> list[str]:
        """Return the vanished sessions that write no more, or have been waited for long enough.

        A process that lives may go on at any time, in the middle of a copy into slots in quarantine, so it is waited
        for without end.
        """
        now = self._clock()
        return [session_id for session_id, vanished in self._vanished.items() if _is_gone(*vanished, now)]

    def num_silent(self) -> int:
        """Return the sessions that were silent for more than half of their time to live, expired ones included.

        Expired ones are counted until they are gone. O(sessions).
        """
        due = self._clock() + self._ttl_s / 2
        is_silent = [session.deadline < due for session in self._open.values()]
        has_expired = [not session.is_dead for session, _ in self._vanished.values()]
        return sum(is_silent) + sum(has_expired)

    def put_off(self, seconds: float) -> None:
        """Move all deadlines: the cache itself stood still for so long."""
        for session in self._open.values():
            session.deadline += seconds

    def _check_not_expired(self, session_id: str) -> None:
        cause = self._vanished[session_id][0].cause if session_id in self._vanished else self._expired.get(session_id)
        if cause is not None:
            raise LeaseExpired(f"session {session_id!r} is over: {cause}")


def _is_gone(session: Session, gone_at: float, now: float) -> bool:
    """Return whether a vanished session writes no more, or has been waited for until `gone_at`."""
    if session.life is None:
        return session.is_dead or gone_at <= now
    return session.life.has_ended() or (gone_at <= now and not session.is_withheld)
