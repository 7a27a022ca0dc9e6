"""`HandoverVerbs`: whose a lease is, and handing it to another client."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any, cast

from raydix.actors.client.admin_verbs import UpkeepVerbs
from raydix.actors.client.lease import Lease, not_mine
from raydix.actors.client.pending_lease import pending
from raydix.actors.transport.error_map import may_have_taken_effect
from raydix.actors.transport.validation import checked_response, make_request
from raydix.schemas import (
    AbortRequest,
    AdoptRequest,
    AdoptResponse,
    CacheError,
    GrantRequest,
    InvalidRequest,
    LeaseGrant,
    LeaseResponse,
    RevokeRequest,
    RevokeResponse,
    TakeBackRequest,
    UnknownLease,
)

if TYPE_CHECKING:
    from raydix.actors.client.lease_verbs import CacheVerbs


def check_grant(grant: Any) -> None:
    """Raise InvalidRequest unless this is a grant."""
    if not isinstance(grant, LeaseGrant):
        raise InvalidRequest(f"a grant is what `await lease.grant()` gives, not {type(grant).__name__}")
    if not isinstance(grant.granter, str):
        raise InvalidRequest(f"the granter of a grant must be a str, not {type(grant.granter).__name__}")


class HandoverVerbs(UpkeepVerbs):
    """A scheduler acquires a lease and grants it; the worker that computes adopts it, and is its one owner.

    lease = await scheduler.acquire(tokens)
    grant = await lease.grant(timeout_s=5)  # pickles
    lease = await worker.adopt(grant)  # in another process, within 5 s
    """

    def __init__(self, owner: str | None = None) -> None:
        super().__init__(owner)
        self._offer_numbers = count(1)

    async def grant(self, lease: Lease, *, timeout_s: float | None = None) -> LeaseGrant:
        """`Lease.grant`. If the caller is cancelled, the offer is taken back and the lease is as before."""
        await self._check_mine(lease)
        offer_id = f"{self._session_id}-{next(self._offer_numbers)}"
        request = make_request(GrantRequest, lease_id=lease.lease_id, offer_id=offer_id, timeout_s=timeout_s)
        with lease.handing_over():
            try:
                offered = checked_response(LeaseResponse, await self._call_of_lease(request))
            except (asyncio.CancelledError, CacheError) as error:
                if may_have_taken_effect(error):
                    self._compensate(TakeBackRequest(lease_id=lease.lease_id, offer_id=offer_id))
                raise
        return LeaseGrant(
            lease_id=lease.lease_id,
            granter=self._session_id,
            epoch=lease.epoch,
            prefix_len=offered.prefix_len,
            published_len=lease.published_len,
            num_slots=offered.num_slots,
            offer_id=offer_id,
        )

    async def revoke(self, grant: LeaseGrant) -> bool:
        """End a lease that this client granted, if it has not been adopted.

        Returns:
            True if this call ended the lease; False if it was adopted, revoked or expired before.

        Raises:
            UnknownLease: another client granted it.
        """
        check_grant(grant)
        if grant.granter not in self._session_ids:
            raise UnknownLease(f"lease {grant.lease_id!r} was granted by another client: only its granter revokes it")
        request = make_request(RevokeRequest, lease_id=grant.lease_id, offer_id=grant.offer_id)
        return checked_response(RevokeResponse, await self._call(request)).ended

    @pending
    async def adopt(self, grant: LeaseGrant) -> Lease:
        """Take over a lease that another client granted: from now on it is this one's, with all it holds.

        Raises:
            UnknownLease: it has ended, or was adopted or revoked already.
            LeaseExpired: the grant's time ran out, or its granter was silent for too long, or died.
            StaleEpoch: the cache has restarted since.
        """
        check_grant(grant)
        request = make_request(
            AdoptRequest,
            lease_id=grant.lease_id,
            granter=grant.granter,
            granted_epoch=grant.epoch,
            offer_id=grant.offer_id,
        )
        try:
            response, transport = await self._call_anew(request)
        except (asyncio.CancelledError, CacheError) as error:
            if may_have_taken_effect(error):
                self._compensate(AbortRequest(lease_id=grant.lease_id))
            raise
        adopted = checked_response(AdoptResponse, response)
        lease = Lease(cast("CacheVerbs", self), adopted.lease, adopted.tokens, transport, self._config.run_len)
        lease.published_len = adopted.published_len
        return lease

    async def _check_mine(self, lease: Lease) -> None:
        if getattr(lease, "client", None) is not self:
            raise not_mine(lease)
        if self._closed or self._loop is not asyncio.get_running_loop():
            await self.open()
        lease.check_open()
