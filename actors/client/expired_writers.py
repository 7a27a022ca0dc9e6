"""`ExpiredWriters`: leases of a client that may still be written, though their session has expired."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import TYPE_CHECKING

from raydix.schemas import CacheUnavailable, StaleEpoch

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.lease import Lease
    from raydix.actors.transport.transport import Transport

logger = logging.getLogger(__name__)


class ExpiredWriters:
    """The client's leases, and its expired sessions that it has not yet closed at the cache.

    A session that fell silent has expired, but coroutines and threads of the client may still be computing KV that they
    write into mapped memory. The cache keeps the session's slots in quarantine until the client closes the session,
    which it does once no lease of it can still be written.

    Attributes:
        pools: the pools that the client has attached.
    """

    def __init__(self) -> None:
        self.pools: weakref.WeakSet[AttachedPool] = weakref.WeakSet()
        self._leases: set[weakref.ref[Lease]] = set()  # a WeakSet takes five times as long per request
        self._sessions: set[Transport] = set()  # expired, and not closed
        self._closing: set[asyncio.Task[None]] = set()

    def add_lease(self, lease: Lease) -> None:
        """Add a lease that was granted."""
        self._leases.add(weakref.ref(lease, self._leases.discard))

    def held_lease_ids(self) -> set[str]:
        """Return the ids of the leases that callers may still use."""
        return {lease.lease_id for lease in self._live_leases() if lease.may_write}

    def end_lease(self, lease_id: str) -> None:
        """Mark a lease as ended: the cache may end it at any time."""
        for lease in self._live_leases():
            if lease.lease_id == lease_id:
                lease.mark_ended()

    def may_write_through(self, transport: Transport) -> bool:
        """Return whether a lease of this lost session may still be written in mapped memory."""
        return any(pool.mapped for pool in self.pools) and any(
            lease.may_write and lease.transport is transport for lease in self._live_leases()
        )

    def _live_leases(self) -> list[Lease]:
        """Return the leases that callers have not dropped."""
        return [lease for reference in self._leases.copy() if (lease := reference()) is not None]

    def add_session(self, transport: Transport) -> None:
        """Add a session that has expired, to close it once no lease of it can still be written."""
        self._sessions.add(transport)

    def forget_session(self, transport: Transport) -> None:
        """Forget a session that another has replaced at the cache."""
        self._sessions.discard(transport)

    @property
    def has_sessions(self) -> bool:
        """Whether there are expired sessions that are not closed yet."""
        return bool(self._sessions or self._closing)

    def close_unused_sessions(self) -> None:
        """Close the expired sessions of which no lease can still be written: the cache frees their slots then."""
        for transport in self._sessions.copy():
            if not self.may_write_through(transport):
                self._sessions.discard(transport)
                closing = asyncio.get_running_loop().create_task(self._close(transport))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _close(self, transport: Transport) -> None:
        try:
            await transport.close()
        except CacheUnavailable:
            self._sessions.add(transport)  # the next call tries again
        except StaleEpoch:
            logger.debug("session %s: its cache is gone", transport.session_id)

    def take_sessions(self) -> list[Transport]:
        """Remove and return all expired sessions, for a client that closes."""
        sessions, self._sessions = list(self._sessions), set()
        return sessions
