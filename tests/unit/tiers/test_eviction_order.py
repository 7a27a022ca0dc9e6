"""Writes to a lower tier change nothing in the tier above: order of eviction, hits, counts, notifications, clock."""

import pytest
from support.traffic.eviction_order import check_order


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "slru", "priority", "2q"])
@pytest.mark.parametrize("kind", ["radix", "window", "mamba"])
def test_writes_leave_the_evictions_as_they_were(kind: str, policy: str) -> None:
    assert check_order(1, policy, kind) > 0
