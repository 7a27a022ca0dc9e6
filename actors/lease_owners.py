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
        held: dict[str, list[float]] = {}  # by owner: leases, slots, when the oldest was granted
        for lease in self._core.leases:
            if counts is None or counts(lease):
                session = self._sessions.find(lease.session_id)
                owner = lease.session_id if session is None else session.owner
                entry = held.setdefault(owner, [0, 0, lease.since])
                entry[0] += 1
                entry[1] += self._core.lease_size(lease)
                entry[2] = min(entry[2], lease.since)
        now = time.monotonic()
        owners = [
            LeaseOwner(owner=owner, leases=int(leases), slots=int(slots), oldest_s=now - since)
            for owner, (leases, slots, since) in held.items()
        ]
        return tuple(sorted(owners, key=lambda owner: -owner.slots)[:limit])
