"""`EventReaders`: how far the readers of a cache's events are behind, so that stale routers are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_STALE_S = 10.0  # a router reads events within milliseconds, and a slow machine within seconds
_STOPPED_S = 600.0


@dataclass(slots=True)
class _Reader:
    """One reader.

    A reader under constant load never has the last event when it asks. So each question marks the last event there is;
    once a later question comes after that event, the reader knows all up to the time of the mark.
    """

    seq: int  # number of the last event that it has
    asked_at: float
    marked_seq: int  # number of the last event at its question
    knows_until: float  # it has all events up to this time


class EventReaders:
    """The readers of events, by session. Each message of one is a question for the events after a number.

    Args:
        clock: seconds, of any origin.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._readers: dict[str, _Reader] = {}

    def ask(self, session_id: str, after_seq: int, last_seq: int) -> None:
        """Note that a reader asks for the events after a number.

        Args:
            last_seq: number of the last event now.
        """
        now = self._clock()
        reader = self._readers.get(session_id)
        if reader is None:
            reader = self._readers[session_id] = _Reader(after_seq, now, last_seq, now)
        if after_seq >= last_seq:
            reader.knows_until = now
        elif after_seq >= reader.marked_seq:
            reader.knows_until = max(reader.knows_until, reader.asked_at)
        reader.seq, reader.asked_at, reader.marked_seq = after_seq, now, last_seq

    def answer(self, session_id: str) -> None:
        """Note that a reader gets its answer. A reader that had all events has waited for new ones until now."""
        reader = self._readers.get(session_id)
        if reader is not None and reader.seq >= reader.marked_seq:
            reader.knows_until = self._clock()

    def forget(self, session_id: str) -> None:
        """Drop the reader of a session that has ended, if it was one."""
        self._readers.pop(session_id, None)

    def num_stale(self, last_seq: int) -> int:
        """Return the readers that lack events of more than ten seconds ago, and have asked within ten minutes.

        Args:
            last_seq: number of the last event now.
        """
        now = self._clock()
        return sum(
            reader.seq < last_seq and now - reader.knows_until > _STALE_S and now - reader.asked_at < _STOPPED_S
            for reader in self._readers.values()
        )
