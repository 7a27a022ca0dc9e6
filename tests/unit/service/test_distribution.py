"""Histograms: the bucket of each value, and estimated quantiles."""

from __future__ import annotations

import pytest

from raydix.actors.metrics.distribution import ACQUIRE_S, BATCH_SIZES, WAIT_S, Distribution
from raydix.schemas import Histogram


def test_a_value_is_counted_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    seen = Distribution((1.0, 2.0, 4.0))
    for value in (0.0, 1.0, 1.5, 2.0, 4.0, 4.1, 100.0):
        seen.add(value)
    seen.add(3.0, times=5)

    assert seen.histogram() == Histogram(bounds=(1.0, 2.0, 4.0), counts=(2, 2, 6, 2), sum=127.6, count=12)


def test_before_the_first_value_all_is_zero() -> None:
    empty = Distribution((1.0, 2.0)).histogram()

    assert empty.counts == (0, 0, 0)
    assert (empty.mean, empty.quantile(0.0), empty.quantile(0.5), empty.quantile(1.0)) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 0.0), (0.1, 0.5), (0.2, 1.0), (0.5, 2.5), (0.8, 4.0), (1.0, 4.0)])
def test_a_quantile_is_estimated_within_its_bucket_and_is_at_most_the_last_bound(share: float, value: float) -> None:
    histogram = Histogram(bounds=(1.0, 2.0, 4.0), counts=(2, 2, 4, 2), sum=30.0, count=10)

    assert histogram.quantile(share) == pytest.approx(value)
    assert histogram.mean == 3.0


@pytest.mark.parametrize("bounds", [ACQUIRE_S, WAIT_S, BATCH_SIZES])
def test_bounds_rise(bounds: tuple[float, ...]) -> None:
    assert bounds[0] > 0
    assert list(bounds) == sorted(set(bounds))
