"""`LeaseOwners`: the slots that each owner's leases hold, for statistics and refusals."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from heapq import nlargest
from math import inf
from typing import NamedTuple

from raydix.actors.sessions.session_table import SessionTable
from raydix.cache_core import LeasedCache
from raydix.schemas import LeaseOwner

_FEW = 256  # leases: up to so many are counted again after each change
_LASTS = 50  # a count of more leases is used for 50 times as long as it took: 2 % of the loop at most


@dataclass(slots=True)
class _Held:
    """The leases and slots of one owner."""

    leases: int = 0
    slots: int = 0
    since: float = inf  # start of the oldest lease


class _Count(NamedTuple):
    """A count, and how long it may be used."""

    changes: int  # `num_changes` of the leases at the count
    good_until: float  # end of its use in spite of changes, if there are many leases
    held: dict[str, _Held]


class LeaseOwners:
    """The owners of a cache's open leases. A count is used until a lease begins, ends, grows or changes its session.

    If there are many leases, it is used for a while longer: a refusal must not visit each of them.

    Args:
        core: has the leases.
        sessions: have the names of the owners.
    """

    def __init__(self, core: LeasedCache, sessions: SessionTable) -> None:
        self._core = core
        self._sessions = sessions
        self._known: dict[str | None, _Count] = {}  # tenant -> count; None: all leases

    def largest(self, limit: int, tenant: str | None = None) -> tuple[LeaseOwner, ...]:
        """Return the owners with the most slots, of all or of a tenant's. O(owners), at times O(pages of leases)."""
        now = time.monotonic()
        owners = nlargest(limit, self._by_owner(tenant).items(), key=lambda item: item[1].slots)
        return tuple(
            LeaseOwner(owner=owner, leases=held.leases, slots=held.slots, oldest_s=now - held.since)
            for owner, held in owners
        )

    def num_leases(self, tenant: str | None = None) -> int:
        """Return the number of open leases, of all or of a tenant's."""
        if tenant is None:
            return self._core.leases.num_of_clients
        return sum(held.leases for held in self._by_owner(tenant).values())

    def _by_owner(self, tenant: str | None) -> dict[str, _Held]:
        leases, known = self._core.leases, self._known.get(tenant)
        if known is None or (known.changes != leases.num_changes and self._is_over(known)):
            began_at = time.monotonic()
            held = self._count(tenant)
            ended_at = time.monotonic()
            known = self._known[tenant] = _Count(leases.num_changes, ended_at + _LASTS * (ended_at - began_at), held)
        return known.held

    def _is_over(self, known: _Count) -> bool:
        return len(self._core.leases) <= _FEW or time.monotonic() >= known.good_until

    def _count(self, tenant: str | None) -> dict[str, _Held]:
        core, by_owner = self._core, defaultdict[str, _Held](_Held)
        found = [
            (session_id, lease)
            for session_id, lease in core.leases.of_clients()
            if tenant is None or core.tenant_of(lease.key.extra_key) == tenant
        ]
        found.sort(key=lambda item: item[1].since)
        sizes = core.lease_sizes([lease for _, lease in found])
        for (session_id, lease), num_slots in zip(found, sizes, strict=True):
            session = self._sessions.find(session_id)
            held = by_owner[session_id if session is None else session.owner]
            held.leases += 1
            held.slots += num_slots
            held.since = min(held.since, lease.since)
        return by_owner
