"""`Quarantine`: leases of vanished sessions, whose private slots may still be written."""

from __future__ import annotations

from collections.abc import Iterator

from raydix.cache_core.leases.lease_table import LeaseRecord


class Quarantine:
    """Leases that have ended, but whose private slots nobody may use yet. By session."""

    def __init__(self) -> None:
        self._by_session: dict[str, list[LeaseRecord]] = {}

    def add(self, lease: LeaseRecord) -> None:
        """Withhold what a lease held privately; it holds nothing else any more."""
        lease.node = lease.receipt = None
        self._by_session.setdefault(lease.session_id, []).append(lease)

    def take(self, session_id: str) -> list[LeaseRecord]:
        """Give up the leases of a session; the caller frees what they held."""
        return self._by_session.pop(session_id, [])

    def __contains__(self, session_id: object) -> bool:
        return session_id in self._by_session

    def __iter__(self) -> Iterator[LeaseRecord]:
        for leases in self._by_session.values():
            yield from leases
