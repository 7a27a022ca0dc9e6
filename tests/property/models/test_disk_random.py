"""The tree of a disk tier, its index and its records agree, whatever is written, evicted, retired, or lost."""

from collections import Counter

import pytest
from support.traffic.disk import DiskShape, DiskTraffic

SHAPES = [DiskShape(1), DiskShape(4), DiskShape(2, num_pages=12), DiskShape(2, window=3), DiskShape(1, num_states=12)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_disk_agrees_with_its_index(shape: DiskShape) -> None:
    done = sum((DiskTraffic(seed, shape).run(300) for seed in range(3)), Counter[str]())

    assert done["written"] > 50 and done["built"] > 20, done
    assert done["crash"] and done["failed commit"] and done["retirement"], done


@pytest.mark.more
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_disk_agrees_with_its_index_for_long(shape: DiskShape) -> None:
    done = sum((DiskTraffic(seed, shape).run(1500) for seed in range(100, 104)), Counter[str]())

    assert done["retired while it was built"] and done["not written"], done
