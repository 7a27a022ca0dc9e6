"""Random requests to a whole service with a host tier: no lease reads a wrong stamp, and no slot of a tier is lost."""

import pytest
from support.traffic.tiered_service import Shape, run_traffic

SIZES: dict[str, int] = {"device_pages": 16, "host_pages": 24}
SHAPES = [
    Shape(1, **SIZES),
    Shape(4, **SIZES),
    Shape(16, **SIZES),
    Shape(1, device_pages=16, host_pages=10),
    Shape(1, policy="2q", **SIZES),
    Shape(1, window=3, **SIZES),
    Shape(4, window=6, device_pages=16, host_pages=10),
    Shape(1, num_states=10, **SIZES),
    Shape(4, num_states=10, window=6, **SIZES),
    Shape(4, bigram=True, **SIZES),
    Shape(1, has_tenants=True, **SIZES),
]
IN_A_THREAD = [Shape(1, has_thread=True, **SIZES), Shape(2, window=3, has_thread=True, **SIZES)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_lease_reads_a_wrong_stamp_and_no_slot_is_lost(shape: Shape) -> None:
    done = run_traffic(shape, range(2), 450)

    assert done["loaded"] and done["served late"] and done["retirement"], "little has happened"
    assert done["write, whole"] and done["write, failed"] and done["load, whole"]


@pytest.mark.parametrize("shape", IN_A_THREAD, ids=str)
def test_a_copier_with_a_thread_does_as_well(shape: Shape) -> None:
    """How much is loaded depends on the thread, so the checks of the traffic are all."""
    run_traffic(shape, range(2), 250)


@pytest.mark.more
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_lease_reads_a_wrong_stamp_and_no_slot_is_lost_for_long(shape: Shape) -> None:
    done = run_traffic(shape, range(100, 104), 2_500)

    for what in ("load, failed", "load, late", "retry of a ticket"):
        assert done[what], f"it was never: {what}"
