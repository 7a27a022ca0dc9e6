"""The pages, the index and the cost of a simulated fleet give the hits of an independent simulation without time."""

from __future__ import annotations

import pytest
from support.fleet.instant import hit_percent
from support.models.sample_trace import recorded_trace

from raydix.actors.observe.trace import read_trace

ROUTERS = (
    "round_robin hash_1 hash_2 hash_4 hash_8 affinity cost_w1 cost_w2 cost_w3 cost_w5 cost_w10 shared_pool"
).split()
REFERENCE = {  # trace: (caches, pages of each): hit rate in %, of each router
    "mooncake_conversation": {
        (2, 1000): "4.831 4.593 5.596 5.562 5.572 4.593 5.171 5.348 5.467 5.530 5.558 5.638",
        (2, 2000): "6.771 5.638 9.195 9.093 9.110 5.638 7.954 8.342 8.623 8.854 8.902 9.196",
        (2, 4000): "11.884 9.196 18.984 18.887 18.642 9.196 15.502 16.671 17.115 17.719 18.388 18.892",
        (4, 1000): "5.576 4.593 9.494 9.395 9.280 4.593 6.933 7.719 8.152 8.598 8.862 9.196",
        (4, 2000): "8.326 5.638 18.489 18.335 17.993 5.638 13.562 15.052 16.055 16.751 18.013 18.892",
        (4, 4000): "11.479 9.196 27.283 27.060 26.459 9.196 18.941 21.366 22.772 24.343 25.931 27.326",
        (8, 1000): "6.328 4.593 18.001 17.798 17.328 4.593 11.551 13.955 14.782 16.304 17.331 18.892",
        (8, 2000): "8.262 5.638 27.218 26.898 26.135 5.638 17.093 19.516 21.749 23.576 25.731 27.326",
        (8, 4000): "10.101 9.196 34.385 34.160 33.347 9.196 21.098 25.496 27.353 29.807 32.402 34.389",
        (16, 1000): "6.259 4.593 26.939 26.692 25.838 4.593 15.240 19.016 21.087 23.380 25.605 27.326",
        (16, 2000): "7.360 5.638 34.167 33.988 33.136 5.638 19.378 24.638 27.099 29.667 32.569 34.389",
        (16, 4000): "9.213 9.196 36.734 36.442 35.541 9.196 23.273 27.281 29.647 32.502 34.916 36.695",
    },
    "toolmix": {
        (8, 1000): "32.047 30.970 39.869 39.726 39.385 31.012 35.729 37.011 37.649 38.533 39.441 40.324",
        (8, 2000): "33.116 31.631 46.299 46.090 45.452 31.728 39.392 41.204 42.525 43.774 45.134 46.219",
        (8, 4000): "34.406 33.907 51.192 51.043 50.468 34.166 42.451 45.013 46.290 48.249 49.673 51.087",
    },
}


@pytest.mark.trace
@pytest.mark.parametrize("name", REFERENCE)
def test_recorded_traffic_without_queues_gives_the_hits_of_the_reference(name: str) -> None:
    trace = read_trace(recorded_trace(name))

    for (num_caches, capacity), percents in REFERENCE[name].items():
        wanted = dict(zip(ROUTERS, map(float, percents.split()), strict=True))
        hits = {router: hit_percent(trace, num_caches, capacity, router)[0] for router in ROUTERS}
        assert hits == pytest.approx(wanted, abs=0.001), (num_caches, capacity)
