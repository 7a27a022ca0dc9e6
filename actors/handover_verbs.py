"""`HandoverVerbs`: whose a lease is, and handing it to another client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from raydix.actors.error_map import may_have_taken_effect
from raydix.actors.lease import Lease, not_mine
from raydix.actors.typed_messages import build, expect
from raydix.actors.upkeep_verbs import UpkeepVerbs
from raydix.schemas import (
    AbortRequest,
    AdoptRequest,
    AdoptResponse,
    CacheError,
    GrantRequest,
    InvalidRequest,
    LeaseGrant,
    LeaseResponse,
)

if TYPE_CHECKING:
    from raydix.actors.verbs import CacheVerbs


class HandoverVerbs(UpkeepVerbs):
    """A scheduler acquires a lease and grants it; the worker that computes adopts it, and is its one owner.

    lease = await scheduler.acquire(tokens)
    grant = await lease.grant()  # pickles
    lease = await worker.adopt(grant)  # in another process
    """

    async def grant(self, lease: Lease) -> LeaseGrant:
        """`Lease.grant`. If the caller is cancelled, the lease is as before."""
        await self._check_mine(lease)
        with lease.handing_over():
            offered = expect(LeaseResponse, await self._call_of_lease(GrantRequest(lease_id=lease.lease_id)))
        return LeaseGrant(
            lease_id=lease.lease_id,
            granter=self._session_id,
            epoch=lease.epoch,
            prefix_len=offered.prefix_len,
            published_len=lease.published_len,
            num_slots=offered.num_slots,
        )

    async def adopt(self, grant: LeaseGrant) -> Lease:
        """Take over a lease that another client granted: from now on it is this one's, with all it holds.

        Raises:
            UnknownLease: it has ended, or was adopted already.
            LeaseExpired: its granter was silent for too long, or died.
            StaleEpoch: the cache has restarted since.
        """
        if not isinstance(grant, LeaseGrant):
            raise InvalidRequest(f"a grant is what `await lease.grant()` gives, not {type(grant).__name__}")
        request = build(AdoptRequest, lease_id=grant.lease_id, granter=grant.granter, granted_epoch=grant.epoch)
        try:
            response, transport = await self._call_anew(request)
        except (asyncio.CancelledError, CacheError) as error:
            if may_have_taken_effect(error):
                self._compensate(AbortRequest(lease_id=grant.lease_id))
            raise
        adopted = expect(AdoptResponse, response)
        lease = Lease(cast("CacheVerbs", self), adopted.lease, adopted.tokens, transport, self._config.run_len)
        lease.published_len = adopted.published_len
        return lease

    async def _check_mine(self, lease: Lease) -> None:
        if getattr(lease, "client", None) is not self:
            raise not_mine(lease)
        if self._closed or self._loop is not asyncio.get_running_loop():
            await self.open()
        lease.check_open()
