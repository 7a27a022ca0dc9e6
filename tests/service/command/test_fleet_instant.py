"""The pages, the index and the cost of a simulated fleet give the hits of an independent simulation without time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.fleet.instant import hit_percent

from raydix.actors.trace import read_trace

REFERENCE = {  # (caches, pages of each, router): hit rate in %, of the conversation trace
    (2, 4000, "cost_w2"): 16.671,
    (4, 2000, "cost_w1"): 13.562,
    (8, 2000, "round_robin"): 8.262,
    (8, 2000, "hash_1"): 5.638,
    (8, 2000, "hash_2"): 27.218,
    (8, 2000, "hash_8"): 26.135,
    (8, 2000, "affinity"): 5.638,
    (8, 2000, "cost_w1"): 17.093,
    (8, 2000, "cost_w3"): 21.749,
    (8, 2000, "cost_w10"): 25.731,
    (8, 2000, "shared_pool"): 27.326,
    (16, 4000, "cost_w1"): 23.273,
    (16, 1000, "cost_w2"): 19.016,
}


@pytest.mark.trace
def test_recorded_traffic_without_queues_gives_the_hits_of_the_reference() -> None:
    trace = read_trace(Path(os.environ["RAYDIX_TRACE"]))

    found = {each: hit_percent(trace, *each)[0] for each in REFERENCE}

    assert found == pytest.approx(REFERENCE, abs=0.001)
