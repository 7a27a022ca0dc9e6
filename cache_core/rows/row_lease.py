"""`RowLease`: a lease over one row of slots."""

from __future__ import annotations

import numpy as np

from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.cache_core.tree.radix_key import RadixKey


class RowLease(LeaseRecord):
    """The slots of one request: a whole private row. `starts` has only its first slot."""

    __slots__ = ("published_len", "row")

    def __init__(
        self,
        lease_id: str,
        session_id: str,
        key: RadixKey,
        row: int,
        first_slot: int,
        prefix_len: int,
        num_slots: int,
        priority: int,
    ) -> None:
        starts = np.array([first_slot], np.int64)
        super().__init__(lease_id, session_id, key, None, None, prefix_len, starts, 0, num_slots, priority)
        self.row = row
        self.published_len = prefix_len  # leading tokens that other leases may copy; whole pages


def as_row_lease(lease: LeaseRecord) -> RowLease:
    """Return a lease of a `RowCache` as its own type."""
    assert isinstance(lease, RowLease)
    return lease
