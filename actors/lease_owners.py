"""Whose leases they are: for statistics, and for who finds no room."""

from __future__ import annotations

import time
from collections.abc import Callable

from raydix.actors.session_table import SessionTable
from raydix.cache_core import LeasedCache
from raydix.cache_core.lease_table import LeaseRecord
from raydix.schemas import LeaseOwner


class LeaseOwners:
    """The owners of a cache's open leases.

    Args:
        core: whose leases they are.
        sessions: whose names their owners have.
    """

    def __init__(self, core: LeasedCache, sessions: SessionTable) -> None:
        self._core = core
        self._sessions = sessions

    def largest(self, limit: int, counts: Callable[[LeaseRecord], bool] | None = None) -> tuple[LeaseOwner, ...]:
        """Those whose leases cover the most slots, of the leases that count. O(leases)."""
        by_session: dict[str, list[LeaseRecord]] = {}
        for lease in self._core.leases if counts is None else filter(counts, self._core.leases):
            by_session.setdefault(lease.session_id, []).append(lease)
        by_owner: dict[str, list[LeaseRecord]] = {}
        for session_id, leases in by_session.items():
            session = self._sessions.find(session_id)
            by_owner.setdefault(session_id if session is None else session.owner, []).extend(leases)
        now, size = time.monotonic(), self._core.lease_size
        owners = [
            LeaseOwner(
                owner=owner,
                leases=len(leases),
                slots=sum(map(size, leases)),
                oldest_s=now - min(lease.since for lease in leases),
            )
            for owner, leases in by_owner.items()
        ]
        return tuple(sorted(owners, key=lambda owner: -owner.slots)[:limit])
