"""`LeaseOffers`: leases on their way from one client to another. One that is not adopted in time ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from raydix.actors.loop.loop_timer import LoopTimer
from raydix.cache_core import LeasedCache
from raydix.cache_core.leases.lease_table import LeaseRecord

logger = logging.getLogger(__name__)

_LATE_S = 1.0  # a sweep this late means that the process was stopped
_MIN_DELAY_S = 0.01  # pause between two sweeps


class LeaseOffers:
    """The offers of a cache, timed by the cache's clock.

    Attributes:
        num_expired: leases that ended because no session adopted them in time.

    Args:
        core: the cache.
        timeout_s: how long an offer stands unless it says otherwise.
        after_end: called when leases have ended and slots may have become free.
        clock: seconds, of any origin.
    """

    def __init__(
        self,
        core: LeasedCache,
        timeout_s: float,
        after_end: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_expired = 0
        self._core = core
        self._timeout_s = timeout_s
        self._after_end = after_end
        self._clock = clock
        self._due = float("inf")  # time of the next sweep
        self._timer = LoopTimer(self._sweep)

    def offer(self, lease_id: str, session_id: str, offer_id: str, timeout_s: float | None) -> LeaseRecord:
        """Let another session adopt a lease for a time.

        Raises:
            UnknownLeaseError: no such open lease.
        """
        expires_at = self._clock() + (self._timeout_s if timeout_s is None else timeout_s)
        lease = self._core.offer(lease_id, session_id, offer_id, expires_at)
        if not self._timer.is_set or expires_at < self._due:
            self._schedule_sweep(expires_at)
        return lease

    def adopt(self, lease_id: str, from_session: str, session_id: str, offer_id: str) -> LeaseRecord:
        """Move an offered lease to another session, if its time has not run out, by this moment of the clock.

        Raises:
            ExpiredLeaseError: its offer or its session has expired.
            UnknownLeaseError: it has ended, was adopted already, or was not offered by that session.
        """
        self._expire()
        return self._core.adopt(lease_id, from_session, session_id, offer_id)

    def revoke(self, lease_id: str, session_id: str, offer_id: str) -> bool:
        """End an offered lease; False if it was adopted or has ended, also by this moment of the clock."""
        self._expire()
        return self._core.revoke(lease_id, session_id, offer_id)

    def start(self) -> None:
        """Schedule a sweep on the running loop, if an offer stands."""
        if not self._timer.is_set and self._core.leases.offers:
            self._schedule_sweep(min(self._core.leases.offers.values()))

    def stop(self) -> None:
        """Sweep no more, until `start` or the next offer."""
        self._timer.stop()

    def _schedule_sweep(self, due: float) -> None:
        delay_s = max(_MIN_DELAY_S, due - self._clock())
        self._due = self._clock() + delay_s
        self._timer.schedule(delay_s)

    def _sweep(self) -> None:
        self._expire()
        self.start()

    def _expire(self) -> None:
        """End the leases with an offer that has run out. Time in which the process was stopped does not count."""
        if not self._core.leases.offers:
            return
        late_s = self._clock() - self._due
        if late_s > _LATE_S:
            self._core.leases.put_off_offers(late_s + _LATE_S)  # adoptions that came meanwhile are executed first
            self._schedule_sweep(min(self._core.leases.offers.values()))
        if num_ended := self._core.expire_offers(self._clock()):
            self.num_expired += num_ended
            logger.warning("%d granted leases were not adopted in time: they have ended", num_ended)
            self._after_end()
