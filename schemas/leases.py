"""`LeaseGrant`, an offer of a lease to another client, and `LeaseOwner`, the leases of an owner."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import PydanticMessage
from raydix.schemas.shown import counted, short_time, shown


class LeaseGrant(PydanticMessage):
    """An offer of a lease: `lease.grant()` makes it, `client.adopt(grant)` takes it in any process, once.

    Until it is adopted the lease belongs to the granter: it ends with the granter's session, when the offer expires,
    and by `client.revoke(grant)`.
    """

    lease_id: str
    granter: str = Field(description="the session that holds the lease until it is adopted")
    epoch: str = Field(description="the life of the cache that granted the lease")
    prefix_len: int = Field(description="leading tokens that were cached when the lease was acquired")
    published_len: int = Field(description="leading tokens in the tree")
    num_slots: int = Field(description="tokens that the lease covers")
    offer_id: str = Field(description="identifies this offer of the lease")


class LeaseOwner(PydanticMessage):
    """The open leases of one owner: of all clients of that name, which by default is host and process."""

    owner: str
    leases: int
    slots: int = Field(description="that these leases hold; a shared one is counted once, for the oldest lease")
    oldest_s: float = Field(description="seconds since the oldest of them was granted")

    def __str__(self) -> str:
        held = f"{counted(self.slots, 'slot')} by {counted(self.leases, 'lease')}"
        return f"{shown(self.owner)} {held}, up to {short_time(self.oldest_s)} old"
