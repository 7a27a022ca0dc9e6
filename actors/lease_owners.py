"""Whose leases they are: for statistics, and for who finds no room."""

from __future__ import annotations

import time
from dataclasses import dataclass
from heapq import nlargest

from raydix.actors.session_table import SessionTable
from raydix.cache_core import LeasedCache
from raydix.schemas import LeaseOwner


@dataclass(slots=True)
class _Held:
    """What one owner has."""

    leases: int
    slots: int
    since: float  # of the oldest lease

    def add(self, other: _Held) -> None:
        self.leases += other.leases
        self.slots += other.slots
        self.since = min(self.since, other.since)


class LeaseOwners:
    """The owners of a cache's open leases. What was counted is known until a lease comes, goes, grows or moves.

    Args:
        core: whose leases they are.
        sessions: whose names their owners have.
    """

    def __init__(self, core: LeasedCache, sessions: SessionTable) -> None:
        self._core = core
        self._sessions = sessions
        self._known: dict[str | None, tuple[int, dict[str, _Held]]] = {}  # by tenant; None: of all leases

    def largest(self, limit: int, tenant: str | None = None) -> tuple[LeaseOwner, ...]:
        """Those whose leases cover the most slots, of all or of a tenant's. O(owners), after changes O(leases)."""
        now = time.monotonic()
        owners = nlargest(limit, self._by_owner(tenant).items(), key=lambda each: each[1].slots)
        return tuple(
            LeaseOwner(owner=owner, leases=held.leases, slots=held.slots, oldest_s=now - held.since)
            for owner, held in owners
        )

    def num_leases(self, tenant: str | None = None) -> int:
        """How many leases are open, in all or of a tenant's."""
        return sum(held.leases for held in self._by_owner(tenant).values())

    def _by_owner(self, tenant: str | None) -> dict[str, _Held]:
        changes = self._core.leases.num_changes
        counted_at, held = self._known.get(tenant, (-1, {}))
        if counted_at != changes:
            held = self._count(tenant)
            self._known[tenant] = changes, held
        return held

    def _count(self, tenant: str | None) -> dict[str, _Held]:
        core, by_session = self._core, dict[str, _Held]()
        for lease in core.leases:
            if tenant is None or core.tenant_of(lease.key.extra_key) == tenant:
                _add(by_session, lease.session_id, _Held(1, core.lease_size(lease), lease.since))
        by_owner: dict[str, _Held] = {}
        for session_id, held in by_session.items():
            session = self._sessions.find(session_id)
            _add(by_owner, session_id if session is None else session.owner, held)
        return by_owner


def _add(by_name: dict[str, _Held], name: str, held: _Held) -> None:
    if name in by_name:
        by_name[name].add(held)
    else:
        by_name[name] = held
