"""Who holds leases."""

from __future__ import annotations

from pydantic import Field

from raydix.schemas.message import Message
from raydix.schemas.shown import shown


class LeaseOwner(Message):
    """The open leases of one owner: of all clients of that name, which is host and process where none is given."""

    owner: str
    leases: int
    slots: int = Field(description="that these leases hold; a shared one is counted once, for the oldest lease")
    oldest_s: float = Field(description="seconds since the oldest of them was granted")

    def __str__(self) -> str:
        return f"{shown(self.owner)} {self.slots} slots by {self.leases}, up to {self.oldest_s:.0f} s old"
