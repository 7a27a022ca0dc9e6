"""`LeaseGrant`: a lease on its way from one client to another."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import Message


class LeaseGrant(Message):
    """An offer of a lease: `lease.grant()` makes it, `client.adopt(grant)` takes it in any process, once.

    Until it is adopted the lease is its granter's: it ends with the granter's session, when the offer expires, and by
    `client.revoke(grant)`.
    """

    lease_id: str
    granter: str = Field(description="the session that holds the lease until it is adopted")
    epoch: str = Field(description="the life of the cache that granted the lease")
    prefix_len: int = Field(description="leading tokens whose KV was there when it was acquired")
    published_len: int = Field(description="leading tokens in the tree")
    num_slots: int = Field(description="tokens that the lease covers")
    offer_id: str = Field(description="names this offer of the lease")
