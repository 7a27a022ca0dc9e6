"""`LeaseGrant`: a lease on its way from one client to another."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import Message


class LeaseGrant(Message):
    """What `lease.grant()` gives and `client.adopt(grant)` takes, in whatever process: good once.

    Until it is adopted the lease is its granter's, and ends with the granter's session.
    """

    lease_id: str
    granter: str = Field(description="the session that holds the lease until it is adopted")
    epoch: str = Field(description="the life of the cache that granted the lease")
    prefix_len: int = Field(description="leading tokens whose KV was there when it was acquired")
    published_len: int = Field(description="leading tokens in the tree")
    num_slots: int = Field(description="tokens that the lease covers")
