"""`EndedLeases`: the ids of leases that have ended, so that what comes late for one of them has no effect."""

from __future__ import annotations

from collections import OrderedDict

from raydix.cache_core.errors import ExpiredLeaseError, UnknownLeaseError


class EndedLeases:
    """The ids that ended last, up to `capacity` of them, each with the session it belonged to.

    An id that was ended before it was granted counts, too: its grant may be on its way still.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # by session and lease, the oldest first; a plain dict would look for its first through all that went before
        self._expired: OrderedDict[tuple[str, str], bool] = OrderedDict()

    def add(self, session_id: str, lease_id: str, expired: bool = False) -> None:
        """Remember an id; how it ended first is what counts."""
        self._expired.setdefault((session_id, lease_id), expired)
        while len(self._expired) > self._capacity:
            self._expired.popitem(last=False)

    def check(self, session_id: str, lease_id: str) -> None:
        """Raise if that lease of that session is remembered as ended.

        Raises:
            ExpiredLeaseError: its owner was silent for too long, or its grant was not adopted in time.
            UnknownLeaseError: it was released or aborted, or handed over.
        """
        expired = self._expired.get((session_id, lease_id))
        if expired:
            raise ExpiredLeaseError(
                f"lease {lease_id!r} expired: its client was silent for too long or died, or its grant was "
                "not adopted in time"
            )
        if expired is not None:
            raise UnknownLeaseError(f"lease {lease_id!r} has ended")

    def __len__(self) -> int:
        return len(self._expired)
