"""Random requests to a whole service with a disk: no lease reads a wrong or stale stamp, whatever was killed before."""

import pytest
from support.traffic.disk_service import DiskShape, run_disk_traffic

BELOW_THE_POOL = {"device_pages": 16, "host_pages": 0, "disk_pages": 32}
BELOW_THE_HOST = {"device_pages": 16, "host_pages": 20, "disk_pages": 32}
SHAPES = [
    DiskShape(1, **BELOW_THE_POOL),
    DiskShape(2, **BELOW_THE_HOST),
    DiskShape(1, admit="all", **BELOW_THE_POOL),
    DiskShape(1, admit="all", **BELOW_THE_HOST),
    DiskShape(1, window=3, **BELOW_THE_POOL),
    DiskShape(2, window=3, **BELOW_THE_HOST),
    DiskShape(1, num_states=10, **BELOW_THE_POOL),
    DiskShape(2, num_states=10, window=4, **BELOW_THE_HOST),
    DiskShape(2, bigram=True, **BELOW_THE_POOL),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_lease_reads_a_wrong_stamp(shape: DiskShape) -> None:
    run_disk_traffic(shape, range(1), 250)


@pytest.mark.more
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_lease_reads_a_wrong_stamp_for_long(shape: DiskShape) -> None:
    done = run_disk_traffic(shape, range(100, 106), 1200)

    for what in ("loaded from the disk", "kill", "end", "repeated retirement", "confirmed"):
        assert done[what], f"it was never: {what}"
