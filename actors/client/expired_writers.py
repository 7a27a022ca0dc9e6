"""`ExpiredWriters`: who may still be writing through a lease that is over."""

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
    """The leases of a client, and those of its lost sessions of which it has not told the cache that it is back.

    A session that fell silent has expired, but its coroutines and threads may be in the middle of a computation that
    ends in mapped memory. The cache withholds those slots until the client is back: not before they all know.

    Attributes:
        pools: those that the client has attached.
    """

    def __init__(self) -> None:
        self.pools: weakref.WeakSet[AttachedPool] = weakref.WeakSet()
        self._leases: set[weakref.ref[Lease]] = set()  # a WeakSet takes five times as long, of each request
        self._late: set[Transport] = set()
        self._returning: set[asyncio.Task[None]] = set()

    def add(self, lease: Lease) -> None:
        """A lease was granted."""
        self._leases.add(weakref.ref(lease, self._leases.discard))

    def held(self) -> set[str]:
        """The leases that somebody holds, as far as known."""
        return {lease.lease_id for each in self._leases.copy() if (lease := each()) is not None and lease.may_write}

    def give_up(self, lease_id: str) -> None:
        """End the handle of a lease: the cache may end the lease at any time."""
        for each in self._leases.copy():
            if (lease := each()) is not None and lease.lease_id == lease_id:
                lease.end()

    def any_of(self, transport: Transport) -> bool:
        """Whether somebody may be writing mapped memory through a lease of that lost session, not knowing."""
        return any(pool.mapped for pool in self.pools) and any(
            lease.may_write and lease.transport is transport
            for each in self._leases.copy()
            if (lease := each()) is not None
        )

    def wait_for(self, transport: Transport) -> None:
        """A session has expired: remember to tell the cache when nobody writes through it any more."""
        self._late.add(transport)

    def forget(self, transport: Transport) -> None:
        """The cache has been told."""
        self._late.discard(transport)

    @property
    def any_late(self) -> bool:
        """Whether there is anything that the cache has not been told, as far as known."""
        return bool(self._late or self._returning)

    def close_returned(self) -> None:
        """Tell the cache of the sessions through which nobody writes any more: what it withholds of them is free."""
        for transport in self._late.copy():
            if not self.any_of(transport):
                self._late.discard(transport)
                returning = asyncio.get_running_loop().create_task(self._close(transport))
                self._returning.add(returning)
                returning.add_done_callback(self._returning.discard)

    async def _close(self, transport: Transport) -> None:
        try:
            await transport.close()
        except CacheUnavailable:
            self._late.add(transport)  # for the next time
        except StaleEpoch:
            logger.debug("session %s: there is no cache left to tell", transport.session_id)

    def take_all(self) -> list[Transport]:
        """All sessions that wait: their client closes."""
        late, self._late = list(self._late), set()
        return late
